"""A copy-on-write view of the file system in plain files, for machines that forbid overlays.

What a trial writes at `/home/u/x` lies at `ROOT/home/u/x`. A file is copied there before its first change; a file or
folder that was removed leaves a *whiteout* there, a FIFO with a mode that nobody gives to a FIFO. Since a whiteout is
not a folder, one `lstat` tells everything about a path: found (changed), ENOENT (untouched), ENOTDIR (below something
removed). A folder that is made again after it was removed gets a whiteout for each of the real folder's children.

Only the functions captured here are used: the ones in `os` lead back to this file once it is installed. Permissions of
the user's files still hold: what could not be written natively raises PermissionError here as well.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from posix import getpid
from typing import Any

ORIGINAL: dict[str, Any] = {name: getattr(os, name) for name in (
    "access", "chdir", "chmod", "chown", "fchmod", "fchown", "getcwd", "getxattr", "lchown", "link", "listdir", "listxattr", "lstat", "mkdir",
    "mkfifo", "mknod", "open", "readlink", "remove", "removexattr", "rename", "replace", "rmdir", "scandir", "setxattr",
    "stat", "statvfs", "symlink", "truncate", "unlink", "utime",
)}
_lstat, _stat, _access = ORIGINAL["lstat"], ORIGINAL["stat"], ORIGINAL["access"]
_mkdir, _unlink, _rmdir, _open = ORIGINAL["mkdir"], ORIGINAL["unlink"], ORIGINAL["rmdir"], ORIGINAL["open"]
_listdir, _readlink, _rename, _chmod = ORIGINAL["listdir"], ORIGINAL["readlink"], ORIGINAL["rename"], ORIGINAL["chmod"]

_WHITEOUT_MODE = stat.S_IFIFO | stat.S_ISVTX    # a FIFO without any permission
_LINKS = 40                                     # as many symbolic links as the kernel follows
_CHUNK = 1 << 26
_FOLDERS = 50_000                               # remembered folders, about 10 MB


_SHM = "/dev/shm"
#: What Python code opens or removes by name there though it is shared memory, not data: multiprocessing's heaps, blocks and
#: semaphores, torch's tensors, OpenMP's and NCCL's. Redirected, it would not be what the C side of the runtime sees.
_SEGMENT = re.compile(r"pym-\d+-|psm_[0-9a-f]{8}|sem\.|torch_\d+_|__KMP_REGISTERED_LIB_\d|nccl-")


def error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _in_shm(path: str) -> bool:
    return _inside(path, _SHM)


def _exists(path: str) -> os.stat_result | None:
    try:
        return _lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


class Shadow:
    """The view. Paths are absolute; methods marked canonical want the result of `canonical`."""

    def __init__(self, root: str, allowed: list[str], study: str = ""):
        self.root = root.rstrip("/")
        self.allowed = tuple(folder.rstrip("/") for folder in allowed if folder)
        self.study = study.rstrip("/") or self.root
        self._folders: dict[str, str] = {}      # folder as written -> canonical

    def logical(self, path: str) -> str:
        """The path as the script knows it: without the shadow's root."""
        if path.startswith(self.root) and path[len(self.root):len(self.root) + 1] in ("", "/"):
            return path[len(self.root):] or "/"
        return path

    def absolute(self, path: str, folder: int | None = None) -> str:
        if path.startswith("/"):
            return self.logical(path)
        base = self.of_handle(folder) if folder is not None else self.logical(ORIGINAL["getcwd"]())
        return f"{base}/{path}"

    def of_handle(self, handle: int) -> str:
        return self.logical(_readlink(f"/proc/self/fd/{handle}"))

    def canonical(self, path: str, follow: bool = True) -> str:
        """Without symbolic links on the way, and not one at the end if `follow`."""
        if path.startswith(("/proc/", "/dev/")) and "/../" not in path + "/":
            path = os.path.normpath(path)
            if not _in_shm(path):
                return path     # links there are the kernel's own, such as /proc/self/fd/3
        folder, _, name = path.rpartition("/")
        if name in ("", ".", ".."):
            return self._resolve(path)
        known = self._folders.get(folder)
        if known is None:
            known = self._resolve(folder + "/.")    # the dot: a file on the way is an error
            if len(self._folders) > _FOLDERS:
                self._folders.clear()
            self._folders[folder] = known
        result = known.rstrip("/") + "/" + name
        return self._resolve(result) if follow else result

    def _resolve(self, path: str) -> str:
        done, links = "", 0
        pending = path.split("/")[::-1]
        while pending:
            name = pending.pop()
            if name in ("", "."):
                continue
            if name == "..":
                done = done.rpartition("/")[0]
                continue
            at = self.find(f"{done}/{name}")
            seen = _exists(at) if at else None
            if seen is None or not stat.S_ISLNK(seen.st_mode):
                done = f"{done}/{name}"
                if any(pending) and (seen is None or not stat.S_ISDIR(seen.st_mode)):
                    raise error(errno.ENOENT if seen is None else errno.ENOTDIR, path)
                continue
            links += 1
            if links > _LINKS:
                raise error(errno.ELOOP, path)
            target = self.logical(_readlink(at))
            if target.startswith("/"):
                done = ""
            pending += target.split("/")[::-1]
        return done or "/"

    def reached(self, path: Any, place: str) -> bool:
        """Whether the kernel finds by `path`, as the script wrote it, what is really at `place`: a link on the way may lie in the
        shadow only, and so may the working directory."""
        try:
            return path == place or os.path.samestat(_stat(path), _stat(place))
        except OSError:
            return False

    def forget_links(self) -> None:
        """A folder may have become a link, or a link a folder."""
        self._folders.clear()

    def hides(self, path: str) -> bool:
        """Canonical: whether what is really there is the study's own. A script that copies its folder, the trial's copies among it, would
        never be done, and one that looks for its newest checkpoint would find another trial's."""
        if not _inside(path, self.study) or path == self.study:
            return path == self.root
        return not self.allows(path) and not any(_inside(folder, path) for folder in self.allowed)

    def allows(self, path: str) -> bool:
        """Canonical: whether writes there are real."""
        if _inside(path, self.root):
            return False
        if not _in_shm(path):
            return any(_inside(path, folder) for folder in self.allowed)
        # /dev is devices, and they are real; but this is a place that keeps data.
        return any(_inside(path, folder) for folder in self.allowed if _in_shm(folder)) or (
            _SEGMENT.match(path, len(_SHM) + 1) is not None)

    def find(self, path: str) -> str | None:
        """Canonical: where to read it. None: it was removed. The result need not exist."""
        if self.allows(path):
            return path
        there = self.root + path
        try:
            seen = _lstat(there)
        except FileNotFoundError:
            return None if self.hides(path) else path
        except NotADirectoryError:
            return None
        return None if seen.st_mode == _WHITEOUT_MODE else there

    def get(self, path: str) -> str:
        """`find`, or FileNotFoundError."""
        at = self.find(path)
        if at is None:
            raise error(errno.ENOENT, path)
        return at

    def seen(self, path: str) -> os.stat_result | None:
        """Canonical: lstat in the view, None if it does not exist."""
        at = self.find(path)
        return _exists(at) if at else None

    def names(self, path: str) -> list[str]:
        """Canonical: the names in a folder of the view."""
        at = self.get(path)
        if at == path:
            return self._really_in(path)
        names = {name: self.root + path + "/" + name for name in _listdir(at)}
        real = _exists(path)
        below = set(self._really_in(path)) if real is not None and stat.S_ISDIR(real.st_mode) else set()
        gone = {name for name, there in names.items() if (e := _exists(there)) and e.st_mode == _WHITEOUT_MODE}
        return sorted((below | set(names)) - gone)

    def holds_hidden(self, path: str) -> bool:
        """Canonical: whether some of what really lies in this folder is hidden."""
        return _inside(path, self.study) or path == self.root.rpartition("/")[0]

    def _really_in(self, path: str) -> list[str]:
        names = _listdir(path)
        return [name for name in names if not self.hides(f"{path}/{name}")] if self.holds_hidden(path) else names

    # Changes -----------------------------------------------------------------------------------------------------

    def prepare(self, path: str) -> None:
        """Canonical: make the folders of the shadow above `path`. Raises if the view has no such folder."""
        folder = path.rpartition("/")[0]
        there = self.root + folder
        if _exists(there) is not None and self.find(folder) is not None:
            return
        if folder:
            self.prepare(folder)
            at = self.get(folder)
            mode = stat.S_IMODE(_stat(at).st_mode) | stat.S_IRWXU
        else:
            mode = 0o700
        try:
            _mkdir(there, mode)
        except FileExistsError:
            pass    # another process of the trial was first
        _chmod(there, mode)

    def _may_change_folder(self, path: str) -> None:
        folder = path.rpartition("/")[0] or "/"
        if _exists(self.root + path.rpartition("/")[0]) is None or _exists(folder) is not None:
            at = folder if _exists(folder) is not None else self.get(folder)
            if not _access(at, os.W_OK | os.X_OK):
                raise error(errno.EACCES if _exists(at) is not None else errno.ENOENT, path)

    def vacant(self, path: str) -> str:
        """Canonical: the place for a new entry. Raises if the view has one there."""
        if self.allows(path):
            return path
        if self.seen(path) is not None:
            raise error(errno.EEXIST, path)
        return self._cleared(path)

    def _cleared(self, path: str) -> str:
        self._may_change_folder(path)
        self.prepare(path)
        there = self.root + path
        if (old := _exists(there)) is not None and old.st_mode == _WHITEOUT_MODE:
            _unlink(there)
        return there

    def change(self, path: str, copy: bool = True) -> str:
        """Canonical: where to change `path`, an entry of the view or a new file; its content is copied if `copy`."""
        if self.allows(path):
            return path
        at = self.find(path)
        there = self.root + path
        if at == there:
            return there
        seen = _exists(path) if at else None
        if seen is None:
            return self._cleared(path)
        if not (stat.S_ISREG(seen.st_mode) or stat.S_ISDIR(seen.st_mode) or stat.S_ISLNK(seen.st_mode)):
            return path     # a device, a FIFO, a socket: not a place that keeps data
        if not stat.S_ISLNK(seen.st_mode) and not _access(path, os.W_OK):
            raise error(errno.EACCES, path)
        self._copy_up(path, seen, copy)
        return there

    def change_attributes(self, path: str) -> str:
        """Canonical: where to change mode, owner, times or extended attributes of `path`. Its owner may, even where nobody
        may write it."""
        at = self.get(path)
        seen = _exists(at)
        if seen is None:
            raise error(errno.ENOENT, path)
        kept = stat.S_ISREG(seen.st_mode) or stat.S_ISDIR(seen.st_mode)
        if self.allows(path) or at != path or not kept or os.geteuid() not in (0, seen.st_uid):
            return self.change(path)
        self._copy_up(path, seen)
        return self.root + path

    def _copy_up(self, path: str, seen: os.stat_result, content: bool = True) -> None:
        self.prepare(path)
        there = self.root + path
        if stat.S_ISDIR(seen.st_mode):
            self.prepare(path + "/")
            return
        if stat.S_ISLNK(seen.st_mode):
            ORIGINAL["symlink"](_readlink(path), there)
            return
        fresh = f"{there}.{getpid()}.copy"   # renamed when whole: another process may look at the same moment
        out = _open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            if content:
                _copy(path, out)
            os.fchmod(out, stat.S_IMODE(seen.st_mode) | stat.S_IWUSR)
            ORIGINAL["utime"](out, ns=(seen.st_atime_ns, seen.st_mtime_ns))
        finally:
            os.close(out)
        _rename(fresh, there)

    def copy_tree(self, path: str) -> str:
        """Canonical: `path` and all below it lie in the shadow afterwards. A rename needs that."""
        seen = self.seen(path)
        if seen is None:
            raise error(errno.ENOENT, path)
        if self.find(path) == path:
            self._copy_up(path, seen)
        if stat.S_ISDIR(seen.st_mode):
            for name in self.names(path):
                self.copy_tree(f"{path}/{name}")
        return self.root + path

    def mkdir(self, path: str, mode: int) -> None:
        there = self.vacant(path)
        _mkdir(there, mode)
        if there != path:
            self._mask(path)

    def _mask(self, path: str) -> None:
        """After a new folder took a place in the shadow: the real folder's children must not shine through."""
        real = _exists(path)
        if real is None or not stat.S_ISDIR(real.st_mode):
            return
        for name in set(_listdir(path)) - set(_listdir(self.root + path)):
            self._whiteout(f"{path}/{name}")

    def _whiteout(self, path: str) -> None:
        if _exists(path) is None:
            return
        self.prepare(path)
        ORIGINAL["mkfifo"](self.root + path, 0)
        _chmod(self.root + path, stat.S_IMODE(_WHITEOUT_MODE))

    def remove(self, path: str) -> None:
        if self.allows(path):
            _unlink(path)
            return
        seen = self.seen(path)
        if seen is None or stat.S_ISDIR(seen.st_mode):
            raise error(errno.ENOENT if seen is None else errno.EISDIR, path)
        self._may_change_folder(path)
        if self.find(path) != path:
            _unlink(self.root + path)
        self._whiteout(path)

    def rmdir(self, path: str) -> None:
        if self.allows(path):
            _rmdir(path)
            return
        seen = self.seen(path)
        if seen is None or not stat.S_ISDIR(seen.st_mode):
            raise error(errno.ENOENT if seen is None else errno.ENOTDIR, path)
        if self.names(path):
            raise error(errno.ENOTEMPTY, path)
        self._may_change_folder(path)
        self._drop_folder(path)
        self._whiteout(path)

    def _drop_folder(self, path: str) -> None:
        """Remove a folder of the shadow that holds nothing but whiteouts."""
        there = self.root + path
        if self.find(path) == there:
            for name in _listdir(there):
                _unlink(f"{there}/{name}")
            _rmdir(there)

    def rename(self, source: str, target: str) -> None:
        old, new = self.seen(source), self.seen(target)
        if old is None:
            raise error(errno.ENOENT, source)
        if source == target:
            return
        if target.startswith(source + "/") or source.startswith(target + "/"):
            raise error(errno.EINVAL if target.startswith(source) else errno.ENOTEMPTY, target)
        folder = stat.S_ISDIR(old.st_mode)
        if not self.allows(source):
            self._may_change_folder(source)
        if not self.allows(target):
            if new is not None and folder != stat.S_ISDIR(new.st_mode):
                raise error(errno.ENOTDIR if folder else errno.EISDIR, target)
            if new is not None and folder and self.names(target):
                raise error(errno.ENOTEMPTY, target)
            place = self._cleared(target)
            if new is not None and folder:
                self._drop_folder(target)
        else:
            place = target
        _rename(source if self.allows(source) else self.copy_tree(source), place)
        if not self.allows(source):
            self._whiteout(source)
        if folder and place != target:
            self._mask(target)


def _copy(path: str, out: int) -> None:
    handle = _open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while os.sendfile(out, handle, None, _CHUNK):
            pass
    finally:
        os.close(handle)
