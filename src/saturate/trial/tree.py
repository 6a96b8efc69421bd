"""Process trees through /proc: who descends from whom, freezing, thawing, killing.

Process groups do not do: torchrun gives every rank a session of its own. Standard library only; the supervisor uses it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable


def children(pid: int) -> list[int]:
    """Direct children of all threads of `pid`; empty when it is gone."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return found
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found.extend(int(word) for word in file.read().split())
        except (FileNotFoundError, ProcessLookupError):
            continue        # the thread ended while we looked
    return found


def descendants(pid: int) -> list[int]:
    """All living descendants of `pid`, parents before children, without `pid`."""
    found: list[int] = []
    pending = children(pid)
    while pending:
        child = pending.pop()
        found.append(child)
        pending.extend(children(child))
    return found


def descends(pid: int, ancestor: int) -> bool:
    """Whether `pid` is `ancestor` or descends from it; True of one that is gone meanwhile, of which nobody can say."""
    while pid and state(pid):
        at = pid
        while at not in (ancestor, 1, 0) and (fields := _stat(at)):
            at = int(fields[1])
        if at in (ancestor, 1, 0):
            return at == ancestor       # else one on the way has ended just now, and what it had started has another parent
    return bool(pid)


def state(pid: int) -> str:
    """The kernel's one-letter process state, "" when gone."""
    return next(iter(_stat(pid)), "")


def _stat(pid: int) -> list[str]:
    """What stands behind the name in /proc/PID/stat, see proc(5); nothing when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


#: Processes that Python starts beside those of `multiprocessing`, and that end a moment after the one that started them.
_HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
#: Of the flags in /proc/PID/stat: it was forked, and runs the program of the process that forked it (PF_FORKNOEXEC of linux/sched.h).
_FORKED = 0x40


def running(pid: int) -> int:
    """How many descendants have not ended, but for helpers of Python's own."""
    return sum(state(process) not in ("Z", "X", "") and not _is_helper(process) for process in descendants(pid))


def _is_helper(pid: int) -> bool:
    """What a fork server has forked has its command line, and is the script's: only what was started by that command is a helper."""
    fields = _stat(pid)
    if len(fields) < 7 or int(fields[6]) & _FORKED:
        return False
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4096)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(name in words for name in _HELPERS)


#: How long one in uninterruptible sleep is waited for before those below it are stopped: it may wait for one of them (vfork).
_ASLEEP_S = 0.02


def freeze(pid: int, timeout_s: float = 20.0) -> bool:
    """SIGSTOP every descendant until none runs; False when some did not stop in time.

    To be called at a gate only: a rank frozen in the middle of a collective dies of the others' timeout. A parent stands still
    before its children are stopped: one that is told of children that stop (a shell with job control, sudo) would take that for their end.
    Processes may appear until then, so walk until nothing runs. The short sleeps leave the core to those that must stop.
    """
    deadline = time.monotonic() + timeout_s
    while _moving(descendants(pid)):
        if time.monotonic() > deadline:
            return False
        level = children(pid)
        while level:
            _stop(level, deadline)
            level = [child for process in level for child in children(process)]
    return True


def _stop(processes: list[int], deadline: float) -> None:
    """Wait until they stand still, however long they wait for a core in which to do so; or sleep where no signal reaches them."""
    moving = _moving(processes)
    while moving and time.monotonic() < deadline:
        for process in moving:          # again, where somebody else has had it go on
            _signal(process, signal.SIGSTOP)
        awaited = time.monotonic() + _ASLEEP_S
        while moving and time.monotonic() < awaited:
            time.sleep(1e-4)
            moving = _moving(moving)
        if all(state(process) == "D" for process in moving):
            return


def _moving(processes: Iterable[int]) -> list[int]:
    return [process for process in processes if state(process) not in ("T", "t", "Z", "X", "")]


def thaw(pid: int) -> None:
    """SIGCONT every descendant, children first, so that a parent never finds a worker dead-looking."""
    for process in reversed(descendants(pid)):
        _signal(process, signal.SIGCONT)


def kill(pid: int, timeout_s: float = 10.0) -> list[int]:
    """SIGKILL every descendant until none is left; returns those that would not die (uninterruptible sleep)."""
    deadline = time.monotonic() + timeout_s
    while True:
        alive = [p for p in descendants(pid) if state(p) not in ("Z", "X", "")]
        if not alive or time.monotonic() > deadline:
            return alive
        for process in alive:
            _signal(process, signal.SIGKILL)
        time.sleep(1e-3)


def kill_marked(entry: bytes, timeout_s: float = 10.0) -> None:
    """SIGKILL every process that was started with `entry` in its environment, until none is left: what a killed
    supervisor leaves behind has no parent to be found by."""
    deadline = time.monotonic() + timeout_s
    while (found := _marked(entry)) and time.monotonic() < deadline:
        for process in found:
            _signal(process, signal.SIGKILL)
        time.sleep(1e-2)


def _marked(entry: bytes) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if entry in file.read().split(b"\0") and state(int(name)) not in ("Z", "X", ""):
                    found.append(int(name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue        # gone meanwhile, or another user's
    return found


def shared_memory(processes: Iterable[int]) -> set[str]:
    """Files in /dev/shm that one of `processes` has mapped or open to write."""
    found = set()
    for process in processes:
        try:
            with open(f"/proc/{process}/maps", encoding="utf-8", errors="replace") as file:
                found.update(line[line.index("/dev/shm/"):].rstrip("\n") for line in file
                             if "/dev/shm/" in line and line.split(maxsplit=2)[1] in ("rw-s", "-w-s", "rwxs"))
            for number in os.listdir(f"/proc/{process}/fd"):
                path = os.readlink(f"/proc/{process}/fd/{number}")
                if path.startswith("/dev/shm/") and _writes(process, number):
                    found.add(path)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue        # gone meanwhile, or a set-uid helper
    return {path for path in found if not path.endswith(" (deleted)")}


def _writes(process: int, descriptor: str) -> bool:
    with open(f"/proc/{process}/fdinfo/{descriptor}", encoding="ascii") as file:
        flags = next(line for line in file if line.startswith("flags:"))
    return int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY


def resident_bytes(pid: int) -> int:
    """Resident memory of all descendants, shared pages counted once per process (an upper bound)."""
    total = 0
    page = os.sysconf("SC_PAGE_SIZE")
    for process in descendants(pid):
        try:
            with open(f"/proc/{process}/statm", encoding="ascii") as file:
                total += int(file.read().split()[1]) * page
        except (FileNotFoundError, ProcessLookupError, IndexError):
            continue
    return total


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return              # gone, or a set-uid helper that is not ours to stop
