"""A consistent copy of what `torch.save` was asked to store, taken before `torch.save` returns.

torch pickles the object itself, into a recorder that stands where its zip writer would: Python objects are bytes
from then on, shared storages are shared, views are views, and whatever torch can save can be staged. What is left are
the storages, each once. Those on the CPU are copied before `save` returns. Those on a GPU are copied by a side stream
while the host goes on, and the streams that a training computes on wait for that copy before anything that comes later;
so no later write, an optimizer's or any other, can reach a copy. Nothing has to be guessed about who writes when: a
hook before the optimizer's step would miss weights that are swapped for an evaluation, or clipped by hand.

Without a GPU, the side stream (`_from_device`) is tested with a CUDA runtime that is made up.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from saturate.checkpoints import archive
from saturate.checkpoints.arena import Arena

_GRAIN = 64         # bytes: copies of small tensors start on a cache line of their own
_PIECE_BYTES = 8 << 20
_MOST_THREADS = 4   # enough for the memory of the machines that were looked at


class Recorder:
    """Takes what `torch.serialization._save` writes. `records`: name, content (bytes or a storage), bytes."""

    def __init__(self) -> None:
        self.records: list[tuple[str, Any, int]] = []
        self.addresses = False                      # whether torch hands over bare addresses, as up to 2.2

    def write_record(self, name: str, data: Any, size: int) -> None:
        if isinstance(data, str):
            data = data.encode()
        elif isinstance(data, int):                 # of memory that may go away
            self.addresses = True
            data = ctypes.string_at(data, size)
        self.records.append((name, data, size))

    def alignment(self) -> int:
        """Bytes that torch aligns storages to; releases without that record use 64."""
        stored = next((data for name, data, _ in self.records if name == archive.ALIGNMENT_RECORD), None)
        return int(stored) if stored else archive.DEFAULT_ALIGNMENT


@dataclass
class Staged:
    """A snapshot: where in the arena each record lies."""

    arena: Arena | None
    records: list[tuple[str, int, int]]             # name, bytes, offset in the arena
    alignment: int = archive.DEFAULT_ALIGNMENT
    event: Any = None                               # of the side stream, after its last copy
    at_home: Any = contextlib.nullcontext()         # makes the device of that the current one, as in the thread that saved
    content: bytes = b""                            # instead of an arena: what cannot change needs no copy

    def wait(self) -> None:
        """Until the copies from the GPU have arrived. Releases the interpreter lock meanwhile."""
        event, self.event = self.event, None
        if event is not None:
            with self.at_home:          # a new thread has the first device as its current one, and asking would make a context there
                event.synchronize()

    def contents(self) -> Iterator[memoryview]:
        view = memoryview(self.arena.memory if self.arena is not None else self.content)
        for _, size, offset in self.records:
            yield view[offset:offset + size]


def staged_bytes(records: list[tuple[str, Any, int]]) -> int:
    """How large an arena must be."""
    return sum(-(-size // _GRAIN) * _GRAIN for _, _, size in records)


def stage(torch: Any, records: list[tuple[str, Any, int]], arena: Arena, alignment: int) -> Staged:
    """Copy every record into the arena. Afterwards nothing that the caller does can change the snapshot."""
    placed: list[tuple[str, int, int]] = []
    local: list[tuple[Any, Any]] = []
    remote: list[tuple[Any, Any]] = []
    at = 0
    for name, data, size in records:
        placed.append((name, size, at))
        place = arena.tensor[at:at + size]
        if isinstance(data, bytes):
            arena.memory[at:at + size] = data
        elif size and data.device.type == "cpu":
            local.append((place, _as_bytes(torch, data)[:size]))
        elif size:
            remote.append((place, _as_bytes(torch, data)[:size]))
        at += -(-size // _GRAIN) * _GRAIN
    staged = Staged(arena, placed, alignment)
    try:
        if remote:
            _from_device(torch, staged, remote)
        _from_host(torch, local)
    except BaseException:
        staged.wait()           # the device may still write into the arena, which is closed now
        raise
    return staged


def _from_host(torch: Any, pairs: list[tuple[Any, Any]]) -> None:
    """Copy by as many threads as there are cores that torch does not use itself: one alone does not fill the memory's
    bandwidth, and the training stands still meanwhile."""
    pieces = deque((place[at:at + _PIECE_BYTES], source[at:at + _PIECE_BYTES])
                   for place, source in pairs for at in range(0, len(place), _PIECE_BYTES))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(_MOST_THREADS, cores // max(1, torch.get_num_threads()), len(pieces))
    problems: list[Exception] = []

    def copy() -> None:
        try:
            while not problems:
                place, source = pieces.popleft()
                place.copy_(source)
        except IndexError:
            return              # all of them are taken
        except Exception as problem:  # noqa: BLE001 - raised again by the thread that saves
            problems.append(problem)

    helpers = [threading.Thread(target=copy, daemon=True) for _ in range(count - 1)]
    for helper in helpers:
        helper.start()
    copy()
    for helper in helpers:
        helper.join()
    if problems:
        raise problems[0]


def _from_device(torch: Any, staged: Staged, remote: list[tuple[Any, Any]]) -> None:
    """Copy on a stream of its own, ordered after all work that is queued and before all that will be.

    One device: the one whose tensors these are; a storage on another one is copied at once. A snapshot inside the
    capture of a CUDA graph cannot be: there torch's own copy raises too.
    """
    device = remote[0][1].device
    staged.arena.pin(device)
    current = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)
    side.wait_stream(current)
    with torch.cuda.device(device), torch.cuda.stream(side):        # by itself, leaving the stream would make a context on the current device
        try:
            for place, source in remote:
                if source.device == device:
                    place.copy_(source, non_blocking=True)
        finally:                # also where one cannot be begun: those before it may be under way
            staged.event, staged.at_home = side.record_event(), torch.cuda.device(device)
    for stream in {current, torch.cuda.default_stream(device)}:
        stream.wait_event(staged.event)
    for place, source in remote:
        if source.device != device:
            place.copy_(source)
        else:
            source.record_stream(side)      # free memory as soon as it is copied, not when its turn to be written comes


def _as_bytes(torch: Any, storage: Any) -> Any:
    """A one-dimensional uint8 view of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def raw_contents(torch: Any, records: list[tuple[str, Any, int]]) -> Iterator[Any]:
    """The records themselves, one at a time, for a save that needs no snapshot because it ends before it returns."""
    for _, data, size in records:
        if isinstance(data, bytes):
            yield data
        elif not size:
            yield b""
        else:
            yield _view(data if data.device.type == "cpu" else _as_bytes(torch, data).cpu().untyped_storage(), size)


def _view(storage: Any, size: int) -> memoryview:
    """The memory of a CPU storage, which lives as long as the view."""
    memory = (ctypes.c_char * size).from_address(storage.data_ptr())
    memory.storage = storage
    return memoryview(memory).cast("B")
