"""What the search makes of races that noise spoiled."""

from __future__ import annotations

import math
import time
import types
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from test_memory_limit import World, search, technique

from saturate.measure import race
from saturate.records.analysis import Finding
from saturate.records.facts import Facts
from saturate.study import combining, confirming, tune
from saturate.study.candidates import names
from saturate.study.fates import UNCHECKED, leads
from saturate.study.race_pair import KernelWork
from saturate.study.racing import SCREEN, Result
from saturate.study.standing import CannotVerify
from saturate.study.verification import Verified
from saturate.techniques._api import Eligible, Ineligible
from saturate.trial.outcome import Outcome
from saturate.trial.process import TrialEnded

CLOCK = [0.0]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What searches read instead of the machine's time, of which much may pass between two lines."""
    def now() -> float:
        CLOCK[0] += 1e-6
        return CLOCK[0]

    monkeypatch.setattr(time, "monotonic", now)


@dataclass
class Noisy(World):
    """A world in which screening sees `misread`, with an interval that holds everything; longer races see what is."""

    misread: dict[str, float] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    low: float = -0.3

    def run(self, question: str, a: Any, b: Any, limits: Any, *rest: Any, **more: Any) -> Result:
        self.asked.append(question)
        result = super().run(question, a, b, limits, *rest, **more)
        gain = self.misread.get(b[-1].id) if b and limits is SCREEN else None
        if gain is None:
            return result
        seen = types.SimpleNamespace(log_ratio=math.log1p(gain), low=self.low, high=0.3, speedup=1 + gain, speedup_ci=(0.74, 1.35))
        return Result(types.SimpleNamespace(verdict="inconclusive", estimate=seen), result.pairs, result.a_ms, result.b_ms, result.record)    # type: ignore[arg-type]


FAST, SLOW = technique("fast"), technique("slow")


def test_what_screening_misread_is_looked_at_again() -> None:
    world = Noisy({"fast": (0.8, 0.0), "slow": (1.2, 0.0)}, None, misread={"fast": -0.03, "slow": -0.01})
    walk = search(world, FAST, SLOW)
    walk.run()
    assert [c.id for c in walk.kept] == ["fast"]
    assert (walk.fates["fast"].fate, walk.fates["slow"].fate) == ("kept", "slower")


def test_what_is_promising_is_raced_before_other_variants_of_what_is_hopeless() -> None:
    """A gain of 7 % was left undecided, in the time of three variants of loader workers and threads that were slower still."""
    world = Noisy({"one": (1.3, 0.0), "one level=2": (0.7, 0.0), "fast": (0.9, 0.0)}, None, misread={"fast": 0.07})
    walk = search(world, technique("one", levels=(1, 2)), FAST)
    walk.run()
    assert world.asked.index("add fast to baseline") < world.asked.index("screen one level=2 with fast")
    assert [c.label() for c in walk.kept] == ["fast", "one level=2"], "where time is left, they have their turn as before"


@pytest.mark.parametrize("case", [{}, {"named": False}, {"slow_start": True}, {"pairs": 2}])
def test_a_pair_that_contradicts_the_finding_is_raced_once_more(case: dict[str, Any]) -> None:
    """Processes of one program differed by a third: the only pair of what the diagnosis names had a slow one, and it was "slower"."""
    world = Noisy({"small": (0.9, 0.0)}, None)
    module = technique("small")
    module.TECHNIQUE = replace(module.TECHNIQUE, slow_start=case.get("slow_start", False))
    walk = search(world, module)
    walk.findings = (promise(1.3),) if case.get("named", True) else ()
    raced = world.run

    def run(question: str, *rest: Any, **more: Any) -> Result:
        found = raced(question, *rest, **more)
        if not question.startswith("screen"):
            return found
        seen = types.SimpleNamespace(log_ratio=math.log(0.75), low=-0.5, high=-0.1, speedup=0.75, speedup_ci=(0.6, 0.9))
        return replace(found, decision=types.SimpleNamespace(verdict="slower", estimate=seen), pairs=[[-0.3]] * case.get("pairs", 1))  # type: ignore

    world.run = run     # type: ignore[method-assign]
    walk.run()
    assert [c.id for c in walk.kept] == ([] if case else ["small"])
    assert walk.fates["small"].fate == ("slower" if case else "kept")


def test_without_time_it_stays_undecided() -> None:
    world = Noisy({"fast": (0.8, 0.0)}, None, misread={"fast": -0.03})
    walk = search(world, FAST)
    walk._screen(walk.eligible())
    walk.deadline = 0.0
    walk._look_again()
    assert (walk.kept, walk.fates["fast"].fate) == ((), "inconclusive")


@pytest.mark.parametrize(("left_s", "kept"), [(30.0, ["fast"]), (15.0, [])])
def test_where_nothing_is_kept_the_time_of_the_final_race_is_for_what_is_undecided(left_s: float, kept: list[str]) -> None:
    """A quarter of the budget was left unused by studies that ended undecided. Two pairs of 10 s must still end in time."""
    world = Noisy({"fast": (0.8, 0.0), "also": (0.7, 0.0)}, None, misread={"fast": -0.03, "also": -0.03})
    walk = search(world, FAST, technique("also"))
    walk._screen(walk.eligible())
    walk.deadline, walk.end = time.monotonic() - 1.0, time.monotonic() + left_s
    walk._look_again()
    # What is kept must be confirmed: there is no time for another.
    assert [c.id for c in walk.kept] == kept
    assert [walk.fates[i].fate for i in ("fast", "also")] == [("kept" if kept else "inconclusive"), "inconclusive"]


def late_in(world: World, *modules: types.ModuleType, left_s: float, turn_s: float = 0.0) -> Any:
    """A search that begins behind its deadline."""
    walk = search(world, *modules)
    walk.turn_s, walk.deadline, walk.end = turn_s, time.monotonic() - 1.0, time.monotonic() + left_s
    return walk


@pytest.mark.parametrize(("left_s", "turn_s", "tried"), [(30.0, 20.0, True), (15.0, 20.0, False), (7.0, 0.0, True), (3.0, 0.0, False)])
def test_as_long_as_nothing_is_kept_what_had_no_turn_has_one_if_it_ends_in_time(left_s: float, turn_s: float, tried: bool) -> None:
    """Seen: studies that ended with nothing tried, and 40 s of three minutes left. The first turn takes half of a pair of 10 s."""
    world, ends = Noisy({"small": (1.0, 0.0)}, None), []
    plain = world.run
    world.run = lambda *given, **more: (ends.append(given[4]), plain(*given, **more))[1]       # type: ignore[method-assign]
    walk = late_in(world, SMALL, left_s=left_s, turn_s=turn_s)
    walk._screen(walk.eligible())
    assert world.asked == ["screen small"] * tried and walk.fates["small"].fate == ("no_difference" if tried else "not_tried")
    assert ends == [walk.end] * tried, "its rounds have the same time"


def test_behind_the_deadline_turns_are_shared_and_grouped_as_before_it() -> None:
    world, ends = Noisy({"one": (1.0, 0.0), "two": (1.0, 0.0)}, None), []
    plain = world.run
    world.run = lambda *given, **more: (ends.append((world.ends, given[4])), plain(*given, **more))[1]      # type: ignore[method-assign]
    walk = late_in(world, likely("one"), likely("two"), left_s=130.0, turn_s=30.0)
    began = time.monotonic()
    walk._screen(walk.eligible())
    assert world.asked == ["screen one", "screen two"] and began + 40.0 < ends[0][0] < began + 60.0 < ends[1][0], "the first has half of the time"
    world.asked.clear()
    walk = late_in(world, likely("one"), likely("two"), left_s=2500.0, turn_s=1000.0)
    walk._screen(walk.eligible())
    assert world.asked[0] == "add one + two to baseline" and ends[2][1] == walk.end, "there is time for one turn, and for its rounds"


def test_once_something_is_kept_the_time_behind_the_deadline_is_for_the_final_race() -> None:
    world = Noisy({"fast": (0.6, 0.0), "also": (0.7, 0.0)}, None)
    walk = late_in(world, FAST, technique("also"), left_s=60.0)
    walk.run()
    assert [c.id for c in walk.kept] == ["fast"] and walk.fates["also"].fate == "not_tried"


@pytest.mark.parametrize(("starts_within_s", "tried", "fate"), [(100.0, 2, "kept"), (1000.0, 2, "inconclusive"), (1.0, 1, "kept")])
def test_what_compiles_for_long_leaves_time_for_the_others_and_has_a_second_turn(starts_within_s: float, tried: int, fate: str) -> None:
    """Seen: of a budget of three minutes, one technique took four and a half, and five others had no turn."""
    class Compiling(Noisy):
        def run(self, question: str, a: Any, b: Any, *rest: Any, **more: Any) -> Result:
            if any(c.id == "slow" for c in b) and self.ends - time.monotonic() < starts_within_s:
                self.asked.append(question)
                ended = TrialEnded(Outcome("not_in_time", "it compiles"))
                ended.side = "b"
                raise ended
            return super().run(question, a, b, *rest, **more)

    world = Compiling({"slow": (0.8, 0.0), "fast": (0.7, 0.0), "also": (1.0, 0.0)}, None)
    walk = search(world, technique("slow"), technique("fast"), technique("also"))
    walk.deadline, world.ends = time.monotonic() + 130.0, time.monotonic() + 150.0
    walk.run()
    turns = [question.split()[1] for question in world.asked if question.startswith("screen")]
    assert turns.count("slow") == tried and turns[:2] == ["slow", "fast"]
    assert (walk.fates["slow"].fate, walk.fates["fast"].fate) == (fate, "kept")
    assert ("it compiles" in walk.fates["slow"].reason) == (fate != "kept") and world.ends > walk.deadline


def test_the_last_that_waits_has_all_the_time_that_is_left() -> None:
    world = Noisy({"only": (0.8, 0.0)}, None)
    walk = search(world, technique("only"))
    ends, walk.deadline = [], time.monotonic() + 100.0
    world.ends = walk.deadline + 20.0
    plain = walk._best_of
    walk._best_of = lambda variants, best: (ends.append(world.ends), plain(variants, best))[1]       # type: ignore[method-assign]
    walk.run()
    assert ends[0] == world.ends


def test_what_is_promising_has_its_race_though_screening_took_its_time() -> None:
    world = Noisy({"fast": (0.8, 0.0)}, None, misread={"fast": 0.05})
    walk = search(world, FAST)
    promising = walk._screen(walk.eligible())
    walk._screen = lambda eligible: promising       # type: ignore[method-assign]
    walk.deadline, walk.end = time.monotonic() - 1.0, time.monotonic() + 60.0
    walk.run()
    assert [c.id for c in walk.kept] == ["fast"]


def test_what_does_not_verify_is_not_tried_twice() -> None:
    world = Noisy({"fast": (0.8, 0.0)}, None, misread={"fast": -0.03}, wrong=frozenset({"fast"}))
    walk = search(world, FAST)
    walk.run()
    assert walk.kept == () and walk.fates["fast"].fate == "rejected_numerics"
    assert sum("fast" in started for started in world.started) == 2      # screened, and looked at once more


def test_where_nothing_can_be_compared_the_search_ends() -> None:
    world = Noisy({"fast": (0.5, 0.0), "also": (0.6, 0.0)}, None)
    world.refusal = "it does not repeat itself"
    world.verify = lambda techniques: Verified(None, world.refusal)       # type: ignore[method-assign]
    walk = search(world, FAST, technique("also"))
    with pytest.raises(CannotVerify, match="it does not repeat itself"):
        walk.run()
    assert walk.kept == () and "also" not in "".join(world.started)
    assert (walk.fates["fast"].fate, walk.fates["fast"].reason) == ("inconclusive", "cannot verify: it does not repeat itself")


def test_what_cannot_be_told_of_one_is_asked_of_the_others() -> None:
    """A training that amplifies the rounding of a shorter format says nothing of it, and all of what keeps every bit."""
    world = Noisy({"fast": (0.5, 0.0), "also": (0.6, 0.0)}, None)
    plain = world.verify
    world.verify = lambda techniques: (     # type: ignore[method-assign]
        Verified(None, "it amplifies one rounding") if any(c.id == "fast" for c in techniques) else plain(techniques))
    walk = search(world, FAST, technique("also"))
    walk.run()
    assert [c.id for c in walk.kept] == ["also"] and not any(question.startswith("look again") for question in world.asked)
    assert (walk.fates["fast"].fate, walk.fates["fast"].reason) == ("inconclusive", "cannot verify: it amplifies one rounding")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`measured(found)`: the study whose search `found` is, and what was said and done in it."""
    def measure(found: Any, starved: str = "") -> tuple[Any, list[str]]:
        done: list[str] = []
        racer = types.SimpleNamespace(mode="alternate", drop_base=lambda: done.append("drop"))
        for name, stub in {"Racer": racer, "Verifier": types.SimpleNamespace(), "Search": found, "_is_measurable": True, "_fit": None}.items():
            monkeypatch.setattr(tune, name, lambda *arguments, stub=stub, **named: stub)
        monkeypatch.setattr(confirming, "confirm", lambda *arguments: done.append("last race"))
        for name in ("establish", "race_mode", "at_once"):
            monkeypatch.setattr(tune.baseline, name, lambda *arguments: True)
        request = types.SimpleNamespace(budget_s=60.0, threshold=0.02, race_mode="auto", only=None, skip=frozenset(), allow_convergence=False)
        store = types.SimpleNamespace(phases=lambda: [], add_seconds=lambda phase, seconds: None)
        study = types.SimpleNamespace(request=request, store=store, started=0.0, facts=Facts(device="cpu"), findings=[], registry={}, on_end=None,
                                      starved=starved, aa=None, refusal=None, say=done.append)
        bench = types.SimpleNamespace(pace=None, warm_ups=[], peaks=types.SimpleNamespace(too_much=lambda techniques: ""))
        tune._measure(study, bench)         # type: ignore[arg-type]
        return study, done

    return measure


def test_a_study_in_which_nothing_can_be_compared_says_why(measured: Any) -> None:
    def refuses() -> None:
        raise CannotVerify("it does not repeat itself")

    study, done = measured(types.SimpleNamespace(kept=("fast",), base=(), run=refuses))
    assert study.refusal == "cannot verify: it does not repeat itself" == done[-1]


@pytest.mark.parametrize(("starved", "base", "kept", "raced"), [
    ("", (), ("fast",), True), ("", (), (), False),
    ("out of memory", ("needed",), ("needed", "fast"), True),
    ("out of memory", ("needed",), ("needed",), False),         # it would be raced against itself
])
def test_what_was_added_has_a_last_race_and_nothing_stands_frozen_beside_it(
        starved: str, base: tuple[str, ...], kept: tuple[str, ...], raced: bool, measured: Any) -> None:
    _, done = measured(types.SimpleNamespace(kept=kept, base=base, run=lambda: None), starved)
    assert done[done.index("search:") + 1:] == ["drop", *["last race"] * raced]


def test_allow_is_only_named_where_it_would_change_something() -> None:
    """One that is never eligible was said to need --allow, and with it to be put into a recipe by hand."""
    other, never = technique("other"), technique("never")
    for module in (other, never):
        module.TECHNIQUE = replace(module.TECHNIQUE, numerics="convergence")
    never.eligible = lambda facts: Ineligible("put it into a recipe by hand")
    world = World({"other": (0.9, 0.0)}, None)
    walk = search(world, other, never)
    assert walk.eligible() == []
    assert (walk.fates["never"].fate, walk.fates["never"].reason) == ("not_applicable", "put it into a recipe by hand")
    assert walk.fates["other"].fate == "not_tried" and "--allow convergence" in walk.fates["other"].reason
    walk = search(world, other, never)
    walk.allow_convergence = True
    assert [group[0].id for group in walk.eligible()] == ["other"]


def test_a_technique_that_cannot_say_whether_it_applies_or_can_give_nothing_is_not_tried() -> None:
    broken, little = technique("broken"), technique("little")
    broken.eligible = lambda facts: {}["torch"]
    little.bound = lambda facts: 0.009
    walk = search(World({"fast": (0.9, 0.0)}, None), broken, little, FAST)
    assert [group[0].id for group in walk.eligible()] == ["fast"]
    assert walk.fates["broken"].fate == "failed" and "KeyError" in walk.fates["broken"].reason
    assert (walk.fates["little"].fate, walk.fates["little"].reason) == ("not_applicable", "could remove at most 0.9 % of a step")


def test_what_is_certain_joins_at_once_and_the_rest_is_screened_on_top_of_it() -> None:
    world = Noisy({"fast": (0.6, 0.0), "slow": (0.9, 0.0)}, None)
    walk = search(world, FAST, SLOW)
    walk.run()
    assert [c.id for c in walk.kept] == ["fast", "slow"]
    assert world.started.index("fast + slow") < world.started.index("slow"), "only the ablation runs it alone"
    assert world.asked == ["screen fast", "screen slow with fast", "without fast"], "what was just raced is not raced again"


def test_a_certain_one_that_does_not_verify_is_not_stood_on() -> None:
    world = World({"fast": (0.6, 0.0), "slow": (0.8, 0.0)}, None, wrong=frozenset({"fast"}))
    walk = search(world, FAST, SLOW)
    walk.run()
    assert [c.id for c in walk.kept] == ["slow"] and walk.fates["fast"].fate == "rejected_numerics"


def read(gain: float, low: float, high: float) -> Any:
    return types.SimpleNamespace(gain=gain, gain_ci=(low, high))


def test_a_later_variant_must_lead_beyond_what_readings_scatter() -> None:
    two_workers, one = read(0.093, 0.030, 0.160), read(0.117, 0.020, 0.223)
    assert not leads(one, two_workers), "a tie goes to the one that was thought better"
    assert leads(read(0.25, 0.2, 0.3), two_workers) and not leads(read(0.05, 0.0, 0.1), two_workers)
    assert leads(read(0.16, 0.045, 0.25), two_workers) and not leads(read(0.135, 0.02, 0.223), two_workers), "one standard error is 5.5 %"
    assert leads(types.SimpleNamespace(gain=0.1, gain_ci=None), types.SimpleNamespace(gain=0.09, gain_ci=None))


def test_the_first_of_two_equal_variants_is_kept() -> None:
    for faster, kept in ((1.0, 1), (0.8, 2)):
        several = technique("several", levels=(1, 2))
        world = World({"several": (0.7, 0.0), "several level=2": (0.7 * faster, 0.0)}, None)
        walk = search(world, several)
        walk.run()
        assert [candidate.options.level for candidate in walk.kept] == [kept], world.started


@dataclass
class Together(Noisy):
    """A world in which a pair takes this share of the time that its two would take apart."""

    factor: float = 1.0

    def numbers(self, techniques: Any) -> tuple[float, float]:
        need, step = super().numbers(techniques)
        return need, step * (self.factor if {"small", "warm"} <= {c.id for c in techniques} else 1.0)


SMALL, WARM, OTHER = technique("small"), technique("warm"), technique("other")
for module in (WARM, OTHER):
    module.TECHNIQUE = replace(module.TECHNIQUE, stage="environment")
    module.environment = lambda options: {}


def test_a_combination_that_one_pair_leaves_no_doubt_about_is_not_raced_again() -> None:
    world = Together({"small": (1.0, 0.0), "warm": (0.95, 0.0)}, None, factor=0.95)
    walk = search(world, SMALL, WARM)
    walk.run()
    assert [c.id for c in walk.kept] == ["warm", "small"]
    assert [question for question in world.asked if question.startswith("add ")] == ["add small to warm"]


def test_what_gives_nothing_beside_the_kept_set_either_has_one_pair_only() -> None:
    world = Noisy({"slow": (1.0, 0.0), "fast": (0.6, 0.0)}, None)
    walk = search(world, SLOW, FAST)
    walk.run()
    assert [c.id for c in walk.kept] == ["fast"] and world.asked.count("add slow to fast") == 1


def test_behind_the_deadline_there_is_time_as_long_as_only_what_is_needed_to_fit_is_kept() -> None:
    walk = search(World({}, None), FAST, SLOW)
    fast, slow = (variants[0] for variants in walk.eligible())
    walk.deadline, walk.end, walk.base = 10.0, 50.0, (slow,)
    for walk.kept, until in (((), 10.0), ((slow,), 45.0), ((slow, fast), 10.0)):
        assert walk.until(5.0) == until


def promise(bound: float | None) -> Finding:
    return Finding(id="x", title="", reason="", evidence=[], bound=bound, confidence="high", techniques=["small"])


def pairing(factor: float, promised: float | None = 1.8, wrong: frozenset[str] = frozenset()) -> Any:
    world = Together({"small": (1.0, 0.0), "warm": (0.99, 0.0), "other": (0.995, 0.0)}, None, wrong=wrong, factor=factor)
    walk = search(world, SMALL, WARM, OTHER)
    walk.findings = (promise(promised),)
    walk.run()
    return walk, world


def test_what_was_promised_and_not_seen_is_tried_with_what_changes_where_it_runs() -> None:
    walk, world = pairing(0.75)
    assert [c.id for c in walk.kept] == ["warm", "small"] and "screen small and other with baseline" not in world.asked
    assert {identity: fate.fate for identity, fate in walk.fates.items()} == {"small": "kept", "warm": "kept", "other": "no_difference"}
    assert walk.fates["small"].gain == pytest.approx(1 / 0.75 - 1, abs=0.02), "what it gives beside the other, not alone"
    assert "in the final set" in walk.fates["warm"].reason, "it has earned its place beside the other"
    assert [[candidate.id for candidate in added] for added, _ in walk.stairs] == [["warm"], ["small"]], "the report shows them in this order"


@pytest.mark.parametrize("case", [{"factor": 0.97}, {"factor": 0.75, "promised": 1.2}, {"factor": 0.75, "promised": None},
                                  {"factor": 0.75, "wrong": frozenset({"small"})}])
def test_a_pair_joins_for_a_large_gain_that_was_promised_and_verifies(case: dict[str, Any]) -> None:
    walk, world = pairing(**case)
    assert walk.kept == ()
    assert ("screen small and warm with baseline" in world.asked) == (case.get("promised", 1.8) == 1.8)


@pytest.mark.parametrize(("warm", "factor"), [(1.08, 0.85), (0.93, 0.97)])
def test_a_pair_joins_where_both_give_much_together_and_the_promised_one_most_of_it(warm: float, factor: float) -> None:
    """One takes back what the other costs; the other gives it alone."""
    walk = search(Together({"small": (1.0, 0.0), "warm": (warm, 0.0)}, None, factor=factor), SMALL, WARM)
    walk.findings = (promise(1.8),)
    walk._screen(walk.eligible())
    assert not combining.try_pair(walk, walk.fates["small"].candidate, walk.fates["warm"].candidate)
    assert "small" not in {c.id for c in walk.kept}


@pytest.mark.parametrize("change", [{"deadline": 0.0}, {"verified": {"warm"}}], ids=["behind the deadline", "with what was judged by itself"])
def test_no_pair_is_begun_in_vain(change: dict[str, Any]) -> None:
    world = Together({"small": (1.0, 0.0), "warm": (0.99, 0.0)}, None, factor=0.75)
    walk = search(world, SMALL, WARM)
    walk.findings = (promise(1.8),)
    walk._screen(walk.eligible())
    vars(walk).update(change)
    combining.pair_up(walk)
    assert not any(" and " in question for question in world.asked)


@pytest.mark.parametrize("ended", [False, True])
def test_a_pair_that_does_not_verify_blames_neither_of_its_members(ended: bool) -> None:
    """Its partner changes the training, and was never verified by itself: the one that was promised a gain was rejected for it."""
    world = Together({"small": (1.0, 0.0), "warm": (0.99, 0.0)}, None, wrong=frozenset({"warm"}), factor=0.75)
    world.may_be_crowded = lambda ended: False      # type: ignore[attr-defined]
    walk = search(world, SMALL, WARM)
    walk.findings = (promise(1.8),)
    known = world.verify

    def verify(techniques: Any) -> Verified:
        walk.deadline = walk.end = -math.inf        # there is no time for another turn
        if ended:
            raise TrialEnded(Outcome("crashed", "warm deviates"))
        return known(techniques)

    world.verify = verify           # type: ignore[method-assign]
    walk.run()
    fate = walk.fates["small"]
    assert walk.kept == () and fate.fate == "no_difference" and fate.gain == pytest.approx(0.0, abs=0.02), "what it gave alone"
    assert "with warm" in fate.reason and "warm deviates" in fate.reason and "small" not in walk.verified


def test_what_seems_to_give_much_by_itself_has_its_own_race_first() -> None:
    world = Noisy({"small": (0.8, 0.0), "warm": (0.99, 0.0)}, None, misread={"small": 0.2})
    walk = search(world, SMALL, WARM)
    walk.findings = (promise(1.8),)
    walk.run()
    assert [c.id for c in walk.kept] == ["small"]
    assert not any(" and " in question for question in world.asked)


def test_what_is_certain_joins_before_what_changes_where_it_runs_is_screened() -> None:
    """A short budget went into threads, on top of nothing; the second of two certain gains was never added."""
    world = Noisy({"fast": (0.94, 0.0), "slow": (0.96, 0.0), "warm": (0.99, 0.0), "other": (1.1, 0.0)}, None)
    walk = search(world, technique("other"), WARM, SLOW, FAST)
    walk.run()
    assert world.asked.index("add slow to fast") < world.asked.index("screen warm with fast + slow")
    assert world.asked.index("screen other") < world.asked.index("add slow to fast"), "all that changes the work has its turn first"


@pytest.mark.parametrize("slow_start", [True, False])
def test_what_is_certain_joins_before_a_slow_start_that_nothing_names(slow_start: bool) -> None:
    """Seen: with 133 s, a compilation that gave nothing had its turn first, and the second of two certain gains was never added."""
    world = Noisy({"fast": (0.94, 0.0), "slow": (0.96, 0.0), "compiled": (0.99, 0.0)}, None)
    compiled = technique("compiled")
    compiled.TECHNIQUE = replace(compiled.TECHNIQUE, slow_start=slow_start)
    search(world, SLOW, FAST, compiled).run()
    assert ("screen compiled with fast + slow" in world.asked) == slow_start, world.asked


@pytest.mark.parametrize(("low", "promised"), [(0.01, False), (0.01, True), (-0.01, False)])
def test_what_leans_has_its_race_before_a_slow_start_that_nothing_names(low: float, promised: bool) -> None:
    """Seen: +6.0 % [+1.9, +10.2] of what a finding promised much was left at that, while a compilation that nothing names took the time."""
    world = Noisy({"fast": (0.94, 0.0), "small": (0.94, 0.0), "compiled": (0.99, 0.0)}, None, misread={"small": 0.06}, low=low)
    compiled = technique("compiled")
    compiled.TECHNIQUE = replace(compiled.TECHNIQUE, slow_start=True)
    walk = search(world, SMALL, FAST, compiled)
    walk.findings = (promise(1.8),) if promised else ()
    walk.run()
    first = "screen compiled with fast + small" if low > 0 else "screen compiled with fast"
    assert first in world.asked and {"fast", "small"} <= {c.id for c in walk.kept}, world.asked


def test_a_promised_technique_with_a_small_but_certain_gain_joins_and_its_partner_is_seen_on_top() -> None:
    """Seen: bf16 gave +8.5 % [+5.4, +11.7], was kept for a pair that the budget had no time for, and was left out."""
    world = Together({"small": (0.95, 0.0), "warm": (0.99, 0.0), "other": (0.995, 0.0)}, None, factor=0.75)
    walk = search(world, SMALL, WARM, OTHER)
    walk.findings = (promise(1.8),)
    walk.run()
    assert "screen warm with small" in world.asked and {c.id for c in walk.kept} == {"small", "warm"}


def likely(name: str, numerics: str = "exact", bound: float | None = 0.3) -> types.ModuleType:
    module = technique(name)
    module.TECHNIQUE = replace(module.TECHNIQUE, numerics=numerics)
    module.bound = lambda facts: bound
    return module


def in_a_hurry(world: World, *modules: types.ModuleType, turns: float = 1.5) -> Any:
    """A search with time for so many turns of a technique."""
    walk = search(world, *modules)
    walk.turn_s, walk.deadline = 1000.0, time.monotonic() + 1000.0 * turns
    walk.run()
    return walk


def test_where_there_is_time_for_one_race_more_all_that_is_left_is_raced_at_once() -> None:
    """Three techniques, and a budget for one of them: what gave 8 % together was never seen."""
    effects = {"one": (0.97, 0.0), "two": (0.96, 0.0), "narrow": (0.9, 0.0), "unknown": (1.4, 0.0)}
    world = World(effects, None)
    walk = in_a_hurry(world, likely("one"), likely("two"), likely("narrow", "precision"), likely("unknown", bound=None))
    assert world.started[0] == "" and world.started[1] == "one + two", "neither what changes numbers nor what nothing speaks for"
    assert {"one", "two"} <= {c.id for c in walk.kept}
    assert [c.id for c in walk.stairs[0][0]] == ["one", "two"]
    assert "in the final set" in walk.fates["one"].reason, "with time left, each of them has to earn its place"


def test_what_was_judged_by_itself_is_not_asked_about_in_a_group() -> None:
    world = World({"one": (0.97, 0.0), "two": (0.96, 0.0), "three": (0.95, 0.0)}, None)
    walk = search(world, *map(likely, world.effects))
    walk.verified.add("one")
    combining.race_rest(walk, [variants[0] for variants in walk.eligible()])
    assert world.started[1] == "three + two"


def test_what_seemed_slower_is_not_raced_with_the_rest() -> None:
    """It is as undecided as the others, and would take from what they give."""
    world = Noisy({"one": (0.97, 0.0), "two": (0.96, 0.0), "slow": (1.05, 0.0)}, None, misread={"one": 0.03, "two": 0.04, "slow": -0.03})
    walk = search(world, *map(likely, world.effects))
    walk._screen(walk.eligible())
    combining.race_rest(walk, [])
    assert world.asked[-1] == "add one + two to baseline"


def test_what_several_gave_together_is_no_gain_of_one() -> None:
    """Both had what they gave together for their own gain, where the time did not do to drop either again."""
    world = World({"one": (0.97, 0.0), "two": (0.96, 0.0)}, None)
    walk = search(world, likely("one"), likely("two"))
    walk.turn_s, walk.deadline = 1000.0, time.monotonic() + 1500.0
    known = world.verify

    def verify(techniques: Any) -> Verified:
        walk.deadline = walk.end = -math.inf
        return known(techniques)

    world.verify = verify           # type: ignore[method-assign]
    walk.run()
    assert {c.id for c in walk.kept} == {"one", "two"}
    for name in ("one", "two"):
        fate = walk.fates[name]
        assert (fate.fate, fate.gain, fate.gain_ci) == ("kept", None, None) and "for one + two together" in fate.reason


def test_what_is_certain_joins_before_the_rest_is_raced_at_once() -> None:
    world = World({"sure": (0.95, 0.0), "one": (0.97, 0.0), "two": (0.96, 0.0)}, None)
    walk = search(world, likely("sure", "precision", 0.5), likely("one"), likely("two"))
    screen = walk._screen_one

    def takes_long(*arguments: Any) -> bool:
        found = screen(*arguments)
        walk.turn_s, walk.deadline = 1000.0, time.monotonic() + 1500.0
        return found

    walk._screen_one = takes_long       # type: ignore[method-assign]
    walk.run()
    assert [[c.id for c in added] for added, _ in walk.stairs] == [["sure"], ["one", "two"]]


@pytest.mark.parametrize(("slow_start", "named"), [(True, False), (True, True), (False, False)])
def test_before_a_slow_start_that_nothing_names_what_others_have_shown_is_made_sure_of(slow_start: bool, named: bool) -> None:
    """Seen: a compilation that gave nothing took 40 s of 150, and what had two or three turns' worth of promise had no second one."""
    world = Noisy({"sure": (0.95, 0.0), "maybe": (0.95, 0.0), "slow": (0.99, 0.0)}, None, misread={"maybe": 0.03})
    slow = technique("slow")
    slow.TECHNIQUE = replace(slow.TECHNIQUE, slow_start=slow_start)
    walk = search(world, likely("sure", "precision", 0.5), likely("maybe"), slow)
    walk.findings = (Finding(id="x", title="", reason="", evidence=[], bound=1.01, confidence="high", techniques=["slow"]),) if named else ()
    walk.verified.add("earlier")        # else there must be time for the first verification as well
    screen, left = walk._screen_one, iter([2.5, 1.5, 0.5])

    def takes_long(*arguments: Any) -> bool:
        found = screen(*arguments)
        walk.turn_s, walk.deadline = 1000.0, time.monotonic() + 1000.0 * next(left)
        return found

    walk._screen_one = takes_long       # type: ignore[method-assign]
    walk._screen(walk.eligible())
    made_sure = slow_start and not named
    assert [[c.id for c in added] for added, _ in walk.stairs] == ([["sure"], ["maybe"]] if made_sure else [])
    assert ("add maybe to sure" in world.asked) == made_sure
    assert not any("slow" in question for question in world.asked[:2]) or named


def test_a_group_is_not_raced_while_there_is_time_for_each() -> None:
    world = Noisy({"one": (0.97, 0.0), "two": (0.96, 0.0)}, None)
    in_a_hurry(world, likely("one"), likely("two"), turns=3.0)
    assert not any("one + two" in question or "two + one" in question for question in world.asked[:2])


def test_a_member_of_a_group_that_gives_nothing_is_dropped_where_time_is_left() -> None:
    world = World({"one": (0.9, 0.0), "two": (1.0, 0.0)}, None)
    walk = in_a_hurry(world, likely("one"), likely("two"))
    assert [c.id for c in walk.kept] == ["one"] and walk.fates["two"].fate == "no_difference"


@pytest.mark.parametrize("case", [{"wrong": frozenset({"two"})}, {"fails": {"two": "crashed"}}, {}])
def test_a_group_that_fails_blames_none_of_its_members(case: dict[str, Any]) -> None:
    slow = not case
    world = World({"one": (1.05 if slow else 0.97, 0.0), "two": (0.96, 0.0)}, None, **case)
    walk = search(world, likely("one"), likely("two"))
    walk.turn_s, walk.deadline = 1000.0, time.monotonic() + 1500.0
    ended: list[float] = []

    def race(*arguments: Any, **more: Any) -> Any:
        result = type(walk).race(walk, *arguments, **more)
        walk.deadline = walk.end = -math.inf
        ended.append(1.0)
        return result

    walk.race = race        # type: ignore[method-assign]
    walk.run()
    assert walk.kept == () and len(ended) == 1
    for name in ("one", "two"):
        fate = walk.fates[name]
        assert fate.fate in ("inconclusive", "not_tried") and fate.gain is None, "what they gave together is no one's gain"
        assert ("deviates" if "wrong" in case else "crashed: for a test" if case else "-") in fate.reason and "one + two" in fate.reason


def test_a_group_that_crashes_in_verification_says_so() -> None:
    world = World({"one": (0.97, 0.0), "two": (0.96, 0.0)}, None)

    def crashes(techniques: Any) -> Verified:
        walk.deadline = -math.inf           # there is no time for a turn of each
        raise TrialEnded(Outcome("crashed", "in update 40"))

    world.verify = crashes          # type: ignore[method-assign]
    world.may_be_crowded = lambda ended: False      # type: ignore[attr-defined]
    said: list[str] = []
    walk = search(world, likely("one"), likely("two"))
    walk.say = said.append
    walk.turn_s, walk.deadline = 1000.0, time.monotonic() + 1500.0
    walk._screen(walk.eligible())
    assert any("one + two, in verification: crashed: in update 40" in line for line in said)
    assert walk.kept == () and "in verification: crashed: in update 40" in walk.fates["two"].reason


def test_a_resumed_study_groups_what_it_grouped_before() -> None:
    """Its earlier turns take no time then, so it was never short of it: the kept group was forgotten, and its recipe emptied."""
    effects = {"early": (1.1, 0.0), "one": (0.97, 0.0), "two": (0.96, 0.0)}
    modules = (likely("early", bound=0.5), likely("one"), likely("two"))
    walks = []
    world = Noisy(effects, None)
    for turn_s in (1000.0, 0.0):
        walk = search(world, *modules)
        screen = walk._screen_one

        def takes_long(*arguments: Any, walk: Any = walk, screen: Any = screen, turn_s: float = turn_s) -> bool:
            found = screen(*arguments)
            walk.turn_s, walk.deadline = turn_s, time.monotonic() + 1500.0
            return found

        walk._screen_one = takes_long       # type: ignore[method-assign]
        walk._screen(walk.eligible())
        walks.append((walk.kept, list(world.asked)))
        world.asked.clear()
    assert walks[0] == walks[1] and [c.id for c in walks[0][0]] == ["one", "two"]


def test_what_joined_in_a_group_is_not_screened_with_its_other_variants() -> None:
    """It was kept, and then said not to be applicable, for it was there already."""
    world = Noisy({"many": (0.97, 0.0), "many level=2": (0.5, 0.0), "one": (0.96, 0.0)}, None, misread={"many": 0.03})
    many = technique("many", levels=(1, 2))
    many.bound = lambda facts: 0.5
    walk = search(world, many, likely("one"))
    screen = walk._screen_one

    def takes_long(*arguments: Any) -> bool:
        found = screen(*arguments)
        walk.turn_s, walk.deadline = 1000.0, time.monotonic() + 500.0
        return found

    walk._screen_one = takes_long       # type: ignore[method-assign]
    walk._screen(walk.eligible())
    assert {c.label() for c in walk.kept} == {"many", "one"} and walk.fates["many"].fate == "kept"


def screened_late(world: World, *modules: types.ModuleType, turns: float) -> Any:
    """A search that has screened all, and has time for so many turns then."""
    walk = search(world, *modules)
    screen = walk._screen

    def takes_long(eligible: Any) -> Any:
        found = screen(eligible)
        walk.turn_s, walk.deadline = 1000.0, time.monotonic() + 1000.0 * turns
        return found

    walk._screen = takes_long       # type: ignore[method-assign]
    walk.run()
    return walk


@pytest.mark.parametrize(("turns", "together"), [(2.5, True), (3.5, False)])
def test_where_the_time_does_not_do_for_each_what_is_certain_is_added_at_once(turns: float, together: bool) -> None:
    """Two techniques were faster beyond doubt, one of them was kept, and the budget ended: 12 % slower than both."""
    world = Noisy({"one": (0.95, 0.0), "two": (0.93, 0.0), "none": (1.0, 0.0)}, None)
    walk = screened_late(world, technique("one"), technique("two"), technique("none"), turns=turns)
    assert [[c.id for c in added] for added, _ in walk.stairs] == ([["two", "one"]] if together else [["two"], ["one"]])
    assert {c.id for c in walk.kept} == {"one", "two"} and ("add two + one to baseline" in world.asked) == together
    assert ("in the final set" in walk.fates["one"].reason) == together, "with time left, each has to earn its place; the last one added had its race"


@pytest.mark.parametrize(("numerics", "gain", "low", "joins"), [
    ("exact", 0.06, 0.01, True), ("precision", 0.06, 0.01, False), ("exact", 0.06, -0.01, False),
    ("exact", 0.12, 0.01, False),       # it seems to give more than what is certain: nothing is there yet that it could join
])
def test_what_leans_to_faster_joins_what_is_certain_where_the_time_ends(numerics: str, gain: float, low: float, joins: bool) -> None:
    """One of two gains was certain, and the other +6 % [+1.7, +10.5]: the budget had time for one more race, and the certain one needed none."""
    world = Noisy({"sure": (0.93, 0.0), "leans": (0.94, 0.0)}, None, misread={"leans": gain}, low=low)
    walk = screened_late(world, technique("sure"), likely("leans", numerics), turns=2.5)
    together = [question for question in world.asked if question in ("add sure + leans to baseline", "add leans + sure to baseline")]
    assert together == ["add sure + leans to baseline"] * joins
    if joins:
        assert [[c.id for c in added] for added, _ in walk.stairs] == [["sure", "leans"]]


def test_what_leaned_to_faster_without_what_is_kept_now_does_not_join_at_once() -> None:
    world = Noisy({"leans": (0.94, 0.0), "large": (0.6, 0.0), "sure": (0.93, 0.0)}, None, misread={"leans": 0.06}, low=0.01)
    walk = screened_late(world, likely("leans"), technique("large"), technique("sure"), turns=2.5)
    assert walk.kept[0].id == "large" and not any("sure + leans" in question for question in world.asked)


@pytest.mark.parametrize("turns", [2.5, 3.5])
def test_before_the_last_turn_there_must_be_time_to_verify_what_is_certain(turns: float) -> None:
    """A compilation took the time in which the first gain would have been verified."""
    world = Noisy({"sure": (0.95, 0.0), "last": (0.99, 0.0)}, None)
    walk = search(world, technique("sure"), technique("last"))
    screen = walk._screen_one

    def takes_long(*arguments: Any) -> bool:
        found = screen(*arguments)
        walk.turn_s, walk.deadline = 1000.0, time.monotonic() + 1000.0 * turns
        return found

    walk._screen_one = takes_long       # type: ignore[method-assign]
    walk._screen(walk.eligible())
    assert ([c.id for c in walk.kept] == ["sure"]) == (turns < 3)


def test_of_what_is_added_at_once_only_one_has_a_resource() -> None:
    world = Noisy({"one": (0.95, 0.0), "two": (0.93, 0.0), "rival": (0.94, 0.0)}, None)
    walk = screened_late(world, technique("one"), technique("two", resource="it"), technique("rival", resource="it"), turns=1.5)
    assert [c.id for c in walk.stairs[0][0]] == ["two", "one"] and walk.fates["rival"].fate == "not_applicable"


@pytest.mark.parametrize("wrong", ["one", "two"])
def test_where_what_is_added_at_once_does_not_verify_the_best_is_tried_alone(wrong: str) -> None:
    world = Noisy({"one": (0.95, 0.0), "two": (0.93, 0.0)}, None, wrong=frozenset({wrong}))
    walk = screened_late(world, technique("one"), technique("two"), turns=2.5)
    other = {"one": "two", "two": "one"}[wrong]
    assert [c.id for c in walk.kept] == [other]
    assert (walk.fates[other].fate, walk.fates[wrong].fate) == ("kept", "rejected_numerics")


def test_what_gives_less_together_than_the_best_alone_is_not_added_at_once() -> None:
    world = Together({"small": (0.95, 0.0), "warm": (0.94, 0.0)}, None, factor=1.06)
    walk = screened_late(world, SMALL, technique("warm"), turns=2.5)
    assert "add warm + small to baseline" in world.asked and [c.id for c in walk.kept] == ["warm"]


def test_behind_the_deadline_what_is_certain_is_added_at_once_if_two_last_pairs_end_in_time() -> None:
    for left_s, kept in ((30.0, {"one", "two"}), (15.0, {"two"})):
        world = Noisy({"one": (0.95, 0.0), "two": (0.93, 0.0)}, None)
        walk = search(world, technique("one"), technique("two"))
        screen = walk._screen

        def late(eligible: Any, walk: Any = walk, screen: Any = screen, left_s: float = left_s) -> Any:
            found = screen(eligible)
            walk.turn_s, walk.deadline, walk.end = 20.0, time.monotonic() - 1.0, time.monotonic() + left_s
            return found

        walk._screen = late     # type: ignore[method-assign]
        walk.run()
        assert {c.id for c in walk.kept} == kept, "the best is certain, and is verified in any case"
        gains = [walk.fates[name].gain for name in ("one", "two")]
        assert gains == pytest.approx([1 / 0.95 - 1, 1 / 0.93 - 1]), "each its own, not what both gave"


def test_every_technique_has_a_turn_before_any_has_a_second() -> None:
    """Three variants of loader workers, all slower, took the time in which compile would have been found."""
    world = Noisy({"one": (1.2, 0.0), "one level=2": (1.2, 0.0), "one level=3": (0.7, 0.0), "other": (1.1, 0.0)}, None)
    walk = search(world, technique("one", levels=(1, 2, 3)), technique("other"))
    walk.run()
    screened = [question for question in world.asked if question.startswith("screen")]
    assert screened == ["screen one", "screen other", "screen one level=2", "screen one level=3"]
    assert [c.label() for c in walk.kept] == ["one level=3"], "a later variant that gives much is kept as before"


def test_variants_of_what_gives_much_are_compared_at_once() -> None:
    world = Noisy({"one": (0.7, 0.0), "one level=2": (0.5, 0.0), "other": (1.1, 0.0)}, None)
    walk = search(world, technique("one", levels=(1, 2)), technique("other"))
    walk.run()
    screened = [question for question in world.asked if question.startswith("screen")]
    assert [question.startswith("screen one") for question in screened] == [True, True, False]
    assert [c.label() for c in walk.kept] == ["one level=2"]


@pytest.mark.parametrize("crashes", [True, False])
def test_a_fallback_has_its_turn_at_once_and_only_where_the_first_variant_fails(crashes: bool) -> None:
    """Under autocast, a forward that scatters what it computed into a float32 tensor of its own raises."""
    one = technique("one", levels=(1, 2))
    one.TECHNIQUE = replace(one.TECHNIQUE, fallbacks=True)
    world = Noisy({"one": (0.9, 0.0), "one level=2": (0.7, 0.0), "other": (1.1, 0.0)}, None, fails={"one": "crashed"} if crashes else {})
    walk = search(world, one, technique("other"))
    walk.run()
    screened = [question for question in world.asked if question.startswith("screen")]
    assert [question.startswith("screen one") for question in screened] == ([True, True, False] if crashes else [True, False])
    assert [c.label() for c in walk.kept] == ["one level=2" if crashes else "one"] and walk.fates["one"].fate == "kept"


def test_what_is_not_surely_large_waits_for_the_others() -> None:
    world = Ending({"one": (0.87, 0.0), "other": (1.0, 0.0)}, None, reads={"screen one": (0.15, 0.03, 0.28, "faster")})
    walk = walked(world, technique("one"), technique("other"))
    assert [result.record.question for result in walk.results][:2] == ["screen one", "screen other"]
    assert [c.id for c in walk.kept] == ["one"]


def test_what_was_screened_is_kept_when_it_has_verified_and_not_before() -> None:
    """Should the time end in between, it is not in the recipe."""
    walk = search(World({"fast": (0.95, 0.0)}, None), FAST)
    walk._screen(walk.eligible())
    assert walk.screened["fast"].decision.verdict == "faster" and walk.kept == () and walk.fates["fast"].fate == "inconclusive"


def test_what_could_give_most_is_looked_at_again_first() -> None:
    reads = {"screen one": (0.0, -0.1, 0.1, "inconclusive"), "screen two": (0.0, -0.1, 0.3, "inconclusive")}
    walk = walked(Ending({"one": (1.0, 0.0), "two": (1.0, 0.0)}, None, reads=reads), technique("one"), technique("two"))
    assert [result.record.question for result in walk.results][2:] == ["look again at two with baseline", "look again at one with baseline"]


def test_nothing_stands_frozen_beside_what_is_added_and_verified() -> None:
    """The process that screening races share takes memory."""
    world = Noisy({"fast": (0.9, 0.0), "slow": (1.1, 0.0)}, None, misread={"fast": 0.05})
    world.drop_base = lambda: world.asked.append("drop")      # type: ignore[method-assign]
    walked(world, FAST, SLOW)
    assert world.asked[:4] == ["screen fast", "screen slow", "drop", "add fast to baseline"]


def test_a_turn_that_time_cut_short_says_nothing_of_how_long_turns_are() -> None:
    class Slow(Ending):
        def run(self, question: str, *rest: Any, **more: Any) -> Result:
            if question == "screen slow":
                CLOCK[0] += 1.0
            return super().run(question, *rest, **more)

    walk = search(Slow(TWO, None, endings={"screen slow": ("b", "not_in_time")}), SLOW, FAST)
    walk._screen(walk.eligible())
    assert 0 < walk.turn_s < 1.0


@dataclass
class Uneven(World):
    """Some processes of the baseline, those of the pairs in `slow`, take a quarter longer: the kernel gives them pages in each step.
    `steady` ends that."""

    slow: frozenset[int] = frozenset({1, 3})
    steadied: int = 0                   # races for it

    def run(self, question: str, a: Any, b: Any, limits: Any, deadline: float, share_base: bool = False, min_pairs: int = 1) -> Result:
        result = super().run(question, a, b, limits, deadline, share_base, min_pairs)
        if not question.startswith("steady with"):
            return result
        assert not share_base, "the shared process is in one state for ever"
        self.steadied += 1
        uneven = [number in self.slow for number in range(min_pairs)]
        pairs = [[(0.22 if slow else 0.0) + noise for noise in (0.01, -0.01, 0.02, -0.02, 0.0, 0.01)] for slow in uneven]
        work = [(KernelWork(1400.0 if slow else 1.0, 0.0), KernelWork(0.0, 0.0)) for slow in uneven]
        found = race.by_state(pairs, uneven) if len(set(uneven)) == 2 else race.estimate(pairs, 0.1)
        return Result(race.Decision("stop", race.verdict(found), found, "some were slow"), pairs, result.a_ms, result.b_ms, result.record, work)


def steadying() -> types.ModuleType:
    module: Any = technique("steady")
    module.eligible = lambda facts: Eligible("some processes only", steadies=True)
    return module


def test_what_makes_processes_alike_comes_first_and_the_rest_stands_on_it() -> None:
    """The mean over four pairs, of which two show all and two nothing, stayed undecided; so did everything raced without it."""
    world = Uneven({"steady": (0.9, 0.0), "fast": (0.8, 0.0)}, None)
    walk = search(world, FAST, steadying())
    walk.run()
    assert sorted(c.id for c in walk.kept) == ["fast", "steady"]
    assert "fast + steady" in world.started and world.started.index("fast + steady") < world.started.index("fast")
    assert sum(one.record.question.startswith("steady with") for one in walk.results) == 1, "one race, told once"


def test_what_may_make_processes_alike_leaves_the_others_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of four minutes went into four pairs that said nothing, and nothing else was tried."""
    monkeypatch.setattr("saturate.study.search.STEADYING", 0.0)
    world = Uneven({"steady": (1.0, 0.0), "fast": (0.8, 0.0)}, None, slow=frozenset())
    walk = search(world, FAST, steadying())
    walk.run()
    assert [c.id for c in walk.kept] == ["fast"]
    assert world.steadied == 1


@pytest.mark.parametrize(("slow", "wrong"), [(frozenset(), frozenset()), (frozenset({1, 3}), frozenset({"steady"}))])
def test_without_proof_it_is_screened_like_all_others_or_left_out(slow: frozenset[int], wrong: frozenset[str]) -> None:
    world = Uneven({"steady": (1.0, 0.0), "fast": (0.8, 0.0)}, None, wrong=wrong, slow=slow)
    walk = search(world, FAST, steadying())
    walk.run()
    assert world.steadied > 1
    assert [c.id for c in walk.kept] == ["fast"]
    assert walk.fates["steady"].fate == ("rejected_numerics" if wrong else "no_difference")


@pytest.mark.parametrize("left_s", [60.0, -1.0])
def test_what_was_raced_to_make_processes_alike_was_tried(left_s: float) -> None:
    """Seen: a minute of three went into it, and "the budget ended before anything could be tried"."""
    world = Uneven({"steady": (1.0, 0.0), "fast": (0.8, 0.0)}, None, slow=frozenset())
    walk = late_in(world, FAST, steadying(), left_s=left_s)
    race_it = walk.race

    def ends_it(*arguments: Any, **more: Any) -> Any:
        found = race_it(*arguments, **more)
        walk.end = -math.inf
        return found

    walk.race = ends_it         # type: ignore[method-assign]
    walk.run()
    fate = walk.fates["steady"]
    assert world.steadied == (left_s > 0) and walk.kept == () and walk.fates["fast"].fate == "not_tried"
    assert (fate.fate, fate.gain_ci is not None) == (("inconclusive", True) if left_s > 0 else ("not_tried", False))
    assert "could be more or less than counts" in fate.reason or left_s < 0


@dataclass
class Ending(World):
    """A world in which a process ends in some races: `endings` says by question which side, and how. `reads`: what a race sees, whatever is."""

    endings: dict[str, tuple[str, str]] = field(default_factory=dict)
    reads: dict[str, tuple[float, float, float, str]] = field(default_factory=dict)

    def run(self, question: str, *rest: Any, **more: Any) -> Result:
        if question in self.endings:
            side, kind = self.endings[question]
            ended = TrialEnded(Outcome(kind, "for a test"))
            ended.side = side
            raise ended
        result = super().run(question, *rest, **more)
        if question not in self.reads:
            return result
        gain, low, high, verdict = self.reads[question]
        seen = types.SimpleNamespace(log_ratio=math.log1p(gain), low=math.log1p(low), high=math.log1p(high))
        return replace(result, decision=types.SimpleNamespace(verdict=verdict, estimate=seen))     # type: ignore[arg-type]


TWO = {"fast": (0.6, 0.0), "slow": (0.8, 0.0)}


def walked(world: World, *modules: types.ModuleType) -> Any:
    walk = search(world, *modules)
    walk.run()
    return walk


def test_what_the_final_set_does_not_need_is_dropped() -> None:
    """Together they take the time of one: what `small` gave alone, `warm` gives as well."""
    world, verified = Together({"small": (0.8, 0.0), "warm": (0.75, 0.0)}, None, factor=1 / 0.8), []
    world.verify = lambda techniques: verified.append(techniques) or Verified(True, "identical", [names(techniques)])  # type: ignore
    walk, told = search(world, SMALL, WARM), []
    walk.on_kept = lambda walk: told.append(names(walk.kept))
    walk.run()
    assert [c.id for c in walk.kept] == ["warm"] and verified[-1] == walk.kept, "no set is kept that was not verified as it is"
    assert walk.curves == [names(one) for one in verified], "the report shows how each set trains"
    assert told[-1] == "warm", "the recipe is written anew"
    assert walk.fates["small"].fate == "no_difference" and walk.fates["small"].reason.endswith(", in the final set")


@pytest.mark.parametrize(("passed", "word"), [(False, "did not verify"), (None, "could not be verified")])
def test_what_was_not_verified_without_a_member_keeps_it(passed: bool | None, word: str) -> None:
    world = Together({"small": (0.8, 0.0), "warm": (0.75, 0.0)}, None, factor=1 / 0.8)
    world.verify = lambda techniques: Verified(True if [c.id for c in techniques] != ["warm"] else passed, "")     # type: ignore[method-assign]
    walk = walked(world, SMALL, WARM)
    assert sorted(c.id for c in walk.kept) == ["small", "warm"]
    assert walk.fates["small"].fate == "kept" and walk.fates["small"].reason.endswith(f"in the final set, which {word} without it")


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("kind", ["crashed", "motif_differs", "not_active", "too_short"])
def test_what_a_race_that_ended_early_did_not_drop_stays_kept(side: str, kind: str) -> None:
    """It stayed in the recipe as `failed`, and the summary left it out."""
    walk = walked(Ending(TWO, None, endings={"without fast": (side, kind)}), FAST, SLOW)
    fate = walk.fates["fast"]
    assert [c.id for c in walk.kept] == ["fast", "slow"] and fate.fate == "kept"
    assert UNCHECKED in fate.reason and "for a test" in fate.reason and "identical" in fate.reason
    assert fate.gain == pytest.approx(1 / 0.6 - 1), "what it gave when it was added"


def test_what_the_budget_did_not_check_says_so() -> None:
    walk = search(World(TWO, None), FAST, SLOW)
    walk._look_again = lambda: setattr(walk, "deadline", 0.0)        # type: ignore[method-assign]
    walk.run()
    assert [c.id for c in walk.kept] == ["fast", "slow"]
    assert walk.fates["fast"].reason.endswith(f"{UNCHECKED}: the budget had ended")
    assert UNCHECKED not in walk.fates["slow"].reason, "its own race was that with and without it"
    alone = search(World({"fast": (0.6, 0.0)}, None), FAST)
    alone._look_again = lambda: setattr(alone, "deadline", 0.0)      # type: ignore[method-assign]
    alone.run()
    assert UNCHECKED not in alone.fates["fast"].reason


def test_a_later_variant_that_fails_leaves_the_entry_of_the_one_that_was_measured() -> None:
    """Seen: failed, with the options of the variant that failed and the gain of the other."""
    several = technique("several", levels=(1, 2))
    walk = walked(Ending({"several": (1.37, 0.0)}, None, endings={"screen several level=2": ("b", "crashed")}), several)
    fate = walk.fates["several"]
    assert (fate.fate, fate.candidate.options.level) == ("slower", 1) and fate.gain == pytest.approx(1 / 1.37 - 1)
    assert fate.reason.endswith("; several level=2: failed, crashed: for a test")


def test_a_failed_variant_does_not_decide_what_another_left_open() -> None:
    several = technique("several", levels=(1, 2))
    world = Ending({"several": (1.0, 0.0)}, None, endings={"screen several level=2": ("b", "crashed")},
                   reads={"screen several": (0.0, -0.1, 0.1, "inconclusive")})
    walk = search(world, several)
    walk._screen(walk.eligible())
    assert walk.fates["several"].is_open(0.02)
    walk._look_again()
    assert (walk.fates["several"].fate, walk.fates["several"].candidate.options.level) == ("no_difference", 1), "it has its second look"


def test_a_variant_that_runs_takes_the_place_of_one_that_failed() -> None:
    several = technique("several", levels=(1, 2))
    walk = walked(Ending({"several level=2": (0.7, 0.0)}, None, endings={"screen several": ("b", "crashed")}), several)
    assert [c.label() for c in walk.kept] == ["several level=2"] and walk.fates["several"].candidate.options.level == 2


@pytest.mark.parametrize("kind", ["crashed", "motif_differs"])
def test_the_end_of_the_kept_set_is_no_fault_of_what_is_raced_against_it(kind: str) -> None:
    """It was `failed`, or rejected for numerics that were not its own."""
    walk = walked(Ending(TWO, None, endings={"screen slow with fast": ("a", kind)}), FAST, SLOW)
    fate = walk.fates["slow"]
    assert [c.id for c in walk.kept] == ["fast"] and fate.fate == "inconclusive"
    assert fate.reason == f"fast, which it was compared with, ended: {kind.replace('_', ' ')}: for a test"


@pytest.mark.parametrize("kind", ["crashed", "out_of_memory_device"])
def test_the_end_of_the_baseline_ends_the_search(kind: str) -> None:
    with pytest.raises(TrialEnded):
        walked(Ending(TWO, None, endings={"screen fast": ("a", kind)}), FAST, SLOW)


@pytest.mark.parametrize("kind", ["too_short", "not_in_time"])
def test_a_baseline_that_only_had_no_time_ends_nothing(kind: str) -> None:
    walk = walked(Ending(TWO, None, endings={"screen fast": ("a", kind)}), FAST, SLOW)
    assert "slow" in {c.id for c in walk.kept} and walk.fates["fast"].fate == ("inconclusive" if kind == "too_short" else "kept"), "it has a second turn"


@pytest.mark.parametrize("ended", ["screen small and warm with baseline", "add small to warm"])
def test_a_pair_that_fails_leaves_what_is_known_of_each(ended: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Ending({"small": (1.0, 0.0), "warm": (0.99, 0.0)}, None, endings={ended: ("b", "crashed")})
    monkeypatch.setattr("saturate.study.combining.LARGE", -1.0)        # whatever the pair gains, the second race is asked for
    walk = search(world, SMALL, WARM)
    walk.findings = (promise(1.8),)
    walk._screen(walk.eligible())
    combining.try_pair(walk, walk.fates["small"].candidate, walk.fates["warm"].candidate)
    assert walk.fates["small"].fate == "no_difference" and walk.fates["small"].reason.endswith("; with warm: crashed: for a test")


def test_a_race_that_does_not_tell_drops_nothing_and_is_told_of() -> None:
    walk = walked(Ending(TWO, None, reads={"without fast": (0.01, -0.05, 0.08, "inconclusive")}), FAST, SLOW)
    assert [c.id for c in walk.kept] == ["fast", "slow"] and walk.fates["fast"].fate == "kept"
    assert walk.fates["fast"].reason == "+1.0% [-5.0%, +8.0%]: could be more or less than counts, in the final set"


@pytest.mark.parametrize(("side", "fate", "reason"), [
    ("a", "inconclusive", "in verification: baseline, which it was compared with, ended: crashed: for a test"),
    ("b", "failed", "in verification: crashed: for a test"),
    ("b not_active", "not_applied", "in verification: not active: for a test"),
])
def test_a_run_of_the_baseline_that_fails_in_verification_is_no_fault_of_the_candidate(side: str, fate: str, reason: str) -> None:
    def fails(techniques: Any) -> Verified:
        ended = TrialEnded(Outcome(side[2:] or "crashed", "for a test"))
        ended.side = side[0]
        raise ended

    world: Any = World({"fast": (0.6, 0.0)}, None)
    world.verify, world.reference, world.may_be_crowded = fails, (), lambda ended: False
    walk = walked(world, FAST)
    assert walk.kept == () and (walk.fates["fast"].fate, walk.fates["fast"].reason) == (fate, reason)
    assert [result.record.question for result in walk.results] == ["screen fast"], "it had its verification"
