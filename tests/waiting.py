"""Waiting for what other processes and threads do, however busy the machine is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")


def until(true: Callable[[], Found], what: str = "it did not come", seconds: float = 120.0) -> Found:
    """What `true` returned once that was true. Where it comes, nobody waits longer than it takes: the limit is for where it does not."""
    ends = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < ends, what
        time.sleep(0.01)
    return found


def is_waited_for(path: str | os.PathLike[str]) -> bool:
    """Whether a process waits for the lock on this file, which another one holds. Source: proc(5), /proc/locks."""
    inode = f":{os.stat(path).st_ino} "
    return any(" -> " in line and inode in line for line in Path("/proc/locks").read_text(encoding="ascii").splitlines())
