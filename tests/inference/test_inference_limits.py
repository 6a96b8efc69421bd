"""Limits that the user's own model passes: then what keeps them is the answer, however slow it is."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import optimizations
import pytest
from test_inference_confirm import weighing
from test_inference_search import BF16, INT8, OTHER, RUN, FakeWorker, World, fates, quick, registry, technique, walk

from saturate.errors import NothingFaster
from saturate.inference import api, confirm, limits, result, serving
from saturate.inference.candidates import Candidate
from saturate.inference.failures import WorkerFailed
from saturate.inference.journal import Journal
from saturate.inference.search import Search
from saturate.inference.serving import Climbs, Served, with_throughput
from saturate.records.inference import ModelFacts, OptimizeRecord
from saturate.report import inference as report
from saturate.report import inference_html as page
from saturate.report import inference_words as words

__all__ = ["quick"]         # a fixture

SMALL = {"peak_memory_gb": 0.5}     # the model of a `World` takes 1
WON = SimpleNamespace(found=SimpleNamespace(candidate=SimpleNamespace(label=lambda: optimizations.WINNER.id)))


def ended(search: Search, world: World, seconds: float = 60.0) -> tuple[Any, Any, str]:
    """(who won, its final race, the verdict of the record)."""
    search.deadline_s, search.end_s = time.monotonic() + seconds, math.inf
    won, final = confirm.champion(search, world, search.deadline_s)
    return won, final, result.verdict_of(won, final, search, not result.open_ones(search))


def recorded(search: Search, won: Any, final: Any, monkeypatch: pytest.MonkeyPatch) -> OptimizeRecord:
    monkeypatch.setattr("saturate.inference.artifact.read", lambda folder: SimpleNamespace(files=[]))
    monkeypatch.setattr("saturate.inference.lines.of_artifact", lambda folder, manifest: "")
    lab = SimpleNamespace(facts=ModelFacts(), budget=None, jury=None, threads=1, deadline_s=time.monotonic())
    return result.record_of(search, lab, won, None, final, None, "", notes=["another"], began=time.monotonic())     # type: ignore[arg-type]


# -- by memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "said"), [(1.25, "keeps_limits"), (1.0, "keeps_limits"), (0.5, "faster")])
@pytest.mark.parametrize("module", [RUN, INT8])
def test_what_keeps_a_limit_that_the_model_passes_is_the_answer(monkeypatch: pytest.MonkeyPatch, module: Any, factor: float, said: str) -> None:
    world = World({module.TECHNIQUE.id: factor}, {"int8": 0.001}, served=int(4e8))
    weighing(world, 4e8)
    search = walk(world, module, limits=SMALL)
    won, final, verdict = ended(search, world)
    assert verdict == said and won is not None and won.found.fate == "kept" and won.memory_bytes == 4e8
    assert won.found.reason.endswith("; it keeps the limits, and the model does not") is (said == "keeps_limits")
    record = recorded(search, won, final, monkeypatch)
    assert record.verdict == said and record.best is not None and record.best.speedup == pytest.approx(1 / factor, rel=0.01)
    assert record.artifact is not None and record.baseline.fate == "over_limit"
    assert record.notes == ["the model itself does not keep the limits: peak_memory_gb is 1, at most 0.5 was asked for", "another"]
    assert [one.id for one in report.front([record.baseline, *report.rows(record)])] == [module.TECHNIQUE.id], "the model is no choice"


def test_a_model_that_keeps_its_limits_is_not_given_up_for_a_slower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World({"run": 1.25}, served=int(4e8))
    search = walk(world, RUN, limits={"peak_memory_gb": 2.0, "p99_ms": 1500.0})
    assert search.over is None and fates(search) == {"run": "slower"} and ended(search, world) == (None, None, "nothing_helps")
    assert recorded(search, None, None, monkeypatch).baseline.fate == "dominated"


def test_of_those_that_keep_the_limits_the_fastest_wins_and_the_others_are_no_open_question() -> None:
    world = World({"run": 1.6, "other": 1.25}, served=int(4e8))
    weighing(world, 4e8)
    search = walk(world, RUN, OTHER, limits=SMALL)
    won, _, verdict = ended(search, world)
    assert verdict == "keeps_limits" and won.found.candidate.label() == "other" and fates(search) == {"run": "dominated", "other": "kept"}
    assert api._best_lossless(search, world) == (None, ""), "the screening says that no lossless one beats the model"     # type: ignore[arg-type]


def test_where_nobody_keeps_the_limits_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World({"run": 0.5}, served=int(6e8))
    search = walk(world, RUN, limits=SMALL)
    assert fates(search) == {"run": "over_limit"} and ended(search, world) == (None, None, "nothing_helps")
    record = recorded(search, None, None, monkeypatch)
    assert record.baseline.fate == "over_limit" and words.title(record) == "Nothing usable is shown to keep the limits"
    with pytest.raises(NothingFaster, match="nothing that keeps the limits was found") as refused:
        _ = result.Result(record, search, world).best      # type: ignore[arg-type]
    assert "as it is" not in (refused.value.remedy or "")


@pytest.mark.parametrize(("objective", "words"), [("latency", "is faster"), ("memory", "needs less memory"), ("throughput", "serves more samples")])
def test_what_was_looked_for_is_said_where_there_is_nothing_of_it(objective: str, words: str) -> None:
    lab = SimpleNamespace(folder=Path("runs/r18"))
    for verdict, remedy in (("nothing_helps", "use the model as it is"), ("inconclusive", "more time and workdir='runs/r18'")):
        record = msgspec.structs.replace(optimizations.nothing(), objective=objective, verdict=verdict)
        with pytest.raises(NothingFaster, match=f"nothing that {words}") as refused:
            _ = result.Result(record, None, lab).best      # type: ignore[arg-type]
        assert remedy in refused.value.remedy


@pytest.mark.parametrize(("sizes", "kept"), [((4e8, 4.9e8), True), ((4e8, 4e8, 5.1e8), False)])
def test_the_memory_of_several_processes_says_whether_a_slower_one_keeps_a_limit(sizes: tuple[float, ...], kept: bool) -> None:
    """That is all that speaks for it, and two processes of one program may differ."""
    world = World({"run": 1.25}, served=int(4e8))
    weighing(world, *sizes)
    search = walk(world, RUN, limits=SMALL)
    won, _, verdict = ended(search, world)
    assert (won is not None) is kept and fates(search) == {"run": "kept" if kept else "over_limit"}
    assert verdict == ("keeps_limits" if kept else "nothing_helps")


@pytest.mark.parametrize(("fresh", "passes"), [(int(4e8), False), (int(9e8), True), (None, False)])
def test_the_model_passes_a_limit_of_memory_if_each_of_its_processes_does(fresh: Any, passes: bool) -> None:
    """One of several is above it by chance; what nobody knows is held against nobody."""
    world = World({"run": 1.25})
    world.baseline_bytes = lambda processes: int(1e9) if processes == 1 and fresh else fresh      # type: ignore[method-assign]
    assert (walk(world, RUN, limits=SMALL).over is not None) is passes


def test_where_no_second_process_of_the_model_lives_the_first_one_counts() -> None:
    world = World({"run": 1.25})

    def baseline_bytes(processes: int) -> int:
        if processes > 1:
            raise WorkerFailed("out_of_memory", "no room")
        return int(1e9)

    world.baseline_bytes = baseline_bytes       # type: ignore[method-assign]
    assert walk(world, RUN, limits=SMALL).over is not None


def test_formats_that_are_slow_are_tried_on_other_runtimes_where_the_model_is_no_choice() -> None:
    """Behind a format at a tenth of the model's speed nothing is hoped of another runtime; but it may be the one that keeps the limit."""
    runtimes = [technique(name) for name in ("run", "other")]
    for runtime in runtimes:
        runtime.COMPILES = True
    tried = {}
    for most in (0.5, 2.0):
        world = World({"run": 1.0, "other": 1.0, "bf16": 10.0}, {"bf16": 0.001})
        world.served_bytes = lambda worker, found: int(4e8 if "bf16" in found.candidate.ids else 9e8)      # type: ignore[method-assign]
        search = walk(world, BF16, *runtimes, limits={"peak_memory_gb": most})
        tried[most] = sum(found.fate == "not_tried" for found in search.tried.values())
    assert tried[0.5] == 0 < tried[2.0]


def test_a_format_alone_has_its_turn_where_the_runtimes_pass_the_limit() -> None:
    """Beside such a runtime it passes the limit as well."""
    runtime = technique("run")
    runtime.COMPILES = True
    world = World({"run": 0.5, "bf16": 1.0}, {"bf16": 0.001})
    world.served_bytes = lambda worker, found: int(9e8 if "run" in found.candidate.ids else 4e8)      # type: ignore[method-assign]
    assert fates(walk(world, BF16, runtime, limits=SMALL)) == {"run": "over_limit", "bf16 + run": "over_limit", "bf16": "dominated"}


def test_a_search_that_goes_on_tells_again_what_is_slow(tmp_path: Any) -> None:
    """Whether the model keeps the limits was not known, or was otherwise, in the search before."""
    modules = registry(RUN, INT8)

    def again(world: World) -> Search:
        from saturate.inference import plan
        search = Search(world, plan.pool(modules, ModelFacts(), check=True), "latency", SMALL, time.monotonic() + 60, 0.01,
                        journal=Journal(tmp_path, "key", more={"check": "a", "budget": "b"}))
        search.run(world.baseline())
        return search

    small = World({"run": 1.25, "int8": 1.5}, {"int8": 0.001}, served=int(4e8))
    small.baseline_bytes = lambda processes: int(3e8)       # type: ignore[method-assign]
    assert set(fates(again(small)).values()) == {"slower"} and small.started
    for world, fate in ((World({}), "dominated"), (small, "slower")):
        world.started.clear()
        search = again(world)
        assert not world.started and {fate_ for label, fate_ in fates(search).items() if not search.tried[_named(search, label)].unscored} == {fate}


def _named(search: Search, label: str) -> Candidate:
    return next(candidate for candidate in search.tried if candidate.label() == label)


# -- by latency ----------------------------------------------------------------------------------------------------------


class Uneven(FakeWorker):
    """Every fourth call takes three times as long."""

    def block(self, count: int, *, cpu: int | None = None) -> list[int]:
        return [int(1e9 * self.factor * (1 if index % 4 else 3)) for index in range(count)]


def uneven(world: World) -> World:
    world.baseline = lambda: Uneven(1.0, Candidate())       # type: ignore[method-assign]
    return world


def test_a_slower_one_whose_calls_are_even_keeps_a_limit_of_the_99th_percentile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saturate.inference.racing._FEWEST_CALLS", 8)
    world = uneven(World({"run": 1.25}))
    search = walk(world, RUN, limits={"p99_ms": 2000.0})
    assert search.over == "p99_ms is 3e+03, at most 2000 was asked for"
    won, final, verdict = ended(search, world)
    assert verdict == "keeps_limits" and won is not None and final.verdict == "slower" and final.b.calls >= limits.ENOUGH_CALLS


def test_a_slower_one_is_not_certified_by_a_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saturate.inference.racing._FEWEST_CALLS", 8)
    world = uneven(World({"run": 1.25}))
    search = walk(world, RUN, limits={"p99_ms": 2000.0})
    few: list[Any] = []
    monkeypatch.setattr(confirm, "with_enough_calls", lambda won, final, *more: few.append(final) or replace(final, times_b=final.times_b[:20]))
    won, _, verdict = ended(search, world)
    found = next(iter(search.tried.values()))
    assert few and won is None and verdict == "inconclusive" and found.fate == "inconclusive"
    assert "it seems to keep the limits; the time ended after 20 calls, too few to tell: give it more time" in found.reason


def test_what_is_plainly_faster_may_serve_more_after_a_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it may be the winner by latency: it has more to offer than the limits."""
    monkeypatch.setattr("saturate.inference.racing._FEWEST_CALLS", 8)
    found = {}
    for factor in (0.5, 1.25):
        world = uneven(World({"run": factor}))
        world.deadline_s = time.monotonic() + 60        # type: ignore[attr-defined]
        search = walk(world, RUN, limits={"p99_ms": 2000.0})
        monkeypatch.setattr(confirm, "with_enough_calls", lambda won, final, *more: replace(final, times_b=final.times_b[:20]))
        one = confirm.survive(next(iter(search.tried.values())), world, print)
        assert search.over is not None and one is not None
        found[factor] = serving._final(one, search, world) is not None      # type: ignore[arg-type]
    assert found == {0.5: True, 1.25: False}


def test_what_was_no_faster_is_a_contender_again_once_the_model_passes_a_limit() -> None:
    search = walk(World({"run": 0.9}), RUN, limits={"p50_ms": 2000.0})
    found = next(iter(search.tried.values()))
    found.fate = "no_difference"
    search.hear([int(1e9)] * 9)
    assert search.over is None and found.fate == "no_difference"
    search.hear([int(3e9)] * 999)
    assert search.over is not None and confirm.contenders(search) == [found]


@pytest.mark.parametrize(("first", "then", "over"), [(Uneven, FakeWorker, False), (FakeWorker, Uneven, True)])
def test_what_the_final_race_shows_of_the_model_counts(monkeypatch: pytest.MonkeyPatch, first: Any, then: Any, over: bool) -> None:
    """What was thought of it at first is not said at the end if it is otherwise, nor is another called slow or dominated by it."""
    monkeypatch.setattr("saturate.inference.racing._FEWEST_CALLS", 8)
    world = World({"run": 0.99, "other": 1.25})
    world.baseline = lambda: first(1.0, Candidate())        # type: ignore[method-assign]
    search = walk(world, RUN, OTHER, limits={"p90_ms": 2000.0})
    assert (search.over is not None) is not over and fates(search)["other"] == ("slower" if over else "dominated")
    world.baseline = lambda: then(1.0, Candidate())         # type: ignore[method-assign]
    search.own_times = search.own_times[:8]
    won, final, verdict = ended(search, world)
    assert (search.over is not None) is over and fates(search)["other"] == ("dominated" if over else "slower")
    assert (won is not None) is (verdict == "keeps_limits") is over
    assert (recorded(search, won, final, monkeypatch).baseline.fate == "over_limit") is over


@pytest.mark.parametrize(("name", "slow", "calls", "few"), [
    ("p99_ms", 0, 12, True), ("p99_ms", 0, 101, False), ("p99_ms", 0, 320, False), ("p50_ms", 0, 4, True), ("p50_ms", 0, 5, False),
    ("p50_ms", 3, 12, True), ("p50_ms", 2, 12, False), ("p90_ms", 0, 28, True), ("p90_ms", 0, 29, False)])
def test_how_many_calls_show_that_a_limit_is_kept(name: str, slow: int, calls: int, few: bool) -> None:
    times_ns = [int(30e6)] * slow + [int(10e6)] * (calls - slow)
    assert limits.too_few_calls(times_ns, None, {name: 15.0}, instead=True) is few
    assert not limits.too_few_calls(times_ns, None, {name: 15.0}), "what is faster has more to offer"
    assert not limits.too_few_calls(times_ns[:1], int(1e9), {"peak_memory_gb": 2.0}, instead=True), "calls say nothing of memory"


def test_more_calls_of_the_model_are_made_until_they_tell() -> None:
    """Two calls that are slower than the median may be say nothing of it."""
    search = walk(World({"run": 0.5}), RUN, limits={"p50_ms": 900.0})
    assert search.over == "p50_ms is 1e+03, at most 900 was asked for"
    hurried = walk(World({"run": 0.5}), RUN, limits={"p50_ms": 900.0}, seconds=0.0)
    assert hurried.over is None, "and none behind the end of the time"


# -- what is said --------------------------------------------------------------------------------------------------------


def kept(**changes: Any) -> OptimizeRecord:
    one = optimizations.win()
    assert one.best is not None
    slow = msgspec.structs.replace(one.best, speedup=0.8, speedup_ci=(0.78, 0.82))
    over = msgspec.structs.replace(one.baseline, fate="over_limit", reason="the model as it came; p99_ms is 100, at most 40 was asked for")
    return optimizations.win(**{"verdict": "keeps_limits", "best": slow, "baseline": over,
                                "notes": ["the model itself does not keep the limits: p99_ms is 100, at most 40 was asked for"], **changes})


def test_the_summary_says_that_it_keeps_the_limits_and_at_what_speed() -> None:
    text = report.summary(kept(), width=110, color=False)
    assert text.startswith("Keeps the limits at 0.80x [0.78, 0.82] the speed, within a drop of 0.01\n")
    assert "faster" not in text.splitlines()[0] and "the model itself does not keep the limits: p99_ms is 100" in text
    assert "\nartifact  " in text and words.won(kept())
    assert "Keeps the limits at" in page.render(kept())
    nothing = msgspec.structs.replace(optimizations.nothing(), baseline=kept().baseline)
    assert report.summary(nothing, width=110, color=False).startswith("Nothing usable within the budget is shown to keep the limits\n")
    refused = msgspec.structs.replace(nothing.candidates[0], fate="not_deployable", speedup=0.7, reason="it cannot be stored")
    nothing = msgspec.structs.replace(nothing, candidates=[refused])
    assert words.lost(nothing)[1] == words.became(refused), "it might have been the answer, though it is slower"
    assert words.lost(msgspec.structs.replace(nothing, baseline=optimizations.BASELINE))[1] == ""


@pytest.mark.parametrize(("over", "ratio", "said"), [(True, 0.8, "keeps_limits"), (True, None, "inconclusive"), (False, 0.8, "nothing_helps")])
def test_who_serves_fewer_samples_and_keeps_the_limits_is_the_answer(over: bool, ratio: float | None, said: str) -> None:
    race = SimpleNamespace(verdict="slower" if ratio else "inconclusive", speedup=ratio, speedup_ci=ratio and (0.7, 0.9), reason="no time")
    record = optimizations.win(baseline=kept().baseline if over else optimizations.BASELINE)
    record = with_throughput(record, Served(Climbs(), won=WON, race=race))     # type: ignore[arg-type]
    assert record.verdict == said and (record.best is not None) is (said == "keeps_limits")
    if said == "keeps_limits":
        assert words.title(record).startswith("Keeps the limits at 0.80x [0.70, 0.90] the samples per second, within")


def test_another_budget_has_its_choice_among_those_that_keep_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World({"int8": 1.25}, {"int8": 0.03}, served=int(4e8))
    weighing(world, 4e8)
    search = walk(world, INT8, limits=SMALL)
    assert fates(search)["int8"] == "rejected_accuracy" and ended(search, world)[2] == "nothing_helps"
    monkeypatch.setattr("saturate.inference.artifact.read", lambda folder: SimpleNamespace(files=[]))
    monkeypatch.setattr("saturate.inference.artifact.load", lambda folder: folder)
    told: list[Any] = []
    monkeypatch.setattr("saturate.inference.artifact.confirm", lambda folder, best: told.append(best))
    world.jury, world.within, world.discard = object(), lambda max_drop, until_s: world, lambda kept: None      # type: ignore[attr-defined]
    found = result.Result(optimizations.nothing(), search, world)      # type: ignore[arg-type]
    with pytest.raises(NothingFaster, match="nothing that was tried keeps the limits within a drop of 0.02, as far as is shown") as refused:
        found._picked(0.02, 60.0)
    assert refused.value.cause.startswith("int8: 0.80x; a drop of 0.030")
    world.budget = 0.05
    assert found._picked(0.05, 60.0).label() == "int8" and told[0].speedup == pytest.approx(0.8, rel=0.01)     # type: ignore[attr-defined]
