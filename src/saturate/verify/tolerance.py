"""What may differ: a tolerance that comes from the workload itself.

Two sources. A/A runs show what the same program does twice (zero on a CPU, more with atomics on an accelerator).
Twins are baseline runs whose parameters were once perturbed by a relative rounding of the candidate's number format:
they show what this training makes of an error of that size, step by step. A trajectory that amplifies errors does so
in the twin as well, so late updates get a wide tolerance and the early ones, where nothing has been amplified yet,
carry the power of the test.

    allowed[k] = max(floor, SAFETY * largest deviation of any A/A run or twin in the updates up to k + k/2 + 2)

It looks ahead because a candidate rounds again in every update and so is further along the same exponential than a
twin that was perturbed once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from statistics import median

from saturate.verify.apart import Apart, apart
from saturate.verify.broken import LEAST_UPDATES as LEAST_TOGETHER
from saturate.verify.broken import broken
from saturate.verify.deviation import (
    FIRST_ACTING,
    QUANTUM,
    Deviation,
    OfMetrics,
    deviation,
    least_gradient,
    moves_without_direction,
    norm,
    update_of,
)
from saturate.verify.series import COARSE, ROUNDING, Series
from saturate.verify.settings import settled

#: Fewer updates than this prove too little.
LEAST_UPDATES = 50

#: A candidate rounds in every operation of every step, a twin only once. Drift adds up over the run, so its errors do
#: so in the candidate and not in the twin: it gets more. Measured on the trainings of the tests (65 of them), bf16
#: autocast needs at most 0.83 of what is allowed for the loss, 0.76 for the drift, and 0.55 for the rest.
SAFETY = 4.0
DRIFT_SAFETY = 12.0

#: No tolerance on lengths exceeds this factor, so that an exploding gradient always shows.
WIDEST_RATIO = math.log(100.0)

#: Once updates may turn by a radian, the trajectories have separated: loss and gradient norm are then only held to their
#: range, the length of updates to `WIDEST_RATIO`, and what is broken outright (not finite, not moving) still fails. Where fewer than
#: `LEAST_TOGETHER` acting updates come before, that proves too little, and means over thirds of the run are compared as well (see `apart`).
SEPARATED = 1.0

#: A program that runs twice gives the same numbers but for the order of sums, and for the shortest format (bfloat16: 2^-9). Little
#: has been amplified in the first updates: what differs by more is another training.
REPEATS = 2.0**-5

#: A unit in the last place of a format, relative: at most so many of its roundings.
UNIT = 4.0

#: To either side of an update, those that its length is compared with.
AROUND = 5

#: A tensor may always travel this much less than in the baseline (a factor of two): noise of few sampled entries.
LEAST_LAG = math.log(2.0)

#: A buffer may always stray from its way by this share of it: rounding to 16 bits makes a few hundredths, one that stands still
#: strays by all of it, and one that is updated twice per step by nearly as much.
LEAST_STRAY = 0.5

#: Of entries in 16 bits, this share may always move more or fewer. Measured from rate 1e-4 to 1e-6: honest runs differ by up to 3 %, twins
#: by 2 %; twice the learning rate moves at least 25 % more, half of it at least 40 % fewer.
LEAST_MORE = math.log(1.1)


@dataclass(frozen=True)
class Tolerance(OfMetrics):
    """Allowed deviation per update (units as in `deviation`), and the least allowed update cosine."""

    slowest: float
    moves: float
    excused: list[frozenset[str]]       # what of each update is broken in an unchanged or perturbed run as well (see `broken`)
    settled: int = 0                    # updates in which a candidate must set its optimizers as the baseline does
    apart: Apart | None = None          # what is asked as well of a training whose trajectories separate at once

    @property
    def least_cosine(self) -> list[float]:
        return [max(-1.0, 1 - turn * turn / 2) for turn in self.turn]


def _horizon(k: int) -> int:
    """The last update that what is allowed in update k looks at."""
    return max(k, FIRST_ACTING) * 3 // 2 + 2


def widened(allowed: Sequence[float], losses: Sequence[Sequence[float]], otherwise: Sequence[Sequence[float]]) -> list[float]:
    """What a loss may deviate between two kinds of runs of one training: `allowed`, and what is made of the baseline's losses where
    it runs `otherwise`."""
    off = [max((abs(a - b) if math.isfinite(a - b) else math.inf for a, b in zip(ours, theirs)), default=0.0)
           for ours, theirs in zip(losses, otherwise)]
    return [limit + SAFETY * max(off[: _horizon(k) + 1], default=0.0) for k, limit in enumerate(allowed)]


def _running(found: Sequence[list[float]], floor: Sequence[float], widest: float, safety: float) -> list[float]:
    """Running maximum over updates (looking ahead) and over runs, times the safety factor, between floor and cap. Where a run has no
    number that the baseline has, anything is allowed in that update."""
    allowed = []
    for k, least in enumerate(floor):
        if any(math.inf in run[k:k + 1] for run in found):
            allowed.append(math.inf)
            continue
        seen = [value for run in found for value in run[: _horizon(k) + 1] if math.isfinite(value)]
        allowed.append(min(widest, max(least, safety * max(seen, default=0.0))))
    return allowed


def _shorter(baseline: Series) -> list[float]:
    """How many times shorter each update is than the median of those around it, at least 1. In a short one terms cancel, as where
    momentum turns round, and errors are as large as the terms: a relative deviation of its length shows them so many times larger."""
    lengths = [norm(update_of(baseline, k)) if k else 0.0 for k in range(len(baseline))]
    around = [median(lengths[max(1, k - AROUND): k + AROUND + 1] or [0.0]) for k in range(len(lengths))]
    return [max(1.0, usual / length) if length > 0 and math.isfinite(usual) else 1.0 for length, usual in zip(lengths, around)]


def _of_twin(baseline: Series, twin: Series) -> Deviation:
    """A twin's deviation, without the update whose sampled difference holds the perturbation itself."""
    found = deviation(baseline, twin, FIRST_ACTING + 1)
    nothing = [math.nan] * (FIRST_ACTING + 1)
    later = slice(FIRST_ACTING + 1, None)
    return replace(found, turn=nothing + found.turn[later], stretch=nothing + found.stretch[later])


def tolerance(
    baseline: Series,
    aa: Sequence[Series] = (),
    twins: Sequence[Series] = (),
    rounding: float | None = None,
) -> Tolerance:
    """What a candidate may deviate from `baseline`, per update.

    `aa` are unchanged repetitions; `twins` were perturbed after update 1, by `rounding` (relative; 2^-9 for bf16, 2^-12 for fp16, 2^-11 for
    TF32; for a change of summation order that of the coarsest format that the baseline computes in, which it is where none is given: 2^-24 in
    float32, in float64 2^-53). Floors, for the first acting update (they grow with the square root of the updates, as independent errors do);
    their constants are those of float32, and shrink with the rounding of a baseline in float64, that of the angle with its square root (of which
    it is made: below 1e-8 rad a cosine says nothing):

    loss        the rounding, at least 1e-5, of the loss (of a tenth of its median, once it is nearly zero); where the loss itself
                is in a format of 16 bits, one unit of it
    gradient    four roundings, at least 1e-4: sums of many terms in another order; once the trajectories have separated, the range of
                the baseline's own
    turn        5e-3 rad, or the square root of the rounding when more: Adam-like rules divide small gradients by
                their own size, so entries whose exact gradient is zero (the biases of attention keys) move by noise;
                a fused AdamW turned a public transformer's updates by 0.012 rad in update 51, its twin by 3e-5 only,
                while a wrong gradient turns them by tenths
    stretch     1e-3, or four roundings; more where an update is shorter than those around it, as many times as it is
    drift       1e-6, or a fiftieth of the rounding: rounding has no preferred sign
    statistics  half of a buffer's way; once the trajectories have separated, any
    moves       a tenth, or four times what chance makes of so many
    """
    n = len(baseline)
    rounding = baseline.coarsest_rounding if rounding is None else rounding
    finer = baseline.rounding / ROUNDING["float32"]
    runs = [*(deviation(baseline, run) for run in aa), *(_of_twin(baseline, twin) for twin in twins)]
    sizes = [baseline.loss(k) for k in range(n)]
    finite = [size for size in sizes if math.isfinite(size)]
    typical = median(map(abs, finite)) if finite else 0.0
    # errors of independent updates add up like a random walk
    walk = [math.sqrt(max(1, k - FIRST_ACTING + 1)) for k in range(n)]
    scale = [max(abs(size), 0.1 * typical) if math.isfinite(size) else typical for size in sizes]
    unit = UNIT * ROUNDING[baseline.loss_format] if baseline.loss_format in COARSE else 0.0
    floors = ([max(1e-5 * finer, rounding, unit) * size * w for size, w in zip(scale, walk)],
              [max(1e-4 * finer, 4 * rounding) * w for w in walk],
              [max(5e-3 * math.sqrt(finer), math.sqrt(rounding)) * w for w in walk],
              [max(1e-3 * finer, 4 * rounding) * w for w in walk],
              [max(1e-6 * finer, rounding / 50) * w for w in walk],
              [LEAST_STRAY] * n)
    widest = (math.inf, WIDEST_RATIO, 2.0, WIDEST_RATIO, math.inf, math.inf)
    safety = (SAFETY, SAFETY, SAFETY, SAFETY, DRIFT_SAFETY, SAFETY)
    columns = zip(*(run.series() for run in runs)) if runs else ((),) * len(floors)
    loss, gradient, turn, stretch, drift, statistics = (
        _running(*column) for column in zip(columns, floors, widest, safety))
    stretch = [min(max(allowed, WIDEST_RATIO), allowed * times) for allowed, times in zip(stretch, _shorter(baseline))]
    norms = [max(value, least_gradient(baseline)) for value in baseline.grad_norms if math.isfinite(value)]
    spread = min(WIDEST_RATIO, math.log(max(norms) / min(norms))) if norms and min(norms) > 0 else WIDEST_RATIO
    apart_at = [k for k in range(FIRST_ACTING, n) if turn[k] >= SEPARATED]
    asked = None
    if runs and len(apart_at) > max(0, n - FIRST_ACTING - LEAST_TOGETHER):
        asked = apart(baseline, [*aa, *twins], runs, floors[:2], SAFETY, _horizon(apart_at[0]))
    for k in apart_at:
        if k > FIRST_ACTING:        # the first one is computed from the baseline's own parameters, whatever comes of it
            loss[k] = max(loss[k], max(finite, default=0.0) - min(finite, default=0.0))
            gradient[k] = max(gradient[k], spread)
            stretch[k] = max(stretch[k], WIDEST_RATIO)
            statistics[k] = math.inf
    lag = _total([run.slowest for run in runs], LEAST_LAG)
    chance = 1 / math.sqrt(max(1, moves_without_direction(baseline)))
    more = _total([abs(run.moves) for run in runs], LEAST_MORE, SAFETY * chance)
    excused = [frozenset(what for run in (*aa, *twins) if k < len(run) for what, _ in broken(baseline, run, k)) for k in range(n)]
    alike = settled(baseline, [*aa, *twins])
    held = n if alike >= n else sum(_horizon(k) < alike for k in range(n))
    return Tolerance(loss, gradient, turn, stretch, drift, statistics, lag, more, excused, held, asked)


def _total(found: Sequence[float], *least: float) -> float:
    """What is allowed of a number of the whole run: as `_running` says."""
    if math.inf in found:
        return math.inf
    return min(WIDEST_RATIO, max([*least, *(SAFETY * value for value in found if math.isfinite(value))]))


def informative(baseline: Series) -> str | None:
    """Why nothing can be verified with this baseline, in words for the user; None when it can.

    A comparison that would pass whatever the candidate did is refused instead.
    """
    n = len(baseline)
    if n < LEAST_UPDATES:
        return f"only {n} updates were recorded, {LEAST_UPDATES} are needed"
    losses = [baseline.loss(k) for k in range(n) if baseline.losses[k]]
    if not losses:
        return "no loss was seen: the script does not call backward() on one"
    for k, value in enumerate(losses):
        if not math.isfinite(value):
            return f"the baseline's own loss is not finite (update {k})"
    if not all(map(math.isfinite, baseline.samples[-1])):
        return "the baseline's own parameters are not finite at the end"
    if not any(losses):
        return "the loss is zero in every update"
    if len(set(losses)) == 1:
        return f"the loss is the same in every update ({losses[0]:g})"
    known = [value for value in baseline.grad_norms if math.isfinite(value)]
    if known and not any(known):
        return "all gradients are zero"
    if not any(baseline.samples[0]) and not any(baseline.samples[-1]):
        return "no parameters were sampled, or all of them are zero"
    moving = [k for k in range(FIRST_ACTING, n) if norm(update_of(baseline, k)) > 0]
    if len(moving) >= (n - FIRST_ACTING) / 2:
        return None
    if _stands_still(baseline, moving):
        return (f"it has converged after update {moving[-1]}: no parameter moves any more, and the loss stays the same; give it a larger "
                "or harder configuration, or its optimizer a smaller tolerance (tolerance_change of LBFGS)")
    few = f"in only {len(moving)} of {n - FIRST_ACTING} updates"
    if moving and len(set(baseline.grad_norms[moving[-1] + 1:])) == 1 and moving[-1] + 2 < n:      # gradients that nobody takes away
        return (f"the script goes on with another model after update {moving[-1]}, and neither the parameters nor the gradients of the one that was "
                "recorded change any more; begin with what is trained for longer (a checkpoint of what comes before it, for one)")
    if moving and len(known) == len(baseline) and all(known[FIRST_ACTING:]):
        return (f"what is looked at of the parameters (64 entries of each tensor) moves {few}, though none has a gradient of zero: each "
                "moves a few rows of large tables, as of embeddings, or a learning rate is 0 most of the time; smaller tables, or larger "
                "batches, can be compared")
    return f"the parameters move {few} (learning rate 0, all frozen, or the script goes on with another model)"


def _stands_still(baseline: Series, moving: Sequence[int]) -> bool:
    """Whether the updates that move anything are the first ones, but for a few, and the loss is the same in all after them."""
    if not moving or len(moving) < (moving[-1] - FIRST_ACTING + 1) / 2:
        return False
    return len({baseline.losses[k][0] for k in range(moving[-1] + 1, len(baseline)) if baseline.losses[k]}) == 1


def unrepeatable(baseline: Series, repetition: Series) -> str | None:
    """Why the baseline's own repetition says that no comparison tells anything, in words for the user; None when it does not.

    A script that takes its seed from the clock trains something else each time. Its repetition widens the tolerance to whatever
    it does, and a candidate is accepted or not by chance.
    """
    help = ("give it a fixed seed (one from the clock, or from the system's randomness, makes each run another training); sort what it "
            "takes from a set (its order follows addresses, or the hashes of strings where the script chooses PYTHONHASHSEED itself); "
            "take what its own worker processes make in a fixed order (from a queue it comes in the order in which they are ready)")
    for k, (expected, found) in enumerate(zip(baseline.digests[:FIRST_ACTING], repetition.digests)):
        if expected and found and expected != found:
            return f"the script does not repeat itself: a second run of it had other data in update {k}; {help}"
    if repetition.samples and baseline.samples and len(repetition.samples[0]) != len(baseline.samples[0]):
        return f"the script does not repeat itself: a second run of it had trained other tensors by its first update; {help}"
    if len(repetition) <= FIRST_ACTING:
        return None                 # not comparable; whoever compares says why
    if _starts_otherwise(baseline, repetition):
        return f"the script does not repeat itself: its first updates are others in a second run; {help}"
    return None


def _starts_otherwise(baseline: Series, repetition: Series) -> bool:
    """Whether the first updates differ by more than rounding explains, before anything could amplify it.

    The losses of two random batches come near each other by chance, so all numbers of both updates are looked at. A search within a step (LBFGS)
    amplifies already in the first. Where the first update that a technique acts in might turn by a radian (see `SEPARATED`), none would be
    compared.
    """
    found = deviation(baseline, repetition)
    updates = range(1 if baseline.searches else FIRST_ACTING)
    moved = norm([a - b for a, b in zip(repetition.samples[0], baseline.samples[0])])
    return (any(found.loss[k] > REPEATS * abs(baseline.loss(k)) for k in updates)
            or not baseline.searches and any(found.gradient[k] > REPEATS for k in updates)
            or moved > REPEATS * norm(baseline.samples[0]) or found.turn[1] > SEPARATED / 2
            or not baseline.searches and any(SAFETY * turn >= SEPARATED for turn in found.turn[: _horizon(FIRST_ACTING) + 1]))


def repeated(baseline: Series, repetition: Series) -> Series:
    """The baseline, with nan for those entries of its buffers that its own repetition has otherwise, by more than a few roundings, while
    everything else is the same: a clock, or memory that nothing was written to. They say nothing about a candidate."""
    if not baseline.statistics or baseline.statistics_segments != repetition.statistics_segments:
        return baseline
    alike = takewhile(lambda k: _alike(baseline, repetition, k), range(min(len(baseline), len(repetition))))
    odd = {at for k in alike for at, (a, b) in enumerate(zip(baseline.statistics[k], repetition.statistics[k]))
           if a != b and a == a and not abs(a - b) <= QUANTUM * baseline.rounding * max(abs(a), abs(b))}
    if not odd:
        return baseline
    rows = [[math.nan if at in odd else value for at, value in enumerate(row)] for row in baseline.statistics]
    return replace(baseline, statistics=rows)


def _alike(one: Series, other: Series, k: int) -> bool:
    """Whether update k is bit by bit the same, but for the buffers."""
    return (repr(one.losses[k]) == repr(other.losses[k]) and repr(one.grad_norms[k]) == repr(other.grad_norms[k])
            and one.samples[k] == other.samples[k])
