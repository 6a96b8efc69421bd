"""What a verifier asks for, and says, where its runs are given instead of recorded."""

from __future__ import annotations

import dataclasses
import random
import types
from array import array

import pytest
from captures import write

from saturate.study.bench import timed_losses
from saturate.study.candidates import Candidate, ordered
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


FUSED, BF16 = ((Candidate(module, module.Options()),) for module in (fused_optimizer, bf16_autocast))


class Told(Verifier):
    """Each run is what `tell` says of it; `answers` are those of the study."""

    def __init__(self, tell, **answers):
        super().__init__(types.SimpleNamespace(store=types.SimpleNamespace(answer=answers.get, set_answer=answers.__setitem__)))
        self.series, self.answers = tell, answers


def test_in_a_set_each_keeps_its_own_promise():
    """Beside a fused optimizer, which may round otherwise, an exact technique changed a bit."""
    found = Told(lambda run: series([1.0], 1e-9 if run.techniques else 0.0)).verify(ordered((*EXACT, *FUSED)))
    assert found.passed is False and found.reason.startswith("gc-freeze alone: declared exact")


def test_beside_what_was_needed_to_fit_each_keeps_its_own_promise_too():
    """That rounds to fewer bits, and an exact technique on top of it changed a bit."""
    verifier = Told(lambda run: series([1.0], 0.0 if run.techniques == BF16 else 1e-9))
    verifier.reference = BF16
    found = verifier.verify(ordered((*BF16, *EXACT)))
    assert found.passed is False and found.reason.startswith("declared exact, but not bit-identical")


def test_a_study_that_is_gone_on_with_knows_the_verdicts_it_had():
    for chosen in (EXACT, FUSED):
        first = Told(lambda run: series([1.0], 1e-9 if run.techniques else 0.0))
        found = first.verify(chosen)
        resumed = Told(lambda run: pytest.fail("a run was recorded again"), **first.answers)
        assert resumed.verify(chosen) == found and found.passed is (chosen == FUSED)


@pytest.mark.parametrize(("chosen", "passed"), [(BF16, True), (FUSED, False)], ids=["bf16", "fused"])
def test_only_what_is_computed_in_fewer_bits_is_held_to_the_rounding_of_those(chosen, passed):
    """One rounding to bf16 changes this gradient by 3 %, and one of its own by next to nothing."""
    def tell(run):
        return dataclasses.replace(series([1.0]), grad_norms=[1.05 if run.techniques else 1.0 + 16 * run.perturb] * 52)

    found = Told(tell).verify(chosen)
    assert found.passed is passed, found.reason


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_accelerator_that_repeats_its_bits_by_chance_rejects_no_exact_technique(device):
    """Two runs of the baseline agreed, and a third one did not."""
    runs = [dataclasses.replace(series([1.0], change), device=device) for change in (0.0, 0.0, 1e-9, 0.0, 2e-9)]
    found = Given(*runs).verify(EXACT)
    assert found.passed is (device == "cuda"), found.reason


def test_what_nearly_passed_is_held_against_more_twins():
    """When a training begins to amplify rounding is chance, and one twin may have been late."""
    def tell(run):
        off = 5e-4 if run.techniques else 2e-4 if run.perturb and run.repetition else 0.0
        return dataclasses.replace(series([1.0]), grad_norms=[1.0 + off] * 52)

    assert Told(tell).verify(FUSED).passed is True
    alone = Told(lambda run: tell(run if run.techniques else Run()))
    assert alone.verify(FUSED).passed is False, "without them it is outside"


@pytest.mark.parametrize(("chosen", "louder", "passed"), [
    (BF16, 1.0, True),
    (BF16, 3.0, False),
    (FUSED, 1.0, False),        # it may draw no other numbers
], ids=["as the seeds", "louder", "which draws none"])
def test_what_draws_other_numbers_lies_where_the_baselines_seeds_lie(chosen, louder, passed):
    """With randomness aligned it is the same training, and with its own another one."""
    def tell(run):
        off = 1.0 + 0.01 * run.seed_offset if not run.techniques else 1.02 * louder if not run.aligned else 1.0
        return dataclasses.replace(series([1.0]), losses=[[off * (1.0 + 1 / (k + 1))] for k in range(52)])

    found = Told(tell).verify(chosen)
    assert found.passed is passed and ("from the mean of 5 seeds" in found.reason) is (louder > 1)


def test_what_trains_otherwise_when_it_is_timed_does_not_verify():
    plain = series([1.0])
    for late, passed in ((0.0, True), (0.1, False)):
        timed = [[loss + late * (k > 10) for loss in losses] for k, losses in enumerate(plain.losses)]
        found = Told(lambda run: plain, **{timed_losses(()): plain.losses, timed_losses(EXACT): timed}).verify(EXACT)
        assert found.passed is passed and ("otherwise when it is timed" in found.reason) is not passed


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
