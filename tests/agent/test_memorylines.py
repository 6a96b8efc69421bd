"""Whose line allocated what was in use when most memory was."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from saturate.agent import memorylines
from saturate.agent.memorylines import CudaLines, KeptLines, at_peak

TORCH = str(Path(torch.__file__).parent / "nn" / "linear.py")
LIBRARY = str(Path(pytest.__file__).parent / "modeling.py")


def alloc(addr: int, size: int, *frames: tuple[str, int, str]) -> dict[str, Any]:
    return {"action": "alloc", "addr": addr, "size": size,
            "frames": [{"filename": file, "line": line, "name": name} for file, line, name in frames]}


def free(addr: int, size: int) -> dict[str, Any]:
    return {"action": "free_completed", "addr": addr, "size": size, "frames": []}


def test_what_is_alive_at_the_peak() -> None:
    events = [alloc(1, 100), alloc(2, 50), free(1, 100), alloc(1, 30), alloc(3, 90), free(2, 50), alloc(4, 10)]
    assert [event["addr"] for event in at_peak(events)] == [2, 1, 3]
    assert at_peak([]) == [] and at_peak([free(9, 5)]) == []


def test_what_was_there_before_counts_when_it_goes() -> None:
    """200 bytes of before are freed: the peak is at the beginning, not where the most of this step's is in use."""
    events = [alloc(1, 100), free(7, 200), alloc(2, 150)]
    assert [event["addr"] for event in at_peak(events)] == [1]


class History:
    """Stands in for the allocator of a device."""

    def __init__(self, *traces: list[dict[str, Any]], problem: str = "", recorded: bool = False):
        self.calls: list[Any] = []
        self.cuda = self.memory = self._C = self
        self.__file__ = torch.__file__
        self.traces, self.problem, self.recorded = traces, problem, recorded

    def _cuda_isHistoryEnabled(self) -> bool:
        return self.recorded

    def _record_memory_history(self, enabled: str | None, **options: Any) -> None:
        if self.problem:
            raise RuntimeError(self.problem)
        self.calls.append(enabled)

    def _snapshot(self) -> dict[str, Any]:
        return {"device_traces": self.traces}


#: A process that never called set_device has the first as its current one, and may train on others.
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


def test_lines_of_a_history() -> None:
    own, wide = ("/home/u/model.py", 8, "forward"), ("/home/u/model.py", 9, "forward")
    events = [alloc(1, 10, (TORCH, 1, "forward"), own), alloc(2, 70, (LIBRARY, 310, "forward"), ("/home/u/train.py", 60, "main")),
              alloc(3, 25, wide), alloc(4, 5, wide), alloc(5, 900), alloc(6, 1, (TORCH, 2, "x"))]
    history = History([alloc(9, 1000, wide)], events)
    lines = CudaLines(history, (SECOND,))
    lines.start()
    assert lines.largest() == [["/home/u/train.py", 60, "main", LIBRARY, 310, "forward", 70], [*wide, "", 0, "", 30], [*own, "", 0, "", 10]]
    lines.stop()
    lines.stop()
    assert history.calls == ["all", None], "what was switched on is switched off, once"


def test_a_history_whose_beginning_is_lost_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memorylines, "MOST_EVENTS", 2)
    lines = CudaLines(History([alloc(1, 1), alloc(2, 1)]), (FIRST,))
    lines.start()
    assert lines.largest() == [] and "2 times or more" in lines.unknown


def test_lines_of_a_training_on_several_devices() -> None:
    one, other = ("/home/u/model.py", 8, "forward"), ("/home/u/model.py", 9, "forward")
    lines = CudaLines(History([alloc(1, 10, one), free(1, 10), alloc(1, 5, other)], [alloc(1, 7, one), alloc(2, 20, other)]), (FIRST, SECOND))
    lines.start()
    assert lines.largest() == [[*other, "", 0, "", 20], [*one, "", 0, "", 17]], "of each device what it held at its own peak"


def test_an_allocator_without_a_history_tells_why() -> None:
    """With PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync."""
    history = History([alloc(1, 1)], problem="cudaMallocAsync does not yet support recordHistory. If you need it, please file an issue.\nmore")
    lines = CudaLines(history, (FIRST,))
    lines.start()
    assert lines.largest() == [] and lines.unknown.endswith("cudaMallocAsync does not yet support recordHistory. If you need it, please file an issue.")
    lines.stop()


def test_a_history_that_the_script_records_goes_on() -> None:
    history = History([alloc(1, 1)], recorded=True)
    lines = CudaLines(history, (FIRST,))
    lines.start()
    assert lines.largest() == [] and "the script itself" in lines.unknown
    lines.stop()
    assert history.calls == []


def test_lines_that_keep() -> None:
    lines = KeptLines(torch)
    lines.add(5, sys._getframe())
    lines.add(6, sys._getframe())
    (first, second) = lines.largest()
    assert first[-1] == 6 and second[-1] == 5 and first[0] == __file__ and first[2] == "test_lines_that_keep"
