"""What a verifier asks for, and says, where its runs are given instead of recorded."""

from __future__ import annotations

import dataclasses
import random
import types
from array import array

import pytest
from captures import write

from saturate.study.candidates import Candidate
from saturate.study.verification import Run, Verifier
from saturate.techniques import bf16_autocast, fused_optimizer, gc_freeze
from saturate.verify.series import CAPTURE, Series

EXACT = (Candidate(gc_freeze, gc_freeze.Options()),)


def series(buffers: list[float], change: float = 0.0) -> Series:
    """A training that moves, with these in its buffer in turn (the last goes on)."""
    drawn, place, rows = random.Random(0), [1.0] * 8, []
    for k in range(52):
        place = [p + drawn.gauss(0, 0.01) + (change if k == 30 else 0.0) for p in place]
        rows.append(array("d", place))
    held = [[buffers[min(k, len(buffers) - 1)]] for k in range(52)]
    return Series([[1.0 + 1 / (k + 1)] for k in range(52)], [1.0] * 52, rows, segments=[8], statistics=held, statistics_segments=[1])


class Given(Verifier):
    """`runs`: what each of the baseline's repetitions, and then what the candidate, recorded."""

    def __init__(self, *runs: Series):
        nothing = types.SimpleNamespace(answer=lambda question: None, set_answer=lambda question, answer: None)
        super().__init__(types.SimpleNamespace(store=nothing))
        *self.repetitions, self.candidate = runs
        self.asked: list[Run] = []

    def series(self, run: Run) -> Series:
        self.asked.append(run)
        return self.candidate if run.techniques else self.repetitions[run.repetition]


@pytest.mark.parametrize(("runs", "passed", "reason"), [
    ((series([1.0]), series([1.0]), series([1.0])), True, "bit-identical to the baseline"),
    ((series([1.0]), series([1.0]), series([1.0, 2.0])), False, "declared exact, but not bit-identical"),
    ((series([1.0, 2.0]), series([1.0, 3.0]), series([5.0, 4.0])), True, "bit-identical to the baseline, as far as that repeats itself"),
    ((series([1.0, 2.0]), series([1.0, 3.0]), series([5.0, 4.0], 1e-9)), False, "declared exact, but not bit-identical"),
], ids=["same", "another buffer", "a clock", "a clock, and another training"])
def test_an_exact_technique_is_held_to_the_bits_that_the_baseline_repeats(runs, passed, reason):
    assert gc_freeze.TECHNIQUE.numerics == "exact"
    verifier = Given(*runs)
    found = verifier.verify(EXACT)
    assert found.passed is passed and found.reason.startswith(reason)
    assert not any(run.perturb for run in verifier.asked)


@pytest.mark.parametrize("technique", [gc_freeze, fused_optimizer, bf16_autocast])
def test_a_baseline_that_trains_other_tensors_each_time_cannot_be_verified(technique):
    """Whose optimizers step in the order of addresses: "saturate itself failed: the samples are of different parameters"."""
    whole = series([1.0])
    parted = dataclasses.replace(whole, samples=[row[:4] for row in whole.samples], segments=[4])
    found = Given(whole, parted, series([1.0, 2.0], 1e-9)).verify((Candidate(technique, technique.Options()),))
    assert found.passed is None and "a second run of it had trained other tensors" in found.reason


def apart(seed: int, keeps: bool) -> Series:
    """A training that a rounding sends elsewhere from update 4 on; half of each update `keeps` its direction, or nothing does."""
    path, own, place, rows = random.Random(0), random.Random(seed), [1.0] * 512, []
    for k in range(52):
        shared, rest = (1.0, 0.0) if k < 4 else (0.9, 0.44) if keeps else (0.0, 1.0)
        place = [p + 1e-3 * (shared * path.gauss(0, 1) + rest * own.gauss(0, 1)) for p in place]
        rows.append(array("d", place))
    return Series([[1.0 + 1 / (k + 1) + (1e-2 * own.random() if k >= 4 else 0.0)] for k in range(52)], [1.0] * 52, rows, segments=[16] * 32)


class Apart(Given):
    """The candidate, and baseline runs that are others for each perturbation and seed."""

    def __init__(self, keeps: bool, candidate: Series):
        super().__init__(apart(0, keeps), candidate)
        self.keeps = keeps

    def series(self, run: Run) -> Series:
        self.asked.append(run)
        return self.candidate if run.techniques else apart(10 + run.repetition, self.keeps) if run.perturb else self.repetitions[0]


@pytest.mark.parametrize("technique", [fused_optimizer, bf16_autocast])
def test_a_training_that_comes_apart_at_once_verifies_by_what_its_twins_share_or_not_at_all(technique):
    """Where twins keep no direction, a verdict would be chance: neither a right candidate nor a wrong one is called verified, or rejected."""
    chosen = (Candidate(technique, technique.Options()),)
    assert Apart(True, apart(1, keeps=True)).verify(chosen).passed is True
    assert Apart(True, apart(1, keeps=False)).verify(chosen).passed is False
    for keeps in (True, False):
        found = Apart(False, apart(1, keeps)).verify(chosen)
        assert found.passed is None and "this training amplifies one rounding until, by update 5, " in found.reason


def test_a_recorded_run_that_was_removed_is_recorded_again(tmp_path):
    """As by who frees space: the disk is full, says the remedy."""
    store = types.SimpleNamespace(answer=lambda question: "t003")
    verifier, run = Verifier(types.SimpleNamespace(store=store, folder=tmp_path)), Run(())
    assert not verifier._known(run)
    (tmp_path / "t003").mkdir()
    (tmp_path / "t003" / CAPTURE).write_text("")
    assert not verifier._known(run)
    write(series([1.0]), tmp_path / "t003")
    assert verifier._known(run) and len(verifier.series(run)) == 52
