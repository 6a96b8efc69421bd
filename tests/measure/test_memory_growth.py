"""Growth of memory over steps: what is called growth, and the size that lasts."""

from __future__ import annotations

import random

import pytest

from saturate.measure.memory_growth import RISES, Growth, at, growth, lasting


def leak(steps, start=300.0, rate=2.0):
    return [(step, start + rate * step) for step in steps]


def test_growth_is_what_the_last_blocks_rise_by():
    found = growth(64, [(3, 250.0), (7, 330.0), *leak(range(11, 40, 4), 310.0, 2.0)], 4, 0.1)
    assert found is not None and found.step_bytes == 2.0 and found.start_bytes == 310.0, "the first steps allocate what stays"
    assert found.peak_bytes(50) == 410.0 and found.lasts_steps(500.0) == 95


@pytest.mark.parametrize("trail", [
    [], [(3, 300.0)], [(3, 300.0), (7, 340.0), (11, 350.0), (15, 350.0), (19, 350.0)],
    leak((3, 7, 11)), leak((3, 7, 11, 15, 19, 23), rate=0.05), [*leak((3, 7, 11, 15, 19)), (23, 338.0)],
    [*leak((3, 7, 11), rate=0.05), *leak((15, 19, 23), 340.0, 0.05)]])      # one step that allocates what stays, and heaps that creep
def test_no_growth_is_made_of_too_little(trail):
    assert growth(64, trail, 4, 0.1) is None


def test_highest_peaks_of_noise_are_seldom_called_growth():
    noise, called = random.Random(1), 0
    for _ in range(2000):
        highest, trail = 0.0, []
        for step in range(3, 52, 4):
            highest = max(highest, 300 * (1 + noise.gauss(0, 0.01)))
            trail.append((step, highest))
        called += growth(64, trail, RISES, 0.012) is not None
    assert called <= 2


def test_what_is_above_idle_is_in_proportion_to_the_batch():
    known = [Growth(64, 2.0, 300.0), Growth(500, 6.0, 350.0)]
    assert at(known, 100.0, 32) == Growth(32, 1.0, 200.0) and at(known, 100.0, 1000) == Growth(1000, 12.0, 600.0)


def test_the_size_that_lasts_is_in_proportion():
    known = [Growth(500, 6.0, 350.0)]
    found = lasting(known, 340.0, 560.0, 60)
    assert 340 + found / 500 * (10 + 60 * 6) <= 560 < 340 + (found + 2) / 500 * (10 + 60 * 6)
    assert lasting([*known, Growth(100, 6.0, 345.0)], 340.0, 560.0, 60) < 100, "the smallest known size is what counts"
    assert lasting(known, 600.0, 560.0, 60) == 0 and lasting([Growth(8, 0.001, 340.0)], 340.0, 560.0, 60) == 8
