"""A technique's `Options` from a recipe's table.

`Options` is a frozen dataclass of the standard library, because techniques also load inside the user's process; so this
file imports nothing but the standard library either. What a field allows is read from its annotation (`bool`, `int`,
`float`, `str` or `Literal[...]`), from its metadata (`field(default=1, metadata={"minimum": 1, "maximum": 64})`), and
from a `ValueError` that `__post_init__` raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from saturate.errors import RecipeError
from saturate.records.spelling import suggestion

_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True)
class OptionProblem:
    """One option that does not fit. `name` is empty when the combination is what is wrong."""

    name: str
    message: str
    remedy: str = ""


class _Unfit(Exception):
    """A value that its field does not accept; the message says what was expected."""


def problems(options_class: type, mapping: Mapping[str, Any]) -> list[OptionProblem]:
    """Everything in `mapping` that `options_class` does not accept, in the order of the mapping."""
    return _build(options_class, mapping)[1]


def options_from(module: Any, mapping: Mapping[str, Any]) -> Any:
    """The `Options` of a technique module, with defaults for what `mapping` leaves out.

    Raises RecipeError for an unknown option, a wrong type or a value out of range.
    """
    options, found = _build(module.Options, mapping)
    if found:
        first, name = found[0], module.TECHNIQUE.id
        where = f"option {first.name} of {name}" if first.name else f"options of {name}"
        raise RecipeError(f"{where}: {first.message}", remedy=first.remedy or f"saturate explain {name}")
    return options


def _build(options_class: type, mapping: Mapping[str, Any]) -> tuple[Any, list[OptionProblem]]:
    known = {field.name: field for field in fields(options_class)}
    hints = get_type_hints(options_class)
    values, found = {}, []
    for name, value in mapping.items():
        if name not in known:
            remedy = suggestion(name, known) or f"options here: {', '.join(known) or 'none'}"
            found.append(OptionProblem(name, "unknown option", remedy))
            continue
        try:
            values[name] = _fit(hints[name], value)
            _in_range(values[name], known[name].metadata)
        except _Unfit as error:
            found.append(OptionProblem(name, str(error)))
    if found:
        return None, found
    try:
        return options_class(**values), []
    except ValueError as error:  # raised by the technique's own __post_init__: its message is for the user
        return None, [OptionProblem("", str(error))]


def _fit(hint: Any, value: Any) -> Any:
    """`value` as the annotation `hint` wants it. Raises _Unfit; never guesses (1 is not true, 4.0 is not 4)."""
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            raise _Unfit(f"expected one of {', '.join(map(repr, choices))}, got {short(value)}")
        return value
    if hint is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    if type(value) is not hint:
        raise _Unfit(f"expected {_NAMES.get(hint, hint)}, got {short(value)}")
    if hint is float and not math.isfinite(value):
        raise _Unfit(f"expected a finite number, got {value}")
    return value


def _in_range(value: Any, metadata: Mapping[str, Any]) -> None:
    if "minimum" in metadata and value < metadata["minimum"]:
        raise _Unfit(f"{short(value)} is below the least allowed value, {metadata['minimum']}")
    if "maximum" in metadata and value > metadata["maximum"]:
        raise _Unfit(f"{short(value)} is above the largest allowed value, {metadata['maximum']}")


def short(value: Any) -> str:
    """A value as it may appear in one line of an error."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return "a huge number"  # repr() of more than 4300 digits raises
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
