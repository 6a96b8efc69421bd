"""One case per rule: what it must find, where it must keep quiet, and what it must not be confused with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from saturate.records.observations import Observations


def but(seen: Any, **changes: Any) -> Any:
    """`seen` with other fields; `loader__fetch_cpu=0.9` changes the field of a part."""
    for path, value in changes.items():
        outer, _, inner = path.partition("__")
        seen = dataclasses.replace(seen, **{outer: but(getattr(seen, outer), **{inner: value}) if inner else value})
    return seen


@dataclass(frozen=True)
class Case:
    """`edges` are (field, last value that is found, first that is not); `missing` are fields without which the rule
    abstains; `quiet` are other changes that silence it, by their reason; `still` are changes that do not."""

    rule: str
    fires: Observations
    lost: float | None
    edges: tuple[tuple[str, Any, Any], ...] = ()
    missing: tuple[str, ...] = ()
    quiet: dict[str, dict[str, Any]] = field(default_factory=dict)
    still: dict[str, dict[str, Any]] = field(default_factory=dict)
    reason: str = ""  # part of the sentence
    techniques: tuple[str, ...] = ()


def base(**changes: Any) -> Observations:
    """Twenty steps of 100 ms on an A100, and nothing else observed."""
    cuda = Observations(device="cuda", capability=(8, 0), bf16_native=True, steps=20, step_ms=100.0)
    return but(cuda, **changes)


def on_cpu(**changes: Any) -> Observations:
    return but(Observations(device="cpu", steps=20, step_ms=100.0), **changes)
