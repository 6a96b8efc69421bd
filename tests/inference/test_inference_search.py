"""The search over a made-up machine: what is tried, in which order, and what becomes of it."""

from __future__ import annotations

import contextlib
import math
import time
import types
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saturate.errors import EnvironmentProblem
from saturate.inference import confirm, order, plan, play_off, racing, result
from saturate.inference.accuracy import Judgement
from saturate.inference.candidates import Candidate, Part
from saturate.inference.failures import CheckFailed, WorkerFailed
from saturate.inference.guards import Behaviour, Finding
from saturate.inference.journal import Journal
from saturate.inference.limits import over_limit, surely_over_limit
from saturate.inference.scores import Scores
from saturate.inference.search import Search, Tried
from saturate.inference.techniques._api import FOR_ALL_S
from saturate.inference.tried import entry_of, tried_of
from saturate.measure.race import Limits
from saturate.records.inference import LEFT_OUT, NO_CHECK, ModelFacts, Timing
from saturate.techniques._api import Eligible, Ineligible, Proof, Technique, Touch


def technique(id: str, stage: str = "runtime", numerics: str = "reordering", touches: tuple[Touch, ...] = (Touch("runtime"),),
              variants: int = 1, bound: float | None = None, refuse: str = "", prepare_s: float = 2.0) -> Any:
    """A module that keeps the contract as far as the search asks."""
    options = make_dataclass("Options", [("number", int, field(default=0))], frozen=True)
    return types.SimpleNamespace(
        __name__=f"fake.{id.replace('-', '_')}", TECHNIQUE=Technique(id=id, title=id, numerics=numerics, stage=stage, touches=touches),
        Options=options, PREPARE_S=prepare_s, eligible=lambda facts: Ineligible(refuse) if refuse else Eligible("yes"),
        variants=lambda facts: [options(number) for number in range(variants)], bound=lambda facts: bound, as_code=lambda o: f"use {id}")


class Hashable(types.SimpleNamespace):
    __hash__ = object.__hash__


def registry(*modules: Any) -> dict[str, Any]:
    return {module.TECHNIQUE.id: Hashable(**vars(module)) for module in modules}


RUN = technique("run")
OTHER = technique("other")
SWITCH = technique("switch", "session", "exact", (Touch("switch"),))
BF16 = technique("bf16", "number", "precision", (Touch("number-format"),))
INT8 = technique("int8", "runtime", "precision", (Touch("runtime"), Touch("number-format")))
PRUNE = technique("prune", "train", "convergence", (Touch("weights-trained"),))


@dataclass
class FakeWorker:
    factor: float                   # time of a call, relative to the baseline's
    candidate: Candidate
    active: bool = True
    closed: bool = False
    notes: dict[str, str] = field(default_factory=dict)
    cpu: int | None = None
    shares = 1

    def __post_init__(self) -> None:
        self.ready = types.SimpleNamespace(prepare_s=1.0, first_call_s=0.1, compile_s=None, proofs=[Proof(self.active, "seen" if self.active else "idle")],
                                           done=[part.id for part in self.candidate.parts], notes=self.notes)

    def block(self, count: int, *, cpu: int | None = None) -> list[int]:
        return [int(1e9 * self.factor)] * count

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...

    def memory_bytes(self) -> int:
        return int(1e9)

    def close(self) -> None:
        self.closed = True


@dataclass
class World:
    """`factors` by technique id multiply; `drops` by id add up; `fails`, `idle` and `wrong` by id."""

    folder = Path("workdir")
    factors: dict[str, float]
    drops: dict[str, float] = field(default_factory=dict)
    fails: dict[str, str] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()
    wrong: frozenset[str] = frozenset()
    raises: frozenset[str] = frozenset()
    stiff: frozenset[str] = frozenset()     # takes no other batch size
    budget: float = 0.01
    healing: float = 0.0            # of the drop, per kept layer
    few: bool = False               # samples of the check
    undecided: bool = False
    served: int | None = None       # bytes of its artifact; in the search all have 1e9
    exported: float = 0.0           # seconds that the first to start does something for all
    started: list[str] = field(default_factory=list)
    workers: list[FakeWorker] = field(default_factory=list)

    def start(self, candidate: Candidate) -> FakeWorker:
        self.started.append(candidate.label())
        for part in candidate.parts:
            if part.id in self.fails:
                raise WorkerFailed("failed", self.fails[part.id])
        factor = math.prod(self.factors[part.id] for part in candidate.parts) * (1 + 0.01 * len(candidate.keep))
        worker = FakeWorker(factor, candidate, not any(part.id in self.idle for part in candidate.parts))
        if self.exported and not self.workers:
            time.sleep(self.exported)
            worker.notes[FOR_ALL_S] = str(self.exported)
        self.workers.append(worker)
        return worker

    def examine(self, worker: FakeWorker, candidate: Candidate) -> Behaviour:
        wrong = any(part.id in self.wrong for part in candidate.parts)
        return Behaviour((Finding("structure", not wrong, "other shapes"),), 50.0, 0.125)

    def other_sizes(self, worker: FakeWorker, candidate: Candidate) -> str | None:
        return "a batch of 1 fails" if any(part.id in self.stiff for part in candidate.parts) else None

    def baseline_bytes(self, processes: int) -> int | None:
        return int(1e9)

    def artifact_bytes(self, artifact: Any) -> int | None:
        with contextlib.closing(self.load(artifact)) as worker:
            return worker.memory_bytes()

    def served_bytes(self, worker: FakeWorker, found: Any) -> int | None:
        return self.served

    def score(self, worker: FakeWorker) -> Scores:
        if any(part.id in self.raises for part in worker.candidate.parts):
            raise CheckFailed("KeyError")
        drop = sum(self.drops.get(part.id, 0.0) for part in worker.candidate.parts)
        return Scores(0.9 - max(0.0, drop - self.healing * len(worker.candidate.keep)))

    def judge(self, scores: Scores) -> Judgement:
        drop = 0.9 - scores.mean
        verdict = "undecided" if self.undecided else "pass" if drop <= self.budget + 1e-9 else "fail"
        return Judgement(verdict, drop, (drop - 0.02, drop + 0.02), 1000 if self.undecided else None, None, f"a drop of {drop:.3f}")

    def certifies(self) -> bool:
        return not self.few

    def confirmed(self, scores: Scores, candidate: Candidate) -> Judgement:
        return self.judge(scores)

    def ranking(self) -> tuple[list[str], tuple[str, ...]]:
        return [f"layer{index}" for index in range(16)], ("layer7", "layer9")

    def deploy(self, found: Any) -> Any:
        return found.candidate

    def load(self, artifact: Any) -> FakeWorker:
        return self.start(artifact)

    def baseline(self) -> FakeWorker:
        return FakeWorker(1.0, Candidate())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racing, "BLOCK_S", 0.001)


def walk(world: World, *modules: Any, check: bool = True, journal: Any = None, seconds: float = 60.0, **more: Any) -> Search:
    found = plan.pool(registry(*modules), ModelFacts(), check=check)
    search = Search(world, found, more.pop("objective", "latency"), more.pop("limits", {}), time.monotonic() + seconds, world.budget,
                    journal=journal)
    search.run(world.baseline())
    return search


def fates(search: Search) -> dict[str, str]:
    return {candidate.label(): found.fate for candidate, found in search.tried.items()}


def test_the_fastest_within_the_budget_wins_and_every_candidate_has_a_fate() -> None:
    world = World({"run": 0.5, "other": 0.8, "bf16": 0.6, "int8": 0.2}, {"int8": 0.05, "bf16": 0.001})
    search = walk(world, RUN, OTHER, BF16, INT8)
    best = search.best()
    assert best is not None and best.candidate.label() == "bf16 + run" and best.speedup == pytest.approx(1 / 0.3, rel=0.01)
    assert search.tried[Candidate.of(search.pool.numbers[1:])].fate == "rejected_accuracy" or fates(search)["int8"] == "rejected_accuracy"
    assert all(worker.closed for worker in world.workers)


def test_nothing_begins_when_the_rest_is_needed_to_confirm_the_best() -> None:
    """Storing, loading, scoring and racing a large model's best two takes longer than the share that is kept for it in any case."""
    world = World({"run": 0.5, "int8": 0.2}, {"int8": 0.001})
    search = walk(world, RUN, INT8)
    search.end_s = time.monotonic() + 60
    assert search.time_left()
    search.best(lossless=True).seconds = 15.0           # type: ignore[union-attr]
    assert search.time_left()
    search.best().seconds = 40.0                        # type: ignore[union-attr]
    assert not search.time_left()
    started = len(world.started)
    search.tried = {found.candidate: found for found in (search.best(), search.best(lossless=True))}   # type: ignore[union-attr, misc]
    search.run(world.baseline())
    assert len(world.started) == started


def test_no_number_format_begins_that_the_check_could_not_judge_twice() -> None:
    """A check of half a minute was called on a candidate shortly before a minute was over, and once more on its artifact behind it."""
    for check_s, tried in ((310.0, {"run"}), (290.0, {"run", "int8"})):
        world = World({"run": 0.5, "int8": 0.2}, {"int8": 0.001})
        found = plan.pool(registry(RUN, INT8), ModelFacts(), check=True)
        search = Search(world, found, "latency", {}, time.monotonic() + 420, 0.01, end_s=time.monotonic() + 600, check_s=check_s)
        search.run(world.baseline())
        assert {part for label in world.started for part in label.split(" + ")} == tried
        assert {row.id for row in result.untried(search, 1, "no time")} == {"run", "int8"} - tried


def test_the_check_of_what_has_not_met_it_counts_in_what_confirming_takes() -> None:
    search = walk(World({"run": 0.5}), RUN)
    before_s, search.check_s, search.end_s = search._until_s(), 20.0, time.monotonic() + 60
    assert search._until_s() < before_s and search._until_s() < time.monotonic() + 41
    search.late_s = time.monotonic() + 10
    assert search.too_late(search.best()) and not search.too_late()
    search.start_s = 15.0
    assert search._until_s() < time.monotonic() + 26, "the model's own process has to start for the final race"
    search.afresh_s = 5.0
    assert search._until_s() < time.monotonic() + 16, "two processes of it start afresh, and it was tried in one that did not"


def test_what_a_candidate_did_for_all_is_not_expected_again() -> None:
    """The first to need an export makes it: of a small model's minute half was kept free, to confirm what takes seconds by then."""
    world = World({"run": 0.5, "int8": 0.4})
    world.exported = 0.03
    search = walk(world, RUN, INT8)
    first, other = (next(found for candidate, found in search.tried.items() if [part.id for part in candidate.parts] == [name]) for name in ("run", "int8"))
    assert (first.for_all_s, other.for_all_s) == (0.03, 0.0) and first.seconds > 0.03, "what it cost is what it cost"
    assert first.again_s == first.seconds - 0.03 and other.again_s == other.seconds
    first.seconds, first.for_all_s, search.check_s = 30.0, 25.0, 0.0
    assert search.confirming_s(first) == pytest.approx(6.0)
    search.end_s, search.deadline_s = time.monotonic() + 60, time.monotonic() + 60
    other.seconds = 2.0
    assert search._until_s() > time.monotonic() + 60 - 6.0 - 2.4 - 1
    assert search.room_for(first, other) and order.seconds(first.candidate, search.tried) == 5.0
    before, after = (tried_of(first.candidate, entry_of(one)) for one in (first, other))
    assert before.again_s == 30.0, "an earlier search has left no export" and after.again_s == 2.0


def test_without_a_check_only_lossless_candidates_run() -> None:
    world = World({"run": 0.5, "bf16": 0.1})
    search = walk(world, RUN, BF16, check=False)
    assert world.started == ["run"] and "no check" in search.pool.refused["bf16"]


def test_what_the_user_left_out_was_not_tried_which_does_not_say_that_it_does_not_apply() -> None:
    found = plan.pool(registry(RUN, OTHER, technique("third", refuse="it needs CUDA")), ModelFacts(), check=True, skip=("other",))
    assert [(row.id, row.fate, row.reason) for row in result.refused(found)] == [
        ("other", "not_tried", LEFT_OUT), ("third", "not_applicable", "it needs CUDA")]


def test_training_with_rounding_applies_where_the_user_may_give_the_data() -> None:
    """ "not applicable" says that this model or machine gives it nothing to do."""
    from saturate.inference.techniques import qat_dynamic_int8, qat_int8

    found = plan.pool({module.TECHNIQUE.id: module for module in (qat_int8, qat_dynamic_int8)}, ModelFacts(linears=4, dtypes=("float32",)), check=True)
    assert {row.fate for row in result.refused(found)} == {"not_tried"} and len(found.refused) == 2
    assert all("give train=saturate.Train(loader, loss), on the command line --train" in reason for reason in found.refused.values())


def test_what_needs_a_check_applies_and_was_not_tried_without_one() -> None:
    found = plan.pool(registry(RUN, BF16, technique("third", numerics="precision", refuse="it needs CUDA")), ModelFacts(), check=False)
    assert [(row.id, row.fate, row.reason) for row in result.refused(found)] == [
        ("bf16", "not_tried", NO_CHECK), ("third", "not_applicable", "it needs CUDA")]


def test_switches_that_help_are_combined_and_others_are_not() -> None:
    world = World({"run": 0.5, "switch": 0.9})
    assert "switch + run" in fates(walk(world, RUN, SWITCH))
    world = World({"run": 0.5, "switch": 1.0, "other": 0.9})
    search = walk(world, RUN, SWITCH, OTHER)
    assert fates(walk(World({"run": 1.1}), RUN))["run"] == "slower"
    assert search.best().candidate.label() == "run"                 # type: ignore[union-attr]


@pytest.mark.parametrize(("what", "fate"), [
    ({"fails": {"run": "it crashed"}}, "failed"), ({"idle": frozenset({"run"})}, "not_applied"),
    ({"wrong": frozenset({"run"})}, "rejected_behaviour")])
def test_what_does_not_work_costs_one_row(what: dict[str, Any], fate: str) -> None:
    search = walk(World({"run": 0.1, "other": 0.5}, **what), RUN, OTHER)
    assert fates(search)["run"] == fate and search.best().candidate.label() == "other"      # type: ignore[union-attr]


@pytest.mark.parametrize(("start_s", "pairs"), [(0.0, 3), (4.0, 3), (40.0, 1)])
def test_no_pair_begins_that_would_not_start_in_time(monkeypatch: pytest.MonkeyPatch, start_s: float, pairs: int) -> None:
    """A start is cut short by no deadline: of what compiles for a minute, a pair that began before the end came a minute behind it."""
    now, started = [0.0], []
    monkeypatch.setattr(racing, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def start() -> FakeWorker:
        started.append(1)
        now[0] += start_s / 2
        return FakeWorker(1.0, Candidate())

    racing.race(start, start, limits=Limits(max_pairs=3, min_rounds=6, max_rounds=8), deadline_s=60.0)
    assert len(started) == 2 * pairs


@pytest.mark.parametrize(("block_s", "verdict", "rounds"), [(0.5, "faster", 6), (10.0, "inconclusive", 2)])
def test_the_end_of_the_time_does_not_cut_rounds_that_take_less_than_the_start(
    monkeypatch: pytest.MonkeyPatch, block_s: float, verdict: str, rounds: int,
) -> None:
    """A program 7.67 times as fast as the model was "No answer yet": its processes came to the final race a little late, after half a minute, and
    half a second of it was all that was measured."""
    now, ratios = [0.0], [8.0, 3.0, 7.0, 8.0, 7.5, 8.5]
    monkeypatch.setattr(racing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    plain = racing.round_of

    def start() -> FakeWorker:
        now[0] += 15.0
        return FakeWorker(1.0, Candidate())

    def round_of(a: racing.Lane, b: racing.Lane, index: int) -> float:
        plain(a, b, index)
        now[0] += 2 * block_s
        return math.log(ratios[index])

    monkeypatch.setattr(racing, "round_of", round_of)
    found = racing.race(start, start, limits=confirm.FINAL, deadline_s=20.0)
    assert found.verdict == verdict and now[0] == 30.0 + 2 * block_s * rounds
    assert verdict == "faster" or "2 of at least 6 rounds, which take about 150 s" in found.reason
    assert verdict != "faster" or found.speedup_ci[0] > 3       # type: ignore[index]


class Mortal(FakeWorker):
    """The model's own process, which ends after some blocks."""

    left = 0

    def block(self, count: int, *, cpu: int | None = None) -> list[int]:
        self.left -= 1
        if self.left < 0:
            raise WorkerFailed("failed", "signal 9")
        return super().block(count, cpu=cpu)


class Ends(World):
    """The model's own processes live for so many blocks each, the last one forever."""

    def lives(self, *blocks: int) -> Ends:
        self.blocks, self.baselines = list(blocks), []
        return self

    def baseline(self) -> FakeWorker:
        worker = Mortal(1.0, Candidate())
        worker.left = self.blocks.pop(0) if self.blocks else 10**6
        self.baselines.append(worker)
        return worker


def test_what_keeps_the_budget_and_is_slower_than_the_model_is_called_that(tmp_path: Path) -> None:
    """"dominated", of a number format at 0.22x, where nothing was kept that could have been better."""
    for _ in range(2):          # and when it is known from before
        search = walk(World({"int8": 1.5}, {"int8": 0.001}), INT8, journal=Journal(tmp_path, "k", True))
        assert fates(search) == {"int8": "slower"} and next(iter(search.tried.values())).reason == "0.67x; a drop of 0.001"
    assert fates(walk(World({"int8": 1.5}, {"int8": 0.001}), INT8, objective="memory")) == {"int8": "dominated"}


@pytest.mark.parametrize("blocks", [0, 2, 3, 5])
def test_the_end_of_the_model_s_own_process_is_not_held_against_a_candidate(blocks: int) -> None:
    """Neither before the first one, nor beside it."""
    world = Ends({"run": 0.5, "other": 0.8}).lives(blocks)
    search = walk(world, RUN, OTHER)
    assert fates(search) == {"run": "dominated", "other": "dominated"} and search.baseline is not None
    assert len(world.baselines) == 2 and search.tried[search.best().candidate].speedup == pytest.approx(2, rel=0.01)   # type: ignore[union-attr]
    assert world.baselines[1].closed and all(worker.closed for worker in world.workers)


def test_who_is_beside_the_model_s_process_when_it_ends_twice_may_be_the_answer() -> None:
    search = walk(Ends({"run": 0.5, "other": 0.8}).lives(5, 5), RUN, OTHER)
    first = next(iter(search.tried.values()))
    assert first.fate == "failed" and first.outside and not first.lasting and "twice the model's own process ended" in first.reason
    assert [found.fate for found in search.tried.values()][1:] == ["dominated"]


def test_a_model_that_does_not_live_ends_the_search_by_name() -> None:
    world = Ends({"run": 0.5}).lives(5, 0)
    with pytest.raises(EnvironmentProblem, match="another one does not live either") as caught:
        walk(world, RUN)
    assert "workdir='workdir' it goes on from here" in caught.value.remedy
    assert all(worker.closed for worker in world.baselines[1:])


def test_other_options_of_what_took_too_long_are_not_tried() -> None:
    world = World({"run": 0.5, "other": 0.8})

    def start(candidate: Candidate) -> FakeWorker:
        world.started.append(candidate.label())
        if candidate.parts[0].id == "run":
            raise WorkerFailed("timeout", "preparation took longer than 1 s")
        return FakeWorker(0.8, candidate)

    world.start = start     # type: ignore[method-assign]
    search = walk(world, technique("run", variants=3), OTHER)
    assert world.started == ["run", "other"] and fates(search)["run number=2"] == "not_tried"


INT4 = technique("int4", "runtime", "precision", (Touch("runtime"), Touch("number-format")))


class Lucky(World):
    """The first process of "int8" is faster than all later ones of it."""

    def start(self, candidate: Candidate) -> FakeWorker:
        again = candidate.label() in self.started
        worker = super().start(candidate)
        if candidate.label() == "int8" and not again:
            worker.factor *= 0.93
        return worker


def test_the_best_few_run_once_more_side_by_side() -> None:
    """Seen: of three programs within one percent the slowest was kept, which was 6 % behind."""
    world = Lucky({"run": 0.5, "int8": 0.2, "int4": 0.19, "bf16": 0.4})
    search = walk(world, RUN, INT8, INT4, BF16)
    assert search.best().candidate.label() == "int4"
    assert "in two screenings" not in search.best().reason and sorted(world.started[-2:]) == ["int4", "int8"]
    assert all(worker.closed for worker in world.workers)
    assert search.tried[search.best().candidate].speedup > search.ranked()[1].speedup
    first, second, beside = 1 / (0.2 * 0.93), 1 / 0.19, 0.2 / 0.19
    assert search.best().speedup == pytest.approx(first * math.sqrt(second / first * beside), rel=2e-3), "both screenings count alike"


def test_each_of_several_that_are_close_runs_beside_the_best_so_far() -> None:
    world = Lucky({"run": 0.5, "int8": 0.2, "int4": 0.19, "int2": 0.1915, "bf16": 0.4})
    search = walk(world, RUN, INT8, INT4, technique("int2", "runtime", "precision", INT4.TECHNIQUE.touches), BF16)
    best, last = search.best(), next(one for one in search.tried.values() if one.candidate.label() == "int2")
    assert best.candidate.label() == "int4" and last.speedup == pytest.approx(math.sqrt(best.speedup / 0.1915 * 0.19 / 0.1915), rel=2e-3)


def test_what_is_clear_or_known_from_before_is_not_run_again(tmp_path: Path) -> None:
    world = World({"run": 0.5, "int8": 0.2, "int4": 0.25, "bf16": 0.6})
    walk(world, RUN, INT8, INT4, BF16)
    assert len(set(world.started)) == len(world.started)
    close = Lucky({"run": 0.5, "int8": 0.2, "int4": 0.19})
    first = walk(close, RUN, INT8, INT4, journal=Journal(tmp_path, "k", True))
    later = World({"run": 0.5, "int8": 0.2, "int4": 0.19})
    again = walk(later, RUN, INT8, INT4, journal=Journal(tmp_path, "k", True))
    assert later.started == [] and again.best().speedup == first.best().speedup


def test_nothing_starts_to_be_compared_once_more_where_there_is_no_room_for_it() -> None:
    """A process that compiles took a minute of a time that had ended, and was closed again."""
    world = Lucky({"run": 0.5, "int8": 0.2, "int4": 0.19})
    search = walk(world, RUN, INT8, INT4)
    before = len(world.started)
    for seconds, started in ((40.0, 0), (1.0, 2)):
        search.deadline_s = time.monotonic() + 60
        for one in search.tried.values():
            one.seconds = seconds
        play_off.run(search)
        assert len(world.started) - before == started


@pytest.mark.parametrize("moment", ["start", "first call"])
def test_a_rival_that_fails_once_more_changes_nothing(moment: str) -> None:
    world = Lucky({"run": 0.5, "int8": 0.2, "int4": 0.19})
    start = world.start

    class Breaks(FakeWorker):
        def block(self, count: int, *, cpu: int | None = None) -> list[int]:
            raise WorkerFailed("failed", "it ended")

    def fails(candidate: Candidate) -> FakeWorker:
        if not world.started.count("int4") or candidate.label() != "int4":
            return start(candidate)
        if moment == "start":
            raise WorkerFailed("failed", "no room")
        world.workers.append(Breaks(1.0, candidate))
        return world.workers[-1]

    world.start = fails     # type: ignore[method-assign]
    search = walk(world, RUN, INT8, INT4)
    assert search.best().candidate.label() == "int8" and all(worker.closed for worker in world.workers)


def compiling(id: str) -> Any:
    module = technique(id)
    module.COMPILES = True
    return module


FIRST, SECOND = compiling("first"), compiling("second")
RUNS = {"first": 0.5, "second": 0.45, "run": 0.5, "other": 0.45, "int8": 0.2, "bf16": 0.9}


def test_a_number_format_that_is_far_from_the_best_is_not_tried_on_one_more_runtime() -> None:
    """What it gave on another runtime, and what the two give without it, must promise half of more than the best."""
    search = walk(World(RUNS), FIRST, SECOND, BF16, INT8)
    assert fates(search)["bf16 + second"] == "slower" and fates(search)["bf16 + first"] == "not_tried"
    assert "far from the best" in next(one.reason for one in search.tried.values() if one.candidate.label() == "bf16 + first")
    for world, modules, more in (
            (World({**RUNS, "bf16": 0.5}), (FIRST, SECOND, BF16, INT8), {}),          # 4.4x of 5x: another runtime may well do better
            (World(RUNS), (RUN, OTHER, BF16, INT8), {}),                              # what interprets says little of what compiles
            (World(RUNS, {"int8": 0.5}), (FIRST, SECOND, BF16, INT8), {}),            # the best misses the budget
            (World(RUNS), (FIRST, SECOND, BF16, INT8), {"objective": "memory"})):
        assert "not_tried" not in fates(walk(world, *modules, **more)).values()


def test_what_was_left_out_has_its_turn_when_the_best_does_not_stand() -> None:
    world = World(RUNS)
    search = walk(world, FIRST, SECOND, BF16, INT8)
    left_out = next(one.candidate for one in search.tried.values() if one.fate == "not_tried")
    assert search.wanted_after_all() == [] and search.tried[left_out] not in result.open_ones(search)
    for one in search.tried.values():
        if one.candidate.label() == "int8":
            one.fate = "over_limit"
            fallen = one
    assert search.wanted_after_all() == [left_out] and search.tried[left_out] in result.open_ones(search)
    world.baseline = lambda: FakeWorker(1.0, Candidate())       # type: ignore[attr-defined]
    search.mend(fallen)
    assert search.tried[left_out].working and world.started[-1] == "bf16 + first"


def test_what_an_earlier_search_has_tried_is_not_left_out(tmp_path: Path) -> None:
    """All that is known costs nothing, and comes in the order of the pool: the best may come before it."""
    first = walk(World(RUNS), FIRST, SECOND, BF16, journal=Journal(tmp_path, "k", True))
    assert fates(first)["bf16 + first"] != "not_tried"
    again = walk(World(RUNS), FIRST, SECOND, BF16, INT8, journal=Journal(tmp_path, "k", True))
    assert fates(again)["bf16 + first"] == fates(first)["bf16 + first"]


@pytest.mark.parametrize(("format", "runtimes", "best", "left_out"), [
    (2.0, (1.5, 1.5), 5.0, True),           # 3.0 hoped for
    (2.0, (1.5, 1.5), 2.9, False),
    (2.0, (1.0, 2.0), 5.0, False),          # a runtime twice as fast by itself may make it 4, and 6 are hoped for
    (2.0, (2.0, None), 5.0, False),         # what the other gives alone is not known
    (None, (1.5, 1.5), 5.0, False),         # the format was not measured
])
def test_what_lets_a_format_be_left_out(format: float | None, runtimes: tuple[float, float | None], best: float, left_out: bool) -> None:
    first, second, number = (Part(Hashable(**vars(module)), module.Options()) for module in (FIRST, SECOND, BF16))
    tried = {Candidate.of([part]): SimpleNamespace(speedup=speed, again_s=1.0) for part, speed in zip((first, second), runtimes)}
    seen = Candidate.of([first, number])
    tried[seen] = SimpleNamespace(speedup=format, again_s=1.0)
    found = order.outrun(Candidate.of([second, number]), tried, best)
    assert found == (seen if left_out else None)
    assert order.outrun(Candidate.of([second]), tried, 100.0) is None, "lossless ones are wanted for their own sake"


@pytest.mark.parametrize(("best", "left_out"), [(5.0, False), (7.0, True)])
def test_of_several_that_show_a_format_the_fastest_says_what_may_be_hoped_for(best: float, left_out: bool) -> None:
    first, second, third, number = (Part(Hashable(**vars(module)), module.Options()) for module in (FIRST, SECOND, compiling("third"), BF16))
    speeds = {(first,): 1.5, (second,): 1.5, (third,): 1.5, (third, number): 4.0, (first, number): 2.0}
    tried = {Candidate.of(list(parts)): SimpleNamespace(speedup=speed, again_s=1.0) for parts, speed in speeds.items()}
    assert order.outrun(Candidate.of([second, number]), tried, best) == (Candidate.of([third, number]) if left_out else None)


def test_what_promises_most_for_its_time_comes_first() -> None:
    """A short search must not spend itself on compilers before the number formats that take seconds."""
    slow, quick = technique("compile", bound=2.0, prepare_s=30.0), technique("run", bound=2.2, prepare_s=5.0)
    int8 = technique("int8", "runtime", "precision", (Touch("runtime"), Touch("number-format")), bound=7.0, prepare_s=8.0)
    exact = technique("exact-int8", "runtime", "precision", (Touch("runtime"), Touch("number-format")), bound=6.8, prepare_s=90.0)
    world = World({"compile": 0.5, "run": 0.6, "int8": 0.2, "exact-int8": 0.19, "bf16": 0.6})
    walk(world, slow, quick, int8, exact, technique("bf16", "number", "precision", (Touch("number-format"),), bound=4.0))
    first = world.started[:4]
    assert first[:2] == ["int8", "run"] and first.index("compile") < 4 and world.started.index("exact-int8") > world.started.index("compile")


def test_what_was_seen_in_this_study_counts_more_than_a_prior() -> None:
    facts, options = ModelFacts(), registry(technique("run", variants=2, bound=4.0, prepare_s=2.0))["run"].variants(ModelFacts())
    run, other = registry(technique("run", variants=2, bound=4.0, prepare_s=2.0), technique("other", bound=2.0, prepare_s=12.0)).values()
    first, second = (Candidate.of([Part(run, one)]) for one in options)
    unknown = Candidate.of([Part(other, other.Options())])
    assert order.rate(second, facts, {}, 1.0) > order.rate(unknown, facts, {}, 1.0)
    seen = {first: Tried(first, "dominated", "", speedup=1.1, seconds=40.0)}
    assert order.seconds(second, seen) == 40.0 and order.seconds(unknown, seen) == pytest.approx(20.0 * 40.0 / 10.0)
    assert order.rate(second, facts, seen, 1.1) < order.rate(unknown, facts, seen, 1.1)
    third = Candidate.of([Part(run, run.Options(7))])
    seen[second] = Tried(second, "dominated", "", speedup=1.3, seconds=10.0)
    assert order.seconds(third, seen) == 40.0, "one of them took that long"
    assert order.expected_speedup(third, facts, seen) == pytest.approx(order.SOME * 1.3), "its options may give a little more"


def test_a_repair_takes_several_trials() -> None:
    broken = Tried(Candidate(), "rejected_accuracy", "", speedup=4.0, seconds=10.0)
    assert order.repair_rate(broken, 2.0) == pytest.approx(math.log(0.9 * 4.0 / 2.0) / (3 * 10.0))


def test_what_does_not_fit_into_the_time_that_is_left_waits() -> None:
    world = World({"run": 0.2, "other": 0.8})
    walk(world, technique("run", bound=9.0, prepare_s=400.0), technique("other", bound=1.01), seconds=60.0)
    assert world.started[0] == "other" and "run" in world.started, "it is tried when nothing else is left"


def test_what_does_not_fit_is_not_begun_at_the_very_end_where_something_is_found() -> None:
    """It gets half a minute to prepare whatever is left: of a search of two minutes, confirming began that much later."""
    def searched(left_s: float, *modules: Any) -> list[str]:
        world = World({"run": 0.5, "other": 0.2})
        walk(world, *modules, seconds=left_s)
        return world.started

    quick, long = technique("run", bound=9.0), technique("other", bound=9.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "seconds", lambda candidate, tried: 4000.0 if candidate.ids == ["other"] else 0.01)
        assert searched(20.0, quick, long) == ["run"]
        assert searched(60.0, quick, long) == ["run", "other"], "there is time to prepare it, should it be quicker than expected"
        assert searched(20.0, long) == ["other"], "else nothing would be tried"


def test_what_an_earlier_search_knows_fits_into_any_time(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    walk(World({"run": 0.5, "other": 0.2}), RUN, OTHER, journal=Journal(tmp_path, "k"))
    monkeypatch.setattr(order, "seconds", lambda candidate, tried: 4000.0)
    world = World({"run": 0.5, "other": 0.2})
    search = walk(world, RUN, OTHER, journal=Journal(tmp_path, "k"), seconds=20.0)
    assert not world.started and fates(search)["run"] == "dominated" and search.best().candidate.ids == ["other"]      # type: ignore[union-attr]


def test_what_takes_the_model_as_a_whole_is_not_repaired() -> None:
    """It would be the same program again, under the name of layers that it did not leave alone."""
    whole = technique("int8", "runtime", "precision", (Touch("runtime"), Touch("number-format")))
    whole.WHOLE = True
    search = walk(World({"run": 0.5, "int8": 0.2}, {"int8": 0.03}, healing=0.006), RUN, whole)
    assert fates(search)["int8"] == "rejected_accuracy" and not any(candidate.keep for candidate in search.tried)


def test_another_variant_has_its_turn_before_a_repair() -> None:
    world = World({"int8": 0.2}, {"int8": 0.03}, healing=0.006)
    search = walk(world, technique("int8", "runtime", "precision", (Touch("runtime"), Touch("number-format")), variants=2))
    assert world.started[:2] == ["int8", "int8 number=1"] and search.best() is not None and search.best().candidate.keep     # type: ignore[union-attr]


def test_a_repair_goes_on_where_a_killed_search_was(tmp_path: Any) -> None:
    def once() -> tuple[World, Search]:
        world = World({"int8": 0.2}, {"int8": 0.03}, healing=0.006)
        return world, walk(world, INT8, journal=Journal(tmp_path, "k"))

    once()
    lines = (tmp_path / "candidates.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "candidates.jsonl").write_text(lines[0])        # the broken one only
    again, search = once()
    assert "int8" not in again.started and len(search.best().candidate.keep) == 4     # type: ignore[union-attr]


def test_a_set_of_layers_that_cannot_be_kept_does_not_end_a_repair() -> None:
    world = World({"int8": 0.2}, {"int8": 0.03}, healing=0.006)
    start = world.start

    def refusing(candidate: Candidate) -> FakeWorker:
        if candidate.keep == {"layer7", "layer9"}:
            raise WorkerFailed("not_applied", "no product of the graph belongs to layer7, layer9")
        return start(candidate)

    world.start = refusing      # type: ignore[method-assign]
    assert len(walk(world, INT8).best().candidate.keep) == 4     # type: ignore[union-attr]


def test_a_check_that_fails_on_a_candidate_rejects_it() -> None:
    search = walk(World({"run": 0.5, "int8": 0.1}, raises=frozenset({"int8"})), RUN, INT8)
    assert fates(search)["int8"] == "rejected_behaviour"


def test_a_broken_candidate_is_repaired_while_it_stays_faster() -> None:
    world = World({"run": 0.5, "int8": 0.2}, {"int8": 0.03}, healing=0.006)
    search = walk(world, RUN, INT8)
    best = search.best()
    assert best is not None and best.candidate.numerics == "precision" and len(best.candidate.keep) == 4
    slow = walk(World({"run": 0.2, "int8": 0.199}, {"int8": 0.03}, healing=0.006), RUN, INT8)
    assert not any(candidate.keep for candidate in slow.tried), "it would not be worth it"


def test_what_is_slower_than_the_best_is_not_scored() -> None:
    search = walk(World({"run": 0.3, "int8": 0.9}), RUN, INT8)
    found = next(one for one in search.tried.values() if one.candidate.label() == "int8")
    assert found.fate == "slower" and found.scores is None


def test_training_builds_on_the_best() -> None:
    search = walk(World({"run": 0.5, "bf16": 0.5, "prune": 0.5}), RUN, BF16, PRUNE)
    assert search.best().candidate.label() == "prune + bf16 + run"      # type: ignore[union-attr]


def test_limits_and_time() -> None:
    search = walk(World({"run": 0.5}), RUN, limits={"p99_ms": 0.1})
    assert fates(search)["run"] == "over_limit"
    assert not walk(World({"run": 0.5}), RUN, seconds=0.0).tried
    seen = Timing(p50=1, p90=2, p99=3, calls=4), int(5e9)
    assert over_limit(*seen, {"p99_ms": 3.0, "peak_memory_gb": 5.0}) is None
    assert "peak_memory_gb is 5" in (over_limit(*seen, {"peak_memory_gb": 4.9}) or "")
    assert "peak_memory_gb is not known" in (over_limit(seen[0], None, {"peak_memory_gb": 4.9}) or ""), "and not nothing"
    said = [over_limit(Timing(p50=1, p90=2, p99=p99, calls=4), None, {"p99_ms": 15.0}) for p99 in (15.04, 15.0000000004, math.nextafter(15, 16), 15.0, 16.04)]
    assert said == [*(f"p99_ms is {text}, at most 15 was asked for" for text in ("15.04", "15.0000000004", "15.000000000000002")), None,
                    "p99_ms is 16, at most 15 was asked for"]


@pytest.mark.parametrize(("name", "slow", "refused"), [("p99_ms", 1, False), ("p99_ms", 2, True), ("p90_ms", 4, False), ("p90_ms", 5, True),
                                                      ("p50_ms", 14, False), ("p50_ms", 15, True), ("p99_ms", 0, False)])
def test_a_screening_refuses_nobody_for_one_call_that_was_held_up(name: str, slow: int, refused: bool) -> None:
    """Of twenty calls one was slow: the 99th percentile is beyond the limit, and nothing is known of it."""
    times_ns = [int(30e6)] * slow + [int(10e6)] * (20 - slow) if name != "p50_ms" else [int(30e6)] * slow + [int(10e6)] * (21 - slow)
    said = surely_over_limit(times_ns, int(1e9), {name: 15.0, "peak_memory_gb": 2.0})
    assert (said is not None) is refused and (not refused or str(said).startswith(f"{name} is "))
    assert surely_over_limit(times_ns, int(3e9), {name: 1e3, "peak_memory_gb": 2.0}) == "peak_memory_gb is 3, at most 2 was asked for"


def test_memory_that_nobody_knows_wins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWorker, "memory_bytes", lambda self: None)
    search = walk(World({"run": 0.5}), RUN, objective="memory")
    found = search.best()
    assert found is not None and search.value(found) == 0.0 and "how much memory it takes is not known" in found.reason
    assert fates(walk(World({"run": 0.5}), RUN, limits={"peak_memory_gb": 8.0})) == {"run": "over_limit"}


def test_memory_is_that_of_the_artifact_and_not_of_its_exporter() -> None:
    limits = {"peak_memory_gb": 0.5}
    search = walk(world := World({"run": 0.5}), RUN, limits=limits)
    assert fates(search) == {"run": "dominated"}, "what exporting took refuses nobody, where the artifact could not be measured"
    assert confirm.champion(search, world, time.monotonic() + 60)[0] is None and fates(search) == {"run": "over_limit"}, "and nobody is let through"
    assert fates(walk(World({"run": 0.5}, served=int(6e8)), RUN, limits=limits)) == {"run": "over_limit"}
    search = walk(World({"run": 0.5}, served=int(4e8)), RUN, limits=limits)
    assert fates(search) == {"run": "dominated"} and search.best().peak_memory_bytes == 4e8       # type: ignore[union-attr]
    search = walk(World({"run": 0.5}, served=int(4e8)), RUN, objective="memory")
    assert search.value(search.best()) == pytest.approx(2.5)       # type: ignore[arg-type]
    search = walk(World({"run": 0.5}, served=int(4e8)), RUN)
    assert search.best().peak_memory_bytes == 1e9, "where memory does not matter, nothing is stored"       # type: ignore[union-attr]


def test_the_journal_saves_the_work_and_survives_a_cut(tmp_path: Any) -> None:
    modules = registry(RUN, INT8)

    def once(cut: bool = False) -> tuple[World, Search]:
        world = World({"run": 0.5, "int8": 0.2}, {"int8": 0.001})
        found = plan.pool(modules, ModelFacts(), check=True)
        search = Search(world, found, "latency", {}, time.monotonic() + 60, 0.01, journal=Journal(tmp_path, "k"))
        search.run(world.baseline())
        return world, search

    world, first = once()
    assert world.started
    again, second = once()
    assert again.started == [] and fates(second) == fates(first) and second.best().scores == first.best().scores    # type: ignore[union-attr]
    text = (tmp_path / "candidates.jsonl").read_bytes()
    (tmp_path / "candidates.jsonl").write_bytes(text[:-20])
    cut, third = once()
    assert len(cut.started) == 1 and fates(third) == fates(first)
    assert Journal(tmp_path, "another key").known == {}


def test_answers_that_changed_are_recorded_whatever_the_scores_are(tmp_path: Any) -> None:
    """A score that is not right or wrong does not show how many there were: the outputs do."""
    for _ in range(2):              # the second time from the journal
        search = walk(World({"run": 0.5, "int8": 0.2}), RUN, INT8, journal=Journal(tmp_path, "k"))
        assert [found.record().flip_rate for found in search.tried.values()] == [0.125, 0.125]
    found = next(iter(search.tried.values()))
    found.judgement = Judgement("pass", 0.0, (0.0, 0.0), None, 0.01, "")
    assert found.record().flip_rate == 0.01, "right and wrong answers, where the check knows"


def test_a_full_disk_is_named(tmp_path: Any) -> None:
    journal = Journal(tmp_path / "gone", "k")
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        journal.add("run", {})


def test_undecided_ones_are_confirmed_and_what_fails_gives_way() -> None:
    world = World({"run": 0.5, "int8": 0.2}, {"int8": 0.001}, undecided=True)
    search = walk(world, RUN, INT8)
    assert fates(search)["int8"] == "undecided"
    world.undecided = False         # the other samples decide
    won = confirm.winner(search, world)
    assert won is not None and won.found.candidate.label() == "int8"
    world.undecided = True
    won = confirm.winner(search, world)
    assert won is not None and won.found.candidate.label() == "run", "a lossless one needs no samples"


def test_what_cannot_be_stored_gives_way() -> None:
    world = World({"run": 0.5, "other": 0.6})

    def deploy(found: Any) -> Any:
        if found.candidate.label() == "run":
            raise confirm.NotStored("it holds a lambda")
        return found.candidate

    world.deploy = deploy       # type: ignore[method-assign]
    search = walk(world, RUN, OTHER)
    won = confirm.winner(search, world)
    assert won is not None and won.found.candidate.label() == "other"
    assert fates(search)["run"] == "not_deployable"


class Hanging(FakeWorker):
    def block(self, count: int, *, cpu: int | None = None) -> list[int]:
        raise WorkerFailed("timeout", "a call took longer than 60 s")


@pytest.mark.parametrize("other", [0.6, 0.51])      # 0.51: close enough to race it first
def test_what_hangs_in_a_race_gives_way(other: float) -> None:
    """Once, a failure there was that of the whole search."""
    world = World({"run": 0.5, "other": other})
    search = walk(world, RUN, OTHER)
    world.load = lambda artifact: (Hanging if artifact.label() == "run" else FakeWorker)(0.5, artifact)  # type: ignore[method-assign]
    won, final = confirm.champion(search, world, time.monotonic() + 60)
    assert won is not None and won.found.candidate.label() == "other" and final is not None and final.verdict == "faster"
    lost = next(found for candidate, found in search.tried.items() if candidate.label() == "run")
    assert lost.fate == "failed" and lost.reason.startswith("timeout: in the final race, a call took longer")


@pytest.mark.parametrize(("kind", "known"), [("disk_full", False), ("failed", True)])
def test_a_full_disk_is_not_remembered_against_a_candidate(tmp_path: Any, kind: str, known: bool) -> None:
    world = World({"run": 0.5, "other": 0.5})

    def start(candidate: Candidate) -> FakeWorker:
        if candidate.label() == "other":
            raise WorkerFailed(kind, "OSError: No space left on device")
        return FakeWorker(0.5, candidate)

    world.start = start         # type: ignore[method-assign]
    search = walk(world, RUN, OTHER, journal=Journal(tmp_path, "key"))
    found = next(found for candidate, found in search.tried.items() if candidate.label() == "other")
    assert found.fate == "failed" and result.cut_short(found) is not known
    remembered = Journal(tmp_path, "key").known
    assert (found.candidate.key() in remembered) is known and len(remembered) == 1 + known


def test_what_takes_no_other_batch_gives_way() -> None:
    world = World({"run": 0.5, "other": 0.6}, stiff=frozenset({"run"}))
    search = walk(world, RUN, OTHER)
    won = confirm.winner(search, world)
    assert won is not None and won.found.candidate.label() == "other" and fates(search)["run"] == "rejected_behaviour"


class Tailed(FakeWorker):
    """Now and then a call takes much longer; and it needs twice the memory."""

    def block(self, count: int, *, cpu: int | None = None) -> list[int]:
        return [*super().block(count)[1:], int(9e8)]

    def memory_bytes(self) -> int:
        return int(2e9)


@pytest.mark.parametrize("limits", [{"p99_ms": 800.0}, {"peak_memory_gb": 1.5}])
def test_limits_hold_for_what_was_stored_and_over_many_calls(limits: dict[str, float]) -> None:
    world = World({"run": 0.5, "other": 0.6})

    def load(candidate: Candidate) -> FakeWorker:
        worker = world.start(candidate)
        return Tailed(worker.factor, candidate) if candidate.label() == "run" else worker

    world.load = load       # type: ignore[method-assign]
    search = walk(world, RUN, OTHER, limits=limits)
    assert "over_limit" not in fates(search).values(), "a screening does not see it"
    won, final = confirm.champion(search, world, math.inf)
    assert won is not None and won.found.candidate.label() == "other" and final is not None and final.verdict == "faster"
    found = next(one for one in search.tried.values() if one.candidate.label() == "run")
    assert found.fate == "over_limit" and found.reason.startswith(f"loaded from its artifact: {next(iter(limits))} is ")


def held_up(slow: set[int]) -> type[FakeWorker]:
    """A class of workers whose calls take 10 ms, and 30 ms for those of these numbers, counted over all that are made of it."""
    class Worker(FakeWorker):
        calls = 0

        def block(self, count: int, *, cpu: int | None = None) -> list[int]:
            first = type(self).calls
            type(self).calls += count
            return [int(30e6 if call in slow else 10e6) for call in range(first, first + count)]

    return Worker


@pytest.mark.parametrize(("slow", "seconds", "kept", "calls"), [({12}, 60.0, "kept", 101), ({12, 60}, 60.0, "over_limit", 101),
                                                               (set(range(0, 999, 9)), 60.0, "over_limit", 12), ({7}, 0.0, "inconclusive", 4)])
def test_one_slow_call_of_a_dozen_refuses_no_winner(slow: set[int], seconds: float, kept: str, calls: int) -> None:
    """A slow model has twelve calls in a final race of six rounds: more of them are made before one is its 99th percentile."""
    world = World({"run": 0.5})
    search = walk(world, RUN)
    search.limits, slowed = {"p99_ms": 15.0}, held_up(slow)
    world.load = lambda artifact: slowed(0.5, artifact)     # type: ignore[method-assign]
    won, final = confirm.champion(search, world, time.monotonic() + seconds)
    found = next(iter(search.tried.values()))
    assert found.fate == kept and (won is not None) is (kept == "kept")
    if won is not None:
        assert final is not None and final.b is not None and final.b.calls >= calls and final.b.p99 < 15.0
    elif kept == "inconclusive":
        assert "give it more time" in found.reason and result.open_ones(search) == [found]


def test_the_first_call_of_a_block_does_not_count() -> None:
    """Caches are cold behind the block of the other one."""
    class Cold(FakeWorker):
        def block(self, count: int, *, cpu: int | None = None) -> list[int]:
            return [9, *[1] * (count - 1)]

    lane = racing.Lane(Cold(1.0, Candidate()), 3)
    assert lane.run() == 1 and lane.times_ns == [1, 1, 1]


def test_a_race_knows_the_faster_and_stops() -> None:
    race = racing.race(lambda: FakeWorker(1.0, Candidate()), lambda: FakeWorker(0.5, Candidate()), limits=Limits(max_pairs=2))
    assert race.verdict == "faster" and race.speedup == pytest.approx(2.0, rel=0.01) and race.b is not None and race.b.p50 == 500
    same = racing.race(lambda: FakeWorker(1.0, Candidate()), lambda: FakeWorker(1.0, Candidate()), limits=Limits(max_pairs=3))
    assert same.verdict in ("no_difference", "inconclusive")


@pytest.mark.parametrize("costs", [(3e7, 12e7), (2e7, 4e7, 16e7), (1e7, 9e7, 2e7, 8e7, 3e7, 7e7, 1e7), (3e6, 12e6)])
@pytest.mark.parametrize("speedup", [1.3, 2.9, 5.0])
def test_both_of_a_race_meet_the_same_inputs(monkeypatch: pytest.MonkeyPatch, costs: tuple[float, ...], speedup: float) -> None:
    """Long texts take longer than short ones, and the faster of two makes more calls in the time of a block: its blocks were of others."""
    monkeypatch.setattr(racing, "BLOCK_S", 0.12)

    class Lengths(FakeWorker):
        in_turn, following = len(costs), 0

        def block(self, count: int, start: int | None = None, *, cpu: int | None = None, among: int | None = None) -> list[int]:
            first = self.following if start is None else start
            self.following = first + count
            return [int(self.factor * costs[(first + number % (among or count)) % len(costs)]) for number in range(count)]

    race = racing.race(lambda: Lengths(1.0, Candidate()), lambda: Lengths(1 / speedup, Candidate()))
    assert race.verdict == "faster" and race.speedup == pytest.approx(speedup, rel=0.01)
    assert race.a is not None and race.b is not None and race.a.p50 / race.b.p50 == pytest.approx(speedup, rel=0.01)
    a, b = (racing.Lane.of(Lengths(factor, Candidate())) for factor in (1.0, 1 / speedup))
    assert racing.screen(a, b) == pytest.approx(speedup, rel=0.01)


def test_the_second_of_two_blocks_begins_on_the_cpu_of_the_first() -> None:
    class Placed(FakeWorker):
        def block(self, count: int, *, cpu: int | None = None) -> list[int]:
            self.cpu = self.cpu if cpu is None else cpu
            return [int(1e9 * self.factor * (1 + self.cpu / 3))] * count       # the second CPU is slower

    a, b = (racing.Lane.of(Placed(1.0, Candidate(), cpu=cpu)) for cpu in (0, 1))
    assert [racing.round_of(a, b, index) for index in range(3)] == [0.0] * 3


def test_a_race_of_too_few_rounds_says_so_in_place_of_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racing, "time", SimpleNamespace(monotonic=lambda: 0.0))

    class Uneven(FakeWorker):
        def block(self, count: int, *, cpu: int | None = None) -> list[int]:
            self.factor *= 3
            return super().block(count)

    found = racing.race(lambda: FakeWorker(1.0, Candidate()), lambda: Uneven(1e-3, Candidate()), deadline_s=0.0)
    assert found.verdict == "inconclusive" and found.speedup is None and found.speedup_ci is None
    assert found.reason.startswith("the time ended after 2 of at least 6 rounds") and found.reason.endswith("give it more time")
    sure = racing.race(lambda: FakeWorker(1.0, Candidate()), lambda: FakeWorker(0.5, Candidate()), deadline_s=0.0)
    assert sure.verdict == "faster" and sure.speedup == pytest.approx(2.0, rel=0.01), "nobody doubts this one"

    won = confirm.Confirmed(Tried(Candidate(), "dominated", "36.21x in a screening", 36.21), Path("artifact"))
    assert result.verdict_of(won, found, SimpleNamespace(objective="memory"), True) == "inconclusive"
    confirm.settle(won, found, "inconclusive")
    assert won.found.fate == "inconclusive" and won.found.reason.startswith("in the final race the time ended after 2")


def test_who_is_not_told_from_another_in_a_race_is_not_said_to_be_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racing, "race", lambda *rest, **more: racing.Race("inconclusive", None, None, None, "the time ended"))
    first, second = (confirm.Confirmed(Tried(Candidate(), "dominated", "", 2.0), Path(name)) for name in "ab")
    search = SimpleNamespace(deadline_s=0.0, progress=print)
    assert confirm.duel(first, second, World({}), search) is first      # type: ignore[arg-type]
    assert second.found.reason.endswith("in a race: the time ended") and "slower" not in second.found.reason


def test_candidates_know_their_conflicts_and_order() -> None:
    modules = registry(RUN, INT8, BF16, SWITCH, PRUNE)
    part = {id: Part(module, module.Options()) for id, module in modules.items()}
    assert Candidate.of([part["run"], part["int8"]]).conflict() == "runtime"
    mixed = Candidate.of([part["run"], part["bf16"], part["switch"], part["prune"]])
    assert mixed.conflict() is None and [one.id for one in mixed.parts] == ["switch", "prune", "bf16", "run"]
    assert mixed.numerics == "convergence" and not mixed.lossless and Candidate().lossless


def test_one_technique_alone_is_not_named_twice() -> None:
    search = walk(World({"run": 1.0}, fails={"run": "run: no such kernel"}), RUN)
    assert [found.reason for found in search.tried.values()] == ["failed: no such kernel"]


def test_the_model_is_weighed_once_where_there_is_no_room_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def baseline_bytes(world: World, processes: int) -> int:
        if processes > 1:
            raise WorkerFailed("failed", "no room for two")
        return int(2e9)

    monkeypatch.setattr(World, "baseline_bytes", baseline_bytes)
    search = walk(World({"int8": 0.5}, {"int8": 0.001}), INT8, objective="memory")
    assert search.baseline is not None and search.baseline.peak_memory_bytes == 2e9 and fates(search)["int8"] == "dominated"
