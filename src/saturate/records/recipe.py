"""The recipe: the TOML file that a study writes and `saturate run` applies.

    schema = 1
    [made_for]      where it was measured
    [evidence]      what the whole set of techniques gave there
    [[technique]]   one change each, in the order in which they were kept

An empty file is a valid recipe that changes nothing. A person may edit a recipe; rewriting it keeps their comments.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from saturate.errors import RecipeError
from saturate.records import options as option_tables
from saturate.records._recipe_reader import Unreadable, examine, loads, read, text_of, with_lines
from saturate.records._recipe_schema import SCHEMA, Entry, MadeFor, MeasuredEvidence, Problem, Recipe, clip, same
from saturate.records._recipe_writer import dumps, write
from saturate.records.spelling import suggestion

__all__ = [
    "SCHEMA", "Entry", "MadeFor", "MeasuredEvidence", "Problem", "Recipe",
    "check", "diff", "dumps", "loads", "read", "validate", "write",
]


def check(path: str | os.PathLike[str], registry: Mapping[str, Any]) -> list[Problem]:
    """Everything that is wrong with the file `path`, with lines where they are known; never raises RecipeError."""
    try:
        text = text_of(path)
    except RecipeError as error:
        return [Problem(message=error.message, remedy=error.remedy)]
    try:
        recipe, problems = examine(text)
    except Unreadable as error:
        return [error.problem]
    return problems + with_lines(validate(recipe, registry), text)


def validate(recipe: Recipe, registry: Mapping[str, Any]) -> list[Problem]:
    """What this installation cannot do about a well-formed recipe.

    `registry` maps ids to technique modules. Finds unknown ids and options, options of a wrong type or out of range,
    techniques that appear twice, two owners of one exclusive resource, and a numerics class other than the technique's.
    """
    found: list[Problem] = []
    owners: list[tuple[int, Entry, Any]] = []
    first_seen: dict[str, int] = {}
    for index, entry in enumerate(recipe.techniques):
        key = ("technique", index)
        if entry.id in first_seen:
            found.append(Problem(
                message=f"{clip(entry.id)} is already technique {first_seen[entry.id] + 1}", key=(*key, "id"),
                remedy="remove one of the two",
            ))
            continue
        first_seen[entry.id] = index
        module = registry.get(entry.id)
        if module is None:
            found.append(Problem(
                message=f"unknown technique '{clip(entry.id)}'", key=(*key, "id"),
                remedy=suggestion(entry.id, registry) or "saturate techniques lists them",
            ))
            continue
        for wrong in option_tables.problems(module.Options, entry.options):
            found.append(Problem(
                message=f"{entry.id}: {clip(wrong.name) + ': ' if wrong.name else ''}{wrong.message}",
                key=(*key, "options", wrong.name) if wrong.name else (*key, "options"),
                remedy=wrong.remedy or f"saturate explain {entry.id}",
            ))
        numerics = module.TECHNIQUE.numerics
        if entry.numerics and entry.numerics != numerics:
            found.append(Problem(
                message=f"{entry.id} is of numerics class {numerics}, not {clip(entry.numerics)}", key=(*key, "numerics"),
                remedy=f"run saturate tune again: what was verified may not be what is applied; or write numerics = \"{numerics}\" there, "
                       f"if that will do (saturate explain {numerics})",
            ))
        owners.append((index, entry, module))
    return found + _conflicts(owners)


def _conflicts(owners: list[tuple[int, Entry, Any]]) -> list[Problem]:
    """Two techniques conflict when one claims a resource for itself (no stack order) that the other touches too."""
    found = []
    for position, (_, earlier, first) in enumerate(owners):
        orders = {touch.resource: touch.order for touch in first.TECHNIQUE.touches}
        for index, later, second in owners[position + 1:]:
            for touch in second.TECHNIQUE.touches:
                if touch.resource in orders and None in (touch.order, orders[touch.resource]):
                    found.append(Problem(
                        message=f"{later.id} and {earlier.id} both own '{touch.resource}'",
                        key=("technique", index, "id"), remedy="keep one of the two",
                    ))
    return found


def diff(a: Recipe, b: Recipe) -> list[str]:
    """What differs, one line each, from `a` to `b`; empty when nothing does. Their order is nothing: techniques declare their own."""
    lines = []
    for section in ("made_for", "evidence"):
        lines += _changes(section, msgspec.structs.asdict(getattr(a, section)), msgspec.structs.asdict(getattr(b, section)))
    left, right = ({entry.id: entry for entry in recipe.techniques} for recipe in (a, b))
    lines += [f"- technique {clip(name)}" for name in left if name not in right]
    lines += [f"+ technique {clip(name)}" for name in right if name not in left]
    for name in left:
        if name in right:
            old, new = (msgspec.structs.asdict(side[name]) for side in (left, right))
            lines += _changes(f"{clip(name)}.options", old.pop("options"), new.pop("options"))
            lines += _changes(clip(name), old, new)
    return lines


def _changes(prefix: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [
        f"{prefix}.{clip(name)}: {_shown(old.get(name))} -> {_shown(new.get(name))}"
        for name in dict.fromkeys([*old, *new])
        if not same(old.get(name), new.get(name))
    ]


def _shown(value: Any) -> str:
    return "(none)" if value is None or value in ("", [], {}) else clip(value if isinstance(value, str) else json.dumps(value))
