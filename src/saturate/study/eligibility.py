"""Which techniques are worth a trial of a workload, and in which order. The others get their fate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from saturate.records.analysis import Finding
from saturate.records.facts import Facts
from saturate.study.candidates import Candidate
from saturate.study.fates import Fate
from saturate.study.guidance import LAST, promise
from saturate.techniques._api import bound_of, variants_of

#: A technique that cannot remove more than this share of a step is not worth a process.
SMALLEST_BOUND = 0.01


@dataclass(frozen=True)
class Asked:
    """What the answer depends on. `steadying`: the ids of those that make processes alike are added to it."""

    facts: Facts
    only: frozenset[str] | None
    skip: frozenset[str]
    allow_convergence: bool
    findings: tuple[Finding, ...]
    steadying: set[str]

    def of(self, registry: Mapping[str, ModuleType], fates: dict[str, Fate]) -> list[list[Candidate]]:
        """The variants of every technique worth a trial, most promising first. `fates` gets one of each technique."""
        found = []
        for identity, module in registry.items():
            answer = self._excluded(identity) or self._answer(module)
            if isinstance(answer, Fate):
                fates[identity] = answer
            else:
                fates[identity] = Fate("not_tried", "the budget ended before its turn", answer[1][0])
                found.append(answer)
        found.sort(key=lambda entry: self._place(entry[0], entry[1][0]))
        return [variants for _, variants in found]

    def _excluded(self, identity: str) -> Fate | None:
        if identity in self.skip:
            return Fate("not_tried", "excluded with --skip")
        if self.only is not None and identity not in self.only:
            return Fate("not_tried", "not named with --only")
        return None

    def _answer(self, module: ModuleType) -> Fate | tuple[float | None, list[Candidate]]:
        try:
            answer = self._ask(module)
        except Exception as error:  # noqa: BLE001 - third-party code: it becomes this technique's fate
            return Fate("failed", f"it cannot say whether it applies: {error!r}")
        if not isinstance(answer, Fate) and module.TECHNIQUE.numerics == "convergence" and not self.allow_convergence:
            return Fate("not_tried", "changes the training itself: needs --allow convergence")
        return answer

    def _ask(self, module: ModuleType) -> Fate | tuple[float | None, list[Candidate]]:
        """What a technique says of this workload: why not, or how much it could give and with which options."""
        answer = module.eligible(self.facts)
        if not answer:
            return Fate("not_applicable", answer.reason)
        if answer.steadies:
            self.steadying.add(module.TECHNIQUE.id)
        bound = bound_of(module, self.facts)
        if bound is not None and bound < SMALLEST_BOUND:
            return Fate("not_applicable", f"could remove at most {100 * bound:.1f} % of a step")
        variants = [Candidate(module, options) for options in variants_of(module, self.facts)]
        for candidate in variants:
            candidate.chosen()      # asks for its variables
        return bound, variants

    def _place(self, bound: float | None, first: Candidate) -> tuple[bool, bool, bool, bool, tuple[int, float]]:
        """What makes processes alike comes first. What changes the work itself comes before what changes where it runs: that depends
        on the former. What can give but little comes behind both, and what is only worth a trial under a limit costs time: it is last."""
        about = first.module.TECHNIQUE
        promised = promise(first.id, bound, self.findings, about.slow_start)
        return (first.id not in self.steadying, saves_memory(first, self.facts), promised[0] == LAST, about.stage == "environment", promised)


def saves_memory(candidate: Candidate, facts: Facts) -> bool:
    """Whether this technique is only eligible because a memory limit was asked for."""
    if facts.memory_limit_bytes is None:
        return False
    return not candidate.module.eligible(dataclasses.replace(facts, memory_limit_bytes=None))
