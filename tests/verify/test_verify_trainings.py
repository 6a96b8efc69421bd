"""Real tiny trainings with planted bugs against the verdicts.

How often they are wrong over many seeds is what `bench/verify.py` counts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_trainings import Plan, train, twins

from saturate.verify.compare import bitwise, compare
from saturate.verify.tolerance import informative, tolerance

BF16, FLOAT32 = 2.0**-9, 2.0**-24
PLANS = [Plan(model="mlp", optimizer="adamw"), Plan(model="mlp", optimizer="sgd", seed=1),
         Plan(model="convnet", optimizer="adamw"), Plan(model="convnet", optimizer="sgd")]
TRANSFORMER = Plan(model="transformer", optimizer="adamw")


def name(plan):
    return f"{plan.model}-{plan.optimizer}"


def judge(plan, candidate, rounding):
    baseline = train(plan)
    assert informative(baseline) is None
    return compare(baseline, train(candidate), tolerance(baseline, [], twins(plan, rounding), rounding))


BUGS = {
    "gradient sum": "gradient norm deviates by 100 % in update 2",
    "skipped step": "update 30 is missing",
    "learning rate": "update norm deviates by 11.1 % in update 2",
    "dropped micro-batch": "gradient norm",
    "stale gradients": "gradient norm",
    "frozen layer": "did not move in update 2",
    "no weight decay": "parameter drift",
    "nan": "loss is nan in update 40",
}


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("plan", PLANS, ids=name)
def test_bugs_are_rejected_even_within_the_tolerance_of_bf16(plan, bug):
    """The reason names what was planted. With AdamW the summed gradient leaves the update as it is: only the gradient
    norm shows it."""
    verdict = judge(plan, replace(plan, bug=bug), BF16)
    assert not verdict.passed
    assert BUGS[bug] in verdict.reason


@pytest.mark.parametrize("bug", ["gradient sum", "learning rate", "no weight decay"])
def test_bugs_in_a_transformer_are_rejected(bug):
    verdict = judge(TRANSFORMER, replace(TRANSFORMER, bug=bug), BF16)
    assert not verdict.passed and BUGS[bug] in verdict.reason


@pytest.mark.parametrize("lr", [1e-5, 3e-5, 3e-3])
@pytest.mark.parametrize("bug", ["matrices at half the rate", "matrices at twice the rate"])
def test_what_happens_to_matrices_alone_is_seen(bug, lr):
    """Most tensors of a transformer are biases and scales: the median of all tensors was theirs. Slow trainings, as fine-tuning is, show
    nothing in their loss."""
    verdict = judge(replace(TRANSFORMER, lr=lr), replace(TRANSFORMER, lr=lr, bug=bug), BF16)
    assert not verdict.passed and "update norm" in verdict.reason and verdict.reason.split(",")[0].endswith("in update 2")


@pytest.mark.parametrize("lr", [3e-5, 3e-3])
@pytest.mark.parametrize("plan", [replace(PLANS[2]), TRANSFORMER], ids=name)
def test_gradients_whose_elements_have_changed_places_are_seen(plan, lr):
    """Their norm is the same, and so was the direction of what was read of them: one column of each weight."""
    verdict = judge(replace(plan, lr=lr), replace(plan, lr=lr, bug="other places"), BF16)
    assert not verdict.passed and "update cosine" in verdict.reason


@pytest.mark.parametrize("plan", PLANS, ids=name)
def test_other_data_dressed_up_as_a_speed_up_is_rejected(plan):
    from_start = judge(plan, replace(plan, data_seed=99, from_start=True), BF16)
    later = judge(plan, replace(plan, data_seed=99), BF16)
    assert not from_start.passed and " 0" in from_start.reason
    assert not later.passed and " 2" in later.reason
    assert not judge(plan, replace(plan, seed=plan.seed + 50), BF16).passed


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("plan", PLANS, ids=name)
def test_bf16_autocast_is_accepted(plan, seed):
    plan = replace(plan, seed=seed)
    verdict = judge(plan, replace(plan, bf16=True), BF16)
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize("change", [{"bf16": True}, {"fused": True}, {"reverse_batch": True}], ids=str)
def test_honest_changes_to_a_transformer_are_accepted(change):
    """Its key bias has no true gradient, so AdamW moves it at random under bf16: medians over tensors ignore it."""
    verdict = judge(TRANSFORMER, replace(TRANSFORMER, **change), BF16 if "bf16" in change else FLOAT32)
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize("plan", PLANS, ids=name)
def test_another_order_of_summation_is_accepted_and_bf16_is_not_taken_for_one(plan):
    assert judge(plan, replace(plan, reverse_batch=True), FLOAT32).passed
    assert not judge(plan, replace(plan, bf16=True), FLOAT32).passed
    assert not bitwise(train(plan), train(replace(plan, bf16=True)))


def test_fused_adamw_is_accepted_as_a_reordering():
    plan = PLANS[0]
    assert judge(plan, replace(plan, fused=True), FLOAT32).passed


def test_an_identical_run_is_bitwise_identical_and_accepted_without_any_twin():
    plan = PLANS[0]
    baseline = train(plan)
    again = train.__wrapped__(plan)
    assert again is not baseline and bitwise(baseline, again)
    verdict = compare(baseline, again, tolerance(baseline))
    assert verdict.passed
    assert [curve.metric for curve in verdict.curves] == ["loss", "gradient norm", "update cosine"]
    assert all(curve.passed for curve in verdict.curves)


@pytest.mark.parametrize("change, reason", [
    ({"bug": "constant loss", "from_start": True}, "the same in every update (1)"),
    ({"bug": "zero loss", "from_start": True}, "zero in every update"),
    ({"lr": 0.0}, "the parameters move in only 0 of 50 updates"),
    ({"bug": "nan"}, "the baseline's own loss is not finite (update 40)"),
    ({"updates": 20}, "only 20 updates")])
def test_what_proves_nothing_is_refused(change, reason):
    assert reason in informative(train(replace(PLANS[0], **change)))


def test_a_planted_bug_names_its_curve():
    plan = PLANS[0]
    verdict = judge(plan, replace(plan, bug="gradient sum"), BF16)
    failed = [curve for curve in verdict.curves if not curve.passed]
    assert [curve.metric for curve in failed] == ["gradient norm"]
    assert failed[0].reason == verdict.reason
    assert failed[0].candidate[2] - failed[0].baseline[2] > failed[0].tolerance[2]


DOUBLE = [replace(plan, double=True) for plan in (*PLANS, TRANSFORMER)]
FLOAT64 = 2.0**-53


@pytest.mark.parametrize("plan", DOUBLE, ids=name)
def test_of_a_training_in_float64_float32_is_no_reordering(plan):
    verdict = judge(plan, replace(plan, bug="float32 forward"), FLOAT64)
    assert not verdict.passed and "in update 2" in verdict.reason
    assert judge(plan, replace(plan, bug="float32 forward"), BF16).passed, "a change of number formats is another promise"


@pytest.mark.parametrize("plan", DOUBLE, ids=name)
def test_another_order_of_summation_in_float64_is_accepted(plan):
    verdict = judge(plan, replace(plan, reverse_batch=True), FLOAT64)
    assert verdict.passed, verdict.reason
    if plan.optimizer == "adamw":
        verdict = judge(plan, replace(plan, fused=True), FLOAT64)
        assert verdict.passed, verdict.reason
