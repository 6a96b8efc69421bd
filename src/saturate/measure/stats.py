"""Order statistics and quantiles that the race needs. Standard library only; every function is pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import atan2, comb, cos, exp, fsum, inf, lgamma, log, pi, sin, sqrt
from statistics import NormalDist, median

#: Robust standard deviations beyond which a value is an outlier; and the fewest values that can show one: of three, two
#: that agree by chance would make the third one look wild.
OUTLIER, FEWEST_TO_SHOW_ONE = 5.0, 4


@lru_cache(maxsize=256)
def _median_weights(n: int) -> tuple[float, ...]:
    """Chance that each order statistic of `n` values is the median of a bootstrap resample (exact; for an even n, the
    mean over its lower and its upper median)."""
    m = (n + 1) // 2

    def at_most(i: int) -> float:
        """P(the m-th smallest of n draws is among the i smallest values)."""
        p = i / n
        return sum(comb(n, j) * p**j * (1 - p) ** (n - j) for j in range(m, n + 1))

    cumulative = [at_most(i) for i in range(n + 1)]
    lower = [b - a for a, b in zip(cumulative, cumulative[1:])]
    return tuple((a + b) / 2 for a, b in zip(lower, reversed(lower)))


def median_se(values: Sequence[float]) -> float:
    """Standard error of the median: the bootstrap's, in closed form (infinitely many resamples, no random numbers).

    Maritz and Jarrett, "A note on estimating the variance of the sample median", JASA 73 (1978). Values are cut off
    at `OUTLIER` robust standard deviations first (of four or more): a resample of few values can have a wild one for its median, and
    then its square would be all that counts. In the unit of the values. Raises ValueError for fewer than two values:
    their spread is not observable.
    """
    if len(values) < 2:
        raise ValueError("the spread of fewer than two values is not observable")
    centre, reach = median(values), OUTLIER * mad_sd(values) if len(values) >= FEWEST_TO_SHOW_ONE else inf
    ordered = sorted(min(max(x, centre - reach), centre + reach) for x in values)
    weights = _median_weights(len(values))
    mean = sum(w * x for w, x in zip(weights, ordered))
    return sqrt(sum(w * (x - mean) ** 2 for w, x in zip(weights, ordered)))


def quantile(values: Sequence[float], q: float) -> float:
    """The `q` quantile (0 to 1), linear between order statistics. Raises ValueError when there are no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def mad_sd(values: Sequence[float]) -> float:
    """Robust standard deviation: 1.4826 times the median absolute deviation (equals sd for a normal distribution)."""
    centre = median(values)
    return 1.4826 * median([abs(v - centre) for v in values])


def _t_within(t: float, df: int) -> float:
    """P(|T| <= t) of Student's t with `df` degrees of freedom: Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = atan2(t, sqrt(df))
    c2 = cos(angle) ** 2
    odd = df % 2
    term, total = 1.0, 0.0
    for k in range(df // 2):
        total += term
        term *= c2 * ((2 * k + 2) / (2 * k + 3) if odd else (2 * k + 1) / (2 * k + 2))
    if odd:
        return 2 / pi * (angle + sin(angle) * cos(angle) * total)
    return sin(angle) * total


@lru_cache(maxsize=1024)
def t_quantile(p: float, df: int) -> float:
    """Quantile of Student's t, 0.5 <= p < 1. Raises ValueError outside, and for df < 1."""
    if not 0.5 <= p < 1 or df < 1:
        raise ValueError(f"no Student quantile for p={p}, df={df}")
    low, high = 0.0, 1.0
    while _t_within(high, df) < 2 * p - 1:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(middle, df) < 2 * p - 1 else (low, middle)
    return (low + high) / 2


def wilson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of a rate (Wilson 1927). Raises ValueError when nothing was tried."""
    if trials <= 0:
        raise ValueError("no trials")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate, spread = successes / trials, z * z / trials
    centre = (rate + spread / 2) / (1 + spread)
    half = z / (1 + spread) * sqrt(rate * (1 - rate) / trials + spread / (4 * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def at_least(count: int, draws: int, chance: float) -> float:
    """P(X >= count) of a binomial X: `draws` independent ones with a `chance` between 0 and 1 each.

    >>> round(at_least(1, 20, 0.01), 3), round(at_least(2, 20, 0.01), 3)
    (0.182, 0.017)
    """
    def term(hits: int) -> float:
        ways = lgamma(draws + 1) - lgamma(hits + 1) - lgamma(draws - hits + 1)
        return exp(ways + hits * log(chance) + (draws - hits) * log(1.0 - chance))

    return min(1.0, fsum(term(hits) for hits in range(max(0, count), draws + 1)))
