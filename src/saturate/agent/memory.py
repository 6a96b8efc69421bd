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
    """The caching allocator's peaks since `begin`, on the training's devices. Every method does nothing where it is not on CUDA."""

    def __init__(self, session: Any):
        self.session = session
        self._retries = 0
        self._limited = False

    @property
    def _devices(self) -> tuple[Any, ...]:
        """Those of the trained parameters. A rank may never have made its own the current one, and asking another would create
        a context there."""
        return self.session.inspection.devices if self.session.context.device == "cuda" else ()

    def limit(self, limit_bytes: int) -> None:
        """Let the allocator take no more than this: beyond it, it frees its cache, and then raises out of memory."""
        if self._devices and not self._limited:
            limit_allocator(self.session.torch.cuda, self._devices, limit_bytes)
            self._limited = True

    def begin(self) -> None:
        """A window begins: what another batch size left in the cache is given back, and peaks start anew."""
        if self._devices:
            cuda = self.session.torch.cuda
            self.session.drain()
            cuda.empty_cache()
            for device in self._devices:
                cuda.reset_peak_memory_stats(device)
            self._retries = self._retried()

    def seen(self) -> dict[str, int] | None:
        """Bytes on the device that needs most, what the fullest one can give the allocator in all (`room_bytes`), and how often
        the allocator had to free its cache before it could go on; None on a CPU."""
        devices = self._devices
        if not devices:
            return None
        cuda = self.session.torch.cuda
        return {"reserved_bytes": max(cuda.max_memory_reserved(device) for device in devices),
                "idle_bytes": max(cuda.memory_allocated(device) for device in devices),
                "room_bytes": min(cuda.memory_reserved(device) + cuda.mem_get_info(device)[0] for device in devices),
                "retries": self._retried() - self._retries}

    def _retried(self) -> int:
        return sum(self.session.torch.cuda.memory_stats(device).get("num_alloc_retries", 0) for device in self._devices)


def limit_allocator(cuda: Any, devices: tuple[Any, ...], limit_bytes: int) -> None:
    """Let the caching allocator take no more than this of each of these devices."""
    for device in devices:
        total = cuda.get_device_properties(device).total_memory
        cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)


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
