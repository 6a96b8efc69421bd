"""Host buffers that snapshots are copied into: kept and reused, shared with the helper process, pinned for a GPU.

A fresh buffer costs a page fault per 4 KiB at its first use, more than the copy itself; so buffers are kept. They are
memfd files (the helper maps them by descriptor; /dev/shm and its limit are not involved).

Without a GPU, `Arena.pin` is tested with a CUDA runtime made up.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

from saturate.checkpoints.host_memory import available_bytes

_GRAIN = 1 << 21                # whole huge pages
_SLACK = 16                     # a sixteenth more than asked for: the next snapshot may be a little larger
_KEPT = 2                       # idle buffers; more than two different sizes in turn are rare


class Arena:
    """`size` bytes of host memory. `tensor` is a uint8 view of it; `descriptor` is -1 where memory has no file."""

    def __init__(self, torch: Any, size: int):
        self.size = size
        self.descriptor = -1
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("saturate-checkpoint", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, size)
        self.memory = mmap.mmap(self.descriptor, size)
        with torch.inference_mode(False):       # made in an evaluation, it could not be written into outside of one
            self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._torch = torch
        self._pinned: bool | None = None        # None: not tried
        self._device: Any = None                # whose copies it is pinned for

    def pin(self, device: Any) -> None:
        """Page-lock it, so that copies from the GPU `device` need no staging by the driver and do not block the host. On
        a current device that is another one the call would make a context, which takes memory there."""
        if self._pinned is None:
            self._device = device
            with self._torch.cuda.device(device):
                status = self._torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self.size, 0)
                self._pinned = int(status) == 0     # refused (ulimit -l): copies still work, more slowly
                if not self._pinned:
                    _take_last_error(self._torch, device)

    def close(self) -> None:
        if self._pinned:
            with self._torch.cuda.device(self._device):
                self._torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
        del self.tensor             # it exports the mapping, which could not be closed before
        try:
            self.memory.close()
        except BufferError:
            pass                    # a view of it lives on in a traceback; the mapping ends with it
        if self.descriptor >= 0:
            os.close(self.descriptor)


def _take_last_error(torch: Any, device: Any) -> None:
    """CUDA remembers that a call has failed, and torch raises what is remembered after the next kernel that this thread launches. So
    that is one of ours, and not one of the script's."""
    try:
        torch.ones(1, device=device)
    except RuntimeError:
        pass                    # now it is forgotten


class Pool:
    """Arenas by size. Not thread-safe: its owner holds a lock."""

    def __init__(self, torch: Any):
        self._torch = torch
        self._idle: list[Arena] = []

    def take(self, size: int) -> Arena | None:
        """An arena of at least `size` bytes; None when memory is too short for another one."""
        fitting = [arena for arena in self._idle if size <= arena.size <= 4 * max(size, _GRAIN)]
        if fitting:
            arena = min(fitting, key=lambda arena: arena.size)
            self._idle.remove(arena)
            return arena
        wanted = -(-(size + size // _SLACK) // _GRAIN) * _GRAIN
        self._drop(wanted)
        available = available_bytes()
        if available is not None and wanted > available // 2:
            return None
        try:
            return Arena(self._torch, wanted)
        except (OSError, ValueError, OverflowError):       # no memory, no descriptors: the caller does without
            return None

    def give(self, arena: Arena) -> None:
        self._idle.append(arena)
        self._drop(0)

    def _drop(self, wanted: int) -> None:
        """Close what is idle and will not be used again: the smaller ones first, all of them for a larger one."""
        self._idle.sort(key=lambda arena: arena.size)
        while len(self._idle) > _KEPT or (wanted and self._idle and self._idle[0].size < wanted):
            self._idle.pop(0).close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
