"""Is a training with other random numbers still one of the same kind? The second check of class `stream`.

Dropout drawn in another order gives another trajectory, so nothing can be compared update by update. Instead the
candidate must lie where fresh seeds of the baseline lie: for each third of the run and each of loss, gradient norm
and update length (means of logarithms, which smooths them), the distance to the mean of the seeds is held against
their spread by Student's t for one further observation. The spread is pooled over the thirds. With nine comparisons
each at a ninth of `LEVEL` (Bonferroni) an honest candidate is rejected in at most that share of studies, if
logarithms of such means are about normal; the tests measure it. Five seeds see a difference of about five of their
standard deviations, so this check finds what is broken, not what is slightly off: the aligned comparison does that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance

from saturate.verify.compare import Verdict
from saturate.verify.deviation import FIRST_ACTING, norm, update_of
from saturate.verify.series import Series

#: Share of honest candidates that may be rejected.
LEVEL = 0.02
THIRDS = 3
LEAST_SEEDS = 5

#: Seeds that agree better than this (relative) by luck do not make the envelope any narrower.
LEAST_SPREAD = 0.002

#: Student's quantile at 1 - LEVEL / 18 for 5 ... 12 seeds, with 2 (n - 1) degrees of freedom: the three pooled
#: spreads are of the same seeds, so between n - 1 and 3 (n - 1) of them are independent. More seeds use the last one.
T_QUANTILES = {5: 4.42, 6: 4.08, 7: 3.87, 8: 3.73, 9: 3.64, 10: 3.56, 11: 3.51, 12: 3.46}

METRICS = ("loss", "gradient norm", "update norm")
Thirds = list[float]


def _thirds(values: Sequence[float]) -> Thirds:
    """Mean of each third; the last one takes the remainder."""
    size = len(values) // THIRDS
    return [fmean(values[i * size : None if i == THIRDS - 1 else (i + 1) * size]) for i in range(THIRDS)]


def _log(value: float) -> float:
    return math.log(value) if value > 0 else math.nan


def _curves(series: Series, count: int) -> tuple[list[float], list[float], list[float]]:
    """Loss, and the logarithms of gradient norm and update norm, of the acting updates."""
    acting = range(FIRST_ACTING, count)
    return ([series.loss(k) for k in acting], [_log(series.grad_norms[k]) for k in acting],
            [_log(norm(update_of(series, k))) for k in acting])


def _outside(metric: str, seeds: list[Thirds], found: Thirds) -> str | None:
    """In which third `found` lies outside the seeds' spread."""
    scale = 1.0
    if metric == "loss":
        if all(value > 0 for thirds in [*seeds, found] for value in thirds):
            seeds, found = [[math.log(v) for v in thirds] for thirds in seeds], [math.log(v) for v in found]
        else:               # a reward or a log-likelihood: relative to its own size instead
            scale = fmean(abs(v) for thirds in seeds for v in thirds)
    columns = list(zip(*seeds))
    sd = max(math.sqrt(fmean(variance(column) for column in columns)), LEAST_SPREAD * scale)
    n = len(seeds)
    allowed = T_QUANTILES[min(n, max(T_QUANTILES))] * math.sqrt(1 + 1 / n) * sd
    for third, (column, value) in enumerate(zip(columns, found), 1):
        distance = abs(value - fmean(column))
        if distance > allowed:
            unit = f"{math.expm1(distance):.1%} from the mean of {n} seeds, {math.expm1(allowed):.1%} allowed"
            if metric == "loss" and scale != 1.0:
                unit = f"{distance:.3g} from the mean of {n} seeds, {allowed:.3g} allowed"
            return f"{metric} in third {third} of the run is {unit}"
    return None


def envelope(seeds: Sequence[Series], candidate: Series) -> Verdict:
    """Whether `candidate` lies where the baseline's own seeds lie.

    Raises ValueError for fewer than five seeds, or runs too short to cut in three.
    """
    if len(seeds) < LEAST_SEEDS:
        raise ValueError(f"an envelope needs at least {LEAST_SEEDS} seeds, not {len(seeds)}")
    if all(seed.losses == seeds[0].losses for seed in seeds):
        return Verdict(None, "the script trains alike whatever seed it is given, so nobody knows how far other random numbers may lead")
    longest = max(map(len, seeds))
    count = min(map(len, seeds))
    if count - FIRST_ACTING < THIRDS:
        raise ValueError(f"{count} updates are too few for an envelope")
    if len(candidate) < count - 1:
        return Verdict(False, f"it stopped after {len(candidate)} of {longest} updates")
    count = min(count, len(candidate))
    ours, theirs = [_curves(seed, count) for seed in seeds], _curves(candidate, count)
    compared = 0
    for metric, columns, found in zip(METRICS, zip(*ours), theirs):
        if not all(math.isfinite(value) for column in columns for value in column):
            continue            # not measured, or an update that the baseline itself skips: nothing to compare with
        for k, value in enumerate(found):
            if not math.isfinite(value):
                return Verdict(False, f"{metric} has no finite value in update {k + FIRST_ACTING}")
        compared += 1
        reason = _outside(metric, [_thirds(column) for column in columns], _thirds(found))
        if reason is not None:
            return Verdict(False, reason)
    if not compared:
        return Verdict(False, "the seeds themselves give no finite numbers to compare with")
    return Verdict(True, f"inside the spread of {len(seeds)} seeds in {compared} metrics")
