"""Resident memory of a trial's process tree: its peak, and a limit that it does not survive.

What is counted: private memory of every process once, memory that forked or sharing processes have in common once, and
mapped files (libraries, memory-mapped data) once, by the process that maps the most. Where the kernel does not tell what is
shared (`smaps_rollup`), every process counts in full.

A thread looks at the tree, the more often the closer it is to the limit, and kills it when it passes. The peak of a window
comes from the kernel's own high-water marks (VmHWM, set back through `clear_refs`: proc(5)), which miss nothing between two
looks; the looks add what processes had that are gone.
"""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import dataclass

from saturate.trial import tree

#: Between two looks a tree is taken to grow by no more than this, bytes per second: the kernel clears pages no faster on a
#: few cores.
_FASTEST_GROWTH = 8e9
_SHORTEST_S, _LONGEST_S = 0.002, 0.05

#: How often the list of processes is made anew.
_LIST_S = 0.05

#: ... and what they share is found out anew, at the latest.
_SETTLE_S = 2.0

_PAGE = os.sysconf("SC_PAGE_SIZE")
_FIELD = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True)
class Resident:
    """Of a tree, bytes. `exact`: shared memory counts once."""

    total_bytes: int
    overlap_bytes: int      # what a plain sum over processes has on top
    exact: bool


def resident(pid: int) -> Resident:
    """What the descendants of `pid` have resident now. Walks their page tables: milliseconds per gibibyte."""
    processes = {child: status for child in tree.descendants(pid) if "VmRSS" in (status := _sizes(f"/proc/{child}/status"))}
    plain = sum(status["VmRSS"] for status in processes.values())
    if len(processes) < 2:
        return Resident(plain, 0, True)
    shares = {child: _sizes(f"/proc/{child}/smaps_rollup") for child in processes}
    if any("Pss_Anon" not in share and tree.state(child) not in ("", "Z", "X") for child, share in shares.items()):
        return Resident(plain, 0, False)
    files = max(status.get("RssFile", 0) for status in processes.values())
    total = min(plain, files + sum(share.get("Pss_Anon", 0) + share.get("Pss_Shmem", 0) for share in shares.values()))
    return Resident(total, plain - total, True)


def file_bytes(pid: int) -> int:
    """What the descendants of `pid` map of files now, as `resident` counts it."""
    return max((_sizes(f"/proc/{child}/status").get("RssFile", 0) for child in tree.descendants(pid)), default=0)


def in_use(pid: int) -> int | None:
    """What the descendants of `pid` have resident and the system cannot take back: without what they map of files. None where it is not
    known what several of them have in common."""
    found = resident(pid)
    return max(0, found.total_bytes - file_bytes(pid)) if found.exact else None


def queued_ns() -> int:
    """How long the calling thread was ready to run so far and waited for a core; 0 where the kernel keeps no count of it.
    Source: kernel Documentation/scheduler/sched-stats, /proc/PID/schedstat."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError, ValueError):       # a kernel without it: what it would explain stays unexplained
        return 0


def high_water_bytes(pid: int) -> int:
    """The sum of the most that each living descendant of `pid` ever had resident (at least their peak together), with what
    they share now counted once."""
    marks = sum(_sizes(f"/proc/{child}/status").get("VmHWM", 0) for child in tree.descendants(pid))
    return max(0, marks - resident(pid).overlap_bytes)


def cpu_seconds(pid: int) -> float:
    """Processor time of all living descendants of `pid`, with that of the children they have waited for."""
    ticks = 0
    for child in tree.descendants(pid):
        try:
            with open(f"/proc/{child}/stat", encoding="ascii", errors="replace") as file:
                ticks += sum(int(word) for word in file.read().rsplit(")", 1)[1].split()[11:15])
        except (FileNotFoundError, ProcessLookupError, IndexError):
            continue        # gone meanwhile
    return ticks / os.sysconf("SC_CLK_TCK")


def kernel_work(pid: int) -> tuple[int, float]:
    """Of one process so far: page faults served without the disk, and seconds its threads spent in the kernel. Zeros when it is
    gone. Source: proc(5), /proc/PID/stat."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return int(fields[7]), int(fields[12]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):       # gone, or a system without procfs: nothing is known
        return 0, 0.0


class Meter:
    """Watches the descendants of `pid` until `close`. Bytes; `limit_bytes` may be set later. `deadline` is of
    time.monotonic: a tree that outlives it is killed as well."""

    def __init__(self, pid: int, limit_bytes: float, deadline: float = float("inf")):
        self.limit_bytes = limit_bytes
        self.exceeded_bytes: int | None = None      # what it had when it was killed for the limit
        self.late = False                           # it was killed at the deadline
        self.exact = True
        self._pid = pid
        self._deadline = deadline
        self._overlap = 0
        self._seen = 0
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """A window begins: forget the peak so far. While the tree stands at a gate."""
        self._settle()
        for child in tree.descendants(self._pid):
            try:
                with open(f"/proc/{child}/clear_refs", "w", encoding="ascii") as file:
                    file.write("5")
            except OSError:
                continue    # gone meanwhile, or forbidden here: then its mark is an older, higher one
        with self._lock:
            self._seen = 0

    def peak_bytes(self) -> int:
        """The highest since `begin`, or since the start. While the tree stands at a gate, or after its end."""
        marks = high_water_bytes(self._pid)
        with self._lock:
            return max(self._seen, marks)

    def idle_bytes(self) -> int:
        """Resident now. While the tree stands at a gate."""
        return self._settle().total_bytes

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _settle(self) -> Resident:
        """Find out anew what a plain sum counts twice."""
        found = resident(self._pid)
        with self._lock:
            self._overlap, self.exact = found.overlap_bytes, self.exact and found.exact
        return found

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        processes: list[int] = []
        listed = settled = pause = 0.0
        while not self._ended.wait(pause):
            now = time.monotonic()
            if now > self._deadline:
                self.late = True
                tree.kill(self._pid)
                return
            if now - listed >= _LIST_S:
                before, processes, listed = processes, tree.descendants(self._pid), now
                if processes != before or (len(processes) > 1 and now - settled >= _SETTLE_S):
                    self._settle()      # a fork doubles what a plain sum counts
                    settled = now
            total = sum(_pages(child) for child in processes) * _PAGE
            if total - self._overlap > self.limit_bytes and self._passed():
                return
            with self._lock:
                seen = total - self._overlap
                self._seen = max(self._seen, seen)
            pause = min(_LONGEST_S, max(_SHORTEST_S, (self.limit_bytes - seen) / _FASTEST_GROWTH))

    def _passed(self) -> bool:
        """Whether it really is above the limit, counted well; then it is killed."""
        found = self._settle()
        if found.total_bytes <= self.limit_bytes:
            return False
        self.exceeded_bytes = found.total_bytes
        with self._lock:
            self._seen = max(self._seen, found.total_bytes)
        tree.kill(self._pid)
        return True


def _pages(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1])
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return 0            # gone meanwhile


def _sizes(path: str) -> dict[str, int]:
    """The sizes that a file of /proc lists, bytes."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return {name: 1024 * int(size) for name, size in _FIELD.findall(file.read())}
    except OSError:
        return {}           # gone meanwhile, or not ours to read
