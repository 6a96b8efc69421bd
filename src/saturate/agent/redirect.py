"""Interception: what this process writes through Python goes to a shadow tree in the trial's run folder.

For machines that forbid namespaces (see `trial/cage.py`). Covered here: `open`, `os`, and what is built on them (pathlib, shutil, tempfile,
numpy, pickle, zipfile, logging...); `redirect_libraries` covers some that open their files by themselves. Not covered, and stopped by the
guards where they are there (`trial/landlock.py`, `trial/metadata.py`): writes and changes of mode, owner and times by other C libraries and
by programs that are not Python. Standard library only.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import stat
import sys
from collections.abc import Callable
from typing import Any

from saturate import classheld
from saturate.agent import rawfile
from saturate.agent.scan import Entry, Scan
from saturate.agent.shadow import ORIGINAL, Shadow, error

_io_open, _io_fileio = io.open, io.FileIO
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SETS = ("supports_dir_fd", "supports_fd", "supports_follow_symlinks", "supports_effective_ids")

_shadow: Shadow | None = None


def install_from_plan(redirect: dict[str, Any]) -> None:
    """`install` with what `CagePlan.redirect` gave to the launcher."""
    install(redirect["root"], redirect["allowed"], redirect.get("study", ""))
    scratch, given = redirect.get("scratch"), os.path.realpath(os.environ.get("TMPDIR") or "/tmp")
    if scratch and _shadow is not None and not _shadow.allows(given):       # as behind `env -i`
        os.environ["TMPDIR"] = scratch


def install(root: str | os.PathLike[str], allowed: list[Any], study: str = "") -> Callable[[], None]:
    """Redirect from now on: writes under one of `allowed` are real, all others go to `root`; of `study`, a folder, only those show.
    Returns how to undo it."""
    global _shadow
    shadow = _shadow = Shadow(os.path.realpath(root), [os.path.realpath(path) for path in allowed],
                              study and os.path.realpath(study))
    os.makedirs(shadow.root, exist_ok=True)
    patches = _Patches(shadow)
    replaced = patches.table()
    for name, function in replaced.items():
        function.__name__ = function.__qualname__ = name
        _like_original(name, function)
        setattr(os, name, function)
    standing = {id(ORIGINAL[name]): function for name, function in replaced.items() if name in ORIGINAL}
    held = list(classheld.functions(standing))
    for kind, name, original in held:
        setattr(kind, name, staticmethod(standing[id(original)]))
    builtins.open = io.open = patches.builtin_open
    io.FileIO = rawfile.redirected(patches.opener)  # type: ignore[misc, assignment]
    writes_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True    # beside the source, by functions that are not in `os`

    def undo() -> None:
        global _shadow
        for name in replaced:
            setattr(os, name, ORIGINAL.get(name, _GETCWDB))
        for kind, name, original in held:
            setattr(kind, name, staticmethod(original))
        builtins.open = io.open = _io_open
        io.FileIO = _io_fileio  # type: ignore[misc]
        sys.dont_write_bytecode = writes_bytecode
        _shadow = None

    return undo


_GETCWDB = os.getcwdb


def _like_original(name: str, function: Any) -> None:
    for group in _SETS:
        members = getattr(os, group)
        if ORIGINAL.get(name) in members:
            members.add(function)


def for_reading(path: Any) -> Any:
    """Where a C library must read `path`; itself if nothing is redirected."""
    if _shadow is None or not isinstance(path, (str, os.PathLike)):
        return path
    return _shadow.get(_shadow.canonical(_shadow.absolute(os.fspath(path))))


def for_writing(path: Any, copy: bool) -> Any:
    """Where a C library must write `path`; `copy`: it changes what is there instead of replacing it."""
    if _shadow is None or not isinstance(path, (str, os.PathLike)):
        return path
    return _shadow.change(_shadow.canonical(_shadow.absolute(os.fspath(path))), copy)


class _Patches:
    """The functions that replace those in `os`, with the same arguments."""

    def __init__(self, shadow: Shadow):
        self.shadow = shadow

    def path(self, path: Any, dir_fd: int | None = None, follow: bool = True) -> str:
        return self.shadow.canonical(self.shadow.absolute(os.fsdecode(path), dir_fd), follow)

    def table(self) -> dict[str, Any]:
        shadow = self.shadow
        table = {name: self._on_existing(name, shadow.get) for name in
                 ("stat", "access", "statvfs", "getxattr", "listxattr")}
        table["truncate"] = self._on_existing("truncate", self._existing)
        table |= {name: self._on_attributes(name) for name in ("chmod", "chown", "utime", "setxattr", "removexattr")}
        table |= {"fchmod": table["chmod"], "fchown": table["chown"]}
        table |= {name: self._on_existing(name, shadow.get, follow=False) for name in ("lstat", "readlink")}
        table["lchown"] = self._on_existing("lchown", shadow.change_attributes, follow=False)
        table |= {name: getattr(self, name) for name in (
            "open", "listdir", "scandir", "mkdir", "rmdir", "unlink", "rename", "link", "symlink", "mkfifo", "mknod",
            "chdir", "getcwd", "getcwdb",
        )}
        table = {name: _plain(function) for name, function in table.items()}
        table["remove"], table["replace"] = _plain(self.unlink), _plain(self.rename)
        return table

    def _existing(self, path: str) -> str:
        if self.shadow.seen(path) is None:
            raise error(errno.ENOENT, path)
        return self.shadow.change(path)

    def _on_existing(self, name: str, place: Callable[[str], str], follow: bool = True) -> Any:
        original = ORIGINAL[name]

        def function(path: Any, *arguments: Any, **keywords: Any) -> Any:
            if isinstance(path, int):
                return original(path, *arguments, **keywords)
            dir_fd = keywords.pop("dir_fd", None)
            at = place(self.path(path, dir_fd, follow and keywords.get("follow_symlinks", True)))
            try:
                result = original(os.fsencode(at) if isinstance(path, bytes) else at, *arguments, **keywords)
            except OSError as failed:
                failed.filename = path
                raise
            return self.shadow.logical(result) if name == "readlink" and isinstance(result, str) else result

        return function

    def _on_attributes(self, name: str) -> Any:
        """Of a path, or of an open file: one that was opened to be read is the user's own, and is changed in its copy."""
        by_path, original = self._on_existing(name, self.shadow.change_attributes), ORIGINAL[name]

        def function(path: Any, *arguments: Any, **keywords: Any) -> Any:
            if isinstance(path, int):
                real = ORIGINAL["readlink"](f"/proc/self/fd/{path}")
                ours = real != self.shadow.logical(real) or self.shadow.allows(real)
                if ours or not real.startswith("/") or self.shadow.seen(real) is None:
                    return original(path, *arguments, **keywords)
                return original(self.shadow.change_attributes(real), *arguments, **keywords)
            return by_path(path, *arguments, **keywords)

        return function

    def builtin_open(self, file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
                     newline: Any = None, closefd: bool = True, opener: Any = None) -> Any:
        if opener is None and isinstance(file, (str, bytes, os.PathLike)):
            opener = self.opener       # keeps `file.name` and error texts as the script knows them
        return _io_open(file, mode, buffering, encoding, errors, newline, closefd, opener)

    def opener(self, path: Any, flags: int) -> int:
        return self.open(path, flags, 0o666)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        shadow = self.shadow
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        place = self.path(path, dir_fd, follow=not (flags & os.O_NOFOLLOW or exclusive))
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            if not shadow.allows(place):
                shadow.prepare(place + "/")
                place = shadow.root + place
        elif not flags & _WRITES:
            place = shadow.get(place)
        elif not shadow.allows(place):
            place = self._to_write(place, flags)
        try:
            return ORIGINAL["open"](place, flags, mode)
        except OSError as failed:
            failed.filename = path
            raise

    def _to_write(self, path: str, flags: int) -> str:
        seen = self.shadow.seen(path)
        if seen is None and not flags & os.O_CREAT:
            raise error(errno.ENOENT, path)
        if seen is not None and flags & os.O_CREAT and flags & os.O_EXCL:
            raise error(errno.EEXIST, path)
        if seen is not None and stat.S_ISDIR(seen.st_mode):
            raise error(errno.EISDIR, path)
        if seen is not None and not flags & (_WRITES & ~os.O_CREAT):
            return self.shadow.get(path)    # only opened to read, though it would have been created
        return self.shadow.change(path, copy=not flags & os.O_TRUNC)

    def _names(self, path: Any) -> tuple[str, list[str]]:
        place = self.shadow.of_handle(path) if isinstance(path, int) else self.path(path)
        seen = self.shadow.seen(place)
        if seen is None or not stat.S_ISDIR(seen.st_mode):
            raise error(errno.ENOENT if seen is None else errno.ENOTDIR, path)
        return place, self.shadow.names(place)

    def listdir(self, path: Any = ".") -> list[Any]:
        _, names = self._names("." if path is None else path)
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def scandir(self, path: Any = ".") -> Any:
        path, shadow = "." if path is None else path, self.shadow
        place = shadow.of_handle(path) if isinstance(path, int) else self.path(path)
        if shadow.find(place) == place and not shadow.holds_hidden(place) and shadow.reached(path, place):
            return ORIGINAL["scandir"](path)    # untouched: the entries need no second look
        place, names = self._names(path)
        folder = place if isinstance(path, int) else os.fspath(path)
        return Scan([Entry(folder, name, shadow.get(f"{place}/{name}")) for name in names])

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self.shadow.mkdir(self.path(path, dir_fd, follow=False), mode)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self.shadow.rmdir(self.path(path, dir_fd, follow=False))
        self.shadow.forget_links()

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self.shadow.remove(self.path(path, dir_fd, follow=False))
        self.shadow.forget_links()

    def rename(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        self.shadow.rename(self.path(src, src_dir_fd, follow=False), self.path(dst, dst_dir_fd, follow=False))
        self.shadow.forget_links()

    def link(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None,
             follow_symlinks: bool = True) -> None:
        source = self.path(src, src_dir_fd, follow=False)
        seen = self.shadow.seen(source)
        if seen is None or stat.S_ISDIR(seen.st_mode):
            raise error(errno.ENOENT if seen is None else errno.EPERM, os.fsdecode(src))
        target = self.shadow.vacant(self.path(dst, dst_dir_fd, follow=False))
        ORIGINAL["link"](self.shadow.change(source), target, follow_symlinks=False)

    def symlink(self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        ORIGINAL["symlink"](src, self.shadow.vacant(self.path(dst, dir_fd, follow=False)))
        self.shadow.forget_links()

    def mkfifo(self, path: Any, mode: int = 0o666, *, dir_fd: int | None = None) -> None:
        ORIGINAL["mkfifo"](self.shadow.vacant(self.path(path, dir_fd, follow=False)), mode)

    def mknod(self, path: Any, mode: int = 0o600, device: int = 0, *, dir_fd: int | None = None) -> None:
        ORIGINAL["mknod"](self.shadow.vacant(self.path(path, dir_fd, follow=False)), mode, device)

    def chdir(self, path: Any) -> None:
        if isinstance(path, int):
            ORIGINAL["chdir"](path)
            return
        place = self.path(path)
        real_folder = self.shadow.find(place) is not None and os.path.isdir(place)
        try:
            ORIGINAL["chdir"](self.shadow.get(place))
        except OSError as failed:
            failed.filename = path
            raise
        if real_folder:
            _prefer_real(place)

    def getcwd(self) -> str:
        return self.shadow.logical(ORIGINAL["getcwd"]())

    def getcwdb(self) -> bytes:
        return os.fsencode(self.getcwd())


def _prefer_real(place: str) -> None:
    """Programs and C libraries started from here find the user's files by relative paths."""
    try:
        ORIGINAL["chdir"](place)
    except FileNotFoundError:
        return      # the folder exists in the shadow only


def _plain(method: Any) -> Any:
    """A function, as those in `os` are: a bound method has no `__name__` that could be set."""

    def function(*arguments: Any, **keywords: Any) -> Any:
        return method(*arguments, **keywords)

    function.__doc__ = method.__doc__
    return function
