"""Files that exist whole or not at all: temporary file, fsync, rename, fsync of the folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

#: How temporary files are named. One that lies about belongs to a process that was killed.
TEMPORARY = ".saturate-temporary-"

#: What file systems answer that cannot sync a folder (shared folders of virtual machines, 9p, some of FUSE).
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


def temporary(folder: Path) -> Path:
    """A name in `folder` that nobody else uses."""
    return folder / f"{TEMPORARY}{secrets.token_hex(8)}"


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
    new = temporary(path.parent)
    try:
        with open(new, "xb") as stream:
            with contextlib.suppress(OSError):      # locked while it is written, where that can be: see `target.is_written`
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
