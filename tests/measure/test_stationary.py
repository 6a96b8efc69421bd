import random

import pytest

from saturate.measure.stationary import block_steps, drifts, in_turns, surely_longer, typical_ms, warmed_up, with_lead

MS = 1_000_000


def steps(count, ms, sd=0.03, seed=0):
    rng = random.Random(seed)
    return [int(ms * MS * max(0.2, rng.gauss(1, sd))) for _ in range(count)]


def first_answer(times):
    """(number of steps seen, answer) the first time that `warmed_up`, asked after every step, gives one."""
    for n in range(1, len(times) + 1):
        found = warmed_up(times[:n])
        if found is not None:
            return n, found
    return None


def test_a_steady_training_is_warm_at_once():
    seen, start = first_answer(steps(100, 20))
    assert start <= 2 and seen <= 30


@pytest.mark.parametrize("seed", range(5))
def test_compile_steps_are_before_the_start(seed):
    times = [4000 * MS, 900 * MS, 1500 * MS, *steps(80, 20, seed=seed)]
    seen, start = first_answer(times)
    assert 3 <= start <= 6 and seen <= 40


def test_a_recompilation_in_warm_up_is_waited_out():
    times = [4000 * MS, *steps(5, 20), 3000 * MS, 2500 * MS, *steps(60, 20, seed=1)]
    seen, start = first_answer(times)
    assert start >= 1 and seen >= 16
    assert warmed_up(times) is not None


def test_never_an_answer_before_anything_steady():
    assert warmed_up([]) is None
    assert warmed_up([20 * MS] * 5) is None
    assert warmed_up([3000 * MS] * 3 + steps(4, 20)) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_step_time_that_still_falls_is_not_warm(seed):
    rng = random.Random(seed)
    ramp = [int(MS * (20 + 30 * 0.97**k) * rng.gauss(1, 0.02)) for k in range(40)]
    assert warmed_up(ramp) is None
    seen, start = first_answer([*ramp, *steps(400, 20, 0.02, seed)])
    assert start > 25


def test_steps_that_alternate_with_the_loader_workers():
    for workers in (2, 4, 8):
        pattern = [40 * MS] + [400_000] * (workers - 1)
        times = [3000 * MS, *(int(t * random.Random(k).gauss(1, 0.03)) for k, t in enumerate(pattern * 60))]
        found = first_answer(times)
        assert found is not None and found[1] >= 1, workers
        assert typical_ms(times[1:]) == pytest.approx((40 + 0.4 * (workers - 1)) / workers, rel=0.15)


def test_evaluation_pauses_and_outliers_do_not_reset_it():
    times = steps(200, 20)
    for k in range(49, 200, 50):
        times[k] = 2000 * MS
    rng = random.Random(4)
    for k in rng.sample(range(200), 6):
        times[k] *= 8
    answers = [warmed_up(times[:n]) for n in range(60, 200)]
    assert sum(answer is None for answer in answers) <= 14


@pytest.mark.parametrize("ms, most", [(0.2, 100), (5, 100), (50, 20), (2000, 12)])
def test_short_steps_need_many_and_long_steps_few(ms, most):
    seen, _ = first_answer(steps(300, ms))
    assert 8 <= seen <= most


@pytest.mark.parametrize("seed", range(4))
def test_very_uneven_steps_are_accepted_in_the_end(seed):
    """Sequences of any length: the step time scatters by 40 % for ever."""
    assert first_answer(steps(200, 30, 0.4, seed)) is not None


@pytest.mark.parametrize("step_ms, workers, prefetch, bound, expected", [
    (20, 0, 2, True, (1, 15)), (5, 0, 2, True, (1, 60)), (700, 0, 2, True, (1, 2)), (40, 2, 2, True, (4, 8)),
    (40, 3, 2, True, (6, 12)), (10, 4, 4, True, (16, 32)), (10, 4, 2, True, (8, 32)), (10, 8, 1, False, (1, 30)),
    (7, 3, 1, True, (3, 45))])
def test_blocks(step_ms, workers, prefetch, bound, expected):
    assert block_steps(step_ms, workers, prefetch, loader_bound=bound) == expected


@pytest.mark.parametrize("step_ms, workers, expected", [(20, 0, (8, 15)), (500, 0, (1, 2)), (40, 2, (4, 8)), (10, 2, (15, 30))])
def test_a_host_is_ahead_of_its_device_before_a_block_is_timed(step_ms, workers, expected):
    assert block_steps(step_ms, workers, queued=True) == expected


@pytest.mark.parametrize("times, as_if", [
    ([25, 20, 21], [20, 20, 21]), ([4000, 20, 20], [4000, 20, 20]), ([19, 20, 20], [19, 20, 20]), ([25], [25]), ([], [])])
def test_the_first_step_behind_a_drained_device(times, as_if):
    """It holds what the host does before it is ahead of the device; a compilation is something else."""
    assert with_lead(times) == as_if


@pytest.mark.parametrize("step_ms, steps, expected", [
    (2, 150, (6, 5, 25)), (14, 22, (6, 1, 4)), (40, 8, (4, 1, 2)), (100, 3, (3, 1, 1)), (280, 2, (2, 1, 1)), (1500, 2, (1, 1, 2)),
    (16, 2, (1, 1, 2))])
def test_turns(step_ms, steps, expected):
    turns, _, each = found = in_turns(step_ms, steps)
    assert found == expected and turns * each >= steps


@pytest.mark.parametrize("seconds, sure", [
    ((24,), False), ((24, 25), True), ((30, 24), True), ((130, 24), False), ((24, 34), False), ((24, 9), False), ((9, 9, 9), False), ((24, 24, 24), True)])
def test_steps_longer_than_there_is_time_for(seconds, sure):
    """One step may be a compilation, and two that differ are not the same."""
    assert surely_longer([int(1e9 * s) for s in seconds], 10e9) == sure


@pytest.mark.parametrize("seed", range(5))
def test_blocks_of_a_training_that_becomes_slower_or_faster(seed):
    rng = random.Random(seed)

    def blocks(count, drift, sd):
        return [100 * (1 + drift * n) * rng.lognormvariate(0, sd) for n in range(count)]

    assert drifts(blocks(6, 0.05, 0.002)) and drifts(blocks(12, -0.02, 0.01)) and drifts([20.0] * 5 + [10.0] * 4)
    assert not drifts(blocks(6, 0.0, 0.05)) and not drifts(blocks(40, 0.0, 0.05)) and not drifts(blocks(12, 0.003, 0.0))
    assert drifts(blocks(12, 0.007, 0.0)) and not drifts(blocks(12, 0.006, 0.0)), "5 % from the first third to the last"
    assert not drifts([20.0, 20.0, 10.0, 10.0, 10.0]) and not drifts([]), "too few to tell"
    assert not drifts([20.0, 20.1, 19.9, 20.0, 95.0, 20.1, 20.0, 19.9, 20.0, 20.1]), "one evaluation"


def test_a_block_needs_a_step_time():
    for bad in (0, -1, float("nan")):
        with pytest.raises(ValueError):
            block_steps(bad)
