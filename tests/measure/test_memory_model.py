"""The model of peak memory over batch sizes: what it extrapolates, proposes and refuses to propose."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from saturate.measure import memory_model
from saturate.measure.memory_model import (
    Line,
    Point,
    first_proposal,
    heap_share,
    line,
    margin_bytes,
    next_probe,
    propose,
)

MIB = 2**20


def points(*pairs):
    return [Point(size, peak) for size, peak in pairs]


def test_the_line_through_two_sizes_is_exact():
    found = line(points((8, 180.0), (16, 260.0)))
    assert found == Line(100.0, 10.0)
    assert found.capacity(1000.0, 10_000) == 90
    assert found.capacity(999.9, 10_000) == 89, "a peak above the limit by a little does not fit"


def test_one_size_takes_what_is_idle_for_a_batch_of_nothing():
    assert line(points((10, 300.0)), idle_bytes=100.0) == Line(100.0, 20.0)


def test_a_floor_below_small_sizes_does_not_flatten_the_slope():
    """At 8 and 16 the optimizer's temporaries are the peak; a least-squares line would promise far too much."""
    measured = points((8, 500.0), (16, 500.0), (64, 740.0), (128, 1380.0))
    assert line(measured).sample_bytes == 10.0
    assert line(measured).capacity(2020.0, 10_000) == 192


def test_neighbours_do_not_make_a_slope_of_noise():
    """101 is 40 bytes above 100 by chance: without SEPARATION that would be 40 a sample instead of 10."""
    measured = points((10, 200.0), (100, 1100.0), (101, 1140.0))
    assert line(measured).sample_bytes == pytest.approx(940 / 91)


def test_sizes_measured_twice_count_with_their_highest_peak():
    assert line(points((8, 180.0), (16, 260.0), (16, 250.0))) == Line(100.0, 10.0)


def test_no_growth_means_no_bound_but_the_given_one():
    assert line(points((8, 300.0), (16, 300.0))).capacity(301.0, 4096) == 4096
    assert line(points((8, 300.0), (16, 290.0))).sample_bytes == 0.0, "a smaller peak of a larger batch is noise, not a negative slope"


def test_nothing_fits_below_the_fixed_part():
    assert line(points((1, 110.0), (2, 120.0))).capacity(99.0, 100) == 0


def test_probes_stay_clear_of_the_limit_and_then_stop():
    true = Line(100 * MIB, 1 * MIB)
    measured, size = [], 16
    for _ in range(10):
        measured.append(Point(size, true.peak_bytes(size)))
        size = next_probe(measured, 100 * MIB, 1124 * MIB, 10**6)
        if size is None:
            break
        assert true.peak_bytes(size) < 0.9 * 1124 * MIB
    assert size is None and len(measured) <= 4
    assert measured[-1].peak_bytes > 0.55 * 1124 * MIB, "too low to extrapolate from"


def test_a_first_size_near_the_limit_is_halved():
    assert next_probe(points((64, 950.0)), 100.0, 1000.0, 10_000) == 32
    assert next_probe(points((1, 950.0)), 100.0, 1000.0, 10_000) is None


def test_probes_do_not_pass_the_dataset():
    assert next_probe(points((8, 200.0)), 190.0, 10_000.0, 20) == 20
    assert next_probe(points((8, 200.0), (20, 230.0)), 190.0, 10_000.0, 20) is None


def test_a_hidden_slope_cannot_carry_a_probe_over_the_limit():
    """Up to 100 samples the peak is that of another moment; then 10 a sample. Idle is 100."""
    def peak(size):
        return max(1100.0, 100 + 10 * size)
    measured, size = [], 8
    while size is not None:
        measured.append(Point(size, peak(size)))
        size = next_probe(measured, 100.0, 3000.0, 10**6)
        assert size is None or peak(size) <= 3000.0
    assert next_probe(points((8, 500.0), (16, 510.0)), 100.0, 1000.0, 10**6) == int(0.85 * 900 / (410 / 16)), "nor near it"


def test_a_first_proposal_after_one_size_is_a_cautious_one():
    found = first_proposal(points((4, 140.0)), 100.0, 100_000.0, 10**6)
    assert found == 4 * memory_model.MOST_GROWTH
    found = first_proposal(points((50, 600.0)), 100.0, 1000.0, 10**6)
    assert line(points((50, 600.0)), 100.0).peak_bytes(found) <= 100 + 0.85 * 900


def test_three_sizes_on_one_line_are_trusted_nearly_to_the_limit():
    """fixed 100, 10 a sample: 290 fit 3000. Two sizes prove no line, and neither do three with a bend between them."""
    almost = first_proposal(points((10, 220.0), (80, 905.0), (190, 2000.0)), 100.0, 3000.0, 10**6)
    assert almost == 190 + int(1000 / ((1095 / 110) ** 2 / (1780 / 180))) == 289, "without care 290"
    assert first_proposal(points((10, 200.0), (80, 900.0), (190, 2000.0)), 100.0, 3000.0, 10**6) == 289
    two = first_proposal(points((80, 900.0), (190, 2000.0)), 100.0, 3000.0, 10**6)
    bent = first_proposal(points((10, 800.0), (80, 900.0), (190, 2000.0)), 100.0, 3000.0, 10**6)
    neighbours = first_proposal(points((10, 200.0), (189, 1990.0), (190, 2000.0)), 100.0, 3000.0, 10**6)
    assert two == bent == neighbours == int(2900 / 10.3)


def test_a_failure_below_the_prediction_halves_the_gap():
    measured = points((10, 200.0), (50, 600.0))
    assert propose(measured, [80], 2000.0, 10**6) == 65
    assert propose(measured, [80, 65], 2000.0, 10**6) == 57


def test_what_cannot_change_the_answer_is_not_proposed():
    measured = points((10, 200.0), (50, 600.0))
    assert propose(measured, [51], 2000.0, 10**6) is None
    assert propose(measured, [], 600.0, 10**6) is None, "50 is what fits exactly"
    assert propose(measured, [], 2000.0, 50) is None, "the dataset has no more"
    assert propose(points((1000, 1000.0), (500, 500.0)), [], 1005.0, 10**6) is None, "half a percent more is not worth a process"
    assert propose([], [16], 600.0, 10**6) is None


def test_a_later_proposal_allows_for_samples_that_need_more_than_the_line_says():
    assert propose(points((10, 200.0), (50, 600.0)), [], 2000.0, 10**6) == 50 + int(1400 / 10.5), "without care 190"


def test_the_part_of_a_batch_that_lies_in_heaps_is_what_they_grew_by():
    small, large = points((8, 180.0), (16, 260.0))
    assert heap_share([(small, 50.0), (large, 90.0)]) == 0.5 and heap_share([(small, 50.0), (large, 40.0)]) == 0.0
    assert heap_share([(small, 45.0)]) == 0.25 and heap_share([]) == 1.0


def test_a_size_above_the_goal_counts_as_a_failure_with_a_known_peak():
    found = propose(points((10, 200.0), (50, 600.0), (100, 1110.0)), [], 1100.0, 10**6)
    assert found is not None and 50 < found < 100


def test_the_margin_is_a_share_of_the_limit_or_of_what_the_heap_holds():
    assert margin_bytes(1000 * MIB) == 5 * MIB
    assert margin_bytes(1000 * MIB, heap_bytes=700 * MIB) == 105 * MIB


@settings(max_examples=150, deadline=None)
@given(fixed=st.floats(50, 2000), sample=st.floats(0.01, 50), floor=st.sampled_from([0, 0, 0.2, 1.5]), own=st.integers(1, 512),
       headroom=st.floats(1.5, 60), step=st.sampled_from([0, 2, 20]), seed=st.integers(0, 2**16))
def test_a_search_ends_soon_and_near_the_truth(fixed, sample, floor, own, headroom, step, seed):
    """Any true line with noise, a floor, and an allocator that takes memory in steps (MiB): at most four processes, never an
    answer that did not run, and where no floor hides the slope at least 85 % of what really fits."""
    noise = random.Random(seed)

    def peak(size):
        exact = max(fixed * (1 + floor), fixed + sample * size)
        if step:
            exact = step * -(-exact // step)
        return exact * (1 + noise.uniform(-0.003, 0.003))

    assume(headroom * sample * own > max(10 * step, 0.1 * fixed))      # less would be lost in what peaks vary by
    limit = fixed * (1 + floor) + headroom * sample * own + 1
    goal = limit - margin_bytes(limit)
    most = 10**6
    measured, failed, size = [], [], own
    for _ in range(memory_model.MOST_PROBES + 1):
        found = peak(size)
        if found > limit:
            failed.append(size)
            break
        measured.append(Point(size, found))
        size = next_probe(measured, fixed, goal, most)
        if size is None:
            break
    if not measured:
        return
    size, trials = max(1, first_proposal(measured, fixed, goal, most)), 1
    if failed and size >= min(failed):
        size = propose(measured, failed, goal, most, fixed)
    ran = [p.micro_batch for p in measured if p.peak_bytes <= goal]
    while size is not None and trials < 4:
        trials += 1
        for _ in range(3):
            found = peak(size)
            if found > limit:
                failed.append(size)
                size = propose(measured, failed, goal, most, fixed)
                break
            measured.append(Point(size, found))
            if found <= goal:
                ran.append(size)
            size = propose(measured, failed, goal, most, fixed)
            if size is None:
                break
    assert trials <= 4 and all(peak(s) <= 1.01 * limit for s in ran)
    truly = int((goal - fixed) / sample)
    if floor == 0 and truly >= 4:
        assert max(ran, default=0) >= 0.85 * truly - 2, (ran, failed, truly)
