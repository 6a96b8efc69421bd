"""Functions of `os` that classes of Python's own took when they were made, where no module holds them: those behind `Path.glob` do in
Python 3.13. Whoever replaces such a function replaces it there, too. Nothing is loaded for it: it is asked before the script begins."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

#: Modules whose classes do so.
_MODULES = ("glob",)


def functions(ids: Iterable[int]) -> Iterator[tuple[type, str, Any]]:
    """The classes that are loaded and hold one of these functions as a static method, each with the name and the function."""
    wanted = frozenset(ids)
    for module in filter(None, map(sys.modules.get, _MODULES)):
        for kind in [value for value in list(vars(module).values()) if isinstance(value, type) and value.__module__ == module.__name__]:
            for name, value in list(vars(kind).items()):
                if isinstance(value, staticmethod) and id(value.__func__) in wanted:
                    yield kind, name, value.__func__
