"""`io.FileIO` where files are redirected: `io.open` makes the real one, and scripts and libraries call it by that name as well."""

from __future__ import annotations

import abc
import io
import os
from collections.abc import Callable
from typing import Any

_ORIGINAL = io.FileIO


class _Kind(abc.ABCMeta):
    """What `io.open` made is an `io.FileIO` still. An `ABCMeta`, as that of the other classes in `io`: a script may inherit from both."""

    def __subclasscheck__(cls, subclass: type) -> bool:
        return super().__subclasscheck__(subclass) or (cls.__base__ is _ORIGINAL and issubclass(subclass, _ORIGINAL))


def redirected(opens: Callable[[Any, int], int]) -> type[io.FileIO]:
    """The class for `io.FileIO`. `opens(path, flags)` opens a file where it is redirected to."""

    class FileIO(_ORIGINAL, metaclass=_Kind):  # type: ignore[misc, valid-type]
        def __init__(self, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None):
            if opener is None and isinstance(file, (str, bytes, os.PathLike)):
                opener = opens      # keeps `name` and error texts as the script knows them
            super().__init__(file, mode, closefd, opener)

    FileIO.__module__, FileIO.__qualname__, FileIO.__doc__ = _ORIGINAL.__module__, "FileIO", _ORIGINAL.__doc__
    return FileIO
