"""Where a process that was started beside another one waits, before it trains, until the controller gives it its turn: the other one is warm
then, or has recorded its updates.

Both would want all cores for their steps, and threads that wait for each other spin on cores that the others need. Starting (imports,
reading data) takes most of a short trial and wants one core. The controller holds a lock on a file, which this end waits for: the
kernel drops it however the controller ends.
"""

from __future__ import annotations

import fcntl
import os

# Bound before a script, or the redirection of its files, can replace it: `bootstrap.start` imports this.
_open, _close = os.open, os.close


def wait(path: str) -> None:
    """Return when nobody holds the file."""
    descriptor = _open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    finally:
        _close(descriptor)
