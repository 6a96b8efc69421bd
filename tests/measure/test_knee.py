"""Where more samples per batch stop to pay, from rates in rounds."""

from __future__ import annotations

import math
import random

import pytest

from saturate.measure.knee import interval, knee
from saturate.measure.stats import median_se


def test_an_interval_holds_its_median_and_narrows():
    noise = random.Random(0)
    few = [100 * (1 + noise.gauss(0, 0.05)) for _ in range(6)]
    many = [100 * (1 + noise.gauss(0, 0.05)) for _ in range(60)]
    for rates in (few, many):
        centre, low, high = interval(rates)
        assert low < centre < high and low < 100 < high
    assert interval(many)[2] - interval(many)[1] < interval(few)[2] - interval(few)[1]
    half = math.log(interval([90.0, 100.0, 110.0])[2] / 100)       # Student's t with two degrees of freedom
    assert half == pytest.approx(4.303 * median_se([math.log(0.9), 0.0, math.log(1.1)]), rel=1e-3)
    with pytest.raises(ValueError):
        interval([100.0])


def test_the_smallest_size_that_is_as_fast_as_the_best():
    rounds = {8: [50, 51, 50, 49, 50, 50], 16: [90, 91, 89, 90, 90, 91], 32: [99, 100, 99, 101, 100, 99], 64: [100, 99, 100, 100, 101, 100]}
    assert knee(rounds) == 32


def test_sizes_are_compared_within_rounds():
    """The machine is twice as slow in every other round: rates scatter by a factor of two, the difference does not."""
    slow = [1, 2, 1, 2, 1, 2]
    rounds = {16: [80 * s for s in slow], 32: [100 * s for s in slow]}
    assert knee(rounds) == 32, "20 % slower in every round is no noise"


def test_noise_alone_does_not_make_a_small_size_the_knee():
    wild = [100, 40, 160, 90, 60, 180]
    assert knee({8: [0.7 * rate for rate in reversed(wild)], 64: wild}) == 64


def test_growth_to_the_end_has_its_knee_there():
    assert knee({8: [10, 10.1, 9.9, 10], 16: [20, 20.1, 19.9, 20], 32: [40, 40.2, 39.8, 40]}) == 32
    assert knee({8: [10.0, 10.0]}) == 8
    with pytest.raises(ValueError):
        knee({})
