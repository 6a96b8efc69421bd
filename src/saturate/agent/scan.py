"""What `os.scandir` returns for a folder of the merged view (see `shadow.py`)."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from typing import Any

from saturate.agent.shadow import ORIGINAL


class Entry:
    """What `os.scandir` yields for a folder that the trial changed: an `os.DirEntry` of the merged view."""

    def __init__(self, folder: Any, name: str, at: str):
        binary = isinstance(folder, bytes)
        self.name: Any = os.fsencode(name) if binary else name
        self.path: Any = os.path.join(folder, self.name)
        self._at = at

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=False) if not follow_symlinks else os.stat(self.path)

    def inode(self) -> int:
        return ORIGINAL["lstat"](self._at).st_ino

    def _is(self, test: Callable[[int], bool], follow_symlinks: bool) -> bool:
        try:
            return test(self.stat(follow_symlinks=follow_symlinks).st_mode)
        except FileNotFoundError:
            return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        return False


class Scan:
    """The iterator and context manager that `os.scandir` returns."""

    def __init__(self, entries: list[Entry]):
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Entry]:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> Scan:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())
