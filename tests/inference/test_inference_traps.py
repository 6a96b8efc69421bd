"""The trap suite: what a search must not fall for, through `saturate.optimize`. Each trap has an outcome with a name.

The fast tests replace a candidate's process by a call in this one; the slow ones are the same with real processes.
"""

from __future__ import annotations

import importlib
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import saturate
from saturate.errors import CheckUnusable, EnvironmentProblem, NothingFaster, StudyLocked, UsageError, WorkloadFailed
from saturate.inference import api, artifact, lab
from saturate.inference.candidates import Candidate, Part
from saturate.inference.ending import so_far
from saturate.inference.failures import WorkerFailed
from saturate.inference.result import judged
from saturate.inference.search import Search, Tried
from saturate.records.inference import CandidateRecord, ModelFacts, OptimizeRecord
from saturate.techniques._api import NotApplied

torch = pytest.importorskip("torch", reason="models need torch")


@pytest.fixture(autouse=True)
def traps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The planted modules can be imported, here and in candidates' processes."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "traps"))
    monkeypatch.chdir(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("trap_")]:
        del sys.modules[name]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Replace all techniques by planted ones; returns the module of models and data."""

    def begin(*names: str) -> Any:
        found = {name.replace("_", "-"): importlib.import_module(name) for name in names}
        monkeypatch.setattr(api._registry, "load", lambda: found)
        return importlib.import_module("trap_model")

    return begin


class InProcess:
    """What the search asks of `process.Worker`, without a process."""

    cpu: int | None = None
    shares = 1

    def __init__(self, source: Any, what: Any, **limits: Any):
        self.model = source.model(torch).eval()
        self.batches = source.inputs(torch)
        context = types.SimpleNamespace(torch=torch, model=self.model)
        try:
            done = [part.module.apply(context, part.options) for part in what.parts]
            proofs = [part.module.active(context, part.options) for part in what.parts]
        except NotApplied as reason:
            raise WorkerFailed("not_applied", str(reason)) from reason
        once, again = self.run(*self.batches[0]), self.run(*self.batches[0])
        facts = ModelFacts(kind=type(self.model).__name__, dtypes=("float32",), random=not torch.equal(once, again))
        self.ready = types.SimpleNamespace(prepare_s=0.0, first_call_s=0.0, compile_s=None, done=done, notes={}, proofs=proofs, peak_memory_bytes=1, facts=facts)

    def run(self, *inputs: Any) -> Any:
        try:
            with torch.no_grad():
                return self.model(*inputs)
        except Exception as error:      # what the process would report
            raise WorkerFailed("failed", f"{type(error).__name__}: {error}", "", True) from error

    probe = run

    def outputs(self) -> list[list[Any]]:
        return [[self.run(*batch)] for batch in self.batches]

    def block(self, count: int, *, cpu: int | None = None) -> list[int]:
        return [1_000_000 * (1 + self.model.rounds)] * count

    def memory_bytes(self) -> int:
        return 1

    def sensitivity(self, limit_s: float) -> list[tuple[str, float]]:
        return []

    def ask(self, function: str, *arguments: Any) -> Any:
        return []

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "Worker", InProcess)


def correct(kit: Any, count: int = 600, seed: int = 2) -> Callable[[Any], list[bool]]:
    """The check: for each of `count` samples, whether its class is read."""
    inputs, labels = kit.samples(count, seed)
    return lambda run: [bool(hit) for x, y in zip(inputs.split(100), labels.split(100)) for hit in run(x).argmax(1) == y]


def loader(kit: Any, seed: int = 1) -> list[tuple[Any]]:
    return [(x,) for x in kit.samples(128, seed)[0].split(32)]


def row(result: Any, id: str) -> CandidateRecord:
    found = [one for one in result.record.candidates if one.id == id]
    assert found, [one.id for one in result.record.candidates]
    return found[0]


# -- refused before any candidate runs -----------------------------------------------------------------------------


def raises(run):
    raise KeyError("accuracy")


def prints_nothing_else(kit: Any) -> Callable[[Any], Any]:
    inner = correct(kit)

    def check(run):
        print("scoring, please wait")
        return inner(run)

    return check


def losses(kit: Any) -> Callable[[Any], list[float]]:
    inputs, labels = kit.samples(600, 2)
    return lambda run: torch.nn.functional.cross_entropy(run(inputs), labels, reduction="none").tolist()


@pytest.mark.parametrize("check, says, remedy", [
    (raises, "raised KeyError: 'accuracy'", ""),
    (lambda run: [float("nan")], "returned nan", "finite"),
    (lambda run: None, "returned None", "number"),
    (lambda run: [1.0] * 600, "never called", "run"),
    (lambda run: sys.exit(0), "ended the program", ""),
    (lambda run: run(torch.zeros(2, 3)).tolist(), "the model failed", ""),
    (lambda run: [1.0 if run(torch.zeros(1, 64)) is not None else 0.0] * 600, "does not depend on the answers", "run"),
])
def test_a_check_that_cannot_judge_is_refused_by_name(plant, here, check, says, remedy):
    kit = plant("trap_honest")
    with pytest.raises(CheckUnusable) as refused:
        saturate.optimize(kit.Wasteful(), loader(kit), check=check, threads=1, progress=lambda text: None)
    assert says in refused.value.card() and remedy in refused.value.remedy


def test_a_metric_whose_higher_values_are_worse_is_noticed(plant, here):
    kit = plant("trap_shortcut")
    with pytest.raises(CheckUnusable) as refused:
        saturate.optimize(kit.Wasteful(), loader(kit), check=losses(kit), threads=1, progress=lambda text: None)
    assert "Budget(higher_is_better=False)" in refused.value.remedy
    budget = saturate.Budget(0.05, higher_is_better=False)
    result = saturate.optimize(kit.Wasteful(), loader(kit), check=losses(kit), budget=budget, threads=1, progress=lambda text: None)
    assert row(result, "trap-shortcut").fate == "rejected_accuracy"


def test_calibration_data_among_the_data_of_the_check_is_refused(plant, here):
    kit = plant("trap_honest")
    with pytest.raises(CheckUnusable) as refused:
        saturate.optimize(kit.Wasteful(), loader(kit, seed=2), check=correct(kit, 128), threads=1, progress=lambda text: None)
    assert "calibration" in refused.value.message and "among those that the check scores" in refused.value.cause
    mixed = kit.samples(128, 2)[0].flip(0)                  # another order, other batches
    with pytest.raises(CheckUnusable, match="calibration"):
        saturate.optimize(kit.Wasteful(), [(x,) for x in mixed.split(24)], check=correct(kit, 128), threads=1, progress=lambda text: None)


def test_a_budget_that_allows_anything_is_refused(plant, here):
    kit = plant("trap_honest")
    with pytest.raises(CheckUnusable, match="anything"):
        saturate.optimize(kit.Wasteful(), loader(kit), check=correct(kit), budget=saturate.Budget(1), threads=1, progress=lambda text: None)
    with pytest.raises(UsageError):
        saturate.Budget("1%")


def test_a_model_that_fails_on_its_own_inputs_is_not_a_matter_of_the_check(plant, here):
    kit = plant("trap_honest")
    with pytest.raises(WorkloadFailed, match="does not run"):
        saturate.optimize(kit.Wasteful(), [(torch.zeros(4, 3),)], check=correct(kit), threads=1, progress=lambda text: None)


# -- candidates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, fate, says", [
    ("trap_shortcut", "rejected_accuracy", "the drop is at least"),
    ("trap_liar", "rejected_behaviour", "it calls itself reordering"),
    ("trap_broken", "rejected_behaviour", "not finite"),
])
def test_a_fast_candidate_that_does_harm_loses_with_a_reason(plant, here, name, fate, says):
    kit = plant(name)
    result = saturate.optimize(kit.Wasteful(), loader(kit), check=correct(kit), threads=1, progress=lambda text: None)
    found = row(result, name.replace("_", "-"))
    assert (found.fate, says in found.reason) == (fate, True), found.reason
    assert result.record.verdict == "nothing_helps" and result.record.best is None
    assert result.record.artifact is None


def test_numbers_of_numpy_do_not_cost_the_result_at_the_end(plant, here):
    """They passed for Python's until the record was written."""
    numpy, kit = pytest.importorskip("numpy"), plant("trap_shortcut")
    budget = saturate.Budget(numpy.float64(0.02), confidence=numpy.float64(0.9), max_flips=numpy.float64(0.5))
    result = saturate.optimize(kit.Wasteful(), loader(kit), check=correct(kit), budget=budget, limits={"p99_ms": numpy.float64(1e6), "p50_ms": numpy.float64(1e6)},
                               threads=1, progress=lambda text: None)
    assert msgspec.json.decode(Path(result.record.report).with_name("result.json").read_bytes(), type=OptimizeRecord).limits == {"p99_ms": 1e6, "p50_ms": 1e6}
    assert result.record.max_drop == 0.02 and type(result.record.max_drop) is float


def test_a_lie_is_caught_without_a_check_too(plant, here):
    kit = plant("trap_liar")
    result = saturate.optimize(kit.Wasteful(), loader(kit), threads=1, progress=lambda text: None)
    assert row(result, "trap-liar").fate == "rejected_behaviour"


def test_randomness_at_inference_is_said_and_claims_nothing_lossless(plant, here):
    kit = plant("trap_shortcut")
    torch.manual_seed(0)
    result = saturate.optimize(kit.Dice(), loader(kit), check=correct(kit), budget=saturate.Budget(0.02), threads=1, progress=lambda text: None)
    assert any("random at inference" in note for note in result.record.notes)
    assert row(result, "trap-shortcut").fate == "rejected_accuracy"


def test_a_check_may_call_the_model_with_keywords(plant, here):
    kit = plant("trap_shortcut")
    inputs, labels = kit.samples(600, 2)
    result = saturate.optimize(kit.Wasteful(), loader(kit), check=lambda run: run(x=inputs).argmax(1) == labels, threads=1,
                               progress=lambda text: None)
    assert row(result, "trap-shortcut").fate == "rejected_accuracy" and result.record.baseline.accuracy > 0.9


def test_a_model_without_a_tensor_in_its_answer_is_refused_by_name(plant, here, monkeypatch):
    kit = plant("trap_liar")
    monkeypatch.setattr(InProcess, "outputs", lambda self: [[] for _ in self.batches])
    with pytest.raises(WorkloadFailed, match="returns no tensor"):
        saturate.optimize(kit.Wasteful(), loader(kit), threads=1, progress=lambda text: None)


def test_a_model_that_takes_no_other_values_is_no_failure(plant, here):
    kit = plant("trap_liar")

    class Strict(kit.Wasteful):
        def forward(self, x):
            if not any(torch.equal(x, batch[0]) for batch in known):
                raise ValueError("never seen")
            return super().forward(x)

    known = loader(kit)
    result = saturate.optimize(Strict(), known, threads=1, progress=lambda text: None)
    assert row(result, "trap-liar").fate == "rejected_behaviour"


def test_what_was_ended_for_its_time_is_no_proof_that_nothing_helps(plant, here, monkeypatch):
    kit = plant("trap_liar")

    class Late(InProcess):
        def __init__(self, source: Any, what: Any, **limits: Any):
            if what.parts:
                raise WorkerFailed("timeout", "preparation took longer than 30 s")
            super().__init__(source, what, **limits)

    monkeypatch.setattr(lab, "Worker", Late)
    result = saturate.optimize(kit.Wasteful(), loader(kit), threads=1, progress=lambda text: None)
    assert (row(result, "trap-liar").fate, result.record.verdict) == ("failed", "inconclusive")


# -- searches that end early, or are not alone ---------------------------------------------------------------------


class EndsWhileStoring(InProcess):
    """`error` is raised where the best is stored."""

    error: BaseException

    def store(self, folder: Path, limit_s: float) -> Any:
        raise self.error


@pytest.mark.parametrize(("error", "raised", "says"), [
    (KeyboardInterrupt(), KeyboardInterrupt, "interrupted"),
    (WorkerFailed("disk_full", "OSError: No space left on device"), EnvironmentProblem, "cannot be stored"),
    (OSError(28, "No space left on device"), EnvironmentProblem, "cannot be stored"),
    (EnvironmentProblem("no space is left", cause="[Errno 28]"), EnvironmentProblem, "no space is left")])
def test_what_was_found_outlives_an_end_in_the_confirmation(plant, here, monkeypatch, error, raised, says):
    """A full disk says nothing about the candidate, and a user who presses Ctrl-C wants to know what there is."""
    kit = plant("trap_honest", "trap_liar")
    monkeypatch.setattr(EndsWhileStoring, "error", error, raising=False)
    monkeypatch.setattr(lab, "Worker", EndsWhileStoring)
    with pytest.raises(raised) as caught:
        search(kit, check=correct(kit, 1600))
    record = caught.value.record
    assert (record.verdict, record.best, record.artifact) == ("inconclusive", None, None)
    assert record.unconfirmed.id == "trap-honest" and record.unconfirmed.speedup > 2 and record.unconfirmed.artifact is None
    assert {one.id: one.fate for one in record.candidates} == {"trap-honest": "dominated", "trap-liar": "rejected_behaviour"}
    assert says in record.notes[0] and Path(record.report).exists()
    assert msgspec.json.decode(Path("work/result.json").read_bytes())["unconfirmed"]["id"] == "trap-honest"
    with pytest.raises(NothingFaster, match="nothing that is faster") as nothing:
        caught.value.result.best        # noqa: B018
    assert "not confirmed" in nothing.value.cause


def test_the_best_so_far_is_the_one_that_is_stored():
    tried = [Tried(Candidate((), frozenset({name})), "dominated", "", speed) for name, speed in (("a", 1.5), ("b", 2.0), ("c", 0.9))]
    found = types.SimpleNamespace(tried={one.candidate: one for one in tried}, value=lambda one: one.speedup, least=1.0)
    stored = {tried[0].candidate: Path("artifacts/1"), tried[2].candidate: Path("artifacts/2")}
    assert so_far(found, types.SimpleNamespace(stored={})).speedup == 2.0
    assert so_far(found, types.SimpleNamespace(stored=stored)).artifact == "artifacts/1"
    for one in tried[:2]:
        one.fate = "not_deployable"
    assert so_far(found, types.SimpleNamespace(stored=stored)) is None


def test_two_searches_do_not_share_a_folder(plant, here):
    """The second one would put its model in the place of the first one's."""
    kit = plant("trap_liar")
    refused: list[StudyLocked] = []

    def meanwhile(run: Any) -> Any:
        with pytest.raises(StudyLocked) as caught:
            search(kit)
        refused.append(caught.value)
        return correct(kit)(run)

    search(kit, check=meanwhile)
    assert refused and refused[0].cause and "--workdir" in refused[0].remedy


def test_a_result_whose_folder_belongs_to_another_search_picks_nothing(plant, here):
    kit = plant("trap_shortcut")
    result = search(kit, check=correct(kit))
    saturate.optimize(kit.Wasteful(7), loader(kit), threads=1, workdir="work", progress=lambda text: None)
    with pytest.raises(EnvironmentProblem, match="holds another model"):
        result.pick(0.5)


@pytest.mark.parametrize("kind", ["timeout", "failed"])
def test_inputs_that_saturate_made_up_end_no_search(plant, here, monkeypatch, kind):
    """A model that hangs, or dies, on another batch size than the user's works on the user's."""
    kit = plant("trap_liar")

    class OneSize(InProcess):
        ended = False

        def probe(self, *inputs: Any) -> Any:
            if len(inputs[0]) != len(self.batches[0][0]):
                self.ended = True
                raise WorkerFailed(kind, "a call took longer than 10 s")
            return self.run(*inputs)

        def block(self, count: int, *, cpu: int | None = None) -> list[int]:
            assert not self.ended, "another process goes on"
            return super().block(count)

    monkeypatch.setattr(lab, "Worker", OneSize)
    result = saturate.optimize(kit.Wasteful(), loader(kit), threads=1, progress=lambda text: None)
    assert row(result, "trap-liar").fate == "rejected_behaviour"
    assert any(note.startswith("other batch sizes were not tried: with an input of [1, ") for note in result.record.notes)


def test_what_a_check_prints_stays_off_stdout(plant, here, capsys):
    kit = plant("trap_broken")
    saturate.optimize(kit.Wasteful(), loader(kit), check=prints_nothing_else(kit), threads=1)
    printed = capsys.readouterr()
    assert printed.out == "" and "scoring, please wait" in printed.err


# -- with real processes -------------------------------------------------------------------------------------------


def search(kit: Any, *, time: str = "10m", **more: Any) -> Any:
    return saturate.optimize(kit.Wasteful(), loader(kit), threads=1, time=time, workdir="work", progress=lambda text: None, **more)


@pytest.mark.slow
def test_the_fastest_breaks_accuracy_and_the_next_one_wins(plant):
    kit = plant("trap_shortcut", "trap_honest", "trap_liar", "trap_broken")
    result = search(kit, check=correct(kit, 1600))
    fates = {name: row(result, name).fate for name in ("trap-shortcut", "trap-liar", "trap-broken")}
    assert fates == {"trap-shortcut": "rejected_accuracy", "trap-liar": "rejected_behaviour", "trap-broken": "rejected_behaviour"}
    assert row(result, "trap-honest").fate == "kept", result.table()
    best = result.record.best
    assert result.record.verdict == "faster" and best is not None
    assert best.verdict == "pass" and best.speedup_ci[0] > 1.3
    x, labels = kit.samples(400, 9)                         # samples that nobody has seen
    assert (result.best(x).argmax(1) == labels).float().mean() > 0.99


@pytest.mark.slow
def test_pick_stores_loads_scores_and_races_for_another_budget(plant):
    kit = plant("trap_shortcut", "trap_honest")
    result = search(kit, check=correct(kit, 1600))
    before = msgspec.json.encode(result.record)
    loose = result.pick(max_drop=0.3)
    scores = artifact.read(loose.folder).scores
    assert loose.info.candidate.startswith("trap-shortcut") and scores is not None and scores.verdict == "pass"
    assert scores.accuracy_drop == pytest.approx(1 / kit.CLASSES, abs=0.02) and scores.speedup_ci[0] > 1.3
    assert result.pick(max_drop=0.05).info.candidate == "trap-honest", "the budget of the search, and its result, are as before"
    assert msgspec.json.encode(result.record) == before and result.best.info.candidate == "trap-honest"
    with pytest.raises(NothingFaster, match="within a drop of 0.0001") as caught:
        result.pick(max_drop=0.0001)
    assert "samples cannot tell" in caught.value.cause


def test_a_pick_has_its_time_although_that_of_the_search_is_over(monkeypatch, tmp_path):
    """After Ctrl-C, `end_s` of the search was still in force: nothing that was not scored had a turn."""
    left = []
    monkeypatch.setattr("saturate.inference.result.confirm.champion", lambda search, *given, **more: left.append(search.time_left()) or (None, None))
    lab = types.SimpleNamespace(jury=object(), discard=lambda kept: None)
    lab.within = lambda drop, deadline_s: lab
    search = Search(lab, types.SimpleNamespace(), "latency", {}, time.monotonic() - 60, 0.01, end_s=time.monotonic() - 30)
    with pytest.raises(NothingFaster):
        saturate.Result(None, search, lab)._picked(0.1, 60.0)
    assert left == [True]


def test_pick_judges_by_its_own_budget_and_gives_what_was_not_scored_a_turn():
    yard = types.SimpleNamespace(judge=lambda scores: types.SimpleNamespace(verdict="pass", reason="within"))
    broken = Tried(Candidate(), "rejected_accuracy", "too much", 3.0, scores=0.5)
    found = judged(broken, yard)
    assert (found.fate, found.reason, broken.fate) == ("dominated", "3.00x; within", "rejected_accuracy")
    for fate in ("rejected_behaviour", "not_deployable", "over_limit"):
        assert judged(Tried(Candidate(), fate, "why", 3.0, scores=0.5), yard).fate == fate
    part = Part(importlib.import_module("trap_shortcut"), None)
    assert judged(Tried(Candidate((part,)), "slower", "not scored", 2.0), yard).fate == "dominated"
    assert judged(Tried(Candidate(), "slower", "0.9x", 0.9), yard).fate == "slower"
    assert judged(Tried(Candidate(), "inconclusive", "2 of 6 rounds", 1.9), yard).fate == "dominated", "it computes the same, and has another race"


@pytest.mark.slow
def test_fifty_samples_cannot_certify_one_percent(plant):
    kit = plant("trap_honest")
    result = search(kit, check=correct(kit, 50), budget=saturate.Budget(0.01))
    found = row(result, "trap-honest")
    assert found.fate == "undecided" and found.verdict == "undecided" and "samples cannot tell" in found.reason
    assert found.samples_needed is not None and 640 < found.samples_needed < 760, "one half confirms, by two thirds of the chance of an error"
    assert result.record.best is None and result.record.verdict != "faster"


@pytest.mark.slow
def test_a_single_number_cannot_certify_but_a_user_may_ask_for_point_estimates(plant):
    kit = plant("trap_honest", "trap_shortcut")
    per_sample = correct(kit, 400)

    def share(run):
        values = per_sample(run)
        return sum(values) / len(values) + 0.0 * float(run(torch.zeros(1, 64)).sum())

    estimated = search(kit, check=share, budget=saturate.Budget(0.01, confidence=None))
    assert row(estimated, "trap-shortcut").fate == "rejected_accuracy"
    assert row(estimated, "trap-honest").fate == "kept"
    assert any("single number" in note for note in estimated.record.notes)
