"""Folders that belong to the process which holds their lock. The system ends the lock with the process, however that ends: a folder that
nobody holds is abandoned, and goes before the next one of its kind is made."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from pathlib import Path

#: Hexadecimal digits behind the prefix in the name of such a folder. Names of another length are not ours.
DIGITS = 12


def name(prefix: str) -> str:
    """One that nobody else uses."""
    return f"{prefix}{secrets.token_hex(DIGITS // 2)}"


def locked(folder: Path, wait: bool = False) -> int | None:
    """A descriptor that holds the lock of a folder until it is closed, or the process ends. None where another process
    holds it, or the folder is gone. Raises OSError where the file system has no locks."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if os.fstat(descriptor).st_ino == os.stat(folder).st_ino:
            return descriptor               # else what was opened has another name by now
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def clear(place: Path, prefix: str) -> None:
    """Remove the folders in `place` that begin with `prefix` and are abandoned."""
    for left in place.glob(f"{prefix}{DIGITS * '[0-9a-f]'}"):
        with contextlib.suppress(OSError):          # another user's, a link, or no locks here: then all stay
            if (lock := locked(left)) is not None:
                try:
                    shutil.rmtree(left, ignore_errors=True)
                finally:
                    os.close(lock)
