"""From the best of a search to a claim: who has a turn, what is repaired, and what is said where nothing won."""

from __future__ import annotations

import math
import resource
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_inference_search import (
    INT8,
    OTHER,
    RUN,
    FakeWorker,
    World,
    fates,
    quick,
    technique,
    walk,
)

from saturate.errors import EnvironmentProblem
from saturate.inference import api, confirm, result
from saturate.inference.accuracy import Judgement
from saturate.inference.candidates import Candidate
from saturate.inference.failures import WorkerFailed
from saturate.inference.scores import Scores
from saturate.inference.search import Search, Tried
from saturate.records.inference import LEFT_OUT, Timing
from saturate.techniques._api import Touch

__all__ = ["quick"]         # a fixture

FAST = technique("fast", "runtime", "convergence", bound=9.0)
BF16 = technique("bf16", "number", "convergence", (Touch("number-format"),), bound=1.1)


def champion(search: Search, world: World) -> tuple[confirm.Confirmed | None, Any]:
    search.deadline_s, search.end_s = time.monotonic() + 60, math.inf       # as `optimize` does at the end of the walk
    return confirm.champion(search, world, search.deadline_s)


def stored(world: World, label: str, factor: float) -> None:
    """Loaded from its artifact, `label` has another speed than in its screening."""
    start = world.start

    def load(candidate: Candidate) -> FakeWorker:
        return FakeWorker(factor, candidate) if candidate.label() == label else start(candidate)

    world.load = load       # type: ignore[method-assign]


def losing(world: World, *labels: str) -> None:
    """These lose more on the samples of the confirmation than on those of the selection."""
    judge, score = world.judge, world.score

    def scored(worker: FakeWorker) -> Scores:
        found = score(worker)
        return Scores(found.mean, metric=worker.candidate.label())

    def confirmed(scores: Scores, candidate: Candidate) -> Judgement:
        return Judgement("fail", 0.03, (0.02, 0.04), None, None, "a drop of 0.030") if scores.metric in labels else judge(scores)

    world.score, world.confirmed = scored, confirmed        # type: ignore[method-assign, assignment]


# -- who has a turn ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "fate"), [(1.2, "slower"), (1.0, "no_difference")])
def test_who_loses_the_final_race_gives_way(factor: float, fate: str) -> None:
    world = World({"run": 0.5, "other": 0.6})
    search = walk(world, RUN, OTHER)
    stored(world, "run", factor)
    won, final = champion(search, world)
    assert won is not None and won.found.candidate.label() == "other" and final.verdict == "faster" and won.found.fate == "kept"
    lost = next(one for one in search.tried.values() if one.candidate.label() == "run")
    assert lost.fate == fate and "in the final race" in lost.reason
    assert result.verdict_of(won, final, search, True) == "faster"


def test_where_all_lose_nothing_helps() -> None:
    world = World({"run": 0.5})
    search = walk(world, RUN)
    stored(world, "run", 1.0)
    assert champion(search, world) == (None, None) and fates(search) == {"run": "no_difference"}
    assert not result.open_ones(search) and result.verdict_of(None, None, search, True) == "nothing_helps"


def test_without_time_for_another_race_it_is_not_said_that_nothing_helps() -> None:
    world = World({"run": 0.5, "other": 0.6})
    search = walk(world, RUN, OTHER)
    stored(world, "run", 1.0)
    search.deadline_s = search.end_s = 0.0
    assert confirm.champion(search, world, math.inf) == (None, None)
    assert fates(search)["other"] == "dominated" and [one.candidate.label() for one in result.open_ones(search)] == ["other"]


@pytest.mark.parametrize("how", ["not stored", "not confirmed"])
def test_who_was_not_scored_has_its_turn_when_the_one_that_outran_it_falls(how: str) -> None:
    world = World({"fast": 0.2, "bf16": 0.4, "other": 0.8}, {"bf16": 0.001, "fast": 0.001})
    deploy = world.deploy

    def refuse(found: Any) -> Any:
        if found.candidate.label() == "fast":
            raise confirm.NotStored("it holds a lambda")
        return deploy(found)

    search = walk(world, FAST, BF16, OTHER)
    assert fates(search)["bf16 + other"] == "slower" and fates(search)["fast"] == "dominated"
    if how == "not stored":
        world.deploy = refuse           # type: ignore[method-assign]
    else:
        losing(world, "fast")
    won, _ = champion(search, world)
    assert won is not None and won.found.candidate.label() == "bf16 + other" and won.judgement.verdict == "pass"


@pytest.mark.parametrize(("factor", "fate"), [(0.3, "kept"), (1.5, "slower")])
def test_the_row_of_one_that_was_scored_when_it_was_confirmed_has_its_score(factor: float, fate: str) -> None:
    """Beside a best with a score and a verdict the row of the same candidate said that there was none."""
    world = World({"fast": 0.2, "bf16": 0.4, "other": 0.8}, {"bf16": 0.001, "fast": 0.001})
    search = walk(world, FAST, BF16, OTHER)
    losing(world, "fast")
    stored(world, "bf16 + other", factor)
    champion(search, world)
    row = next(one for one in search.tried.values() if one.candidate.label() == "bf16 + other").record()
    assert (row.fate, row.accuracy, row.verdict) == (fate, pytest.approx(0.899), "pass") and "in the final race" in row.reason


@pytest.mark.parametrize(("lossless_ms", "winner"), [(0.8, "short"), (0.45, "run")])
def test_behind_the_end_of_the_time_one_that_was_not_scored_is_worth_a_turn(lossless_ms: float, winner: str) -> None:
    """Seen on ResNet-50: 96 samples could not tell of five ways to int8, and bfloat16, twice as fast as the lossless one, had no turn."""
    many = technique("fast", "runtime", "convergence", bound=9.0, variants=3)
    world = World({"fast": 0.2, "short": 0.4, "run": lossless_ms})
    search = walk(world, many, technique("short", "runtime", "convergence", bound=1.1), RUN)
    losing(world, *(label for label in fates(search) if label.startswith("fast")))
    search.deadline_s = search.end_s = 0.0
    won, _ = confirm.champion(search, world, math.inf)
    assert won is not None and won.found.candidate.label() == winner, fates(search)


def test_what_answers_otherwise_from_its_artifact_gives_way() -> None:
    """Storing may change what was compared in the search."""
    world = World({"run": 0.5, "other": 0.6})
    search = walk(world, RUN, OTHER)
    world.wrong = frozenset({"run"})
    won, _ = champion(search, world)
    assert won is not None and won.found.candidate.label() == "other"
    assert fates(search)["run"] == "rejected_behaviour" and "loaded from its artifact: other shapes" in {one.reason for one in search.tried.values()}


def test_of_two_that_a_screening_cannot_tell_apart_the_faster_wins() -> None:
    world = World({"run": 0.5, "other": 0.51})
    search = walk(world, RUN, OTHER)
    stored(world, "other", 0.4)
    won, _ = champion(search, world)
    assert won is not None and won.found.candidate.label() == "other" and fates(search)["run"] == "dominated"
    assert "1.25x slower than other in a race" in {one.reason for one in search.tried.values()}


def test_who_was_not_scored_is_left_alone_while_the_best_holds() -> None:
    world = World({"fast": 0.2, "bf16": 0.26, "other": 0.8})
    search = walk(world, FAST, BF16, OTHER)
    assert fates(search)["bf16 + other"] == "slower" and 1.0 < search.tried[search.best().candidate].speedup / (1 / 0.208) < confirm.CLOSE    # type: ignore[union-attr]
    before = len(world.started)
    won, _ = champion(search, world)
    assert won is not None and won.found.candidate.label() == "fast" and set(world.started[before:]) == {"fast"}


def test_a_lossless_one_has_its_turn_however_many_others_fail() -> None:
    many = technique("int8", "runtime", "convergence", variants=9)
    world = World({"int8": 0.2, "run": 0.5}, {"int8": 0.001})
    search = walk(world, many, RUN)
    losing(world, *(label for label in fates(search) if label.startswith("int8")))
    won, _ = champion(search, world)
    assert won is not None and won.found.candidate.label() == "run"


def test_behind_the_end_of_the_time_no_rival_is_stored_that_nobody_would_race() -> None:
    for objective, late, started in (("latency", False, {"fast", "other"}), ("latency", True, {"fast"})):
        world = World({"fast": 0.5, "other": 0.51, "run": 0.9})
        search = walk(world, FAST, technique("other", "runtime", "convergence"), RUN, objective=objective)
        before = len(world.started)
        search.deadline_s, search.end_s = time.monotonic() + (0 if late else 60), math.inf
        won, _ = confirm.champion(search, world, time.monotonic() + 60)
        assert won is not None and set(world.started[before:]) == started


def test_much_later_only_the_first_has_a_turn_and_the_others_stay_open() -> None:
    world = World({"run": 0.5, "other": 0.6, "third": 0.7})
    search = walk(world, RUN, OTHER, technique("third"))
    world.deploy = refusing         # type: ignore[method-assign]
    search.deadline_s, search.end_s, search.late_s = 0.0, math.inf, 0.0
    assert confirm.champion(search, world, math.inf) == (None, None)
    assert fates(search) == {"run": "not_deployable", "other": "dominated", "third": "dominated"} and len(result.open_ones(search)) == 2


def test_much_later_one_that_needs_no_samples_still_has_its_turn() -> None:
    """`pick` for a budget that no number format keeps said that nothing is faster, beside a runtime that computes the same at 2.6x."""
    many = technique("int8", "runtime", "convergence", variants=2)
    world = World({"int8": 0.2, "run": 0.5, "other": 0.6}, {"int8": 0.001})
    search = walk(world, many, RUN, OTHER)
    losing(world, *(label for label in fates(search) if label.startswith("int8")))
    search.deadline_s, search.end_s, search.late_s = 0.0, math.inf, 0.0
    won, _ = confirm.champion(search, world, math.inf)
    assert won is not None and won.found.candidate.label() == "run"
    assert sorted(fate for label, fate in fates(search).items() if label.startswith("int8")) == ["dominated", "rejected_accuracy"]


def test_a_best_lossless_that_would_end_much_too_late_is_not_begun() -> None:
    search = walk(World({"int8": 0.2, "run": 0.5}, {"int8": 0.001}), INT8, RUN)
    search.best(lossless=True).seconds = 30.0       # type: ignore[union-attr]
    for room_s, known in ((60.0, True), (20.0, False)):
        search.late_s = time.monotonic() + room_s
        found, said = api._best_lossless(search, search.lab)        # type: ignore[arg-type]
        assert (found is not None) is known and said == ("" if known else "the time ended before run was stored and raced")


# -- what is repaired ------------------------------------------------------------------------------------------------------


class Unsure(World):
    """Too few samples: what is beyond the budget is not certain to be."""

    def judge(self, scores: Scores) -> Judgement:
        found = super().judge(scores)
        return found if found.verdict == "pass" else Judgement("undecided", found.drop, found.drop_ci, None, None, "5 samples cannot tell")

    confirmed = judge


def test_what_is_undecided_and_seen_beyond_the_budget_is_repaired() -> None:
    search = walk(Unsure({"run": 0.5, "int8": 0.2}, {"int8": 0.03}, healing=0.006), RUN, INT8)
    assert search.best() is not None and len(search.best().candidate.keep) == 4      # type: ignore[union-attr]
    assert "int8" not in {one.candidate.label() for one in confirm.contenders(search)}


@pytest.mark.parametrize(("best", "repaired"), [(0.22, True), (0.205, False)])
def test_a_repair_is_worth_it_where_it_may_still_be_the_best(best: float, repaired: bool) -> None:
    search = walk(World({"run": best, "int8": 0.2}, {"int8": 0.03}, healing=0.006), RUN, INT8)
    assert any(candidate.keep for candidate in search.tried) is repaired


def test_what_is_undecided_and_seen_within_the_budget_is_confirmed_first() -> None:
    search = walk(World({"run": 0.5, "int8": 0.2}, {"int8": 0.001}, undecided=True), RUN, INT8)
    assert not any(candidate.keep for candidate in search.tried)


@pytest.mark.parametrize("few", [False, True])
def test_who_cannot_be_confirmed_takes_no_time_from_who_can(few: bool) -> None:
    """Two of 8 bits were stored, loaded and scored, which 64 samples could not confirm had they scored as the model does; the lossless one, 2.76
    times as fast as the model, had no time left for its race. Nor is one repaired that would be undecided at best."""
    world = World({"run": 0.5, "int8": 0.2}, {"int8": 0.001}, undecided=True, few=few)
    search = walk(world, RUN, INT8)
    deployed: list[str] = []
    world.deploy = lambda found: deployed.append(found.candidate.label()) or found.candidate       # type: ignore[method-assign]
    won, _ = champion(search, world)
    assert won is not None and won.found.candidate.label() == "run" and ("int8" in deployed) is not few
    assert fates(search)["int8"] == "undecided", "as before"
    broken = walk(Unsure({"int8": 0.2}, {"int8": 0.03}, healing=0.006, few=few), INT8)
    assert any(candidate.keep for candidate in broken.tried) is not few
    before = len(broken.tried)
    broken.mend(next(iter(broken.tried.values())))
    assert not few or len(broken.tried) == before


def test_what_fails_in_its_confirmation_is_repaired() -> None:
    world = World({"run": 0.5, "int8": 0.2}, {"int8": 0.001})
    search = walk(world, RUN, INT8)
    losing(world, "int8", "int8 (but layer7, layer9)")
    won, final = champion(search, world)
    assert won is not None and won.found.candidate.keep == {"layer0"} and final.verdict == "faster"
    assert fates(search)["int8"] == "rejected_accuracy" and all(worker.closed for worker in world.workers)
    assert search.end_s == math.inf, "as before"


def test_nothing_is_repaired_without_time_or_without_the_model() -> None:
    for late in (True, False):
        world = World({"run": 0.5, "int8": 0.2}, {"int8": 0.001})
        search = walk(world, RUN, INT8)
        losing(world, "int8")
        search.deadline_s, search.end_s = (0.0 if late else time.monotonic() + 60), math.inf
        if not late:
            starts = iter([False])

            def baseline(own: Any = world.baseline, starts: Any = starts) -> FakeWorker:
                if next(starts, True):
                    return own()
                raise WorkerFailed("failed", "no memory")

            world.baseline = baseline                   # type: ignore[method-assign]
        won, _ = confirm.champion(search, world, math.inf)
        assert won is not None and won.found.candidate.label() == "run" and not any(candidate.keep for candidate in search.tried)


def test_layers_that_cannot_be_ranked_cost_a_repair_and_not_the_search() -> None:
    world = World({"run": 0.5, "int8": 0.2}, {"int8": 0.03})

    def ranking() -> Any:
        raise WorkerFailed("timeout", "it took too long")

    world.ranking = ranking         # type: ignore[method-assign]
    search = walk(world, RUN, INT8)
    assert fates(search)["int8"] == "rejected_accuracy" and search.best() is not None


def test_where_memory_is_the_objective_a_repair_is_worth_it_by_memory() -> None:
    """Slower than the best, and half its size: it is repaired. Faster and larger: it is not."""
    for size, repaired in ((int(2e8), True), (int(8e8), False)):
        world = World({"run": 0.4 if repaired else 0.6, "int8": 0.5}, {"int8": 0.03}, healing=0.006)
        world.served_bytes = lambda worker, found, size=size: size if "int8" in found.candidate.label() else int(4e8)      # type: ignore[method-assign]
        search = walk(world, RUN, INT8, objective="memory")
        assert any(candidate.keep for candidate in search.tried) is repaired


# -- memory --------------------------------------------------------------------------------------------------------------


def weighing(world: World, *sizes: float) -> None:
    """What fresh processes of its artifacts take, in that order, the last one for ever."""
    left, start = list(sizes), world.start

    def load(candidate: Candidate) -> FakeWorker:
        worker = start(candidate)
        worker.memory_bytes = lambda: int(left.pop(0) if len(left) > 1 else left[0])       # type: ignore[method-assign]
        return worker

    world.load = load           # type: ignore[method-assign]


@pytest.mark.parametrize(("sizes", "said"), [((4e8,), "faster"), ((9.4e8,), "faster"), ((9.6e8,), "nothing_helps"), ((1e9,), "nothing_helps"),
                                             ((4e8, 9.9e8, 4e8), "nothing_helps"), ((4e8, 4e8, 1.2e9), "nothing_helps")])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_by_memory_wins_whose_artifact_takes_less_in_each_of_its_processes(factor: float, sizes: Any, said: str) -> None:
    """However fast it is: two processes of one model differ, and the screening had one of each."""
    world = World({"run": factor}, served=int(4e8))
    search = walk(world, RUN, objective="memory")
    weighing(world, *sizes)
    won, final = champion(search, world)
    found = next(iter(search.tried.values()))
    assert result.verdict_of(won, final, search, not result.open_ones(search)) == said
    if said == "faster":
        assert won is not None and found.fate == "kept" and won.memory_bytes == max(sizes)
    else:
        assert won is None and found.fate == "no_difference" and "and the model takes 954 MiB" in found.reason
        assert found.peak_memory_bytes == max(sizes)
    assert all(worker.closed for worker in world.workers)


def test_a_little_less_memory_in_a_screening_is_not_worth_a_turn() -> None:
    world = World({"run": 0.5}, served=int(9.7e8))
    search = walk(world, RUN, objective="memory")
    assert not confirm.contenders(search) and champion(search, world) == (None, None) and not result.open_ones(search)


# -- what is said --------------------------------------------------------------------------------------------------------


def test_undecided_ones_are_no_reason_to_say_that_nothing_helps() -> None:
    world = World({"int8": 0.2}, {"int8": 0.001}, undecided=True)
    search = walk(world, INT8)
    assert champion(search, world) == (None, None)
    open_ones = result.open_ones(search)
    assert open_ones[0].candidate.label() == "int8" and {one.judgement.samples_needed for one in open_ones} == {1000}
    assert result.verdict_of(None, None, search, not open_ones) == "inconclusive"
    slow = walk(World({"int8": 1.2}, {"int8": 0.001}, undecided=True), INT8)
    assert not result.open_ones(slow), "it would not help however many samples there were"


@pytest.mark.parametrize(("speedups", "stored", "who", "why"), [
    ({"int8": 0.2}, True, None, ""), ({"int8": 0.2, "run": 1.3}, True, None, ""), ({"int8": 0.2, "run": 0.5, "other": 0.6}, True, "run", ""),
    ({"int8": 0.2, "run": 0.5, "other": 0.6}, False, None, ""),
    ({"int8": 0.2, "run": 0.5, "other": 0.6, "third": 0.7}, False, None, "2 lossless candidates cannot be stored")])
def test_where_no_lossless_candidate_beats_the_model_it_is_the_model(speedups: dict[str, float], stored: bool, who: str | None, why: str) -> None:
    world = World(speedups, {"int8": 0.001})
    search = walk(world, *(one for one in (INT8, RUN, OTHER, technique("third")) if one.TECHNIQUE.id in speedups))
    if not stored:
        world.deploy = refusing         # type: ignore[method-assign]
    found, said = api._best_lossless(search, world)     # type: ignore[arg-type]
    assert (found and found.found.candidate.label()) == who and said.startswith(why) and bool(said) is bool(why)


def test_the_model_is_the_best_lossless_one_only_where_no_other_can_be() -> None:
    search = walk(World({"int8": 0.2, "run": 1.3}, {"int8": 0.001}), INT8, RUN)
    assert result.undecided_lossless(search) == ""
    run = next(candidate for candidate in search.tried if candidate.label() == "run")
    search.tried[run] = replace(search.tried[run], fate="inconclusive", speedup=1.8)
    assert "not decided" in result.undecided_lossless(search)
    del search.tried[run]
    assert "had no turn" in result.undecided_lossless(search)
    alone = walk(World({"int8": 0.2}, {"int8": 0.001}), INT8)
    assert result.undecided_lossless(alone) == ""
    alone.pool.refused["run"] = LEFT_OUT
    assert "left out" in result.undecided_lossless(alone)


def refusing(found: Any) -> Any:
    raise confirm.NotStored("it holds a lambda")


def raced(speedup: float | None, reason: str = "") -> Any:
    estimate = None if speedup is None else SimpleNamespace(speedup=speedup, speedup_ci=(0.9 * speedup, 1.1 * speedup))
    return SimpleNamespace(verdict="faster", estimate=estimate, b=Timing(p50=1, p90=1, p99=1, calls=9), reason=reason, speedup=speedup,
                           speedup_ci=estimate and estimate.speedup_ci)


@pytest.mark.parametrize(("lossless", "versus", "unraced", "ratio", "why"), [
    ("itself", None, "", 1.0, None), ("other", raced(1.5), "", 1.5, None), ("none", None, "", 4.0, None),
    ("other", raced(None, "the time ended after 2 rounds"), "", None, "the time ended after 2 rounds"),
    ("other", None, "in the race with run: signal 9", None, "in the race with run: signal 9"), ("none", None, "no turn", None, "no turn")])
def test_how_much_faster_it_is_than_the_best_lossless_or_why_that_is_not_known(monkeypatch: pytest.MonkeyPatch, lossless: str, versus: Any,
                                                                               unraced: str, ratio: float | None, why: str | None) -> None:
    monkeypatch.setattr("saturate.inference.artifact.read", lambda folder: SimpleNamespace(files=[]))
    won, other = (confirm.Confirmed(Tried(Candidate(), "kept", ""), Path(name)) for name in "ab")
    best = result.best_of(won, {"itself": won, "other": other, "none": None}[lossless], raced(4.0), versus, unraced)
    assert best is not None and (best.speedup_over_lossless, best.speedup_over_lossless_reason) == (ratio, why)
    assert (best.speedup_over_lossless_ci is None) is (ratio is None)


@pytest.mark.parametrize(("objective", "over", "itself"), [("latency", 4.3, True), ("latency", 3.9, False), ("latency", None, False), ("memory", 4.3, False)])
def test_a_lossless_candidate_that_is_slower_than_the_model_is_not_the_best_lossless(monkeypatch: pytest.MonkeyPatch, objective: str,
                                                                                     over: float | None, itself: bool) -> None:
    """The luckiest of some screenings is above 1 where none helps: the winner would be further ahead of it than of the model."""
    won, other = (confirm.Confirmed(Tried(Candidate(keep=frozenset({name})), "kept", ""), Path(name)) for name in "ab")
    won.found.candidate = SimpleNamespace(lossless=False)           # type: ignore[assignment]
    final, versus = (replaced_log(raced(speedup)) for speedup in (4.0, over))
    monkeypatch.setattr(confirm, "champion", lambda *given: (won, final))
    monkeypatch.setattr(confirm, "contenders", lambda search: [])
    monkeypatch.setattr(confirm, "against", lambda *given: versus)
    monkeypatch.setattr(api, "_best_lossless", lambda search, lab: (other, ""))
    monkeypatch.setattr(result.Result, "of", lambda record, search, lab: record)
    told = concluding(objective)
    api.conclude(told, lambda text: None)
    assert (told.lossless, told.versus) == ((None, None) if itself else (other, versus)) and told.unraced == ""


@pytest.mark.parametrize(("verdict", "objective", "wins", "left_s", "instead"), [
    ("no_difference", "latency", True, 60.0, True), ("slower", "latency", True, 60.0, True), ("inconclusive", "latency", True, 60.0, False),
    ("faster", "latency", True, 60.0, False), ("slower", "latency", False, 60.0, False), ("slower", "latency", True, -1.0, False),
    ("slower", "memory", True, 60.0, False)])
def test_who_is_no_faster_than_what_loses_nothing_gives_way_to_it(monkeypatch: pytest.MonkeyPatch, verdict: str, objective: str, wins: bool,
                                                                  left_s: float, instead: bool) -> None:
    """8 bits won by a screening, 3.94 times as fast as the model, and were at 0.98 of a lossless program in their race."""
    won, other = (confirm.Confirmed(Tried(Candidate(keep=frozenset({name})), "kept", ""), Path(name)) for name in "ab")
    won.found.candidate = SimpleNamespace(lossless=False, label=lambda: "int8")           # type: ignore[assignment]
    final, versus, own = (replaced_log(raced(speedup)) for speedup in (3.9, 0.98, 4.0))
    versus.verdict = verdict
    monkeypatch.setattr(confirm, "champion", lambda *given: (won, final))
    monkeypatch.setattr(confirm, "contenders", lambda search: [])
    monkeypatch.setattr(confirm, "against", lambda *given: versus)
    monkeypatch.setattr(confirm, "crowned", lambda *given: own if wins else None)
    monkeypatch.setattr(api, "_best_lossless", lambda search, lab: (other, ""))
    monkeypatch.setattr(result.Result, "of", lambda record, search, lab: record)
    told = concluding(objective, time.monotonic() + left_s)
    api.conclude(told, lambda text: None)
    assert (told.won, told.final, told.versus) == ((other, own, None) if instead else (won, final, versus)) and told.lossless is other
    assert won.found.fate == ("dominated" if instead else "kept")
    assert not instead or won.found.reason == "0.98x [0.88, 1.08] in a race with baseline (but b), which loses nothing"


def concluding(objective: str, deadline_s: float = 0.0) -> Any:
    return SimpleNamespace(search=SimpleNamespace(objective=objective, progress=print), lab=SimpleNamespace(deadline_s=deadline_s, discard=lambda kept: None),
                           phases=SimpleNamespace(end=lambda name: None), recorded=lambda: SimpleNamespace(artifact=None))


def replaced_log(race: Any) -> Any:
    if race.estimate is not None:
        race.estimate.log_ratio = math.log(race.speedup)
    return race


@pytest.mark.parametrize(("kind", "outside", "perhaps"), [("failed", True, True), ("disk_full", False, True), ("timeout", False, True), ("failed", False, False)])
def test_what_was_ended_for_the_time_or_from_outside_may_be_the_answer(kind: str, outside: bool, perhaps: bool) -> None:
    found = Tried(Candidate(), "dominated", "")
    found.fail(WorkerFailed(kind, "why", outside=outside), "why")         # type: ignore[arg-type]
    assert found.fate == "failed" and result.cut_short(found) is perhaps


def ending(world: World, times: int, how: str, *, outside: bool = True) -> None:
    """The process that serves an artifact ends so often: when it is loaded, when it is scored or in the final race."""
    left = [times]

    def ends(then: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                return then(*given, **named)
            raise WorkerFailed("failed", "ended by signal 9", outside=outside)
        return call

    def load(candidate: Candidate) -> FakeWorker:
        worker = world.start(candidate)
        if how == "race":
            worker.block = ends(worker.block)           # type: ignore[method-assign]
        return worker

    world.load = ends(world.start) if how == "load" else load       # type: ignore[method-assign]
    if how == "score":
        world.score = ends(world.score)                 # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["load", "score", "race"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_process_of_the_artifact_that_is_ended_from_outside_is_tried_once_more(how: str, times: int) -> None:
    world = World({"run": 0.5}, budget=0.01)
    search = walk(world, RUN)
    ending(world, times, how)
    won, final = champion(search, world)
    found = next(iter(search.tried.values()))
    if times == 1:
        assert won is not None and final is not None and not found.outside and found.fate == "kept"
    else:
        assert won is None and found.outside and "signal 9" in found.reason and result.open_ones(search) == [found]
    assert all(worker.closed for worker in world.workers)


@pytest.mark.parametrize(("error", "fate"), [(WorkerFailed("timeout", "storing took longer than 60 s"), "failed"),
                                             (WorkerFailed("failed", "ended by signal 9", outside=True), "not_deployable")])
def test_what_ends_from_outside_or_of_the_time_while_it_is_stored_stays_open(error: WorkerFailed, fate: str) -> None:
    """The load path knew that; of storing only the words were left, and "nothing helps" was said."""
    world = World({"run": 0.5})
    search = walk(world, RUN)

    def deploy(found: Any) -> Any:
        raise confirm.NotStored(error.reason) from error

    world.deploy = deploy       # type: ignore[method-assign]
    assert champion(search, world) == (None, None)
    found = next(iter(search.tried.values()))
    assert found.fate == fate and error.reason in found.reason and result.open_ones(search) == [found]


def test_an_artifact_that_ends_its_process_itself_is_not_tried_again() -> None:
    world = World({"run": 0.5})
    search = walk(world, RUN)
    ending(world, 1, "load", outside=False)
    assert champion(search, world) == (None, None)
    assert fates(search) == {"run": "not_deployable"} and not result.open_ones(search)


def test_a_disk_that_fills_up_leaves_the_report_of_the_search_before(tmp_path: Path) -> None:
    report = result._written(tmp_path / "run" / "report.html", b"of the search before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(EnvironmentProblem, match="cannot be written"):
            result._written(report, b"*" * 4000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert report.read_bytes() == b"of the search before" and list(report.parent.iterdir()) == [report]


def test_the_sizes_and_the_words_of_techniques_are_in_the_record() -> None:
    world = World({"run": 0.5})
    start = world.start

    def noting(candidate: Candidate) -> FakeWorker:
        worker = start(candidate)
        worker.ready.notes["compressed_bytes"] = "1234"
        return worker

    world.start = noting            # type: ignore[method-assign]
    row = next(iter(walk(world, RUN).tried.values())).record()
    assert row.compressed_bytes == 1234 and row.done == ["run"] and row.size_bytes is None
