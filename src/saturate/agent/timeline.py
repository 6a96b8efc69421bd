"""The times of marks in the training: on a CPU what the host's clock says, on accelerators when the devices came to them.

A host only queues work for an accelerator. Its clock at a step boundary says when the last launch was queued, which may be many
steps before the device comes to it. A device that is drained there instead has nothing to do until the host has fetched the next
batch, and what otherwise happens while it works would count as a part of the step. So a mark is an event in the current stream of
every device that trains. When they came to it is read once they are drained, at the end of a block, and between two marks lies
what lies between them in a training that nobody looks at: the device's time where the host is ahead, the host's where it is not.

Only CUDA devices have such events here. Others are drained at every mark: their steps are timed without anything that overlaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

#: A mark: nanoseconds of the host's clock, an event per device, or None where none could be set.
Mark = Any


class Timeline:
    """`begin` and `read` are called with drained devices, `mark` in between. `clock` is in nanoseconds; `devices` tells the
    accelerators that train now."""

    def __init__(self, torch: Any, clock: Callable[[], int], drain: Callable[[], None], devices: Callable[[], Sequence[Any]]):
        self._torch = torch
        self._clock = clock
        self._drain = drain
        self._training = devices
        self._devices: tuple[Any, ...] = ()
        self._events = False            # whether devices can be asked when they came to a mark
        self._origin_ns = 0
        self._origin: Mark = None

    @property
    def queued(self) -> bool:
        """Whether what is timed runs on devices that the host gets ahead of."""
        return bool(self._devices)

    def begin(self) -> Mark:
        self._devices = tuple(self._training())
        self._events = all(device.type == "cuda" for device in self._devices) and self.queued
        self._origin_ns = self._clock()         # before the event: no mark may seem later than it was
        self._origin = recorded(self._torch, self._devices) if self._events else self._origin_ns
        return self._origin

    def mark(self) -> Mark:
        if self._events:
            return recorded(self._torch, self._devices)
        if self._devices:
            self._drain()
        return self._clock()

    def read(self, marks: Iterable[Mark]) -> list[int]:
        """Nanoseconds of the host's clock. Marks that were set one after the other have times in this order."""
        if not self._events:
            return list(marks)
        return in_order([self._reached_ns(mark) for mark in marks], self._origin_ns, self._clock())

    def _reached_ns(self, mark: Mark) -> int | None:
        """When the last of the devices came to it."""
        if mark is not None and mark is self._origin:
            return self._origin_ns
        elapsed = elapsed_ms(self._origin, mark)
        return None if elapsed is None else self._origin_ns + round(1e6 * elapsed)


def recorded(torch: Any, devices: Iterable[Any]) -> Mark:
    """An event in the current stream of each CUDA device: the stream of another one is idle, and would tell the host's time. None
    while the script captures a graph: an event would become a part of it, and tell no time."""
    cuda = torch.cuda
    if cuda.is_current_stream_capturing():
        return None
    events = []
    for device in devices:
        event = cuda.Event(enable_timing=True)
        event.record(cuda.current_stream(device))
        events.append(event)
    return tuple(events)


def elapsed_ms(began: Mark, ended: Mark) -> float | None:
    """Between two marks of drained devices, on the one that took longest: what is spread over several is done when the last one is.
    None: not known, because the script captured a graph meanwhile; of a stream that captures and is not the current one, the event
    is in the graph and has no time."""
    if began is None or ended is None:
        return None
    found = []
    for before, after in zip(began, ended):
        try:
            found.append(before.elapsed_time(after))
        except RuntimeError:
            continue
    return max(found, default=None)


def in_order(times: Sequence[int | None], first: int, last: int) -> list[int]:
    """Times that do not decrease, and lie between `first` and `last`: a device's clock runs a little faster or slower than the
    host's, and streams are not in step. One that is not known (None) is that of the one before."""
    found, latest = [], first
    for time in times:
        latest = min(last, max(latest, latest if time is None else time))
        found.append(latest)
    return found


def wait_for(torch: Any, device: Any) -> None:
    """Return once a device has finished everything that was queued. Raises RuntimeError where torch has no means to tell."""
    kind = device.type
    if kind == "cuda":
        torch.cuda.synchronize(device)
        return
    accelerator = getattr(torch, "accelerator", None)       # since torch 2.6
    current = accelerator.current_accelerator() if accelerator is not None else None
    module = getattr(torch, kind, None)
    if current is not None and current.type == kind:
        accelerator.synchronize(device)
    elif hasattr(module, "synchronize"):
        module.synchronize()
    else:
        raise RuntimeError(f"steps on {kind} devices cannot be timed: this torch has no way to wait for one")
