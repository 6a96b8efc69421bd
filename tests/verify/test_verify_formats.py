"""Trainings in 16 bits, by autocast or with parameters of such a format: what is right passes, and planted bugs do not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tiny_trainings import Plan, train, twins

from saturate.verify.compare import compare
from saturate.verify.series import Series
from saturate.verify.tolerance import informative, tolerance

PLANS = {
    "autocast mlp": Plan(model="mlp", optimizer="adamw", autocast=True),
    "autocast convnet": Plan(model="convnet", optimizer="sgd", autocast=True),
    "bfloat16 mlp": Plan(model="mlp", optimizer="adamw", low="bfloat16"),
    "bfloat16 convnet": Plan(model="convnet", optimizer="adamw", low="bfloat16"),
    "bfloat16 fine-tuning": Plan(model="transformer", optimizer="adamw", lr=3e-5, low="bfloat16"),
    "float16 convnet": Plan(model="convnet", optimizer="sgd", low="float16"),
}
#: With other roundings between operators, with one rounding of each parameter per update, with sums in another order.
HONEST = ({"wide": True}, {"fused": True}, {"reverse_batch": True})
BUGS = {
    "gradient sum": "gradient norm deviates by",
    "skipped step": "update 30 is missing",
    "stale gradients": " in update 2",
    "dropped micro-batch": "gradient norm",
    "nan": "loss is nan in update 40",
}


def judge(plan: Plan, change: dict[str, object]):
    baseline = train(plan)
    assert informative(baseline) is None
    rounding = baseline.coarsest_rounding
    return compare(baseline, train(replace(plan, **change)), tolerance(baseline, [], twins(plan, rounding), rounding))


@pytest.mark.parametrize("name", PLANS)
def test_other_roundings_of_the_baseline_s_own_format_are_accepted(name: str) -> None:
    for change in HONEST:
        if "fused" not in change or PLANS[name].optimizer == "adamw":
            verdict = judge(PLANS[name], change)
            assert verdict.passed, (change, verdict.reason)


@pytest.mark.parametrize("name", PLANS)
def test_bugs_are_rejected_within_the_tolerance_of_the_baseline_s_own_format(name: str) -> None:
    for bug, words in BUGS.items():
        verdict = judge(PLANS[name], {"bug": bug})
        assert not verdict.passed and words in verdict.reason, (bug, verdict.reason)


def test_other_data_is_rejected_in_16_bits() -> None:
    for plan in (PLANS["autocast mlp"], PLANS["bfloat16 mlp"]):
        assert not judge(plan, {"data_seed": 99}).passed and not judge(plan, {"seed": 50}).passed


def test_a_learning_rate_that_16_bits_can_tell_is_told() -> None:
    verdict = judge(PLANS["bfloat16 mlp"], {"bug": "learning rate"})
    assert not verdict.passed and "update norm" in verdict.reason


@pytest.mark.parametrize("rate", [1e-5, 5e-6, 2e-6, 1e-6])
def test_another_learning_rate_is_told_where_an_update_moves_only_a_few_entries(rate: float) -> None:
    """No update of any tensor has a direction then: how many entries move is all there is."""
    plan = Plan(model="unbiased", optimizer="adamw", lr=rate, low="bfloat16")
    for change in HONEST:
        verdict = judge(plan, change)
        assert verdict.passed, (change, verdict.reason)
    for bug in ("half the learning rate", "twice the learning rate", "ten times the learning rate"):
        assert not judge(plan, {"bug": bug}).passed, bug


def test_entries_that_move_more_or_less_often_are_counted_where_an_update_has_no_direction() -> None:
    few, more, many, none = ([UNIT] * count + [0.0] * (64 - count) for count in (3, 6, 64, 0))
    baseline, often = one_tensor([few] * 20), one_tensor([few, few, *[more] * 18])
    allowed = replace(tolerance(baseline), turn=[9.0] * 21, stretch=[9.0] * 21, moves=0.6)
    for expected, found in ((baseline, often), (often, baseline)):
        assert "times as many entries move" in compare(expected, found, replace(allowed, slowest=9.0)).reason
    still = one_tensor([few, few, *[none] * 18])
    assert "0.0526 times as many" in compare(baseline, still, replace(allowed, slowest=math.inf)).reason
    assert compare(one_tensor([many] * 20), one_tensor([many, many, *[few] * 18]), replace(allowed, slowest=9.0)).passed, "it has a direction"
    assert compare(one_tensor([few] * 9), one_tensor([few, few, *[more] * 7]), allowed).passed, "too few to tell"


def one_tensor(moves: list[list[float]], low: str = "bfloat16") -> Series:
    """A tensor of 64 entries, first of ones, that goes on by `moves`."""
    samples = [[1.0] * 64]
    for move in moves:
        samples.append([a + b for a, b in zip(samples[-1], move)])
    return Series([[1 / (k + 1)] for k in range(len(samples))], [1.0] * len(samples), samples, segments=[64], formats=[low])


UNIT = 2.0**-7


def test_where_an_update_is_near_half_a_unit_a_tensor_may_stand_still_in_one_of_two_runs() -> None:
    """All 64 entries of a normalisation's weights are 1, and an Adam-like rule moves them alike: whether they do is chance."""
    all_of_them, none, few = [UNIT] * 64, [0.0] * 64, [UNIT] * 3 + [0.0] * 61
    baseline = one_tensor([few, all_of_them, few, few])
    candidate = one_tensor([few, few, all_of_them, none])
    allowed = replace(tolerance(baseline), turn=[9.0] * 5, stretch=[9.0] * 5)
    assert compare(baseline, candidate, allowed).passed
    wide = replace(baseline, formats=["float32"]), replace(candidate, formats=["float32"])
    assert not compare(*wide, allowed).passed, "in float32 it is none"
    still = one_tensor([few, none, none, none])
    assert "update 2 is missing" in compare(baseline, still, allowed).reason


def test_a_tensor_in_16_bits_that_always_stands_still_is_found() -> None:
    moving = [[UNIT * (-1) ** k] * 64 for k in range(6)]
    baseline, frozen = one_tensor(moving), one_tensor([*moving[:1], *[[UNIT] + [0.0] * 63] * 5])
    allowed = replace(tolerance(baseline), turn=[9.0] * 7, stretch=[9.0] * 7)
    assert "travels only" in compare(baseline, frozen, allowed).reason


def test_a_loss_in_16_bits_may_be_off_by_a_unit() -> None:
    plain = replace(train(PLANS["autocast mlp"]), loss_format="bfloat16")
    nearby = replace(plain, losses=[[loss * (1 + 2.0**-7) for loss in update] for update in plain.losses])
    assert compare(plain, nearby, tolerance(plain)).passed
    assert not compare(plain, nearby, tolerance(replace(plain, loss_format=""))).passed


def test_the_coarsest_format_is_what_the_tolerance_is_of() -> None:
    plain = one_tensor([[UNIT] * 64] * 3)
    found = {arithmetic: replace(plain, arithmetic=arithmetic).coarsest_rounding for arithmetic in ("", "bfloat16", "tfloat32", "float16")}
    assert found == {"": 2.0**-24, "bfloat16": 2.0**-9, "tfloat32": 2.0**-11, "float16": 2.0**-12}
    assert replace(plain, precision="float64", arithmetic="bfloat16").coarsest_rounding == 2.0**-9
