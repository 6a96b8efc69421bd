"""What trials read on standard input."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import termios

from saturate.trial.outcome import PIPED_INPUT

CLOSED_INPUT = "standard input is a file that this user may not open, and every trial opens it anew, so trials get none of it: make it readable"


def source() -> tuple[str, int]:
    """What a workload reads, and from where on: our own standard input if that is a file, which every trial reads for itself.
    A pipe can be read only once, and may never end, and a file that somebody else opened for us may be closed to us: then they
    get nothing."""
    try:
        if stat.S_ISREG(os.fstat(0).st_mode):
            path = f"/proc/{os.getpid()}/fd/0"
            os.close(os.open(path, os.O_RDONLY))
            return path, os.lseek(0, 0, os.SEEK_CUR)
    except OSError:
        pass            # it is closed, or we may not open it
    return os.devnull, 0


def withheld() -> str:
    """What to do about what waits on our standard input and no trial gets; empty where nothing does."""
    try:
        seen = os.fstat(0)
        if stat.S_ISREG(seen.st_mode):
            unread = source()[0] == os.devnull and os.lseek(0, 0, os.SEEK_CUR) < seen.st_size
            return CLOSED_INPUT if unread else ""
        if not (stat.S_ISFIFO(seen.st_mode) or stat.S_ISSOCK(seen.st_mode)):
            return ""
        return PIPED_INPUT if struct.unpack("i", fcntl.ioctl(0, termios.FIONREAD, bytes(4)))[0] > 0 else ""
    except OSError:
        return ""       # it is closed
