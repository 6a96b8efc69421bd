"""Finding techniques: the modules of this package, and those that third parties registered.

    [project.entry-points."saturate.techniques"]
    my-technique = "my_package.my_technique"

Each entry point names a module. A module that does not load or does not keep the contract of `_api` is a
`TechniqueError` that names it: a technique that silently vanished would be worse than one that fails.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

from saturate import plugins
from saturate.errors import TechniqueError
from saturate.techniques._api import ACTS_ON, FUNCTIONS, HEADINGS, NUMERICS, OPTIONAL, STAGES, Technique, Touch
from saturate.techniques._interrupts import from_signal_handler

GROUP = "saturate.techniques"

#: Options go into a TOML recipe, so a field is one of these.
SCALARS = (bool, int, float, str)

#: How many positional arguments each function of a technique takes.
PARAMETERS = {"eligible": 1, "variants": 1, "bound": 1, "apply": 2, "active": 2, "as_code": 1, "environment": 1}


def load() -> dict[str, ModuleType]:
    """Every technique by id, in id order. Raises `TechniqueError` for the first one that is damaged."""
    return plugins.load("saturate.techniques", GROUP, "technique", load_one, lambda module: module.TECHNIQUE.id, TechniqueError)


def load_one(name: str, path: str | None = None) -> ModuleType:
    """Import one technique by module name and check it. Where the name cannot be imported (the agent may live in an
    environment that lacks the third party's package), the file at `path` is loaded under that name instead."""
    return load_checked(name, path, check, "saturate.testing.conformance")


def load_checked(name: str, path: str | None, check: Callable[[ModuleType], list[str]], kit: str) -> ModuleType:
    """`load_one` for any contract: `check` lists what breaks it, `kit` is the module that checks one while it is written."""
    try:
        module = _import(name, path)
    except Exception as error:  # third-party code may raise anything; it is named and raised again
        if from_signal_handler(error):
            raise
        raise TechniqueError(
            f"the technique {name} does not load",
            cause=f"{type(error).__name__}: {error}",
            evidence=path or "",
            remedy="repair or uninstall the package that registers it",
        ) from error
    problems = check(module)
    if problems:
        raise TechniqueError(
            f"the technique {name} breaks the contract",
            cause="; ".join(problems),
            evidence=origin(module)[1],
            remedy=f"{kit} checks a technique while you write it",
        )
    return module


def _import(name: str, path: str | None) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        parents = {name.rsplit(".", count)[0] for count in range(name.count(".") + 1)}
        if not path or error.name not in parents:
            raise       # the technique exists but something that it imports does not
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise ImportError(f"{path} is not a Python source file")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module      # dataclasses look their module up here while it is being executed
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def check(module: ModuleType) -> list[str]:
    """Everything about the module's shape that breaks the contract; empty when it is well formed."""
    environment = getattr(getattr(module, "TECHNIQUE", None), "stage", None) == "environment"
    names = functions(module, "environment") if environment else functions(module)
    return [*documentation_problems(module), *metadata_problems(module, STAGES), *options_problems(module), *merging_problems(module),
            *function_problems(module, {name: PARAMETERS[name] for name in names})]


def functions(module: ModuleType, *more: str) -> list[str]:
    """The names of those that the module must have, and of the optional ones that it has."""
    return [*FUNCTIONS, *more, *(name for name in OPTIONAL if hasattr(module, name))]


def documentation_problems(module: ModuleType) -> list[str]:
    return [f"its docstring has no heading {name!r}" for name in plugins.undocumented(module, HEADINGS)]


def metadata_problems(module: ModuleType, stages: Collection[str]) -> list[str]:
    technique = getattr(module, "TECHNIQUE", None)
    if not isinstance(technique, Technique):
        return ["TECHNIQUE is missing or is not a Technique"]
    problems = []
    expected = plugins.expected_id(module)
    if technique.id != expected:
        problems.append(f"TECHNIQUE.id is {technique.id!r}, the file says {expected!r}")
    for label, value, allowed in (
        ("numerics", technique.numerics, NUMERICS),
        ("stage", technique.stage, stages),
        ("acts_on", technique.acts_on, ACTS_ON),
        ("status", technique.status, ("stable", "experimental")),
    ):
        if value not in allowed:
            problems.append(f"TECHNIQUE.{label} is {value!r}, not one of {', '.join(allowed)}")
    if not isinstance(technique.title, str) or not technique.title.strip():
        problems.append("TECHNIQUE.title is empty")
    if not technique.touches or not all(isinstance(touch, Touch) for touch in technique.touches):
        problems.append("TECHNIQUE.touches must name at least one Touch")
    return problems


def options_problems(module: ModuleType) -> list[str]:
    options = getattr(module, "Options", None)
    if not (inspect.isclass(options) and dataclasses.is_dataclass(options)):
        return ["Options is missing or is not a dataclass"]
    problems = []
    if not options.__dataclass_params__.frozen:
        problems.append("Options is not frozen")
    for field in dataclasses.fields(options):
        if field.default is dataclasses.MISSING:
            problems.append(f"Options.{field.name} has no default")
        elif not isinstance(field.default, SCALARS):
            problems.append(f"Options.{field.name} is a {type(field.default).__name__}; TOML needs a bool, number or text")
    return problems


def merging_problems(module: ModuleType) -> list[str]:
    """Whether the option that `TECHNIQUE.merges` names is a number of backward passes."""
    name, options = getattr(getattr(module, "TECHNIQUE", None), "merges", ""), getattr(module, "Options", None)
    known = {field.name: field.default for field in dataclasses.fields(options)} if dataclasses.is_dataclass(options) else {}
    if not name or (type(known.get(name)) is int and known[name] >= 1):
        return []
    return [f"TECHNIQUE.merges is {name!r}, and Options has no number of 1 or more of this name"]


def function_problems(module: ModuleType, parameters: Mapping[str, int]) -> list[str]:
    """`parameters`: how many positional arguments each function takes. An optional one whose name is misspelt is a problem."""
    problems = []
    for name, count in parameters.items():
        function = getattr(module, name, None)
        if not callable(function):
            problems.append(f"the function {name} is missing")
            continue
        try:
            inspect.signature(function).bind(*range(count))
        except TypeError:
            problems.append(f"{name} must take {count} positional argument(s)")
    for name in OPTIONAL:       # without it the default would act, and nobody would know
        if not hasattr(module, name):
            problems += [f"the function {like} is not part of the contract: is {name} meant?"
                         for like in difflib.get_close_matches(name, _functions_of(module), cutoff=0.8)]
    return problems


def _functions_of(module: ModuleType) -> list[str]:
    """The names of those that the module itself defines."""
    return [name for name, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]


def documentation(module: ModuleType) -> dict[str, str]:
    """The module's docstring by heading."""
    return plugins.documentation(module, HEADINGS)


#: Module name and absolute file path: what another process needs for `load_one`.
origin = plugins.origin


def conflicts(modules: list[ModuleType]) -> list[tuple[str, str, str]]:
    """Pairs of ids that cannot be applied together, with the resource that one of them claims alone."""
    found = []
    for index, first in enumerate(modules):
        for second in modules[index + 1 :]:
            for resource in _claimed(first, second):
                found.append((first.TECHNIQUE.id, second.TECHNIQUE.id, resource))
    return found


def _claimed(first: ModuleType, second: ModuleType) -> list[str]:
    orders = {touch.resource: touch.order for touch in first.TECHNIQUE.touches}
    return [
        touch.resource
        for touch in second.TECHNIQUE.touches
        if touch.resource in orders and (touch.order is None or orders[touch.resource] is None)
    ]


def ordered(modules: list[ModuleType]) -> list[ModuleType]:
    """In the order to apply them: by stage, then by place in a shared stack (closest to the user's code first)."""

    def key(module: ModuleType) -> tuple[int, int, str]:
        technique: Any = module.TECHNIQUE
        orders = [touch.order for touch in technique.touches if touch.order is not None]
        return STAGES.index(technique.stage), min(orders, default=0), technique.id

    return sorted(modules, key=key)
