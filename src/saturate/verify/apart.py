"""Is the candidate still the same training, where one rounding makes another trajectory of it within a few updates?

There each update may point anywhere and each loss may be any of the baseline's (see `tolerance.SEPARATED`): compared update by update,
gradients with the wrong sign pass. What runs that came apart still have in common shows in means over a third of the run. Losses,
gradient norms and lengths of updates differ by no more than those of the baseline and its twins, which have come apart as well. And
in the first third the updates point the same way to some degree: for a while both go downhill from nearly the same place. Measured on TabNet,
whose twins turn by a radian within five updates: mean cosines of 0.42 to 0.59 in eight twins, of 0.48 and 0.63 in a compiled and a
fused run; of 0.05 with another seed, and below 0.16 where gradients had random signs or the wrong one. Later it depends on where each has come to: in small
trainings with too large a learning rate it was 0.04 in the last third of an honest run, 0.37 in the twin's.

So a candidate must have at least `SHARE` of the cosine of the twin that has least. Where no twin keeps its direction for so long, no
candidate can show that it has the baseline's, and nothing can be verified.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from saturate.verify.broken import OPPOSED, cosines
from saturate.verify.deviation import FIRST_ACTING, Deviation
from saturate.verify.series import Series

THIRDS = 3

#: A candidate rounds again in every update and so comes apart an update or two before a twin: of the twin's cosine that takes a tenth.
SHARE = 0.5

#: Twins that are less alike than this prove nothing. On TabNet, gradients with random signs still had 0.15: for some updates Adam's momentum
#: holds what the first two were.
LEAST_ALIKE = 0.35

#: Updates may always be so much longer or shorter, in the mean over a third: Adam's have their length from the learning rate, so that a twin
#: differs by 0.001 where bf16 autocast does by 0.03 (PointNet).
LEAST_STRETCH = math.log(1.25)

MEANS = ("loss", "gradient norm", "update norm")


@dataclass(frozen=True)
class Apart:
    """`limits`: what each of `MEANS` may deviate in each third of the run. `alike`: the least mean cosine of a run of the baseline with it,
    in the first third, and `least`: from which on that is no chance. `parts`: the tensors that go the baseline's way in each of these
    runs. `by`: the update by which one rounding has made another trajectory."""

    limits: tuple[list[float], ...]
    alike: float
    least: float
    parts: frozenset[int]
    by: int


def thirds(values: Sequence[float]) -> list[float]:
    """The means over the acting updates of each third, of what is finite; nan where nothing is. The last one takes the remainder."""
    acting = values[FIRST_ACTING:]
    size = len(acting) // THIRDS
    cut = [acting[i * size: None if i == THIRDS - 1 else (i + 1) * size] for i in range(THIRDS)]
    return [fmean(known) if (known := list(filter(math.isfinite, part))) else math.nan for part in cut]


def _means(found: Deviation) -> tuple[list[float], ...]:
    return thirds(found.loss), thirds(found.gradient), thirds(found.stretch)


def _alike(found: Deviation) -> float:
    return thirds([1 - turn * turn / 2 for turn in found.turn])[0]


def _first(series: Series) -> range:
    """The acting updates of the first third, in which twins are most alike."""
    return range(FIRST_ACTING, FIRST_ACTING + (len(series) - FIRST_ACTING) // THIRDS)


def apart(baseline: Series, runs: Sequence[Series], found: Sequence[Deviation], floors: Sequence[Sequence[float]], safety: float,
          by: int) -> Apart:
    """What is asked of a candidate: what the baseline's own `runs` deviate (`found`) in a third and the one that follows it, into which
    a candidate is ahead of them, times `safety`. `floors` are those of loss and gradient norm per update."""
    of_runs = [_means(one) for one in found]
    least = (*map(thirds, floors), [LEAST_STRETCH] * THIRDS)
    limits = tuple([max([floor[i], *(safety * value for means in of_runs for value in means[metric][: i + 2] if math.isfinite(value))])
                    for i in range(THIRDS)] for metric, floor in enumerate(least))
    alike = min(one if math.isfinite(one) else -1.0 for one in map(_alike, found))
    each = [cosines(baseline, run, _first(baseline)) for run in runs]
    parts = frozenset(part for part in each[0] if all(run.get(part, -1.0) >= LEAST_ALIKE for run in each))
    # Half of it must be more than twice what the cosine of a direction that is drawn at random is as a rule, in so many entries.
    moving = sum(a != b for a, b in zip(baseline.samples[FIRST_ACTING - 1], baseline.samples[-1]))
    return Apart(limits, alike, max(LEAST_ALIKE, 2 / SHARE / math.sqrt(max(1, moving))), parts, by)


def untold(asked: Apart) -> str | None:
    """Why no comparison tells anything, in words for the user; None when one does."""
    if asked.alike >= asked.least:
        return None
    return (f"this training amplifies one rounding until, by update {asked.by}, its updates may point anywhere: those of the baseline and of "
            f"the baseline perturbed by one have a mean cosine of {asked.alike:.2f} in the first third of the run, and to tell a right run from "
            f"a wrong one takes {asked.least:.2f}; a smaller learning rate, or a warm-up of it, amplifies less")


def lacks(baseline: Series, candidate: Series, found: Deviation, asked: Apart) -> tuple[str, float] | None:
    """The first of what is asked that the candidate does not show, in words and as a multiple of what is allowed."""
    alike, needed = _alike(found), SHARE * asked.alike
    if not alike >= needed:
        return (f"update cosine is {alike:.2f} in the first third of the run, in the mean, {needed:.2f} needed: half of what the perturbed "
                "baseline's is"), needed / alike if alike > 0 else math.inf
    for metric, own, limits in zip(MEANS, _means(found), asked.limits):
        for third, (value, limit) in enumerate(zip(own, limits), 1):
            if value > limit:
                seen, most = [f"{one:.3g}" if metric == "loss" else f"{100 * math.expm1(one):.3g} %" for one in (value, limit)]
                return f"{metric} deviates by {seen} in third {third} of the run, in the mean, {most} allowed", value / limit if limit else math.inf
    for part, cosine in cosines(baseline, candidate, _first(baseline)).items():
        if part in asked.parts and cosine < OPPOSED:
            return f"tensor {part} goes the other way than in the baseline, in most updates", math.inf
    return None
