"""The terminal summary: length, width, order, colour."""

from __future__ import annotations

import re

import msgspec
import pytest
import studies

from saturate.report import html, words
from saturate.report.terminal import summary

WIDTHS = (60, 80, 120)
ANSI = re.compile(r"\x1b\[[0-9;]*m")
# Lines that may be longer than the terminal, so that they can be copied whole.
COPIED = ("recipe ", "report ", "next ")


def plain(record, width=80):
    return summary(record, width=width, color=False)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", studies.ALL)
def test_fits_in_twelve_lines_of_the_width(name, width):
    lines = plain(studies.ALL[name](), width).split("\n")
    assert len(lines) <= 12
    for line in lines:
        assert len(line) <= width or line.startswith(COPIED), line
    assert lines[-1].startswith("next ")


def test_counts_wide_characters_as_two_cells():
    record = msgspec.structs.replace(studies.too_noisy(), notes=["\u6e2c" * 100])
    note = next(line for line in plain(record, 60).split("\n") if line.startswith("note"))
    assert note == "note      " + "\u6e2c" * 23 + "..."  # 10 + 46 + 3 cells


def test_the_verdict_comes_first_and_the_command_last():
    lines = plain(studies.big_win()).split("\n")
    assert lines[0] == "1.79x faster [1.77, 1.80], verified: 212.4 -> 118.9 ms/step"
    assert lines[-1] == (
        "next      saturate run .saturate/recipe.toml -- python train.py --config small.yaml --api-token s3cret-value"
    )


def test_kept_techniques_are_listed_by_gain_and_folded():
    text = plain(studies.big_win())
    assert re.search(r"^kept +bf16-autocast +\+31\.2 %  \[\+30\.1, \+32\.3\]  precision$", text, re.M)
    assert "+3 more: compile, fused-optimizer, gc-freeze" in text
    assert text.index("bf16-autocast") < text.index("loader-workers")


def test_parts_that_contradict_the_race_are_not_its_reason():
    record = studies.big_win()
    assert "\nwhy       input wait 66.0 -> 2.10 ms" in plain(record)
    slower = {name: 1.05 * value for name, value in record.split_before.items()}
    contradicted = msgspec.structs.replace(record, split_after=slower)
    assert "\nwhy" not in plain(contradicted)
    told = "less than half of what they found"
    assert told in html.render(contradicted) and told not in html.render(record)


def test_memory_stands_beside_time():
    assert plain(studies.fits()).split("\n")[1].startswith("peak 3.21 GiB instead of 5.13 GiB, limit 4.00 GiB, 0.85x [0.84, 0.87]")
    text = plain(studies.fits(), 100)
    assert "kept      gc-freeze                  +2.4 %  [+1.3, +3.5]    3.21 GiB (-37 %)  exact" in text
    assert "          activation-checkpointing  -18.0 %  [-19.1, -16.9]  3.17 GiB (-38 %)  reordering" in text
    assert "GiB" not in plain(studies.big_win()), "a record of before memory was measured"
    won = studies.fits()
    won = msgspec.structs.replace(won, result=msgspec.structs.replace(won.result, verdict="faster", speedup=1.2, speedup_ci=(1.1, 1.3)))
    assert "memory    peak 3.21 GiB instead of 5.13 GiB, limit 4.00 GiB" in plain(won)


def test_a_rejected_technique_outranks_every_other_reason():
    text = plain(studies.big_win(), 120)
    assert "1 rejected, 1 failed, 1 not applied, 1 slower" in text
    assert "fp16-autocast rejected: loss outside the allowed band at update 41" in text


def test_break_even():
    win = studies.big_win()
    assert "pays back after 1,240 steps (about 2 min 27 s)" in plain(win)

    def steps(number):
        return msgspec.structs.replace(win, result=msgspec.structs.replace(win.result, break_even_steps=number))

    assert "pays back" not in plain(steps(None)), "not measured is not never"
    assert "pays back at once" in plain(steps(0))
    assert "pays back" not in plain(studies.nothing_helps())


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        (
            "nothing_helps",
            "Nothing safe helps: the baseline stays at 212.4 ms/step",
            "saturate explain no_difference",
        ),
        ("cannot_verify", "Cannot verify, so nothing is claimed", "saturate explain inconclusive"),
        ("unverified", "Not verified, no set trains like the baseline", "saturate explain rejected_numerics"),
        ("too_noisy", "Too noisy to decide", "saturate tune -- python train.py"),
        ("slower", "Nothing helps, the best set is slower", "saturate explain slower"),
        ("failed_baseline", "Cannot verify, so nothing is claimed", "saturate explain inconclusive"),
        ("empty", "Undecided", "saturate tune --"),
        ("fits", "Fits, verified", "saturate run .saturate/recipe.toml"),
        ("fits_unverified", "Fits, not compared with the baseline", "saturate run .saturate/recipe.toml"),
        ("too_big", "Does not fit: the baseline stays at 212.4 ms/step", "saturate fit --memory 4GiB -- python train.py"),
    ],
)
def test_every_outcome_has_its_own_first_and_last_line(name, first, last):
    lines = plain(studies.ALL[name]()).split("\n")
    assert lines[0].startswith(first)
    assert last in lines[-1]


def test_a_budget_that_ended_before_anything_was_tried_says_nothing_of_verification():
    record = studies.failed_baseline()
    reason = "the budget of 75 s ended before anything could be timed: starting took 97 s; give it --budget 7m"
    late = msgspec.structs.replace(record, result=msgspec.structs.replace(record.result, verified_reason=reason), out_of_time=True)
    lines = plain(late).split("\n")
    assert lines[0].startswith("Undecided within the budget") and "--budget 7m" in " ".join(lines) and "tune" in lines[-1]
    page = html.render(late)
    assert "give it --budget 7m. </p>" in page and "Cannot verify" not in page
    untold = msgspec.structs.replace(late, out_of_time=False)
    assert plain(untold).startswith("Cannot verify"), "the record says it, not how a reason begins"


def test_the_next_command_keeps_what_its_quotes_hold():
    record = studies.too_noisy()
    command = ["bash", "-c", "cd src\npython train.py --prompt 'a  b'"]
    text = plain(msgspec.structs.replace(record, result=msgspec.structs.replace(record.result, command=command)))
    assert text.split("\n")[-1].endswith("bash -c $'cd src\\npython train.py --prompt \\'a  b\\''")


def test_where_nothing_was_tried_nothing_is_said_of_what_helps():
    record = studies.nothing_helps()
    untried = [msgspec.structs.replace(outcome, fate="not_applicable") for outcome in record.result.techniques]
    text = plain(msgspec.structs.replace(record, result=msgspec.structs.replace(record.result, techniques=untried)))
    assert text.startswith("Nothing could be tried") and "helps" not in text.split("\n")[0]


def test_a_set_that_was_not_verified_never_reads_as_faster():
    record = studies.big_win()
    record = msgspec.structs.replace(record, result=msgspec.structs.replace(record.result, verified=None))
    assert "faster" not in plain(record).split("\n")[0]


@pytest.mark.parametrize("name", studies.ALL)
def test_colour_changes_nothing_but_colour(name):
    record = studies.ALL[name]()
    assert "\x1b" not in plain(record)
    assert ANSI.sub("", summary(record, width=80, color=True)) == plain(record)


def test_green_only_for_a_verified_gain():
    for name, build in studies.ALL.items():
        green = re.search(r"\x1b\[(?:\d+;)*32m", summary(build(), width=80, color=True))
        assert bool(green) == (name in ("big_win", "hostile", "fits")), name


def test_control_characters_of_a_workload_never_reach_the_terminal():
    text = plain(studies.hostile())
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", text)
    assert len(text.split("\n")) <= 12


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "not measured"),
        (float("nan"), "not finite"),
        (0.0, "0"),
        (0.0123, "0.0123"),
        (0.5, "0.500"),
        (2.1, "2.10"),
        (212.44, "212.4"),
        (12_345.6, "12,346"),
        (3e-7, "3.0e-07"),
    ],
)
def test_milliseconds(value, text):
    assert words.ms(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "not measured"),
        (0.84, "0.8 s"),
        (12.4, "12 s"),
        (59.7, "1 min 00 s"),
        (245, "4 min 05 s"),
        (7800, "2 h 10 min"),
    ],
)
def test_seconds(value, text):
    assert words.seconds(value) == text


def test_small_speedups_get_a_third_decimal():
    assert words.ratio(1.018, (1.009, 1.027)) == "1.018x [1.009, 1.027]"
    assert words.ratio(1.786, (1.768, 1.803)) == "1.79x [1.77, 1.80]"


def test_a_bound_that_nobody_can_reach_is_no_number():
    assert words.bound(1.512) == "at most 1.51x"
    assert words.bound(words.TELLING_BOUND) == "at most 20.00x"
    assert words.bound(100.0) == "nearly the whole step"


def test_the_command_that_goes_on_asks_the_same_question():
    record = msgspec.structs.replace(studies.too_noisy(), options=["--only", "compile", "--dir", "/tmp/a b"])
    assert plain(record).split("\n")[-1].startswith("next      saturate tune --only compile --dir '/tmp/a b' -- python train.py")


def test_a_budget_that_would_do_is_in_the_command_to_type():
    record = msgspec.structs.replace(studies.cannot_verify(), options=["--budget", "27m"])
    assert plain(record).split("\n")[-1].startswith("next      saturate tune --budget 27m -- python train.py")
    assert "explain" in plain(studies.cannot_verify()).split("\n")[-1]


def test_what_does_not_fit_is_searched_with_the_same_options():
    record = msgspec.structs.replace(studies.too_big(), options=["--only", "compile", "--fit", "4294967296", "--step", "backward:4", "--dir", "/data/st"])
    assert words.next_command(record).startswith("saturate fit --memory 4GiB --step backward:4 --dir /data/st -- python train.py")
    late = msgspec.structs.replace(record, options=["--fit", "4294967296", "--budget", "2m"])
    assert words.next_command(late).startswith("saturate tune --fit 4294967296 --budget 2m -- python train.py")


def test_why_nobody_knows_when_it_pays_back():
    win = studies.big_win()

    def said(reason):
        return words.break_even(msgspec.structs.replace(win, result=msgspec.structs.replace(win.result, break_even_steps=None, break_even_reason=reason)))

    assert said("the study ended before the final race") == "not known: the study ended before the final race"
    assert said(words.NEVER).startswith("never: ")
    least = words.not_before(20_508, 48.5)
    assert said(least) == least and least.startswith("not before 20,508 steps (about 16 min 35 s): ")
    shown = plain(msgspec.structs.replace(win, result=msgspec.structs.replace(win.result, break_even_steps=None, break_even_reason=least)))
    assert "\npays back not before 20,508 steps (about 16 min 35 s): no start of" in shown


def test_one_pair_is_no_noise_but_a_budget_that_ended():
    noisy = studies.too_noisy()
    race = msgspec.structs.replace(noisy.races[0], question="final", pairs=1)
    assert plain(msgspec.structs.replace(noisy, races=[race]), 120).startswith("Undecided within the budget: final race 1.030x")
    assert plain(msgspec.structs.replace(noisy, races=[msgspec.structs.replace(race, pairs=2)]), 120).startswith("Too noisy to decide")


@pytest.mark.parametrize(("floor", "interval", "title"), [
    (0.0276, (0.99, 1.04), "Inconclusive"), (0.0276, (0.91, 1.13), "Too noisy to decide"), (0.06, (0.99, 1.04), "Too noisy to decide")])
def test_what_two_processes_of_any_program_differ_by_is_no_noise(floor, interval, title):
    """On the quietest machine one pair of the baseline resolves no 2 %: exit code 6, and "stop other programs"."""
    record = studies.too_noisy()
    result = msgspec.structs.replace(record.result, noise_floor=floor, speedup=1.015, speedup_ci=interval)
    races = [msgspec.structs.replace(record.races[0], question=question, pairs=pairs) for question, pairs in (("A/A", 1), ("final", 3))]
    record = msgspec.structs.replace(record, result=result, races=races)
    said = " ".join(plain(record, 120).split())
    assert said.startswith(title) and ("a longer --budget has time for more pairs" in said) is (title == "Inconclusive")
    assert words.headline(record).kind == ("inconclusive" if title == "Inconclusive" else "noisy")


def undecided(**changes):
    """Nothing helped, and one technique had no turn."""
    record = studies.nothing_helps()
    last = msgspec.structs.replace(record.result.techniques[-1], fate="not_tried", reason="the budget ended before its turn", gain=None)
    result = {"verdict": "inconclusive", "techniques": [*record.result.techniques[:-1], last], **changes}
    return msgspec.structs.replace(record, result=msgspec.structs.replace(record.result, **result))


def test_what_gives_nothing_is_not_the_closest_to_an_answer():
    """A compiled step 22 % slower was called the closest, where two techniques had not had their turn."""
    said = plain(undecided(), 120)
    assert "Undecided within the budget" in said and "the budget ended before the rest had a turn" in said and "closest" not in said


def test_a_budget_that_noise_used_up_is_not_called_noise():
    """With steps of a second, looking at the noise took four minutes of four."""
    techniques = [msgspec.structs.replace(o, fate="not_tried", gain=None, gain_ci=None) for o in undecided().result.techniques]
    said = plain(undecided(techniques=techniques, noise_floor=0.114), 120)
    assert said.startswith("Undecided within the budget") and "before anything could be tried" in said
    assert plain(undecided(noise_floor=0.114), 120).startswith("Too noisy to decide")


def test_what_noise_leaves_undecided_is_named():
    """A step compiled 119 % faster [-1, 383]: "differences below 10.2 % cannot be seen here", and not a word of it."""
    first, *others = undecided().result.techniques
    first = msgspec.structs.replace(first, id="compile", fate="inconclusive", gain=1.19, gain_ci=(-0.007, 3.829))
    said = " ".join(plain(undecided(techniques=[first, *others], noise_floor=0.102), 200).split())
    assert said.startswith("Too noisy to decide")
    assert "differences below 10.2 % cannot be seen here; closest: compile +119.0 % [-0.7, +382.9]; a gain counts from" in said


@pytest.mark.parametrize("fate", ["failed", "not_applied", "not_tried"])
def test_what_had_no_gain_of_its_own_was_tried_all_the_same(fate):
    """Seen: one crashed and a pair was raced, one could not be applied; "before anything could be tried"."""
    techniques = [msgspec.structs.replace(o, fate="not_tried", gain=None, gain_ci=None) for o in undecided().result.techniques]
    techniques[0] = msgspec.structs.replace(techniques[0], fate=fate)
    record = undecided(techniques=techniques, noise_floor=0.114)
    if fate == "not_tried":
        pair = msgspec.structs.replace(record.races[0], question="add one + two to baseline", a=[], b=["one", "two"])
        record = msgspec.structs.replace(record, races=[*record.races, pair])
    said = " ".join(plain(record, 120).split())
    assert said.startswith("Undecided within the budget") and "what was tried shows no gain that counts, and the budget ended before the rest" in said
    assert "before anything could be tried" not in said


def test_the_next_command_gives_no_less_time_than_was_given():
    """After half an hour without a decision, the same in ten minutes was what to do next."""
    record = studies.ALL["too_noisy"]()
    for budget_s, options in ((240.0, ""), (600.0, ""), (1790.0, "--budget 30m ")):
        assert f"saturate tune {options}-- " in words.next_command(msgspec.structs.replace(record, budget_s=budget_s))
