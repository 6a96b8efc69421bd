"""Several GPUs, and recorded launches, with stand-ins for them: no test here needs one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from saturate.inference import artifact, examples, hardware, runtimes  # noqa: E402 - after the check for torch
from saturate.inference.formats import _program  # noqa: E402
from saturate.records.artifact import MadeOn  # noqa: E402

BATCHES = [(torch.ones(4, 3),), (torch.zeros(4, 3),)]


# -- several GPUs ------------------------------------------------------------------------------------------------------


class Gpus:
    """Two of them: which one is the current one, and when it was made so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 2):
        self.current, self.seen = 0, []     # type: ignore[var-annotated]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device", self.made_current)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: f"GPU {index}")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (9, 0))

    @contextlib.contextmanager
    def made_current(self, place: str) -> Iterator[None]:
        before, self.current = self.current, torch.device(place).index
        try:
            yield
        finally:
            self.current = before


def test_a_program_is_loaded_and_called_on_the_gpu_that_it_was_made_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch)
    made_on = hardware.here(torch, "cuda:1", 1, ())
    assert (made_on.device, made_on.device_index, made_on.device_name) == ("cuda", 1, "GPU 1")
    for known, place in ((made_on, "cuda:1"), (MadeOn(device="cuda"), "cuda"), (MadeOn(device="cuda", device_index=5), "cuda"), (MadeOn(device="cpu"), "cpu"),
                         (MadeOn(device="cuda", device_index=-1), "cuda"), (MadeOn(device="cuda:x"), "cuda")):
        assert artifact.place_of(torch, known) == place
    manifest: Any = SimpleNamespace(made_on=made_on, format="exported", no_examples="")
    monkeypatch.setattr(artifact, "checked", lambda folder: manifest)
    monkeypatch.setattr(artifact, "_program", lambda *given: gpus.seen.append(gpus.current) or (lambda x: gpus.seen.append(gpus.current)))
    loaded = artifact.load(tmp_path)
    loaded(1)
    assert gpus.seen == [1, 1] and gpus.current == 0 and loaded.place == "cuda:1"
    moved: list[str] = []
    monkeypatch.setattr(artifact, "_demanded_db", lambda info: 60.0)
    monkeypatch.setattr(artifact, "examples_of", lambda torch, folder: [(BATCHES[0], [])])
    monkeypatch.setattr(examples, "moved", lambda torch, inputs, device: moved.append(device) or inputs)
    loaded.verify()
    assert moved == ["cuda:1"]


def test_inputs_on_another_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a tensor on a GPU."""
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda:1")         # type: ignore[assignment]

    gpus = Gpus(monkeypatch)
    signature = {"inputs": {"tuple": [[0]]}, "outputs": [0], "parameters": ["x"], "tensors": [{"dtype": "float32", "shape": [4, 3]}], "ranges": {}}
    call = _program.callable_of(torch, signature, "cuda", lambda tensors: tensors)
    given = BATCHES[0][0].as_subclass(Elsewhere)
    with pytest.raises(TypeError, match="on cuda:1, this program takes torch.float32 on cuda:0"):
        call(given)
    gpus.current = 1
    call(given)


# -- recorded launches -------------------------------------------------------------------------------------------------


class Recorded:
    """A stand-in for CUDA graphs: what is called while one records is called again by `replay`, into the same tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any):
        nothing = SimpleNamespace(wait_stream=lambda stream: None)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: nothing)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: nothing)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
        self.module = module

    def __call__(self, x: Any) -> Any:
        self.given, self.answer = x, self.module(x)
        return self.answer

    def replay(self) -> None:
        with torch.inference_mode():
            self.answer.copy_(self.module(self.given))


def test_what_was_recorded_in_inference_mode_is_replayed_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    call = runtimes.CudaGraphs(torch, Recorded(monkeypatch, lambda x: 2 * x))
    with torch.inference_mode():
        first = call(torch.ones(3))
    with torch.no_grad():
        second = call(torch.full((3,), 5.0))
    assert first.tolist() == [2.0] * 3 and second.tolist() == [10.0] * 3 and len(call.recorded) == 1
