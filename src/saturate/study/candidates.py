"""Techniques with options, and sets of them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

from saturate.techniques import _registry
from saturate.techniques._api import NUMERICS
from saturate.trial.launch import Chosen


@dataclass(frozen=True)
class Candidate:
    """One technique with one choice of options."""

    module: ModuleType
    options: Any

    @property
    def id(self) -> str:
        return self.module.TECHNIQUE.id

    @property
    def numerics(self) -> str:
        return self.module.TECHNIQUE.numerics

    @property
    def merges(self) -> int:
        """How many of the script's backward passes may be one (see `Technique`)."""
        name = self.module.TECHNIQUE.merges
        return getattr(self.options, name) if name else 1

    def options_dict(self) -> dict[str, Any]:
        return asdict(self.options)

    def label(self) -> str:
        """The id, with the options that differ from their defaults."""
        defaults = asdict(self.module.Options())
        changed = {k: v for k, v in self.options_dict().items() if defaults.get(k) != v}
        return self.id + (" " + ",".join(f"{k}={v}" for k, v in changed.items()) if changed else "")

    def chosen(self) -> Chosen:
        name, path = _registry.origin(self.module)
        environment = self.module.environment(self.options) if self.module.TECHNIQUE.stage == "environment" else {}
        return Chosen(self.id, name, path, self.options_dict(), environment)


Set = tuple[Candidate, ...]


def key(techniques: Set) -> str:
    """Canonical text of a set: the same for the same techniques and options in any order."""
    return json.dumps(sorted([c.id, c.options_dict()] for c in techniques), sort_keys=True)


def names(techniques: Set) -> str:
    return " + ".join(c.id for c in techniques) or "baseline"


def without(techniques: Set, candidate: Candidate) -> Set:
    return tuple(c for c in techniques if c is not candidate)


def conflict(techniques: Set, candidate: Candidate) -> str | None:
    """Why `candidate` cannot join `techniques`: an exclusive resource that both own; None when it can."""
    for other in techniques:
        if other.id == candidate.id:
            return f"{candidate.id} is already there with other options"
    for _, other, resource in _registry.conflicts([*(c.module for c in techniques), candidate.module]):
        return f"conflicts with {other} over {resource}"
    return None


def weakest(techniques: Set) -> str:
    """The numerics class of a whole set: the weakest promise in it."""
    return max((c.numerics for c in techniques), key=NUMERICS.index, default="exact")


def merging(techniques: Set) -> int:
    """How many of the script's backward passes may be one with all of these."""
    return math.prod(candidate.merges for candidate in techniques)


def ordered(techniques: Set) -> Set:
    """In the order in which they are applied."""
    order = {module: index for index, module in enumerate(_registry.ordered([c.module for c in techniques]))}
    return tuple(sorted(techniques, key=lambda c: order[c.module]))
