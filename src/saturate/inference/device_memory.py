"""How much of a GPU's memory a process takes, whoever in it asked for it.

torch's allocator knows what it holds itself. AOTInductor's weights, TensorRT's plans and ONNX Runtime's arenas come from
the device directly, and a model that is served by one of them would seem to need nothing. So what the process takes beside the
allocator is counted as well: as much as it has grown since the process took its device, which leaves out the context of
CUDA itself. The driver tells it by process (NVML), but by numbers of processes that hold outside of containers only; inside of one
it is the growth of the whole device, to which other programs on it contribute. Among them are other processes of the same search, such
as the one that a candidate races against: what they take or give back meanwhile is counted as this one's.

Source: NVIDIA NVML API reference guide (nvmlDeviceGetComputeRunningProcesses); CUDA Runtime API (cudaMemGetInfo).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from saturate.machine import nvml as driver
from saturate.machine.nvml import Nvml

#: The inode of the first process namespace, which is part of Linux's interface (PROC_PID_INIT_INO).
_FIRST_NAMESPACE = 0xEFFFFFFC


class DeviceMemory:
    """Of this process, on the current device, from now on: make one before anything is put there. `nvml_module`: a stand-in
    for nvidia-ml-py."""

    def __init__(self, torch: Any, nvml_module: Any = None, proc: Path = Path("/proc")):
        self._cuda = torch.cuda
        self._used: Callable[[], int | None] = self._of_the_device
        self.whole_device = True        # what others take from now on is counted, too
        self._of_the_device()           # CUDA's context is made by the first question, and is no growth
        nvml, _ = driver.start(nvml_module) if knows_processes(proc) else (None, "")
        if nvml is not None and process_bytes(nvml, os.getpid()) is not None:
            self._used, self.whole_device = (lambda: process_bytes(nvml, os.getpid())), False
        self._began = self._beside()

    def peak_bytes(self) -> int | None:
        """The most that torch's allocator held since its peak was reset, and what is taken beside it now; None: not known."""
        beside = self._beside()
        if beside is None or self._began is None:
            return None
        return int(self._cuda.max_memory_reserved()) + max(0, beside - self._began)

    def _beside(self) -> int | None:
        """Bytes in use that are not the allocator's, but for a constant; None: not known."""
        used = self._used()
        return None if used is None else used - int(self._cuda.memory_reserved())

    def _of_the_device(self) -> int | None:
        try:
            free, total = self._cuda.mem_get_info()
        except RuntimeError:            # not every device tells
            return None
        return int(total - free)


def process_bytes(nvml: Nvml, pid: int) -> int | None:
    """What the driver says that a process takes, on all devices together; None where it does not say."""
    listed = [process for handle in nvml.handles().values() for process in nvml.ask("DeviceGetComputeRunningProcesses", handle) or ()]
    found = [process.usedGpuMemory for process in listed if process.pid == pid]
    return sum(found) if found and None not in found else None


def knows_processes(proc: Path) -> bool:
    """Whether the driver's numbers of processes are those that this process knows: in a container another process may have this
    one's number."""
    try:
        return (proc / "self" / "ns" / "pid").stat().st_ino == _FIRST_NAMESPACE
    except OSError:
        return False
