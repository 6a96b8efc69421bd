"""Which layers go back to the original precision: proposals, without processes."""

from __future__ import annotations

import math

import pytest

from saturate.inference.repair import Repair

NAMES = [f"layer{index}" for index in range(40)]


def run(repair: Repair, passes) -> list[frozenset[str]]:
    """Ask until nothing is left; `passes` says of a set whether it is accurate enough."""
    asked = []
    keep = repair.next("fail")
    while keep is not None:
        asked.append(keep)
        assert len(asked) < 100, "it never ends"
        keep = repair.next("pass" if passes(keep) else "fail")
    return asked


@pytest.mark.parametrize("needed", range(1, 21))
def test_the_smallest_number_of_layers_is_found(needed: int) -> None:
    repair = Repair(NAMES)
    asked = run(repair, lambda keep: set(NAMES[:needed]) <= keep)
    assert repair.best == frozenset(NAMES[:needed])
    assert len(asked) <= 2 * math.log2(len(NAMES)) + 1
    assert len(set(asked)) == len(asked), "a set was asked for twice"


def test_first_and_last_layer_are_tried_first_and_may_do() -> None:
    repair = Repair(NAMES, ends=("layer30", "layer39"))
    asked = run(repair, lambda keep: {"layer30", "layer39"} <= keep)
    assert asked[0] == repair.best == {"layer30", "layer39"}
    assert asked[1:] == [frozenset(NAMES[:1])], "only a single layer would be less"


def test_a_failing_pair_of_ends_does_not_hide_a_pair_of_sensitive_layers() -> None:
    repair = Repair(NAMES, ends=("layer30", "layer39"))
    run(repair, lambda keep: set(NAMES[:2]) <= keep)
    assert repair.best == frozenset(NAMES[:2])


def test_ends_that_are_the_most_sensitive_are_not_tried_twice() -> None:
    repair = Repair(NAMES, ends=NAMES[:2])
    asked = run(repair, lambda keep: set(NAMES[:4]) <= keep)
    assert asked == [frozenset(NAMES[:2]), frozenset(NAMES[:4]), frozenset(NAMES[:3])]


def test_nothing_passes_and_half_of_the_layers_is_the_end() -> None:
    repair = Repair(NAMES)
    asked = run(repair, lambda keep: False)
    assert repair.best is None
    assert [len(keep) for keep in asked] == [1, 2, 4, 8, 16, 20]


def test_undecided_is_not_passed() -> None:
    repair = Repair(NAMES)
    assert repair.next("undecided") == frozenset(NAMES[:1])
    assert repair.next("undecided") == frozenset(NAMES[:2])
    assert repair.best is None


def test_a_candidate_that_passes_needs_no_repair() -> None:
    repair = Repair(NAMES)
    assert repair.next("pass") is None
    assert repair.best == frozenset()


def test_noise_that_breaks_the_order_never_reports_a_set_that_failed() -> None:
    """More layers fail where fewer passed: `best` is still one that was judged to pass."""
    verdicts = {1: False, 2: False, 4: True, 3: False}
    repair = Repair(NAMES)
    asked = run(repair, lambda keep: verdicts[len(keep)])
    assert repair.best == frozenset(NAMES[:4])
    assert len(asked) == 4


@pytest.mark.parametrize("names", [[], ["only"]])
def test_a_model_with_hardly_a_layer_has_nothing_to_keep(names: list[str]) -> None:
    assert Repair(names, ends=names).next("fail") is None


def test_two_layers_leave_one_to_try() -> None:
    repair = Repair(["a", "b"], ends=("a", "b"))
    assert run(repair, lambda keep: True) == [frozenset({"a"})]


def test_ends_that_the_ranking_does_not_know_are_left_out() -> None:
    assert Repair(NAMES, ends=("stem", "layer39")).next("fail") == {"layer39"}
