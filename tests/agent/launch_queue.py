"""Accelerators that work off what a host queues for them, in simulated time: a stand-in for torch.cuda."""

from __future__ import annotations

import collections
from types import SimpleNamespace
from typing import Any

MS = 1_000_000


class Machine:
    """A host and its accelerators. `depth`: launches that a device holds before the host has to wait. Times are nanoseconds."""

    def __init__(self, devices: int = 1, depth: int = 1000):
        self.now = 0
        self.depth = depth
        self.devices = tuple(SimpleNamespace(type="cuda", index=index) for index in range(devices))
        self.free = [0] * devices               # when a device has finished everything that was queued
        self.pending: list[collections.deque[int]] = [collections.deque() for _ in range(devices)]
        self.drained = 0
        self.capturing = False

    def host(self, ms: float) -> None:
        self.now += round(ms * MS)

    def launch(self, ms: float, device: int = 0, behind: int = 0, count: int = 1) -> None:
        """Queue `count` kernels of `ms` all together, not to begin before device `behind` has finished what it has."""
        pending = self.pending[device]
        for _ in range(count):
            while pending and pending[0] <= self.now:
                pending.popleft()
            if len(pending) >= self.depth:
                self.now = pending.popleft()
            self.free[device] = max(self.now, self.free[device], self.free[behind]) + round(ms * MS / count)
            pending.append(self.free[device])

    def wait(self, device: Any = None) -> None:
        self.drained += 1
        self.now = max([self.now, *(self.free if device is None else [self.free[device.index]])])

    @property
    def torch(self) -> Any:
        machine = self

        class Event:
            def __init__(self, enable_timing: bool = False):
                assert enable_timing
                self.reached, self.device = -1, -1

            def record(self, stream: Any) -> None:
                self.device = stream.device
                self.reached = max(machine.now, machine.free[self.device])

            def elapsed_time(self, end: Any) -> float:
                assert self.device == end.device >= 0 and max(self.reached, end.reached) <= machine.now, "not ready"
                return (end.reached - self.reached) / MS

        return SimpleNamespace(cuda=SimpleNamespace(
            Event=Event, current_stream=lambda device: SimpleNamespace(device=device.index), synchronize=self.wait,
            is_initialized=lambda: True, is_current_stream_capturing=lambda: self.capturing))
