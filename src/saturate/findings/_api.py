"""The contract of a rule. A rule is one module of this package, and finds one cause of lost time.

A rule module holds, in this order: a docstring with the headings of `HEADINGS` (it is the documentation: `saturate
explain ID`, the docs page and the report are made from it); `RULE`; its thresholds as named constants; and

    detect(seen: Observations) -> Finding | None

which is pure, abstains (None) when a number it needs is None, when `RULE.needs` names something in
`seen.integrity_blocks`, or when no step was observed, and never says what its "Not to be confused with"
excludes. It may hold

    answers(seen: Observations) -> bool

which is False where a number is None without which `detect` always abstains: its silence is no answer then, and a finding that another
trace shows is neither gone nor new. A bound is an upper bound: what the step would be if the cause were gone and nothing else took its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from saturate.records.analysis import Finding
from saturate.records.observations import Observations

HEADINGS = ("What it means", "Evidence", "Threshold", "Not to be confused with", "What helps", "References")

#: Fewer observed steps conclude nothing. One step gives low confidence: what is true of it need not be of the next.
STEPS_TO_CONCLUDE = 1
STEPS_FOR_MEDIUM = 2
STEPS_FOR_HIGH = 20


@dataclass(frozen=True)
class Rule:
    """Metadata. `id` is the file name with dashes. `techniques` are ids of techniques that address the cause; those
    that do not exist (yet, or here) are left out of the finding by the registry."""

    id: str
    title: str
    techniques: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()     # conclusions of the trace, of `_registry.CONCLUSIONS`
    since: str = "0.1"
    fields: frozenset[str] = frozenset()    # of `records.analysis.Device`: says nothing where one of them is not known


class RuleModule(Protocol):
    RULE: Rule

    def detect(self, seen: Observations) -> Finding | None: ...


def bound(share: float) -> float | None:
    """Step now over step then, if `share` of the step vanished. None where all of it would.

    >>> bound(0.5)
    2.0
    """
    return None if not 0.0 <= share < 1.0 else 1.0 / (1.0 - share)
