"""What the noise of a workload leaves to decide: how far apart two processes of one program are, and what the pairs of a race say beside it.

Learnt from races of the baseline against itself. Processes that differ in what the kernel did for them (page faults) are told apart from
even ones: a technique may make all of them even.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from saturate.measure import race
from saturate.measure.race import Decision, Limits
from saturate.study.candidates import Set
from saturate.study.race_pair import LEAST_ROUNDS, KernelWork

#: Two processes differ in what the kernel does for them from so many page faults per step on: 1 MiB.
UNEVEN_FAULTS = 256


class Noise:
    """Of one workload; `threshold`: the gain that counts."""

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.between_sd = race.PRIOR_BETWEEN_SD
        self.steadying: set[str] = set()    # ids of techniques without which processes of one set differ
        self.steady_sd = race.PRIOR_BETWEEN_SD      # between processes that have one of them
        self.aa_pairs: list[list[float]] = []
        self.even_pairs: list[list[float]] = []     # those of them whose processes did not differ in what the kernel did for them

    def learn(self, pairs: list[list[float]], work: Sequence[tuple[KernelWork, KernelWork]] = ()) -> None:
        """Take finished A/A pairs into account for everything that follows."""
        found = usable(pairs)
        self.aa_pairs = [*self.aa_pairs, *found]
        self.between_sd = race.between_sd(self.aa_pairs)
        known = any(_is_known(a, b) for a, b in work)       # of processes that ran one after the other, it never is
        even = [_is_known(a, b) and abs(a.page_faults - b.page_faults) < UNEVEN_FAULTS for a, b in work] if known else [True] * len(found)
        self.even_pairs = [*self.even_pairs, *(pair for pair, alike in zip(found, even) if alike)]
        self.steady_sd = race.between_sd(self.even_pairs)

    def between(self, a: Set, b: Set) -> float:
        """The standard deviation between processes of these two sets, in natural-log units."""
        return self.steady_sd if self.steady(a) and self.steady(b) else self.between_sd

    def decide(self, pairs: list[list[float]], limits: Limits, between_sd: float, over: bool = False) -> Decision:
        return race.next_action(usable(pairs), between_sd, self.threshold, limits, over)

    def by_state(self, pairs: list[list[float]], work: list[tuple[KernelWork, KernelWork]], limits: Limits) -> Decision | None:
        """What the pairs say where only some processes of A are slow; None unless both kinds were seen."""
        known = [(pair, a.page_faults - b.page_faults) for pair, (a, b) in zip(usable(pairs), work) if _is_known(a, b)]
        states = [more >= UNEVEN_FAULTS for _, more in known]
        if len(set(states)) < 2:
            return None
        found = race.by_state([pair for pair, _ in known], states, race.look_confidence(limits.max_pairs))
        return Decision("stop", race.verdict(found, self.threshold), found, f"{sum(states)} of {len(states)} processes of A were slow by chance")

    def steady(self, techniques: Set) -> bool:
        """Whether all processes of a set are alike."""
        return any(one.id in self.steadying for one in techniques)


def usable(pairs: list[list[float]]) -> list[list[float]]:
    """Those with rounds enough to say something."""
    return [pair for pair in pairs if len(pair) >= LEAST_ROUNDS]


def _is_known(a: KernelWork, b: KernelWork) -> bool:
    return math.isfinite(a.page_faults) and math.isfinite(b.page_faults)
