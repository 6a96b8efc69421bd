"""Which lines of code allocated the memory that was in use at the peak of a step.

On CUDA the allocator's own history of one step is replayed. A CPU's allocator keeps none: there, what autograd keeps for
the backward pass is counted by the line that made it keep it, which is all that grows until the end of the forward pass.
The CUDA path was not run on a device when it was written.
"""

from __future__ import annotations

from typing import Any

from saturate.agent.places import Places

#: Lines that are reported, and allocations of one step that are looked at (several KB each while they are recorded).
MOST_LINES = 10
MOST_EVENTS = 200_000

#: File, line and function of the user's code, and the same of the library code below it that allocates ("", 0, "": none).
Line = tuple[tuple[str, int, str], tuple[str, int, str]]
_NOWHERE = ("", 0, "")


class KeptLines:
    """Bytes kept for the backward pass by line, added up while a step runs. Each storage counts for the first line."""

    unknown = ""        # why there are no lines: here they are always counted

    def __init__(self, torch: Any):
        self._places = Places(torch)
        self._bytes: dict[Line, int] = {}

    def add(self, size: int, frame: Any) -> None:
        users, nearest = self._places.users(frame), self._places.nearest(frame)
        if users is not None:
            line = users, nearest if nearest is not None and nearest != users else _NOWHERE
            self._bytes[line] = self._bytes.get(line, 0) + size

    def largest(self) -> list[list[Any]]:
        return largest(self._bytes)


class CudaLines:
    """Records the CUDA allocator's history from `start` to `stop`, and reads that of some devices. `unknown`: why it cannot."""

    def __init__(self, torch: Any, devices: tuple[Any, ...]):
        self._torch = torch
        self._devices = devices
        self._places = Places(torch)
        self._recording = False
        self.unknown = ""

    def start(self) -> None:
        """There is one history per process: one that the script records stays the script's."""
        try:
            if recorded(self._torch):
                self.unknown = "the script itself records the history of the device's allocator"
                return
            self._torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python", max_entries=MOST_EVENTS)
        except RuntimeError as error:       # cudaMallocAsync, or an allocator of the script's own
            self.unknown = f"the device's allocator keeps no history: {str(error).partition(chr(10))[0]}"
            return
        self._recording = True

    def largest(self) -> list[list[Any]]:
        """While it records; of several devices, of each at its own peak. Empty where `unknown` says why."""
        if not self._recording:
            return []
        try:
            traces = self._torch.cuda.memory._snapshot()["device_traces"]
        except RuntimeError as error:
            self.unknown = f"the history of the device's allocator could not be read: {str(error).partition(chr(10))[0]}"
            return []
        found: dict[Line, int] = {}
        for device in self._devices:
            events = traces[device.index]
            if len(events) >= MOST_EVENTS:      # the first ones are forgotten
                self.unknown = f"a step allocates memory {MOST_EVENTS:,} times or more, and the history holds no more"
                return []
            for event in at_peak(events):
                line = self._line(event.get("frames", ()))    # none: an allocation that Python knows nothing of
                if line is not None:
                    found[line] = found.get(line, 0) + event["size"]
        return largest(found)

    def stop(self) -> None:
        if self._recording:
            self._recording = False
            self._torch.cuda.memory._record_memory_history(enabled=None)

    def _line(self, frames: list[dict[str, Any]]) -> Line | None:
        """The innermost frame comes first."""
        def first(least: int) -> tuple[str, int, str] | None:
            return next(((f["filename"], f["line"], f["name"]) for f in frames if self._places.kind(f["filename"]) >= least), None)

        nearest = first(1)
        users = first(2) or nearest
        return None if users is None or nearest is None else (users, nearest if nearest != users else _NOWHERE)


def recorded(torch: Any) -> bool:
    """Whether the allocator's history is being recorded. Raises RuntimeError where the allocator keeps none."""
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)     # older versions do not tell
    return enabled is not None and bool(enabled())


def at_peak(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The allocations of a history that were in use when most bytes were. What was allocated before it began is only seen
    when it is freed, and counts against the total.

    >>> history = [("alloc", 1, 10), ("alloc", 2, 5), ("free_completed", 1, 10), ("alloc", 3, 7)]
    >>> [event["addr"] for event in at_peak([dict(zip(("action", "addr", "size"), event)) for event in history])]
    [1, 2]
    """
    total = most = last = 0
    for index, event in enumerate(events):
        total += {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)
        if total > most:
            most, last = total, index + 1
    alive: dict[int, dict[str, Any]] = {}
    for event in events[:last]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_completed":
            alive.pop(event["addr"], None)
    return list(alive.values())


def largest(found: dict[Line, int]) -> list[list[Any]]:
    """[file, line, function, library's file, line, function, bytes], most bytes first."""
    ordered = sorted(found.items(), key=lambda entry: -entry[1])[:MOST_LINES]
    return [[*users, *inside, size] for (users, inside), size in ordered]

