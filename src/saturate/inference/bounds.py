"""Bounds of a mean drop between paired scores, on one side and with a confidence. Pure functions over numbers.

Both kinds of scores get a function of (number of samples, side): the bound that so many samples with drops like those
seen would give; side 1 is the upper bound, -1 the lower one. `drop` is `baseline - candidate` times `sign`.

**Values that are right or wrong.** The score test of paired proportions inverted: the drop is compared with its standard
error under the likeliest distribution that has the drop in question, in which answers that nobody saw change have their
part. So it does not collapse where no answer changed: n samples without a change do not exclude a drop of 3.1/n (an
exact bound says 3.0/n). T. Tango, "Equivalence test and confidence interval for the difference in proportions for the
paired-sample design", Statistics in Medicine 17 (1998); the same test for ratios: N.-S. Tang, M.-L. Tang and I. Chan,
"On tests of equivalence via non-unity relative risk for matched-pair design", Statistics in Medicine 22 (2003). On one
side score tests claim too much where changes are few, so the standard error is followed by the corrections for steps
(half a sample) and for skewness (Cornish and Fisher): T. Cai, "One-sided confidence intervals in discrete distributions",
Journal of Statistical Planning and Inference 131 (2005).

**Other values.** Student's t of the drops, with a share for what was not seen. Few samples with a large drop make up the mean drop of a damaged
model, and n samples may hold none of them: then the spread that was seen is too small, or zero. So z^2/2 samples more (1.35 at 95 %) are counted
as if each had dropped by all that a score can (`reach`); z^2/2 is by what the score interval of a proportion is centred (A. Agresti and B.
Coull, The American Statistician 52, 1998). Where no drop was seen that makes the bound 3.3/n of the range, a little more than the rule of three,
and it follows the exact bound of a proportion as drops of that size appear. What it cannot cover: a drop larger than the reach. How far scores
lie apart is no measure of it: those of a good model are close together, and the one that breaks is not.

**Relative drops** are compared with a share of the baseline's mean, which comes from the same samples and is as
uncertain: a bound is the share at which `drop - share * baseline` is no longer excluded (E. C. Fieller, Journal of the
Royal Statistical Society B 16, 1954).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import fsum, inf, sqrt
from statistics import NormalDist

from saturate.measure.stats import t_quantile

#: A drop that is so many times the baseline's score is none that anybody could name.
_MOST = 1e12

#: (samples, side) -> bound of the drop
Bound = Callable[[int, int], float]

Cell = tuple[float, float, float]       # drop, what a relative drop refers to (1 for an absolute one), samples


def two_valued(values: Sequence[float]) -> float | None:
    """The other value, where all are 0 or one positive number (1 where all are 0); None for other scores."""
    found = set(values) - {0.0}
    if len(found) > 1 or any(value < 0 for value in found):
        return None
    return found.pop() if found else 1.0


def proportions(before: Sequence[float], after: Sequence[float], sign: int, relative: bool, confidence: float) -> Bound:
    """Bounds of the drop of values that are 0 or `two_valued`."""
    z = NormalDist().inv_cdf(confidence)
    n = len(before)
    counts = {(b, a): 0 for b in (0, 1) for a in (0, 1)}
    for b, a in zip(before, after):
        counts[b > 0, a > 0] += 1
    unit = 1.0 if relative else max(*before, *after) or 1.0

    def bound(samples: int, side: int) -> float:
        cells = [(sign * (b - a), b if relative else 1, count * samples / n) for (b, a), count in counts.items()]
        return unit * _score_bound(cells, z, side)

    return bound


def _score_bound(cells: Sequence[Cell], z: float, side: int) -> float:
    """The drop furthest to one side of the one seen that the score test does not exclude."""
    centre = fsum(drop * count for drop, _, count in cells) / fsum(base * count for _, base, count in cells)
    near, far = 0.0, 1 / fsum(count for _, _, count in cells)
    while not _excluded(cells, centre + side * far, z, side):
        near, far = far, 2 * far
        if far > _MOST:
            return side * inf           # of so few right answers nothing is known, as a share of them
    while far - near > 1e-9 * far:
        middle = (near + far) / 2
        near, far = (near, middle) if _excluded(cells, centre + side * middle, z, side) else (middle, far)
    return centre + side * far


def _excluded(cells: Sequence[Cell], delta: float, z: float, side: int) -> bool:
    """Whether the counts speak against a true drop of `delta` or beyond, on that side."""
    contrasts = [(drop - delta * base, count) for drop, base, count in cells]
    moments = _under_null(contrasts)
    if moments is None:
        return True
    variance, third = moments
    step = side * third / variance if variance > 0 else 0.0
    n, total = fsum(count for _, count in contrasts), fsum(e * count for e, count in contrasts)
    if sqrt(n * variance) < z / 2 * step:
        return False            # that none was seen says nothing where hardly one is expected; the correction for skewness would exclude that
    return side * total + 0.5 <= -z * sqrt(n * variance) + (z * z - 1) / 6 * step


def _under_null(contrasts: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Second and third moment of the contrast under the likeliest distribution over its values (also of those that
    were never seen) whose mean is zero; None where none has that mean.

    Lagrange: p = count / n / (1 + m * contrast); what is missing to 1 lies on the outermost value on the far side.
    """
    top, bottom = max(e for e, _ in contrasts), min(e for e, _ in contrasts)
    if not bottom < 0 < top:
        return None
    n = fsum(count for _, count in contrasts)
    low, high = -1 / top, -1 / bottom
    for _ in range(60):
        m = (low + high) / 2
        low, high = (m, high) if sum(count * e / (1 + m * e) for e, count in contrasts if count) > 0 else (low, m)
    m = (low + high) / 2
    chances = [(e, count / n / (1 + m * e)) for e, count in contrasts if count]
    missing = max(0.0, 1 - fsum(p for _, p in chances))
    chances.append((top if fsum(e * count for e, count in contrasts) < 0 else bottom, missing))
    return fsum(p * e**2 for e, p in chances), fsum(p * e**3 for e, p in chances)


def reach(values: Sequence[float], score_range: tuple[float, float] | None = None) -> float | None:
    """How far the score of a sample that was not seen may drop: from one end of the range to the other. Where nobody
    gave it, scores within 0 and 1 may take any value there, and others any between 0 and those seen. None: nothing
    shows it, they are all the same number."""
    if score_range is not None:
        return score_range[1] - score_range[0]
    low, high = min(values), max(values)
    if low >= 0 and high <= 1:
        return 1.0
    return None if low == high else max(high, 0.0) - min(low, 0.0)


def spread(before: Sequence[float], after: Sequence[float], sign: int, relative: bool, confidence: float,
           reach: float) -> Bound | None:
    """Bounds of the drop of any values, none of which drops by more than `reach`; None for one sample, which shows no
    spread."""
    n = len(before)
    if n < 2:
        return None
    drops = [sign * (b - a) for b, a in zip(before, after)]
    bases = [math.copysign(1.0, fsum(before)) * b for b in before] if relative else [1.0] * n
    drop, base = fsum(drops) / n, fsum(bases) / n
    drop_variance = fsum((x - drop) ** 2 for x in drops) / (n - 1)
    base_variance = fsum((y - base) ** 2 for y in bases) / (n - 1)
    covariance = fsum((x - drop) * (y - base) for x, y in zip(drops, bases)) / (n - 1)
    unseen = NormalDist().inv_cdf(confidence) ** 2 / 2

    def bound(samples: int, side: int) -> float:
        total = samples + unseen
        share = (samples - 1) / (total - 1)
        mean = (samples * drop + unseen * side * reach) / total
        variance = share * drop_variance + unseen * samples / total * (side * reach - drop) ** 2 / (total - 1)
        width = _t(confidence, samples - 1) ** 2 / total
        a = base**2 - width * share * base_variance
        b = mean * base - width * share * covariance
        if a <= 0:
            return side * inf       # the baseline's own mean may be zero
        return (b + side * sqrt(max(0.0, b * b - a * (mean**2 - width * variance)))) / a

    return bound


def _t(p: float, df: int) -> float:
    """Quantile of Student's t; above 1000 degrees of freedom by its expansion around the normal one."""
    if df <= 1000:
        return t_quantile(p, df)
    z = NormalDist().inv_cdf(p)
    return z + (z**3 + z) / (4 * df)
