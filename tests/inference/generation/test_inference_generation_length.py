"""How many tokens to draft: arithmetic that can be done by hand."""

from __future__ import annotations

import pytest

from saturate.inference.generation.draft_length import Costs, DraftLength, expected_tokens, predicted

#: A plain step takes 100, a drafted token 10; verification grows by 2 per token.
CHEAP = Costs((0, 1, 8), (0.0, 10.0, 80.0), (100.0, 104.0, 118.0))
DEAR = Costs((0, 1, 8), (0.0, 50.0, 400.0), (100.0, 100.0, 100.0))


def test_expected_tokens():
    assert expected_tokens([]) == 1
    assert expected_tokens([0.5, 0.5]) == pytest.approx(1.75)
    rate, length = 0.8, 5
    assert expected_tokens([rate] * length) == pytest.approx((1 - rate ** (length + 1)) / (1 - rate)), (
        "Leviathan et al., equation 1"
    )


def test_costs_between_and_beyond_what_was_measured():
    assert CHEAP.relative(0) == 1
    assert CHEAP.relative(1) == pytest.approx(1.14)
    assert CHEAP.relative(4) == pytest.approx(0.40 + 1.10)
    assert CHEAP.relative(15) == pytest.approx(1.5 + 1.32)
    assert CHEAP.ratio == pytest.approx(0.1) and CHEAP.verify(8) == pytest.approx(1.18)


def test_a_draft_that_does_not_pay():
    """Acceptance 0.2 at cost ratio 0.5: 1.2 tokens for 1.5 steps."""
    assert predicted(0.2, DEAR, range(1, 9)) == (1, pytest.approx(0.8))


def test_the_length_follows_what_was_accepted():
    chooser = DraftLength(CHEAP, tuple(range(1, 9)))
    for _ in range(200):
        chooser.observe([8], [8])
    assert chooser.choose(100) == 8 and chooser.choose(3) == 3 and chooser.choose(0) == 0
    for _ in range(300):
        chooser.observe([8], [1])
    assert chooser.choose(100) == 1, "the first always stays, the second never"


def test_drafts_that_do_not_pay_are_given_up_and_tried_again_now_and_then():
    stopping, going = (DraftLength(DEAR, (1, 2, 4), may_stop=stop) for stop in (True, False))
    for chooser in (stopping, going):
        for _ in range(50):
            chooser.observe([1], [0])
    tried = [step for step in range(1, 100) if stopping.choose(10)]
    assert tried == [4, 12, 28, 60, 92], "after 4 steps, 8, 16, 32, and 32"
    for _ in range(300):
        stopping.observe([2], [2])
    assert stopping.choose(10) and stopping.choose(10), "the text changed"
    assert going.choose(10) == 1


@pytest.mark.parametrize(("rows", "pays"), [(1, False), (4, True)])
def test_a_plain_step_that_a_tie_asks_for_is_a_part_of_what_a_round_costs(rows, pays):
    """In 16 bits drafts went on at a loss: of two rounds one ended at a tie, and all waited for a forward of one token."""
    chooser = DraftLength(Costs((0, 1), (0.0, 30.0), (100.0, 100.0)), (1,))
    for _ in range(600):
        chooser.observe([1] * rows, [1] * rows, [False] * rows)
        chooser.observe([1] * rows, [0] + [1] * (rows - 1), [True] + [False] * (rows - 1))
    kept = 1 - 0.5 / rows
    assert (1 + kept) / 1.3 > 1.1, "by what stays alone it pays"
    assert chooser.speedup(1) == pytest.approx((1 + kept - 0.5 / rows + 0.5) / 1.8, rel=0.05) and (chooser.choose(9) == 1) is pays


def test_what_lies_behind_the_first_refusal_says_nothing():
    chooser = DraftLength(CHEAP, (4,))
    for _ in range(100):
        chooser.observe([4, 0], [1, 0])
    first, second, third, _ = chooser.acceptance(4)
    assert first > 0.95 and second < 0.1 and 0.2 < third < 0.8
