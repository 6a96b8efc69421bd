"""Which candidate next: the one with the most expected gain for its expected seconds.

Both start from what the techniques say of themselves, `bound` and `PREPARE_S`, and follow what this study has seen: other
options of the same techniques cost and gain about the same, and a large model or a slow machine makes everything longer
by one factor. Nothing is left out for its prior; only what was measured says that a number format need not be tried on one
more runtime (`outrun`). Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from saturate.inference.candidates import Candidate, Part
from saturate.inference.techniques._api import LOSSLESS, bound_of
from saturate.records.inference import ModelFacts

#: Seconds of preparing a small model with a technique that does not say (`PREPARE_S`): a prior, not a claim.
USUAL_PREPARE_S = 2.0

#: Seconds of a candidate beside its preparation: a process starts, its outputs are compared, it is timed and scored.
TRIAL_S = 8.0

#: What a technique without a bound, or other options of a known one, may give; and the least that is hoped of any.
SOME = 1.05

#: Repairing takes about so many trials, and leaves so much of the broken one's speed.
REPAIR_TRIALS, REPAIRED = 3, 0.9

#: A number format may be so many times as fast on one more runtime, or with other options, as what it gave on others lets expect.
HOPED = 1.5


class Known(Protocol):
    """What the search has found out about a candidate."""

    speedup: float | None

    @property
    def again_s(self) -> float: ...


def rate(candidate: Candidate, facts: ModelFacts, tried: Mapping[Candidate, Known], best: float) -> float:
    """Gain (the logarithm of a speed-up) per second. `best`: the speed-up that this one would have to beat."""
    return gain(expected_speedup(candidate, facts, tried), best) / seconds(candidate, tried)


def outrun(candidate: Candidate, tried: Mapping[Candidate, Known], best: float) -> Candidate | None:
    """Where the number format of this candidate was so slow that on its runtime it cannot be expected to beat `best`; None: nothing says so.

    Compared are the same runtime, where the options of the format are others, and two that compile, by what they give without the
    format: casts that a compiler fuses cost much in what merely records or interprets. Of a ResNet-50 the formats that act on linear
    layers gave what a compiler gives alone; trying them with the next one took a quarter of the search.
    """
    own = _number_of(candidate)
    found: list[tuple[float, Candidate]] = []
    for other, known in tried.items():
        number = _number_of(other) if known.speedup else None
        if own is None or number is None or number.id != own.id or other == candidate:
            continue
        here, there = _without(candidate, own), _without(other, number)
        speeds = (1.0, 1.0) if here == there else (_speed_of(here, tried), _speed_of(there, tried)) if _compiled(here) and _compiled(there) else None
        if speeds is not None and None not in speeds:
            found.append((known.speedup * speeds[0] / speeds[1], other))        # type: ignore[operator] - all three are known
    expected, other = max(found, key=lambda entry: entry[0], default=(math.inf, candidate))
    return other if HOPED * expected < best else None


def _compiled(candidate: Candidate) -> bool:
    return any(getattr(part.module, "COMPILES", False) for part in candidate.parts)


def _number_of(candidate: Candidate) -> Part | None:
    """The one part of a candidate that changes numbers, where all others are lossless."""
    parts = [part for part in candidate.parts if part.module.TECHNIQUE.numerics not in LOSSLESS]
    return parts[0] if len(parts) == 1 and candidate.numerics == "precision" and not candidate.keep else None


def _without(candidate: Candidate, part: Part) -> Candidate:
    return Candidate.of([other for other in candidate.parts if other is not part])


def _speed_of(candidate: Candidate, tried: Mapping[Candidate, Known]) -> float | None:
    return tried[candidate].speedup or None if candidate in tried else None


def repair_rate(broken: Known, best: float) -> float:
    return gain(REPAIRED * (broken.speedup or 0.0), best) / (REPAIR_TRIALS * max(broken.again_s, 1.0))


def gain(speedup: float, best: float) -> float:
    return max(math.log(max(speedup, 1e-3) / best), math.log(SOME))


def expected_speedup(candidate: Candidate, facts: ModelFacts, tried: Mapping[Candidate, Known]) -> float:
    """Over the baseline. Of a set it is what its best part may give: bounds are of whole programs."""
    same = [known.speedup for other, known in tried.items() if known.speedup and other.ids == candidate.ids]
    if same:
        return SOME * max(same)
    alone = [known.speedup for other, known in tried.items()
             if known.speedup and len(other.parts) == 1 and other.parts[0] in candidate.parts]
    return max([*alone, *(bound_of(part.module, facts) or SOME for part in candidate.parts)])


def seconds(candidate: Candidate, tried: Mapping[Candidate, Known]) -> float:
    """That trying it will cost."""
    same = [known.again_s for other, known in tried.items() if known.again_s and other.ids == candidate.ids]
    if same:
        return max(same)
    seen = [(known.again_s, prior_s(other)) for other, known in tried.items() if known.again_s and other.parts]
    scale = sum(real for real, _ in seen) / sum(prior for _, prior in seen) if seen else 1.0
    return scale * prior_s(candidate)


def prior_s(candidate: Candidate) -> float:
    return TRIAL_S + sum(getattr(part.module, "PREPARE_S", USUAL_PREPARE_S) for part in candidate.parts)
