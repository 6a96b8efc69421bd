"""How long a process may take to prepare, and what the samples of the confirmation may be asked."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import optimizations
import pytest

from saturate.errors import CheckUnusable, EnvironmentProblem, WorkloadFailed
from saturate.inference import accuracy, checking, confirm, controls, sensitivity
from saturate.inference import lab as module
from saturate.inference.accuracy import Budget, Judgement, split
from saturate.inference.api import running_model
from saturate.inference.candidates import Candidate
from saturate.inference.confirm import Confirmed, NotStored
from saturate.inference.ending import Ending
from saturate.inference.failures import WorkerFailed
from saturate.inference.journal import Journal
from saturate.inference.jury import Jury, control
from saturate.inference.lab import Lab
from saturate.inference.phases import Phases
from saturate.inference.result import Result, best_of
from saturate.inference.samples import Seen
from saturate.inference.scores import read
from saturate.inference.search import Tried
from saturate.records.inference import ModelFacts, Timing

torch = pytest.importorskip("torch")


def test_what_was_found_may_be_prepared_again_although_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[float] = []

    def start(*given: Any, prepare_s: float, **more: Any) -> Any:
        allowed.append(prepare_s)
        raise WorkerFailed("failed", "for a test")

    monkeypatch.setattr(module, "Worker", start)
    lab = Lab(None, tmp_path, 1, time.monotonic() - 10)         # type: ignore[arg-type]
    with pytest.raises(NotStored, match="for a test"):
        lab.deploy(Tried(Candidate(), "dominated", "", prepare_s=50.0, first_call_s=10.0))
    with pytest.raises(WorkerFailed):
        lab.load(tmp_path)
    with pytest.raises(WorkerFailed):
        lab.start(Candidate())
    with pytest.raises(WorkerFailed):
        lab.serve(None, tmp_path, 1)            # type: ignore[arg-type]
    assert allowed == [240.0, module.LOAD_S, 30.0, module.LOAD_S]


def test_what_is_tried_or_stored_is_forked_and_what_is_claimed_starts_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []

    def start(*given: Any, forks: Any = None, **more: Any) -> Any:
        used.append(forks)
        raise WorkerFailed("failed", "for a test")

    monkeypatch.setattr(module, "Worker", start)
    server: Any = object()
    lab = Lab(None, tmp_path, 1, time.monotonic() + 10, forks=server)         # type: ignore[arg-type]
    with pytest.raises(NotStored):
        lab.deploy(Tried(Candidate(), "dominated", ""))
    for begin in (lambda: lab.start(Candidate()), lab.baseline, lambda: lab.load(tmp_path), lambda: lab.artifact_bytes(tmp_path),
                  lambda: lab.serve(None, tmp_path, 1)):        # type: ignore[arg-type]
        with pytest.raises(WorkerFailed):
            begin()
    assert used == [server, server, None, None, None, None]


@pytest.mark.parametrize(("model_s", "left_s", "allowed_s"), [(5.0, 60, 30), (10.0, 190, 60), (15.0, 170, 85), (20.0, 50, 30), (20.0, -5, 30), (20.0, 1000, 300), (100.0, 1000, 500)])
def test_what_a_candidate_may_take_to_prepare_follows_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_s: float, left_s: float,
                                                                  allowed_s: float) -> None:
    """On a busy machine, where importing torch alone takes ten seconds, half a minute ended most candidates."""
    allowed: list[float] = []

    def start(*given: Any, prepare_s: float, **more: Any) -> Any:
        allowed.append(prepare_s)
        return SimpleNamespace(ready=SimpleNamespace(prepare_s=0.9 * model_s, first_call_s=0.1 * model_s))

    monkeypatch.setattr(module, "Worker", start)
    lab = Lab(None, tmp_path, 1, time.monotonic() + left_s)         # type: ignore[arg-type]
    lab.baseline()
    lab.start(Candidate())
    assert allowed[1] == pytest.approx(allowed_s, abs=0.5)


def test_the_model_itself_may_take_all_the_time_that_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine or a large model is no model that does not run."""
    allowed: list[float] = []

    def start(*given: Any, prepare_s: float, **more: Any) -> Any:
        allowed.append(prepare_s)
        raise WorkerFailed("timeout", f"preparation took longer than {prepare_s:.0f} s")

    monkeypatch.setattr(module, "Worker", start)
    for left_s in (10, 1000):
        with pytest.raises(WorkloadFailed, match="takes too long"), running_model():
            Lab(None, tmp_path, 1, time.monotonic() + left_s).baseline()            # type: ignore[arg-type]
    grace = module.BASELINE_GRACE_S
    assert 9 + grace < allowed[0] <= 10 + grace and 990 + grace < allowed[1] <= 1000 + grace


def test_a_model_that_was_prepared_once_may_take_as_long_again_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[float] = []

    def start(*given: Any, prepare_s: float, **more: Any) -> Any:
        allowed.append(prepare_s)
        return SimpleNamespace(ready=SimpleNamespace(prepare_s=80.0, first_call_s=20.0))

    monkeypatch.setattr(module, "Worker", start)
    lab = Lab(None, tmp_path, 1, time.monotonic() - 10)         # type: ignore[arg-type]
    lab.baseline()
    lab.baseline()
    assert allowed == [module.BASELINE_GRACE_S, module.BASELINE_GRACE_S + 400]


def test_a_compiler_that_hangs_while_it_stores_is_not_waited_for_half_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[float] = []

    def store(folder: Path, limit_s: float) -> Any:
        allowed.append(limit_s)
        raise WorkerFailed("timeout", f"storing took longer than {limit_s:.0f} s")

    monkeypatch.setattr(module, "Worker", lambda *given, **more: SimpleNamespace(store=store, close=lambda: None))
    for left_s in (-10, 7200):
        with pytest.raises(NotStored, match="storing took longer"):
            Lab(None, tmp_path, 1, time.monotonic() + left_s).deploy(                   # type: ignore[arg-type]
                Tried(Candidate(), "dominated", "", prepare_s=50.0, first_call_s=10.0))
    assert allowed == [module.LOAD_S + 240, module.STORE_S]


@pytest.mark.parametrize(("took_s", "left_s"), [(0.0, 300.0), (200.0, 100.0), (299.0, 30.0)])
def test_what_is_stored_to_weigh_it_is_loaded_in_the_rest_of_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, took_s: float, left_s: float) -> None:
    """Storing and loading had a candidate's whole time each, beside what preparing it had taken."""
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    allowed: list[float] = []

    def stored(self: Lab, worker: Any, found: Any, limit_s: float) -> Path:
        allowed.append(limit_s)
        now[0] += took_s
        return tmp_path / "artifact"

    def start(*given: Any, prepare_s: float, **more: Any) -> Any:
        allowed.append(prepare_s)
        raise WorkerFailed("timeout", "it hangs")

    monkeypatch.setattr(Lab, "_stored", stored)
    monkeypatch.setattr(module, "Worker", start)
    lab = Lab(None, tmp_path, 1, now[0] + 1000.0)           # type: ignore[arg-type]
    assert lab.served_bytes(None, None) is None             # type: ignore[arg-type]
    least = min(left_s, 0.3 * (1000.0 - took_s))            # no more than any candidate has by then
    assert allowed == [pytest.approx(300.0), pytest.approx(max(30.0, least))]


def test_an_artifact_that_a_full_disk_keeps_from_loading_is_not_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*given: Any, **more: Any) -> Any:
        raise WorkerFailed("disk_full", "OSError: No space left on device")

    monkeypatch.setattr(module, "Worker", start)
    with pytest.raises(EnvironmentProblem, match="cannot be loaded") as caught:
        Lab(None, tmp_path, 1, time.monotonic()).load(tmp_path)         # type: ignore[arg-type]
    assert "No space left" in caught.value.cause and "--workdir" in caught.value.remedy


class Growing:
    """A process that takes more memory for whatever is not the user's inputs."""

    def __init__(self, bytes_: int):
        self.bytes, self.closed = bytes_, False

    def outputs(self) -> Any:
        return [[torch.zeros(1)]]

    def block(self, count: int) -> list[int]:
        return [1] * count

    def probe(self, *inputs: Any) -> Any:
        self.bytes *= 3
        return torch.zeros(1)

    def memory_bytes(self) -> int | None:
        return self.bytes or None

    def __enter__(self) -> Growing:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.closed = True


@pytest.mark.parametrize(("first", "fresh", "least"), [(100, 90, 90), (100, 110, 100), (0, 90, None), (100, 0, None)])
def test_the_memory_of_the_model_is_that_of_before_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, fresh: int, least: Any) -> None:
    lab = Lab(SimpleNamespace(inputs=lambda torch: [(torch.zeros(2, 3),)], others=lambda torch: []), tmp_path, 1, time.monotonic())    # type: ignore[arg-type]
    worker, other = Growing(first), Growing(fresh)
    monkeypatch.setattr(Lab, "baseline", lambda self: other)
    lab.observe(worker)                         # type: ignore[arg-type]
    lab.probe(worker)                           # type: ignore[arg-type]
    assert worker.bytes > first or not first
    assert lab.baseline_bytes(1) == (first or None) and not other.closed
    assert lab.baseline_bytes(3) == least and other.closed


def test_a_process_of_the_model_that_is_ended_from_outside_is_started_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(SimpleNamespace(), tmp_path, 1, time.monotonic(), own_bytes=100)         # type: ignore[arg-type]
    ends = [WorkerFailed("killed", "signal 9", outside=True), Growing(90), Growing(95), WorkerFailed("failed", "no room")]

    def baseline(self: Lab) -> Any:
        end = ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(Lab, "baseline", baseline)
    assert lab.baseline_bytes(3) == 90
    with pytest.raises(WorkerFailed, match="no room"):
        lab.baseline_bytes(3)


def test_what_was_stored_has_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.artifact, "store", lambda folder, *given, **more: folder)
    monkeypatch.setattr(module.artifact, "read", lambda folder: SimpleNamespace(files=[SimpleNamespace(size_bytes=5), SimpleNamespace(size_bytes=7)]))
    lab = Lab(SimpleNamespace(inputs=lambda torch: [], device="cpu"), tmp_path, 1, time.monotonic(), facts=ModelFacts())      # type: ignore[arg-type]
    found = Tried(Candidate(), "dominated", "")
    lab._stored(SimpleNamespace(store=lambda *given: None), found, 60.0)                                           # type: ignore[arg-type]
    assert found.size_bytes == found.record().size_bytes == 12


class Projecting(torch.nn.Module):
    """Its own forward multiplies, too, as where a table of embeddings is the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.table = torch.nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Any) -> Any:
        return self.body(self.stem(x)) @ self.table.T


def test_the_model_itself_is_no_layer_that_a_repair_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Projecting().eval()
    ranked = sensitivity.rank(torch, model, [(torch.randn(8, 4),)])
    assert {name for name, _ in ranked} == {"", "stem", "body"}
    worker = SimpleNamespace(sensitivity=lambda limit_s: ranked, ask=lambda function: module.module_names(SimpleNamespace(model=model)), close=lambda: None)
    monkeypatch.setattr(Lab, "baseline", lambda self: worker)
    names, ends = Lab(None, tmp_path, 1, time.monotonic()).ranking()         # type: ignore[arg-type]
    assert set(names) == {"stem", "body"} and ends == ("stem", "body")


# -- the samples of the confirmation -------------------------------------------------------------------------------


def scored_lab(before: list[float], budget: Budget) -> Lab:
    halves = split(len(before)) if len(before) >= accuracy.FEWEST_TO_SPLIT else None
    return Lab(None, Path("nowhere"), 1, 0.0, jury=Jury(read(before), budget, halves))       # type: ignore[arg-type]


def named(number: int) -> Candidate:
    return Candidate(keep=frozenset({f"layer{number}"}))


def test_a_search_lets_a_bad_candidate_through_in_five_percent_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole searches in which every candidate loses more than the budget: those whose drop is within it on the samples of the
    selection meet the others one after the other, as in `confirm.winner`."""
    numpy = pytest.importorskip("numpy")
    monkeypatch.setattr(accuracy, "_samples_needed", lambda *given: None)       # takes longest, and is not asked for here
    budget, most = Budget(0.02), 0.02

    @functools.cache
    def passes(lost: int, won: int, turn: int) -> bool:
        """Only the answers that changed count, so as many of them need no second look."""
        before, after = [1.0] * lost + [0.0] * won + [1.0] * (300 - lost - won), [0.0] * lost + [1.0] * (300 - lost)
        return Jury(read(before), budget, ((), tuple(range(300)))).judge(read(after), turn).verdict == "pass"

    rng, searches, wrongly, first = numpy.random.default_rng(5), 1500, 0, 0
    halves = numpy.array(split(600))
    for _ in range(searches):
        right = rng.random(600) < 0.9
        after = numpy.where(right, rng.random((40, 600)) >= 0.0279, rng.random((40, 600)) < 0.05)       # a true drop of 0.0201
        chosen, other = (numpy.stack([(right & ~after)[:, half].sum(1), (~right & after)[:, half].sum(1)]) for half in halves)
        contenders = other[:, (chosen[0] - chosen[1]) / 300 <= most].T[:confirm.MOST + 2]
        turn = next((turn for turn, (lost, won) in enumerate(contenders) if lost - won < 6 and passes(int(lost), int(won), turn)), None)
        wrongly, first = wrongly + (turn is not None), first + (turn == 0)
    assert 0.015 < wrongly / searches <= 0.05 + 2 * (0.05 * 0.95 / searches) ** 0.5
    assert first > 0.4 * wrongly, "most of it is the first one's"


def test_the_levels_of_all_contenders_hold_together() -> None:
    levels = [accuracy.level(0.95, turn) or 0.0 for turn in range(30)]
    assert levels == sorted(levels) and sum(1 - one for one in levels) <= 0.05 + 1e-12 and 0.96 < levels[0] < 0.97
    assert accuracy.level(None, 3) is None


def test_who_met_the_samples_before_has_its_own_level_again(tmp_path: Path) -> None:
    before = [1.0] * 700
    after = read([1.0] * 340 + [0.0] + [1.0] * 359)
    lab = scored_lab(before, Budget(0.02))
    first, second = lab.confirmed(after, named(1)), lab.confirmed(after, named(2))
    assert first.drop_ci is not None and second.drop_ci is not None and first.drop_ci[1] < second.drop_ci[1]
    later = lab.within(0.001, 0.0)              # as `Result.pick` does
    assert later.confirmed(after, named(1)).drop_ci == first.drop_ci and lab.confirmed(after, named(2)) == second
    assert len(lab.turns) == 2
    assert (lab.judge(after).samples_needed or 0) == 0 and lab.judge(after).verdict == "pass", "the selection has all of it"

    lab.remember(Journal(tmp_path, "k"))
    lab.confirmed(after, named(3))
    again = scored_lab(before, Budget(0.02))                        # the search goes on in another process
    again.remember(Journal(tmp_path, "k"))
    assert again.confirmed(after, named(4)) == second != again.confirmed(after, named(5))
    assert [name[-9:-3] for name in again.turns] == ["layer3", "layer4", "layer5"]


class Answering:
    def __init__(self, answer: Any):
        self.answer = answer

    def run(self, x: Any) -> Any:
        return self.answer.clone()


def test_only_the_very_answers_of_the_baseline_are_identical() -> None:
    """Another candidate with the same share of right answers is not: whether one is belongs to its scores, not to their value."""
    right = torch.tensor([0, 1] * 50)
    base, other = (torch.nn.functional.one_hot(labels).float() for labels in (right.clone(), right.clone()))
    base[:5], other[50:55] = base[:5].flip(1), other[50:55].flip(1)

    def accurate(run: Any) -> float:
        return float((run(torch.zeros(100, 1)).argmax(1) == right).float().mean())

    for check, change in ((accurate, lambda x: x), (accurate, lambda x: x.argmax(1, keepdim=True).expand(-1, 2).mul(2).sub(1))):
        lab = Lab(None, Path("nowhere"), 1, 0.0, check=check)       # type: ignore[arg-type]
        found = checking.scored(check, lab.run_of(Answering(change(base))))             # type: ignore[arg-type]
        assert found.scores is not None
        lab.jury = Jury(found.scores, Budget(0.0), answers=found.answers)
        same, another = (lab.score(Answering(change(one))) for one in (base, other))    # type: ignore[arg-type]
        assert same is not None and another is not None
        assert lab.judge(another).verdict == "undecided"
        fractions = change(base).is_floating_point()
        assert lab.judge(same).verdict == ("pass" if fractions else "undecided"), "classes are the same by chance"


def test_a_check_with_few_samples_says_that_it_cannot_confirm() -> None:
    values = [0.1 * (i % 3) for i in range(19)]
    lab = scored_lab(values, Budget(0.5))
    for judgement in (lab.judge(read(values)), lab.confirmed(read(values), named(1))):
        assert judgement.verdict == "undecided" and "too few to split" in judgement.reason and judgement.samples_needed == 38
    assert scored_lab(values, Budget(0.5, confidence=None)).judge(read(values)).verdict == "pass"
    assert scored_lab(values * 2, Budget(0.5)).judge(read(values * 2)).verdict == "pass"


def test_the_samples_that_are_said_to_be_needed_are_those_of_the_whole_check() -> None:
    """Half of them choose, and the others confirm."""
    budget, values = Budget(0.01), read([1.0] * 100)
    alone = accuracy.compare(values, values, budget, confirmed_at=accuracy.level(budget.confidence, 0))
    assert scored_lab([1.0] * 200, budget).judge(read([1.0] * 200)).samples_needed == 2 * (alone.samples_needed or 0) > 600


def test_what_calibrates_candidates_may_not_be_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that was fitted to the samples of the check looks better than it is."""
    x, other = torch.randn(40, 8), torch.randn(40, 8)
    seen = Seen()
    seen.add((x,))
    found = heard([0.5] * 40)
    monkeypatch.setattr(controls, "controls", lambda *given: dataclasses.replace(found, baseline=dataclasses.replace(found.baseline, samples=seen)))
    for calibration in (other, x[10:]):
        source = SimpleNamespace(calibration=lambda torch, calibration=calibration: [(calibration,)])
        with contextlib.nullcontext() if calibration is other else pytest.raises(CheckUnusable, match="calibration data is among"):
            control(len, lambda x: x, Budget(0.5), source, None, 0.0)          # type: ignore[arg-type]


def heard(values: list[float], **more: Any) -> controls.Controls:
    return controls.Controls(checking.Scored(read(values), None, Seen(), "asked", "answered", 1, "", 0.0), **more)


def test_a_check_with_few_samples_is_noted() -> None:
    for count, noted in ((19, True), (20, False)):
        jury, notes = Jury.of(heard([0.5] * count), Budget(0.5))
        assert any(f"{count} samples" in note for note in notes) == noted and (jury.halves is None) == noted
        assert (jury.asked, jury.answers) == ("asked", "answered")


def test_what_is_known_of_the_check_is_said() -> None:
    assert Jury.of(heard([0.5] * 20, notes=("it prints",)), Budget(0.5))[1] == ["it prints"]


def test_that_samples_are_too_few_for_any_candidate_is_said_before_one_is_tried() -> None:
    """64 of 128 samples confirm at two thirds of the chance of an error: a budget of 0.05 was within reach of the selection alone."""
    for count, certain in ((128, False), (160, True)):
        jury, notes = Jury.of(heard([1.0] * count), Budget(0.05))
        assert jury.certifies is certain and bool(notes) is not certain
        assert certain or notes[0].startswith("even a candidate that scores as the model does cannot be certified: 64 samples cannot tell")
        assert certain or "about 140 samples in all would do" in notes[0]
        same = jury.judge(read([1.0] * count))
        assert same.verdict == ("pass" if certain else "undecided"), "the selection asks for no less than the confirmation"
    better, _ = Jury.of(heard([1.0, 1.0, 1.0, 0.0] * 32), Budget(0.05))
    assert not better.certifies and better.judge(read([1.0] * 128)).verdict == "pass", "who scores better than the model may still pass"
    assert Jury.of(heard([1.0] * 30), Budget(0.05, confidence=None))[1] == [], "point estimates certify nothing, as they are asked to"


def test_a_check_that_shuffles_certifies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [0.1 * (i % 3) for i in range(40)]
    lab = scored_lab(values, Budget(0.5))
    monkeypatch.setattr(controls, "controls", lambda *given: heard(values, shuffled=True))
    source = SimpleNamespace(calibration=lambda torch: [])
    lab.jury, _ = control(len, lab.run_of(Answering(None)), Budget(0.5), source, None, 0.0)         # type: ignore[arg-type]
    for judgement in (lab.judge(read(values)), lab.confirmed(read(values), named(1))):
        assert judgement.verdict == "undecided" and "in another order each time" in judgement.reason and judgement.samples_needed is None


@pytest.mark.parametrize("halves", [None, split(40)])
def test_scores_that_are_none_of_the_same_samples_fail(halves: Any) -> None:
    jury = Jury(read([0.1 * (i % 3) for i in range(40)]), Budget(0.5), halves)
    for scores in (read([0.1] * 39), read(0.1)):
        for turn in (None, 0):
            judged = jury.judge(scores, turn)
            assert judged.verdict == "fail" and judged.numbers() == (None, None) and "the check returned" in judged.reason


class Repeating:
    """A candidate that answers with these numbers, one after the other."""

    def __init__(self, *answers: float):
        self.answers = list(answers)

    def outputs(self) -> Any:
        return [[torch.full((2, 3), self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])]]


@pytest.mark.parametrize(("answers", "says"), [((1.0,), None), ((9.0,), "it calls itself"), ((1.0, 1.0, 2.0), "it is random")])
def test_what_is_seen_of_a_candidate_comes_with_what_is_wrong_with_it(answers: tuple[float, ...], says: str | None) -> None:
    lab = Lab(SimpleNamespace(switches={}), Path("nowhere"), 1, 0.0, facts=ModelFacts(dtypes=("float32",)))         # type: ignore[arg-type]
    lab.reference = [[torch.full((2, 3), 1.0)]]
    found = lab.examine(Repeating(*answers), SimpleNamespace(numerics="reordering"))              # type: ignore[arg-type]
    assert (found.problem is None) == (says is None) and (says or "") in (found.problem or "")
    assert found.agreement_db is not None


def test_records_hold_no_infinity() -> None:
    unbounded = Tried(Candidate(), "rejected_accuracy", "", judgement=Judgement("fail", math.inf, (-math.inf, math.inf), None, None, "why"))
    row = unbounded.record()
    assert (row.accuracy_drop, row.accuracy_drop_ci, row.verdict) == (None, None, "fail")
    assert Judgement("pass", 0.1, (0.0, 0.2), None, None, "").numbers() == (0.1, (0.0, 0.2))


class OfSize:
    """A candidate whose program was made for batches of one size, and rounds."""

    def __init__(self, size: int, rounding: float = 0.0):
        self.size, self.rounding = size, rounding

    def run(self, x: Any) -> Any:
        if len(x) != self.size:
            raise WorkerFailed("other_sizes", f"input tensor 0 has shape {list(x.shape)}, this program was made for [{self.size}, 3]", alive=True)
        return (x * 2 * (1 + self.rounding),)


@pytest.mark.parametrize(("given", "refused"), [(True, True), (False, False)])
def test_sizes_that_nobody_gave_may_be_refused(given: bool, refused: bool) -> None:
    lab = Lab(None, Path("nowhere"), 1, 0.0)            # type: ignore[arg-type]
    lab.precision = lambda: "float32"                   # type: ignore[method-assign]
    x = torch.rand(2, 3)
    lab.others = [module.Other((x,), [x * 2], None, None, given)]
    assert (lab.other_sizes(OfSize(8), Candidate()) is not None) == refused         # type: ignore[arg-type]
    assert "agrees" in (lab.other_sizes(OfSize(2, 0.1), Candidate()) or "")         # type: ignore[arg-type]


@pytest.mark.parametrize("itself", [1e-5, 0.0])
def test_on_batches_of_other_sizes_a_candidate_may_do_what_the_model_does_itself(itself: float) -> None:
    """Its twin moves by as much; see `guards.examine`."""
    lab = Lab(None, Path("nowhere"), 1, 0.0)            # type: ignore[arg-type]
    lab.precision = lambda: "float32"                   # type: ignore[method-assign]
    x = torch.rand(2, 3)
    lab.others = [module.Other((x,), [x * 2], [x * 2], [x * 2 * (1 + itself)], True)]
    claims = types.SimpleNamespace(numerics="reordering")
    assert (lab.other_sizes(OfSize(2, 2e-4), claims) is None) == bool(itself)           # type: ignore[arg-type]


def test_of_a_lossless_winner_is_said_what_the_check_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saturate.inference.artifact.read", lambda folder: types.SimpleNamespace(files=[]))
    judgement = Judgement("undecided", 0.03, (-0.01, 0.07), 900, 0.03, "30 samples cannot tell")
    found = Tried(Candidate(), "dominated", "")
    assert found.candidate.lossless
    race = types.SimpleNamespace(estimate=types.SimpleNamespace(speedup=2.0, speedup_ci=(1.9, 2.1)), b=Timing(p50=1, p90=1, p99=1, calls=9))
    won = Confirmed(found, Path("nowhere"), judgement, read([0.5, 1.0]))
    best = best_of(won, won, race, None)            # type: ignore[arg-type]
    assert best is not None and (best.verdict, best.samples_needed, best.accuracy_drop) == ("undecided", 900, 0.03)


def test_artifacts_of_those_that_lost_go_and_what_others_stored_stays(tmp_path):
    lab = Lab(types.SimpleNamespace(without_shared=lambda: None), tmp_path, 1, time.monotonic() + 10)         # type: ignore[arg-type]
    for name in ("earlier", "1", "2"):
        (tmp_path / name).mkdir()
    lab.made += [tmp_path / "1", tmp_path / "2", tmp_path / "never made"]
    lab.discard(tmp_path / "2")
    assert {path.name for path in tmp_path.iterdir()} == {"earlier", "2"}
    lab.discard(None)           # of a later `pick`: what was kept once is kept
    assert (tmp_path / "2").is_dir()


@pytest.mark.parametrize("stored", [True, False])
def test_of_an_interrupted_search_no_artifact_stays_but_the_one_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: bool) -> None:
    """Each holds a copy of the model."""
    lab = Lab(types.SimpleNamespace(without_shared=lambda: None), tmp_path, 1, time.monotonic() + 10)         # type: ignore[arg-type]
    for name in ("earlier", "1", "2"):
        (tmp_path / name).mkdir()
    lab.made += [tmp_path / "1", tmp_path / "2"]
    record = optimizations.stopped()
    record = msgspec.structs.replace(record, unconfirmed=msgspec.structs.replace(record.unconfirmed, artifact=str(tmp_path / "2") if stored else None))
    ended = Ending(SimpleNamespace(baseline=1), lab, [], 0.0, Phases(0.0))         # type: ignore[arg-type]
    monkeypatch.setattr(Ending, "_cut_off", lambda self: record)
    monkeypatch.setattr(Result, "of", lambda record, search, lab: SimpleNamespace(record=record))
    with pytest.raises(KeyboardInterrupt), ended.told():
        raise KeyboardInterrupt
    assert {path.name for path in tmp_path.iterdir()} == ({"earlier", "2"} if stored else {"earlier"})
    assert ended.notes == [f"interrupted: the same call with workdir={str(tmp_path)!r} goes on from here"], "without a workdir it has a name that nobody knows"
