"""The lock of a folder that one saturate works in at a time.

The kernel drops it however the holder ends. It belongs to the process that took it: programs that this one starts never
get it, and a fork of this one (a loader's worker) lets go of it at once, so that it does not outlive its holder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from pathlib import Path

from saturate.errors import EnvironmentProblem, StudyLocked

_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    """Taken at construction; `release` it, or use it as a context. `option`: what names another folder, for the remedy.

    Raises StudyLocked where another process, or another call in this one, works in the folder, and EnvironmentProblem
    where nothing can be written there.
    """

    def __init__(self, folder: Path, option: str = "--dir FOLDER"):
        self._descriptor: int | None = None
        refused, full = f"cannot write in {folder}", f"free space there, or choose another disk with {option}"
        try:
            self._make(folder)
            self._descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)    # what a link leads to is not ours to empty
            _held.add(self)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(self._descriptor, 20).decode("ascii", "replace").strip() or "unknown"   # type: ignore[arg-type]
            self.release()
            raise StudyLocked(
                f"another saturate is working in {folder}", cause="two in one folder would write over each other's files",
                evidence=f"process {holder}", remedy=f"wait until it has ended, or give this one a folder of its own with {option}",
            ) from error
        except OSError as error:
            self.release()
            raise EnvironmentProblem(refused, cause=str(error), remedy=full if error.errno in (errno.ENOSPC, errno.EDQUOT) else
                                     f"choose a writable folder with {option}") from error
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)
        except OSError as error:
            self.release()
            raise EnvironmentProblem(refused, cause=str(error), remedy=full) from error

    def _make(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def release(self) -> None:
        """Not LOCK_UN: in a fork that would unlock its parent's too."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def _let_go() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_let_go)
