"""What memory a training process holds: on a CUDA device, what its caching allocator took at most.

On a CPU the peak is seen from outside (`trial.meter`). The CUDA part was not run on a device when it was written.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

#: Importing torch alone takes some 100 MiB from the heap that is in use.
LEAST_HEAP_BYTES = 1 << 20


class DeviceMemory:
    """The caching allocator's peaks since `begin`. Every method does nothing where the training is not on CUDA."""

    def __init__(self, session: Any):
        self.session = session
        self._retries = 0
        self._limited = False

    @property
    def _on_cuda(self) -> bool:
        return self.session.context.device == "cuda"

    def limit(self, limit_bytes: int) -> None:
        """Let the allocator take no more than this: beyond it, it frees its cache, and then raises out of memory."""
        if self._on_cuda and not self._limited:
            cuda = self.session.torch.cuda
            total = cuda.get_device_properties(cuda.current_device()).total_memory
            cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total))
            self._limited = True

    def begin(self) -> None:
        """A window begins: what another batch size left in the cache is given back, and peaks start anew."""
        if self._on_cuda:
            cuda = self.session.torch.cuda
            cuda.synchronize()
            cuda.empty_cache()
            cuda.reset_peak_memory_stats()
            self._retries = cuda.memory_stats().get("num_alloc_retries", 0)

    def seen(self) -> dict[str, int] | None:
        """Bytes, and how often the allocator had to free its cache before it could go on; None on a CPU."""
        if not self._on_cuda:
            return None
        cuda = self.session.torch.cuda
        free, total = cuda.mem_get_info()
        return {"reserved_bytes": cuda.max_memory_reserved(), "allocated_bytes": cuda.max_memory_allocated(),
                "now_bytes": cuda.memory_reserved(), "idle_bytes": cuda.memory_allocated(),
                "retries": cuda.memory_stats().get("num_alloc_retries", 0) - self._retries,
                "free_bytes": free, "total_bytes": total}


def heap_peak_bytes(session: Any) -> int | None:
    """The most that the C library's heaps had since the process began: all blocks but those so large that each is mapped by
    itself. None on a device, and where glibc does not allocate (musl; jemalloc in front of it). Source: malloc_info(3)."""
    libc = ctypes.CDLL(None)
    if session.context.device != "cpu" or not hasattr(libc, "malloc_info"):
        return None
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    libc.open_memstream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    heaps = ctypes.string_at(text, size.value)
    libc.free(text)
    of_all = re.findall(rb'<system type="max" size="(\d+)"/>', heaps)     # of each heap, then of all together
    peak = int(of_all[-1]) if of_all else 0
    return peak if peak > LEAST_HEAP_BYTES else None


def give_back_freed(session: Any) -> None:
    """On a CPU: let the C library return what was freed, so that what is resident is what is in use. glibc only."""
    if session.context.device == "cpu":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
