"""Files of modules that a piece of code imports when it runs, found without importing anything: what only the making of an item imports
is not there when a dataset is looked at.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
import tokenize
import types
from collections.abc import Callable, Iterable, Iterator

from saturate.data.code_names import imports


def named(code: types.CodeType, package: str) -> list[str]:
    """The modules that the code itself imports when it runs, with those that they lie in. `package`: what relative names begin from."""
    found: dict[str, None] = {}
    for name, above, taken in imports(code):
        if above:
            parents = package.split(".")
            base = ".".join(parents[:len(parents) - above + 1])
            name = f"{base}.{name}" if name else base
        for whole in (name, *(f"{name}.{one}" for one in taken)):       # what is taken may be a module itself
            parts = whole.split(".")
            found.update((".".join(parts[:count]), None) for count in range(1, len(parts) + 1))
    return [name for name in found if name.partition(".")[0] not in sys.stdlib_module_names]


def behind(names: Iterable[str], is_installed: Callable[[str], bool]) -> Iterator[tuple[str, tuple[int, int]]]:
    """The files of these modules and, of the user's, of those that they import in turn, with their sizes and times."""
    pending, met = list(names), set[str]()
    while pending:
        name = pending.pop(0)
        file = None if name in met else _file(name)
        met.add(name)
        if file is None:
            continue
        try:
            seen = os.stat(file)
        except OSError:
            continue                    # in a zip file
        yield name, (seen.st_size, seen.st_mtime_ns)
        if file.endswith(".py") and not is_installed(file):
            package = name if os.path.basename(file) == "__init__.py" else name.rpartition(".")[0]
            pending.extend(one for code in _codes(file, seen.st_mtime_ns) for one in named(code, package))


def _file(name: str) -> str | None:
    """None for what is no module, is built in, or spreads over several folders."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        return getattr(loaded, "__file__", None)
    path: list[str] | None = None
    spec = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        try:
            spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:count]), path)
        except (ImportError, ValueError, AttributeError):
            return None
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec.origin if spec is not None and spec.has_location else None


@functools.lru_cache(256)
def _codes(file: str, changed_ns: int) -> tuple[types.CodeType, ...]:
    """The code of a file, and all that lies in it; nothing where it cannot be compiled, which fails again where it is imported."""
    try:
        with tokenize.open(file) as opened:
            codes = [compile(opened.read(), file, "exec", dont_inherit=True)]
    except (OSError, SyntaxError, ValueError):
        return ()
    for code in codes:
        codes.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return tuple(codes)
