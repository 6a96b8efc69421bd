"""Which candidate next: the one with the most expected gain for its expected seconds.

Both start from what the techniques say of themselves, `bound` and `PREPARE_S`, and follow what this study has seen: other
options of the same techniques cost and gain about the same, and a large model or a slow machine makes everything longer
by one factor. An order is all that comes of it; nothing is left out for its prior. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from saturate.inference.candidates import Candidate
from saturate.records.inference import ModelFacts

#: Seconds of preparing a small model with a technique that does not say (`PREPARE_S`): a prior, not a claim.
USUAL_PREPARE_S = 2.0

#: Seconds of a candidate beside its preparation: a process starts, its outputs are compared, it is timed and scored.
TRIAL_S = 8.0

#: What a technique without a bound, or other options of a known one, may give; and the least that is hoped of any.
SOME = 1.05

#: Repairing takes about so many trials, and leaves so much of the broken one's speed.
REPAIR_TRIALS, REPAIRED = 3, 0.9


class Known(Protocol):
    """What the search has found out about a candidate."""

    seconds: float
    speedup: float | None


def rate(candidate: Candidate, facts: ModelFacts, tried: Mapping[Candidate, Known], best: float) -> float:
    """Gain (the logarithm of a speed-up) per second. `best`: the speed-up that this one would have to beat."""
    return gain(expected_speedup(candidate, facts, tried), best) / seconds(candidate, tried)


def repair_rate(broken: Known, best: float) -> float:
    return gain(REPAIRED * (broken.speedup or 0.0), best) / (REPAIR_TRIALS * max(broken.seconds, 1.0))


def gain(speedup: float, best: float) -> float:
    return max(math.log(max(speedup, 1e-3) / best), math.log(SOME))


def expected_speedup(candidate: Candidate, facts: ModelFacts, tried: Mapping[Candidate, Known]) -> float:
    """Over the baseline. Of a set it is what its best part may give: bounds are of whole programs."""
    same = [known.speedup for other, known in tried.items() if known.speedup and _ids(other) == _ids(candidate)]
    if same:
        return SOME * max(same)
    alone = [known.speedup for other, known in tried.items()
             if known.speedup and len(other.parts) == 1 and other.parts[0] in candidate.parts]
    return max([*alone, *(part.module.bound(facts) or SOME for part in candidate.parts)])


def seconds(candidate: Candidate, tried: Mapping[Candidate, Known]) -> float:
    """That trying it will cost."""
    same = [known.seconds for other, known in tried.items() if known.seconds and _ids(other) == _ids(candidate)]
    if same:
        return max(same)
    seen = [(known.seconds, prior_s(other)) for other, known in tried.items() if known.seconds and other.parts]
    scale = sum(real for real, _ in seen) / sum(prior for _, prior in seen) if seen else 1.0
    return scale * prior_s(candidate)


def prior_s(candidate: Candidate) -> float:
    return TRIAL_S + sum(getattr(part.module, "PREPARE_S", USUAL_PREPARE_S) for part in candidate.parts)


def _ids(candidate: Candidate) -> list[str]:
    return [part.id for part in candidate.parts]
