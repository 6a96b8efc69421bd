"""Processes to make items in: forks of the training, which have its dataset, and share nothing else with it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
import sys
import warnings


def fork(*own: int) -> int:
    """As `os.fork`, for a process to make items in, which shares nothing with the script that either of them could move or use up;
    only these descriptors. What the script does when it is told to end, only the script does: no signal reaches such a process
    before that is settled."""
    shared = _shared(own)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")     # that this process has threads: so it has when workers are forked
            child = os.fork()
        if child == 0:
            _settle(shared)
        return child
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait(child: int) -> None:
    with contextlib.suppress(ChildProcessError):        # the script waits for all children, or ignores how they end
        os.waitpid(child, 0)


def _shared(own: tuple[int, ...]) -> dict[int, int | None]:
    """Descriptors that a fork would share: of files, with their places, and of sockets and pipes."""
    found: dict[int, int | None] = {}
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {*own}:
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISREG(mode):
                found[descriptor] = os.lseek(descriptor, 0, os.SEEK_CUR)
            elif stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
                found[descriptor] = None
        except OSError:                 # closed in the meantime: the one by which they were listed
            continue
    return found


def _settle(shared: dict[int, int | None]) -> None:
    try:
        for number in signal.valid_signals():
            if number == signal.SIGINT or callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor, place in shared.items():
            _alone(descriptor, place, nowhere)
        for stream in (1, 2):           # what the dataset prints it will print again; what the parent had not flushed, twice
            os.dup2(nowhere, stream)
        sys.stdout = sys.stderr = os.fdopen(nowhere, "w")
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)    # the threads of the parent were not forked with it
    except BaseException:  # noqa: BLE001 - whatever it is, the script must not go on in this process
        os._exit(1)


def _alone(descriptor: int, place: int | None, nowhere: int) -> None:
    """Put this process's own in the place of a descriptor: the same file at the same place, or nothing."""
    if place is None:
        os.dup2(nowhere, descriptor, inheritable=False)
        return
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND)
    try:
        fresh = os.open(f"/proc/self/fd/{descriptor}", flags)
    except OSError:                     # opened by somebody with more rights
        os.dup2(nowhere, descriptor, inheritable=False)
        return
    os.lseek(fresh, place, os.SEEK_SET)
    os.dup2(fresh, descriptor, inheritable=False)
    os.close(fresh)
