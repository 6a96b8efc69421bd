"""On which CPU a thread goes on, for fair turns.

The CPUs of one machine differ: a virtual one was seen to be slower by half than its neighbour for seconds, then the other way round. The
scheduler leaves a thread where it is, so of two processes that take turns one may be on the slow CPU for a whole race, for no
reason of its own. Where the second of two turns begins on the CPU of the first, both see the same one (`bench/turns.py`).
Nothing is pinned: the thread is moved once, and where it goes from there is the kernel's affair, as it always was.

Standard library only: this runs inside the workload.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")


def current() -> int | None:
    """The CPU that the calling thread is on; None where nobody says."""
    try:
        with open("/proc/thread-self/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[36])     # field 39 of proc_pid_stat(5)
    except OSError:
        return None


def move(cpu: int | None) -> None:
    """Continue the calling thread on `cpu`, where it may run there, and its memory is not farther away there."""
    here = current()
    if cpu is None or here is None or cpu == here or _node(cpu) != _node(here):
        return
    try:
        allowed = os.sched_getaffinity(0)
        if cpu in allowed and len(allowed) > 1:
            os.sched_setaffinity(0, {cpu})      # moves it at once
            os.sched_setaffinity(0, allowed)
    except OSError:
        pass        # a sandbox forbids it, or the CPU has gone: it stays where it is, which is no error, only noise


@functools.cache
def _node(cpu: int) -> str | None:
    """The NUMA node of a CPU; None on a kernel without."""
    return next((path.name for path in (_CPUS / f"cpu{cpu}").glob("node*")), None)
