"""One file that is about to be replaced: its temporary neighbour, and how the two change places.

`path` holds the old bytes or the new ones at every instant, whatever is killed. A temporary file is locked while it
is written, so one that nobody locks is the litter of a killed process and is removed by the next save into its folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from pathlib import Path

from saturate.checkpoints.durable import sync_folder

#: How files that are being written are named.
LITTER = ".saturate-saving-"


class Unsuitable(Exception):
    """This path cannot be replaced by a rename without changing what a plain save does; the message says why."""


class Target:
    """`path` must be absolute. Raises `Unsuitable`, or OSError, before anything has changed."""

    def __init__(self, path: str):
        self.path = os.path.realpath(path)              # a link stays: what it points to is replaced
        self.folder = os.path.dirname(self.path)
        self.before = _existing(self.path)
        self.temporary, self.descriptor = _open_locked(self.folder)
        try:
            self._like_before()
        except BaseException:
            self.discard()
            raise

    def _like_before(self) -> None:
        """Permissions and owner of the file that is replaced."""
        if self.before is None:
            return
        os.fchmod(self.descriptor, stat.S_IMODE(self.before.st_mode))
        new = os.fstat(self.descriptor)
        if (new.st_uid, new.st_gid) != (self.before.st_uid, self.before.st_gid):
            try:
                os.fchown(self.descriptor, self.before.st_uid, self.before.st_gid)
            except PermissionError as error:
                raise Unsuitable("the file belongs to somebody else, and a new one could not") from error

    def free_bytes(self) -> int:
        """Bytes that the file system still takes, as far as it tells (quotas are not in it)."""
        seen = os.fstatvfs(self.descriptor)
        return seen.f_bavail * seen.f_frsize

    def publish(self) -> None:
        """The data must be synced. Afterwards `path` is the new file, also after a power failure."""
        os.replace(self.temporary, self.path)
        self.temporary = ""
        self.discard()
        sync_folder(Path(self.folder))

    def discard(self) -> None:
        """Close, and remove the temporary file if it has not become the real one."""
        if self.temporary:
            try:
                os.unlink(self.temporary)
            except FileNotFoundError:
                pass            # its folder was removed meanwhile
            self.temporary = ""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _existing(path: str) -> os.stat_result | None:
    try:
        seen = os.stat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(seen.st_mode):
        raise Unsuitable("it is not a regular file")
    if seen.st_nlink > 1:
        raise Unsuitable("it has several names (hard links), which a plain save changes all at once")
    if not os.access(path, os.W_OK):
        raise Unsuitable("the file is read-only")
    return seen


def _open_locked(folder: str) -> tuple[str, int]:
    while True:
        name = os.path.join(folder, f"{LITTER}{secrets.token_hex(8)}")
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        if _lock(descriptor) and os.fstat(descriptor).st_nlink:
            return name, descriptor
        os.close(descriptor)        # somebody took it for litter in the instant before it was locked


def _lock(descriptor: int) -> bool:
    """Whether nobody else holds it. A file system without locks is nobody's: then litter stays."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return True
        raise
    return True


def is_written(path: Path) -> bool | None:
    """Whether a process is writing this temporary file; None where it may not be opened, or its file system has no locks."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)        # shared: who else asks is no writer
    except (BlockingIOError, FileNotFoundError):
        return True                 # gone: it has become the real one
    except OSError:
        return None
    return False


def remove_litter(folder: str) -> None:
    """Remove temporary files of processes that were killed while they wrote."""
    for name in os.listdir(folder):
        if not name.startswith(LITTER):
            continue
        path = os.path.join(folder, name)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue                # gone, or not ours to remove
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        except OSError:
            pass                    # in use, or on a file system that cannot tell
        finally:
            os.close(descriptor)
