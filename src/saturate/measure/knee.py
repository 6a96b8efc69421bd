"""Throughput over batch sizes: an interval for each, and the size from which more samples per batch bring nothing.

Sizes are measured in rounds, one short block of each size per round, so what slows a round down slows all its sizes: they
are compared within rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log, log1p
from statistics import median

from saturate.measure.stats import median_se, t_quantile

#: A smaller size counts as fast as the fastest when the interval of the difference does not exclude this gain ...
GAIN = 0.02

#: ... and it was not slower than this in the middle of the rounds: an interval that excludes nothing proves nothing.
MOST_LOSS = 0.05


def interval(rates: Sequence[float]) -> tuple[float, float, float]:
    """Median and 95 % interval of positive rates, one per round; in their unit. Symmetric in the logarithm.
    Raises ValueError for fewer than two rounds."""
    if len(rates) < 2:
        raise ValueError("fewer than two rounds have no interval")
    logs = [log(rate) for rate in rates]
    centre, half = median(logs), t_quantile(0.975, len(logs) - 1) * median_se(logs)
    return exp(centre), exp(centre - half), exp(centre + half)


def knee(rounds: Mapping[int, Sequence[float]]) -> int:
    """The smallest size whose throughput is within the noise of the best. `rounds`: samples per second by size, each with
    one rate per round, the same rounds for all. Raises ValueError without sizes, or for fewer than two rounds."""
    if not rounds:
        raise ValueError("no size was measured")
    best = max(rounds, key=lambda size: (median(rounds[size]), -size))
    for size in sorted(rounds):
        if size == best:
            break
        lost = [log(fast / slow) for fast, slow in zip(rounds[best], rounds[size])]
        low = log(interval([exp(value) for value in lost])[1])
        if low <= log1p(GAIN) and median(lost) <= log1p(MOST_LOSS):
            return size
    return best
