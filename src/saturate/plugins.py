"""Modules that keep a contract: those of a package, and those that other packages registered through an entry point.

Standard library only: techniques are loaded inside the user's process too. What a module must hold, and which error
says that it does not, is the caller's business.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable
from types import ModuleType

from saturate.errors import UsageError


def load(
    package: str,
    group: str,
    what: str,
    load_one: Callable[[str], ModuleType],
    identity: Callable[[ModuleType], str],
    error: type[UsageError],
) -> dict[str, ModuleType]:
    """Every module by id, in id order; `what` names one of them to the user. Raises what `load_one` raises, and
    `error` where two modules claim the same id."""
    found: dict[str, ModuleType] = {}
    for name in names(package, group):
        module = load_one(name)
        claimed = identity(module)
        if claimed in found and found[claimed] is not module:
            raise error(
                f"two {what}s are called {claimed!r}",
                evidence=f"{origin(found[claimed])[1]} and {origin(module)[1]}",
                remedy="uninstall one of the two packages, or rename its module",
            )
        found[claimed] = module
    return dict(sorted(found.items()))


def names(package: str, group: str) -> list[str]:
    """Dotted names: the package's own public modules, then the registered ones."""
    from importlib.metadata import entry_points  # slow to import, and not needed in the agent

    own = [
        f"{package}.{info.name}"
        for info in pkgutil.iter_modules(importlib.import_module(package).__path__)
        if not info.name.startswith("_")
    ]
    return own + [entry.value for entry in entry_points(group=group)]


def documentation(module: ModuleType, headings: Iterable[str]) -> dict[str, str]:
    """The module's docstring by heading. A heading stands alone on its line and is underlined with dashes."""
    pattern = rf"^({'|'.join(map(re.escape, headings))})\n-+\n"
    parts = re.split(pattern, inspect.cleandoc(module.__doc__ or ""), flags=re.MULTILINE)
    return {heading: text.strip() for heading, text in zip(parts[1::2], parts[2::2], strict=True)}


def stripped() -> bool:
    """Whether this Python drops docstrings (`python -OO`, PYTHONOPTIMIZE=2), so that their absence says nothing of a module."""
    return sys.flags.optimize >= 2


def undocumented(module: ModuleType, headings: Iterable[str]) -> list[str]:
    """The headings that the module's docstring lacks; none where docstrings are stripped."""
    found = documentation(module, headings)
    return [] if stripped() else [heading for heading in headings if not found.get(heading)]


def origin(module: ModuleType) -> tuple[str, str]:
    """Module name and absolute file path: what another process needs to load it."""
    return module.__name__, os.path.abspath(module.__file__ or "")


def expected_id(module: ModuleType) -> str:
    """The file name with dashes."""
    return module.__name__.rpartition(".")[2].replace("_", "-")
