"""Files that exist whole or not at all: temporary file, fsync, rename, fsync of the folder."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

#: How temporary files are named. A file is locked while it is written, where its file system has locks: one that nobody locks belongs
#: to a process that was killed.
TEMPORARY = ".saturate-temporary-"

#: What file systems answer that cannot sync a folder (shared folders of virtual machines, 9p, some of FUSE).
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


def temporary(folder: Path) -> Path:
    """A name in `folder` that nobody else uses."""
    return folder / f"{TEMPORARY}{secrets.token_hex(8)}"


def open_locked(folder: str, prefix: str = TEMPORARY) -> tuple[str, int]:
    """A new temporary file in `folder`, locked for as long as its descriptor is open. Raises OSError."""
    while True:
        name = os.path.join(folder, f"{prefix}{secrets.token_hex(8)}")
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


def remove_litter(folder: str, prefix: str = TEMPORARY) -> None:
    """Remove temporary files of processes that were killed while they wrote. Raises OSError where `folder` cannot be listed."""
    for name in os.listdir(folder):
        if not name.startswith(prefix):
            continue
        path = os.path.join(folder, name)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue                # gone, a folder, or not ours to remove
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        except OSError:
            pass                    # in use, or on a file system that cannot tell
        finally:
            os.close(descriptor)


def publish(temporary_path: Path, stream: BinaryIO, path: Path) -> None:
    """Make a complete temporary file durable, and give it its name."""
    stream.flush()
    os.fsync(stream.fileno())
    os.replace(temporary_path, path)
    sync_folder(path.parent)


def target(path: Path) -> Path:
    """Where links lead that stand at `path`. Raises OSError where they lead round in a loop, as `open` does."""
    found = Path(os.path.realpath(path))
    if found.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return found


def replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write(stream)` fill a new file, then put it in the place of `path`, which keeps its permissions.

    Whatever happens, `path` holds the old bytes or the new ones. A symbolic link stays one: its target is replaced.
    Raises OSError, also where something else than a regular file is there.
    """
    path = target(path)
    if path.exists() and not path.is_file():        # a rename would take the place of a pipe or a device
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    name, descriptor = open_locked(str(path.parent))
    new = Path(name)
    try:
        with open(descriptor, "wb") as stream:
            if path.exists():       # before a byte of it is there: who may not read the old ones may not read the new ones
                os.fchmod(stream.fileno(), stat.S_IMODE(path.stat().st_mode))
            write(stream)
            publish(new, stream, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """`replace`, by a text. Raises OSError."""
    replace(path, lambda stream: stream.write(text.encode()))


def sync_folder(folder: Path) -> None:
    """Make renames and removals in `folder` durable, as far as its file system can. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)
