"""Which steps count, and what they take."""

from __future__ import annotations

import pytest

from saturate.agent.clocked import Step, training_steps


def usual(**parts: int) -> Step:
    return Step(False, {"input": 0, "forward": 10, "rest": 1, **parts}, batches=1)


def share_of_input(steps: list[Step]) -> float:
    parts = training_steps(steps, len(steps) // 2)["parts"]
    return parts["input"] / sum(parts.values())


def test_steps_with_something_else_in_them_are_left_out():
    step = Step(False, {"forward": 10, "rest": 1})
    evaluated, checkpoint = Step(True, {"rest": 12}), Step(False, {"rest": 100})
    assert training_steps([step, evaluated, step, checkpoint, step], 5) == \
        {"parts": {"forward": 30, "rest": 3}, "clocked_steps": 3, "uneven_input": False}
    assert training_steps([evaluated, evaluated], 2) == {"parts": {"rest": 24}, "clocked_steps": 2, "uneven_input": False}
    assert training_steps([], 0) == {"parts": {}, "clocked_steps": 0, "uneven_input": False}


@pytest.mark.parametrize("period", [2, 3, 4, 8])
@pytest.mark.parametrize("offset", range(8))
def test_input_that_comes_in_bursts_is_the_mean_of_whole_turns(period, offset):
    """Every eighth batch opens a file, four workers deliver together: wherever the window lies."""
    steps = [usual(input=period * 1000 if n % period == offset % period else 0) for n in range(20)]
    found = training_steps(steps, 10)
    assert found["uneven_input"] and found["clocked_steps"] == 10
    assert found["parts"] == {"input": 10_000, "forward": 100, "rest": 10}


def test_one_burst_counts_for_all_steps():
    assert share_of_input([usual(input=900 if n == 7 else 0) for n in range(9)]) == pytest.approx(100 / 111)


def test_a_burst_counts_although_the_step_behind_it_is_slow():
    """After a long wait, caches are cold."""
    steps = [usual(input=4000, forward=50) if n % 4 == 3 else usual() for n in range(16)]
    assert training_steps(steps, 8)["parts"] == {"input": 8000, "forward": 160, "rest": 8}


def test_even_input_is_that_of_the_undisturbed_steps():
    steps = [usual(input=100)] * 5 + [usual(input=105)] * 5
    assert training_steps(steps, 5) == {"parts": {"input": 500, "forward": 50, "rest": 5}, "clocked_steps": 5, "uneven_input": False}


@pytest.mark.parametrize("event", [
    usual(rest=200), usual(input=10, rest=200),                 # a checkpoint, a compilation
    Step(False, {"input": 500, "rest": 200}, batches=20),       # an evaluation without a call of eval()
    usual(input=500)._replace(evaluated=True), usual(input=500)._replace(begins=True),
])
def test_what_is_long_for_another_reason_than_its_batch_is_left_out(event):
    steps = [event if n == 4 else usual() for n in range(12)]
    assert training_steps(steps, 6) == {"parts": {"input": 0, "forward": 50, "rest": 5}, "clocked_steps": 5, "uneven_input": False}


def test_beginnings_of_short_epochs_are_part_of_the_steps():
    steps = [usual(input=400)._replace(begins=True) if n % 4 == 0 else usual() for n in range(12)]
    assert share_of_input(steps) == pytest.approx(100 / 111, abs=1e-3)
