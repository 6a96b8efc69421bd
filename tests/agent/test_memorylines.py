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

    def __init__(self, events: list[dict[str, Any]]):
        self.calls: list[Any] = []
        self.cuda = self.memory = self
        self.__file__ = torch.__file__
        self.events = events

    def _record_memory_history(self, enabled: str | None, **options: Any) -> None:
        self.calls.append(enabled)

    def _snapshot(self) -> dict[str, Any]:
        return {"device_traces": [[], self.events]}

    def current_device(self) -> int:
        return 1


def test_lines_of_a_history() -> None:
    own, wide = ("/home/u/model.py", 8, "forward"), ("/home/u/model.py", 9, "forward")
    events = [alloc(1, 10, (TORCH, 1, "forward"), own), alloc(2, 70, (LIBRARY, 310, "forward"), ("/home/u/train.py", 60, "main")),
              alloc(3, 25, wide), alloc(4, 5, wide), alloc(5, 900), alloc(6, 1, (TORCH, 2, "x"))]
    history = History(events)
    lines = CudaLines(history)
    lines.start()
    assert lines.largest() == [["/home/u/train.py", 60, "main", LIBRARY, 310, "forward", 70], [*wide, "", 0, "", 30], [*own, "", 0, "", 10]]
    lines.stop()
    lines.stop()
    assert history.calls == ["all", None], "what was switched on is switched off, once"


def test_a_history_whose_beginning_is_lost_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memorylines, "MOST_EVENTS", 2)
    assert CudaLines(History([alloc(1, 1), alloc(2, 1)])).largest() == []


def test_lines_that_keep() -> None:
    lines = KeptLines(torch)
    lines.add(5, sys._getframe())
    lines.add(6, sys._getframe())
    (first, second) = lines.largest()
    assert first[-1] == 6 and second[-1] == 5 and first[0] == __file__ and first[2] == "test_lines_that_keep"
