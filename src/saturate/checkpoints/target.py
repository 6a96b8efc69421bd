"""One file that is about to be replaced: its temporary neighbour, and how the two change places.

`path` holds the old bytes or the new ones at every instant, whatever is killed; but where a disk has no room for both and
`give_way` was asked. A temporary file is locked while it is written, so one that nobody locks is the litter of a killed
process and is removed by the next save into its folder.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from saturate import notices
from saturate.checkpoints import durable
from saturate.records import sizes

#: How files that are being written are named.
LITTER = ".saturate-saving-"

#: What a disk answers that is full, or of which nobody may have more.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

#: What is said of a save that is not atomic.
_OVER = ": it is written over that, as without async-checkpoint; this save is NOT atomic, what ends it in the middle costs both\n"


class Unsuitable(Exception):
    """This path cannot be replaced by a rename without changing what a plain save does; the message says why."""


class Target:
    """`path` must be absolute. Raises `Unsuitable`, or OSError, before anything has changed."""

    def __init__(self, path: str):
        self.path = os.path.realpath(path)              # a link stays: what it points to is replaced
        self.folder = os.path.dirname(self.path)
        self.before = _existing(self.path)
        self.over = False                               # the old file is the one that is written
        self.queued = False                             # somebody else writes and publishes it
        self.temporary, self.descriptor = durable.open_locked(self.folder, LITTER)
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

    def give_way(self, error: OSError, size: int) -> int | None:
        """After the new file of `size` bytes met `error`: where what is missing is room, and the old one would make enough, it is emptied
        and takes the new one's place, as in a plain save. How many bytes were missing beside it; None: nothing was changed."""
        if self.over or error.errno not in NO_ROOM:
            return None
        try:
            before = _existing(self.path)
        except Unsuitable:
            return None
        os.ftruncate(self.descriptor, 0)                # what the new one held is free again
        free = 0 if error.errno == errno.EDQUOT else self.free_bytes()      # of a quota nobody tells what is left
        if before is None or free + 512 * before.st_blocks < size:
            return None
        old = os.open(self.path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        self.discard()
        self.descriptor, self.over = old, True
        return max(0, size - free)

    def publish(self) -> None:
        """The data must be synced. Afterwards `path` is the new file, also after a power failure."""
        if self.over:
            self.discard()
            return
        os.replace(self.temporary, self.path)
        self.temporary = ""
        self.discard()
        durable.sync_folder(Path(self.folder))

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


def new(path: str, over: bool) -> Target:
    """A disk without room is an error of ours, unless what is there can be written over; any other that keeps the file from being
    created is left to the plain save, which may do without a new file in the folder, and says what is wrong in its own words."""
    try:
        return Target(path)
    except OSError as error:
        if error.errno in NO_ROOM:
            if not over or not os.path.isfile(path):
                raise
            notices.tell(f"saturate: there is no room for a new {path} beside the old one{_OVER}")
        raise Unsuitable(str(error)) from error


def fill(target: Target, size: int, over: bool, write: Callable[[], object]) -> None:
    """`write` `size` bytes to the descriptor of `target`, then publish it. Where that does not fit beside the old file, `over` it."""
    try:
        write()
    except OSError as error:
        missing = target.give_way(error, size) if over else None
        if missing is None:
            raise
        notices.tell(f"saturate: there is no room for the new {target.path} beside the old one, {sizes.decimal(missing)} are missing{_OVER}")
        write()
    target.publish()


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


def remove_litter(folder: str) -> None:
    """Remove temporary files of processes that were killed while they wrote."""
    durable.remove_litter(folder, LITTER)
