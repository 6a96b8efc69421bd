"""A GPU that answers nothing any more, or has no room, as the process says it and as others hear it. No test here needs one."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cloudpickle", reason="the extra inference")

from saturate.inference import gpu_failures, lab, worker  # noqa: E402 - after the check for torch
from saturate.inference.failures import WorkerFailed  # noqa: E402
from saturate.inference.process import Worker  # noqa: E402
from saturate.inference.techniques._api import OutOfTime  # noqa: E402

BATCHES = [(torch.ones(4, 3),), (torch.zeros(4, 3),)]


def on_gpu(synchronize: Any) -> worker.Server:
    """A process whose device is a stand-in."""
    server = worker.Server()
    cuda = SimpleNamespace(synchronize=synchronize, OutOfMemoryError=torch.OutOfMemoryError, mem_get_info=lambda: (2**30, 80 * 2**30),
                           memory_reserved=lambda: 29 * 2**30)
    server.device, server.torch = "cuda", SimpleNamespace(cuda=cuda)
    return server


def raising(error: Exception) -> Any:
    def fail(*given: Any) -> Any:
        raise error

    return fail


def test_a_process_whose_gpu_is_lost_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = RuntimeError("CUDA error: device-side assert triggered")
    for synchronize, fate in ((lambda: None, "raised"), (raising(lost), "ended")):
        server = on_gpu(synchronize)
        server.do_run = raising(lost)       # type: ignore[method-assign]
        assert worker._answer(server, "run", ())[:3] == (fate, "failed", f"RuntimeError: {lost}")
    server.do_run = raising(OutOfTime("its time ended"))    # type: ignore[method-assign]
    assert worker._answer(server, "run", ())[1:3] == ("timeout", "its time ended"), "with more of it, it may be the answer"
    server.do_run = raising(lost)           # type: ignore[method-assign]
    sent: list[Any] = []
    monkeypatch.setattr(worker, "Server", lambda: server)
    monkeypatch.setattr(worker.socket, "socket", lambda fileno: None)
    monkeypatch.setattr(worker.os, "set_inheritable", lambda *given: None)
    monkeypatch.setattr(worker.wire, "receive", lambda stream, device: ("run", ()))
    monkeypatch.setattr(worker.wire, "send", lambda stream, answer, home: sent.append(answer))
    worker.main(0)
    assert [answer[0] for answer in sent] == ["ended"]


def test_who_asked_a_process_whose_gpu_is_lost_knows_that_it_is_gone() -> None:
    asked: Any = object.__new__(Worker)
    vars(asked).update(_owner=os.getpid(), _lock=threading.Lock(), _stream=SimpleNamespace(fileno=lambda: 3), _killed=None, frozen=True, ended=0)
    asked.thaw = lambda: setattr(asked, "frozen", False)
    asked._stop = lambda: setattr(asked, "ended", asked.ended + 1)
    asked._exchange = lambda *given: ("ended", "failed", "CUDA error: device-side assert triggered", "")
    for _ in range(2):
        with pytest.raises(WorkerFailed, match="device-side assert") as caught:
            asked._ask("run")
        assert not caught.value.alive and asked.ended == 1


def test_inputs_that_end_the_baseline_on_its_gpu_are_not_tried_again(tmp_path: Path) -> None:
    def probe(*batch: Any) -> Any:
        raise WorkerFailed("failed", "CUDA error: device-side assert triggered", alive=False)

    found = lab.Lab(SimpleNamespace(inputs=lambda torch: BATCHES), tmp_path, 1, 0.0)        # type: ignore[arg-type]
    found.baseline = lambda: "another"      # type: ignore[method-assign, assignment]
    process, notes = found.probe(SimpleNamespace(probe=probe, close=lambda: None))      # type: ignore[arg-type]
    assert process == "another" and "process ends: CUDA error" in notes[0]      # type: ignore[comparison-overlap]


def test_memory_that_others_hold_is_named() -> None:
    server = on_gpu(lambda: None)
    assert server.reason(torch.OutOfMemoryError("CUDA out of memory.")) == (
        "OutOfMemoryError: CUDA out of memory." + gpu_failures.held_by_others(80 * 2**30, 2**30, 29 * 2**30))
    assert "50.00 GiB of 80.00 GiB" in server.reason(torch.OutOfMemoryError("CUDA out of memory."))
    assert server.reason(ValueError("other")) == "ValueError: other"
