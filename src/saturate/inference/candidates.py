"""A candidate: techniques with options, in the order in which they are applied."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from saturate.inference.techniques._api import LOSSLESS, STAGES
from saturate.techniques._api import NUMERICS

#: A label names so many layers that stay in their own precision; of more it names the first.
SHOWN = 2


@dataclass(frozen=True)
class Part:
    """One technique of a candidate. `module` is its module, `options` an instance of its Options."""

    module: ModuleType
    options: Any

    @property
    def id(self) -> str:
        return self.module.TECHNIQUE.id

    def label(self) -> str:
        """The id, with the options that are not defaults."""
        changed = [f"{field.name}={getattr(self.options, field.name)}" for field in dataclasses.fields(self.options)
                   if getattr(self.options, field.name) != field.default]
        return f"{self.id} {','.join(changed)}".strip()


@dataclass(frozen=True)
class Candidate:
    """Parts in the order of application; `keep` are modules that stay in the original precision. Empty: the baseline."""

    parts: tuple[Part, ...] = ()
    keep: frozenset[str] = frozenset()

    @staticmethod
    def of(parts: list[Part], keep: frozenset[str] = frozenset()) -> Candidate:
        return Candidate(tuple(sorted(parts, key=_place)), keep)

    @property
    def ids(self) -> list[str]:
        return [part.id for part in self.parts]

    def label(self) -> str:
        words = " + ".join(part.label() for part in self.parts) or "baseline"
        return f"{words} (but {_some(sorted(self.keep))})" if self.keep else words

    def key(self) -> str:
        """The same for the same parts, options and kept modules only; what is shown may be cut."""
        return json.dumps([self.techniques(), sorted(self.keep)], sort_keys=True)

    @property
    def numerics(self) -> str:
        """The weakest promise of its parts."""
        return max((part.module.TECHNIQUE.numerics for part in self.parts), key=NUMERICS.index, default="exact")

    @property
    def lossless(self) -> bool:
        return self.numerics in LOSSLESS

    @property
    def repairable(self) -> bool:
        """Whether layers of it can go back to their own precision."""
        return self.numerics == "precision" and not any(getattr(part.module, "WHOLE", False) for part in self.parts)

    def conflict(self) -> str | None:
        """The resource that two parts claim and one of them alone, None where all go together."""
        seen: dict[str, int | None] = {}
        for part in self.parts:
            for touch in part.module.TECHNIQUE.touches:
                if touch.resource in seen and (touch.order is None or seen[touch.resource] is None):
                    return touch.resource
                seen[touch.resource] = touch.order
        return None

    def techniques(self) -> list[dict[str, Any]]:
        """For records: ids and options."""
        return [{"id": part.id, "options": dataclasses.asdict(part.options)} for part in self.parts]


def _some(names: list[str]) -> str:
    """
    >>> _some(["stem", "head"]), _some(["a", "b", "c", "d"])
    ('stem, head', 'a and 3 more layers')
    """
    return ", ".join(names) if len(names) <= SHOWN else f"{names[0]} and {len(names) - 1} more layers"


def _place(part: Part) -> tuple[int, int, str]:
    technique = part.module.TECHNIQUE
    orders = [touch.order for touch in technique.touches if touch.order is not None]
    return STAGES.index(technique.stage), min(orders, default=0), technique.id
