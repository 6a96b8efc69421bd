"""What a study claims when it kept nothing."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest

from saturate.cli import tune
from saturate.records.result import StepTime
from saturate.report import words
from saturate.study import starts, summary
from saturate.study.fates import Fate
from saturate.study.state import Request


def study(**fates: Fate) -> SimpleNamespace:
    return SimpleNamespace(refusal=None, error=None, final=None, starved="", request=SimpleNamespace(threshold=0.02),
                           search=SimpleNamespace(kept=(), fates=fates))


CANDIDATE = SimpleNamespace(id="compile")

CASES = {
    "everything was tried": ("no_difference", {"compile": Fate("no_difference", "", CANDIDATE, 0.001)}),
    "a promising gain was left open": ("inconclusive", {"compile": Fate("inconclusive", "", CANDIDATE, 0.2, (0.01, 0.4))}),
    "a gain that counts is neither seen nor excluded": ("inconclusive", {"compile": Fate("inconclusive", "", CANDIDATE, 0.0, (-0.062, 0.066))}),
    "only a loss was left open": ("no_difference", {"compile": Fate("inconclusive", "", CANDIDATE, 0.001, (-0.05, 0.015))}),
    "it ended before it could be raced": ("inconclusive", {"compile": Fate("inconclusive", "too short", CANDIDATE)}),
    "the budget ended first": ("inconclusive", {"compile": Fate("not_tried", "the budget ended before its turn", CANDIDATE)}),
    "the user did not want it": ("no_difference", {"compile": Fate("not_tried", "excluded with --skip")}),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_helps_is_only_said_when_everything_was_tried(name):
    verdict, fates = CASES[name]
    assert summary._verdict(study(**fates)) == verdict


def test_what_the_budget_did_not_reach_is_named():
    tried = study(tf32=Fate("slower", "", CANDIDATE), compile=Fate("not_tried", "the budget ended before its turn", CANDIDATE))
    assert summary._unfinished(tried) == ["the budget ended before compile had a turn; a longer --budget tries it"]
    assert summary._unfinished(study(tf32=Fate("not_tried", "excluded with --skip"))) == []


def test_the_options_of_a_request_ask_the_same_question_again():
    """Else the command that a report ends with would begin another study, instead of going on with this one."""
    line = ["--only", "compile,bf16-autocast", "--skip", "tf32", "--allow", "convergence", "--threshold", "5%", "--fit", "2GiB",
            "--step", "optimizer:1", "--timeout", "20m", "--race", "alternate", "--dir", "/tmp/elsewhere", "--budget", "90s"]

    def asked(line: list[str]) -> Request:
        parser = argparse.ArgumentParser()
        tune.configure(parser)
        given = parser.parse_args(line)
        return Request(argv=["python", "train.py"], cwd=Path.cwd(), environment={}, directory=given.dir.absolute(), budget_s=given.budget,
                       threshold=given.threshold, only=given.only, skip=given.skip, allow_convergence=given.allow == "convergence",
                       race_mode=given.race, step=given.step, timeout_s=given.timeout, limit_bytes=given.fit)

    again = asked(asked(line).options())
    assert again.identity() == asked(line).identity() and again.directory == Path("/tmp/elsewhere")
    assert again.timeout_s == 1200.0        # what starts without a word for ten minutes was called hung
    assert asked([]).options() == []


def test_a_baseline_that_was_measured_is_a_stair_even_where_nothing_was_searched():
    result = SimpleNamespace(baseline=StepTime(step_ms=61.3))
    assert [(s.label, s.step_ms) for s in summary._staircase(SimpleNamespace(search=None), result)] == [("baseline", 61.3)]
    assert summary._staircase(SimpleNamespace(search=None), SimpleNamespace(baseline=StepTime())) == []


def test_each_stair_stands_on_the_one_below_and_has_the_interval_of_its_own_race():
    """What was measured against the baseline is the last; a technique that ablation took out again has no stair."""
    one, dropped, two, three = (SimpleNamespace(id=name, label=lambda name=name: name) for name in ("one", "dropped", "two", "three"))
    raced = [SimpleNamespace(gain=gain, gain_ci=interval) for gain, interval in
             ((0.25, (0.2, 0.3)), (0.01, (-0.1, 0.1)), (0.6, None), (1.0, (0.9, 1.1)))]
    stairs = list(zip([(one,), (dropped,), (two,), (three,)], raced))
    search = SimpleNamespace(stairs=stairs, kept=(one, two, three), fitted=None, base=())
    found = summary._staircase(SimpleNamespace(search=search, final=None), SimpleNamespace(baseline=StepTime(step_ms=100.0)))
    assert [(s.label, s.step_ms, s.speedup) for s in found] == [
        ("baseline", 100.0, 1.0), ("+ one", 80.0, 1.25), ("+ two", 50.0, 2.0), ("+ three", 25.0, 4.0)]
    assert found[1].speedup_ci == (1.2, 1.3) and found[2].speedup_ci is None and found[3].speedup_ci == pytest.approx((3.8, 4.2))
    result = SimpleNamespace(baseline=StepTime(step_ms=100.0), tuned=StepTime(step_ms=30.0), speedup=3.3, speedup_ci=(3.0, 3.6))
    found = summary._staircase(SimpleNamespace(search=search, final=object()), result)
    assert (found[-1].step_ms, found[-1].speedup, found[-1].speedup_ci) == (30.0, 3.3, (3.0, 3.6))


def started(techniques, startup_s, settling_s, compile_s=None):
    return {"techniques": techniques, "startup_s": startup_s, "warmup_s": 1000.0, "settling_s": settling_s, "compile_s": compile_s, "steps": 2}


NOT_KNOWN = "no start of the baseline, or none of the final set, was timed until its steps were steady"
AT_LEAST = "not before 90 steps (about 1 h 15 min): no start of the final set was timed until its steps were steady"     # 1000 s, of which two steps train


@pytest.mark.parametrize(("plain", "tuned", "steps", "why"), [
    (started([], 10.0, 0.0), started(["compile"], 10.0, 40.0, 40.0), 4, ""),        # one step of 90 s that compiles, among those of 50 s
    (started([], 10.0, 0.0), started(["compile"], 10.0, 40.0), 4, ""),
    (started([], 10.0, None), started(["compile"], 10.0, 40.0), None, NOT_KNOWN),       # steps that never were steady tell nothing
    (started([], 10.0, None), started(["compile"], 10.0, None), None, NOT_KNOWN),
    (started([], 10.0, 0.0), started(["compile"], 10.0, None), None, AT_LEAST),         # ... of the set, what they took at least
    (started([], 10.0, 0.0), started(["compile"], 10.0, None, 900.0), None, AT_LEAST),
    (started([], 2000.0, 0.0), started(["compile"], 10.0, None), None, NOT_KNOWN),
    (started([], 10.0, 0.0), {k: v for k, v in started(["compile"], 10.0, 40.0).items() if k != "settling_s"}, None, NOT_KNOWN),     # an older study
    ({k: v for k, v in started([], 10.0, 0.0).items() if k != "settling_s"}, started(["compile"], 10.0, 40.0), None, NOT_KNOWN),
])
def test_the_steps_of_a_warm_up_train_as_well(plain, tuned, steps, why):
    """All of a warm-up was called a cost of the start: it paid back after nine steps. And at once where the baseline never settled; and
    nothing was said of a compilation of minutes for a gain of milliseconds."""
    final = SimpleNamespace(a_ms=60_000.0, b_ms=50_000.0)
    found = study()
    found.final, found.search.kept = final, (SimpleNamespace(label=lambda: "compile"),)
    found.store = SimpleNamespace(trials=lambda: [plain, tuned])
    assert starts.break_even(found) == steps
    assert starts.why_no_break_even(found, steps) == why


def test_a_recipe_has_paid_for_its_start_by_the_middle_of_several_starts():
    """Compiling is paid with cold caches, as in the longest of them; what other sets compile is none of its cost."""
    trials = [started([], 10.0, 0.0), started([], 30.0, 0.0), started(["compile"], 10.0, 40.0, 40.0), started(["compile"], 17.0, 0.0, 5.0),
              started(["compile"], 20.0, 0.0, 2.0), started(["other"], 10.0, 0.0, 500.0)]
    found = study()
    found.final, found.search.kept = SimpleNamespace(a_ms=60_000.0, b_ms=50_000.0), (SimpleNamespace(label=lambda: "compile"),)
    found.store = SimpleNamespace(trials=lambda: trials)
    assert starts.break_even(found) == 4            # 12 s without compiling, which takes 40 s; 20 s for the baseline
    found.final.b_ms = 60_000.0
    assert starts.why_no_break_even(found, None) == words.NEVER, "as fast as the baseline is not faster"


def of_compile(trials):
    return starts.comparable(SimpleNamespace(store=SimpleNamespace(trials=lambda: trials)), (SimpleNamespace(label=lambda: "compile"),))


def beside(*arguments):
    return {**started(*arguments), "beside": True}


def test_a_start_beside_another_is_not_compared_with_one_alone():
    """Two trainings that both want all cores took 8.7 s to start at once, 2.5 s alone: a recipe was said to start faster than the baseline."""
    alone, both = [started([], 2.6, 0.0), started([], 2.8, 0.0)], [beside([], 8.7, 0.0), beside([], 8.8, 0.0)]
    tuned = [started(["compile"], 3.0, 0.0), beside(["compile"], 9.3, 0.0)]
    assert of_compile([*alone, *both, *tuned]) == (alone, tuned[:1])
    assert of_compile([*alone, *both, tuned[1]]) == (both, tuned[1:])
    assert of_compile([*both, tuned[0]]) == (both[:1], tuned[:1]), "nothing is known that is like it: the shortest"
    found = study()
    found.final, found.search.kept = SimpleNamespace(a_ms=11.0, b_ms=10.0), (SimpleNamespace(label=lambda: "compile"),)
    found.store = SimpleNamespace(trials=lambda: [*alone, *both, tuned[0]])
    assert starts.break_even(found) == 300, "0.3 s of start, 1 ms a step"


def test_the_first_start_of_a_study_is_not_what_a_recipe_is_compared_with():
    """It may have found nothing in the caches of the machine: a recipe that compiles for 20 s was said to pay back at once."""
    first, both = started([], 40.0, 0.0), [beside([], 8.0, 0.0)] * 4
    assert of_compile([first, *both, beside(["compile"], 9.0, 0.0)])[0] == both
    assert of_compile([first, *both, started(["compile"], 5.0, 0.0)])[0] == both[:1]
    assert of_compile([started([], 8.0, None), *both, started(["compile"], 5.0, 0.0)])[0] == both[:1], "steps that never were steady tell nothing"


def test_what_comes_before_the_steady_state_is_told_beside_it():
    """Of the very set: other sets start otherwise. Compiling is paid with cold caches once, so its longest counts."""
    trials = [started([], 3.0, 0.0), started([], 5.0, 0.0), {**started([], None, None), "startup_s": None},
              {**started(["compile"], 8.0, 1.0, 20.0), "recompiles": 2}, started(["compile"], 10.0, 1.0, 4.0), started(["compile", "tf32"], 99.0, 1.0)]
    plain, tuned = of_compile(trials)
    plain, tuned = starts.step_time(60.0, plain), starts.step_time(50.0, tuned)
    assert plain == StepTime(60.0, startup_s=4.0, warmup_s=1000.0) and words.start(plain) == "start-up 4.0 s, warm-up 16 min 40 s"
    assert tuned == StepTime(50.0, startup_s=9.0, warmup_s=1000.0, compile_s=20.0, recompiles=2)
    assert words.start(tuned).endswith("compiling (in these, with cold caches) 20 s, 2 recompilations")
    nothing = starts.step_time(None, [])
    assert nothing == StepTime() and words.start(nothing) == ""


def test_the_reason_of_what_cannot_be_verified_does_not_say_so_again():
    refused = SimpleNamespace(refusal="cannot verify: it does not repeat itself", error=None)
    assert summary._verified(refused) == (None, "it does not repeat itself")
