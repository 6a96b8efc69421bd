"""Names of the user's own functions on the command line: `package.module:function`, or `path/file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from saturate.errors import UsageError, WorkloadFailed
from saturate.records.spelling import suggestion


def resolve(text: str, option: str) -> Callable[..., Any]:
    """The callable that `text` names; `option` is what the user wrote it for. The working directory is searched
    first, as `python -m` does. Raises UsageError for a name that leads nowhere, WorkloadFailed where importing fails."""
    place, colon, attribute = text.rpartition(":")
    if not colon or not place or not all(part.isidentifier() for part in attribute.split(".")):
        raise UsageError(f"{option}: {text!r} is not a name such as package.module:function or path/file.py:function",
                         remedy="name a function that is called without arguments, behind its module or file")
    module = _module_of_file(place, option) if place.endswith(".py") or os.sep in place else _module(place, option)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(
                f"{option}: {place} has no {attribute!r}",
                remedy=suggestion(part, _public(found)) or f"it has {_listed(_public(found))}",
            )
        found = getattr(found, part)
    # A module can be called too, but with inputs: what is asked for is a function that makes one.
    if not callable(found) or (hasattr(found, "named_modules") and not isinstance(found, type)):
        raise UsageError(
            f"{option}: {text} is a {type(found).__name__}, and must be a function",
            remedy=f"define a function that returns it, and name that: {place}:...",
        )
    return found


def call(function: Callable[..., Any], what: str, *arguments: Any) -> Any:
    """Call the user's function. Raises WorkloadFailed with the last lines of its traceback; our own errors pass."""
    with users_code(what):
        return function(*arguments)


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Whatever the user's code raises is WorkloadFailed, with the end of its traceback as evidence. What it prints
    goes to standard error: standard output holds the answer alone."""
    from saturate.inference import users_code as users

    with users.running(what), redirect_stdout(sys.stderr):
        yield


def _module(name: str, option: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(
            f"{option}: {name!r} is not the name of a module",
            remedy="package.module:function, or path/file.py:function",
        )
    _search_first(Path.cwd())
    try:
        with users_code(f"importing {name}"):
            return importlib.import_module(name)
    except WorkloadFailed as failure:
        missing = failure.__cause__
        # The module itself, or a package that it would be in; not something that it imports.
        if (
            isinstance(missing, ModuleNotFoundError)
            and missing.name
            and (name == missing.name or name.startswith(f"{missing.name}."))
        ):
            raise _no_module(missing.name, option) from missing
        raise


def _no_module(name: str, option: str) -> UsageError:
    parent, _, last = name.rpartition(".")
    folders = list(getattr(sys.modules.get(parent), "__path__", [])) if parent else [str(Path.cwd())]
    known = [info.name for info in pkgutil.iter_modules(folders)]
    where = f"in {parent}" if parent else f"in {Path.cwd()}, nor installed"
    return UsageError(
        f"{option}: there is no module {last!r} {where}",
        remedy=suggestion(last, known)
        or (f"modules there: {_listed(known)}" if known else "check the name, and the working directory"),
    )


def _module_of_file(place: str, option: str) -> ModuleType:
    path = Path(place).absolute()
    if not path.is_file():
        near = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UsageError(
            f"{option}: there is no file {place}", remedy=suggestion(path.name, near) or "check the path"
        )
    if not path.stem.isidentifier():
        raise UsageError(
            f"{option}: {path.name} cannot be imported: its name is no identifier",
            remedy="rename it: letters, digits and _",
        )
    # Imported by its name, as when it is run: the candidates' processes must find its classes again.
    _search_first(path.parent)
    with users_code(f"importing {place}"):
        module = importlib.import_module(path.stem)
    loaded = getattr(module, "__file__", None)
    if loaded is None or not os.path.samefile(loaded, path):
        raise UsageError(
            f"{option}: another module is called {path.stem!r}",
            evidence=str(loaded or "built in"),
            remedy=f"rename {path.name}",
        )
    return module


def _search_first(folder: Path) -> None:
    text = str(folder)
    if sys.path[:1] != [text]:
        sys.path.insert(0, text)
        importlib.invalidate_caches()


def _public(holder: Any) -> list[str]:
    return [name for name in dir(holder) if not name.startswith("_")]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "") if names else "no names at all"
