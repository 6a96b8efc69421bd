"""Techniques that merge micro-steps: how few backward passes there may be, and what their losses are compared with."""

from __future__ import annotations

import dataclasses
import math
import random
import types
from array import array

import pytest

from saturate.agent.watchdog import Watchdog
from saturate.study.candidates import Candidate, merging
from saturate.study.race_blocks import other_work
from saturate.study.rates import differ, merged
from saturate.study.verification import Run, Verifier
from saturate.techniques import gc_freeze, merged_micro_batches
from saturate.verify.series import Series, as_often

FOUR = [(10, {"B": 40, "S0": 10})] * 4


def ours(factor: int) -> Candidate:
    return Candidate(merged_micro_batches, merged_micro_batches.Options(factor))


def test_only_a_technique_that_says_so_merges():
    other = Candidate(gc_freeze, gc_freeze.Options())
    assert (ours(4).merges, other.merges, merging((other, ours(4))), merging(())) == (4, 1, 4, 1)


@pytest.mark.parametrize(("backward", "differs"), [
    (10, False), (12, False), (25, False), (40, False),     # all, nearly all, half, and none of the groups are merged
    (7, True), (5, True), (50, True)])                      # some are left out; some run twice
def test_between_the_baselines_backward_passes_and_that_part_of_them(backward, differs):
    found = [(10, {"B": backward, "S0": 10})] * 4
    assert differ(FOUR, found, "B", fewer=4) is differs
    assert differ(found, FOUR, "B", fewer=1 / 4) is differs, "the other way round, where it is left out again"
    assert differ(FOUR, found, "B") is (backward != 40), "what says nothing has as many as the baseline"


def test_an_optimizer_steps_as_often():
    assert differ(FOUR, [(10, {"B": 10, "S0": 5})] * 4, "S0", fewer=4)
    assert merged(FOUR[:1], 4) == [(10, {"B": 10, "S0": 10})]


def block(backward: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(steps=10, events={"B": backward, "S0": 10}, timed_ns=[1] * 10, evaluated=[], sample=[1.0], moved=True)


def test_timed_blocks_of_a_merged_training():
    assert other_work([block(40)] * 4, [block(10)] * 4, FOUR, 4) is None
    assert "backward ran 1.00 times" in str(other_work([block(40)] * 4, [block(10)] * 4, FOUR, 2))
    assert other_work([block(10)] * 4, [block(10)] * 4, merged(FOUR, 4)) is None, "both sides merge"
    assert "backward ran 0.50 times" in str(other_work([block(10)] * 4, [block(5)] * 4, merged(FOUR, 4)))


def test_losses_of_as_many_micro_steps():
    assert as_often([[1.0, 2.0]], [[3.0]], 2) == [[1.5, 1.5]]
    assert as_often([[1.0, 2.0, 3.0]], [[3.0, 3.0]], 2) == [[2.0, 2.0, 2.0]], "the last update of an epoch"
    assert as_often([[1.0, 2.0, 3.0]], [[6.0]], 2) == [[6.0]], "fewer than it says"
    assert as_often([[1.0]], [[0.5, 0.5]], 2) == [[0.5, 0.5]], "more than there were"
    assert as_often([[1.0, 1.0]], [[2.0], [7.0]], 2) == [[1.0, 1.0], [7.0]], "an update that the other has not"
    assert all(map(math.isnan, as_often([[1.0, 2.0]], [[math.nan]], 2)[0]))


def training(micro_steps: int, total: float = 1.0, change: float = 0.0) -> Series:
    drawn, place, rows = random.Random(0), [1.0] * 8, []
    for _ in range(52):
        place = [p + drawn.gauss(0, 0.01) + change for p in place]
        rows.append(array("d", place))
    losses = [[total * (1 + 1 / (k + 1)) / count] * count for k in range(52) for count in [4 if k < 2 else micro_steps]]
    return Series(losses, [1.0] * 52, rows, segments=[8])


class Given(Verifier):
    """The baseline has four micro-steps per update."""

    def __init__(self, candidate: Series):
        nothing = types.SimpleNamespace(answer=lambda question: None, set_answer=lambda question, answer: None)
        super().__init__(types.SimpleNamespace(store=nothing))
        self.candidate = candidate

    def series(self, run: Run) -> Series:
        if run.techniques:
            return self.candidate
        twin = training(4, total=1 + 1e-6 * (run.repetition or 1) if run.perturb else 1.0, change=1e-9 if run.perturb else 0.0)
        return dataclasses.replace(twin, grad_norms=[1.0 + (1e-6 if run.perturb else 0.0)] * 52)


@pytest.mark.parametrize(("candidate", "passed", "reason"), [
    (training(1), True, "within tolerance"), (training(2), True, "within tolerance"), (training(4), True, ""),
    (training(1, total=0.5), False, "loss deviates"), (training(1, total=4.0), False, "loss deviates"),
    (training(5), False, "5 micro-steps instead of 4"),
], ids=["all", "pairs", "none", "half of it", "not divided", "more"])
def test_the_sum_of_an_updates_losses_is_compared(candidate, passed, reason):
    found = Given(candidate)._compare((ours(4),), 2.0**-24, aligned=False)
    assert found.passed is passed and reason in found.reason


def test_too_few_micro_steps_are_another_training():
    found = Given(training(1))._compare((ours(2),), 2.0**-24, aligned=False)
    assert not found.passed and found.reason == "update 2 has 1 micro-steps instead of 4"


def test_a_watch_over_losses_sees_no_jump_where_merging_begins():
    numbered = [(step, 0.25) for step in range(1, 15) for _ in range(4)] + [(step, 1.0) for step in range(15, 21)]
    said = {}
    for adds_up in (False, True):
        watchdog = Watchdog("warn", adds_up)
        watchdog._judge(types.SimpleNamespace(scaler=None, step=None, tokens=[], plan={}),
                        [((step, 0, 0), loss) for step, loss in numbered], at_end=True)
        said[adds_up] = watchdog.over
    assert said == {False: True, True: False}
