"""What a search takes over from one before in the same folder, and what it tries again."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_inference_search import INT8, RUN, FakeWorker, World, fates, quick, registry, technique, walk

from saturate.errors import EnvironmentProblem
from saturate.inference import identity
from saturate.inference import journal as module
from saturate.inference.accuracy import Budget
from saturate.inference.candidates import Candidate, Part
from saturate.inference.failures import WorkerFailed
from saturate.inference.journal import NAME, Journal, rests
from saturate.inference.jury import Jury
from saturate.inference.lab import Lab
from saturate.inference.scores import Scores
from saturate.inference.techniques._api import Train
from saturate.inference.tried import Tried, entry_of, tried_of
from saturate.records.inference import ModelFacts, Timing

torch = pytest.importorskip("torch")

__all__ = ["quick"]         # a fixture


def named(tmp_path: Path, **more: str) -> Journal:
    return Journal(tmp_path, "k", more={"check": "c", "budget": "b", **more})


def part(id: str = "int8") -> Part:
    module = registry(technique(id, numerics="precision"))[id]
    return Part(module, module.Options())


# -- what scores say ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "then", "fate"), [(1e-6, 0.9, "dominated"), (0.9, 1e-6, "rejected_accuracy")])
def test_known_scores_are_judged_by_the_budget_of_now(tmp_path: Path, first: float, then: float, fate: str) -> None:
    def once(budget: float) -> tuple[World, Any]:
        world = World({"prune": 0.5}, {"prune": 0.03}, budget=budget)
        return world, walk(world, technique("prune", "runtime", "convergence"), journal=named(tmp_path, budget=str(budget)))

    once(first)
    again, search = once(then)
    assert again.started == [] and fates(search) == {"prune": fate}
    assert (search.best().reason if search.best() else "") == ("2.00x; a drop of 0.030" if fate == "dominated" else "")     # type: ignore[union-attr]


def test_scores_of_another_check_are_not_taken_over_and_times_are(tmp_path: Path) -> None:
    def once(check: str) -> World:
        world = World({"run": 0.5, "int8": 0.2}, {"int8": 0.001})
        walk(world, RUN, INT8, journal=named(tmp_path, check=check))
        return world

    once("strict")
    assert once("lenient").started == ["int8"]
    assert once("strict").started == once("lenient").started == []


def test_who_was_not_scored_is_tried_under_another_budget(tmp_path: Path) -> None:
    def once(budget: str) -> World:
        world = World({"run": 0.3, "int8": 0.9})
        walk(world, RUN, INT8, journal=named(tmp_path, budget=budget))
        return world

    once("0.01")
    assert once("0.01").started == [] and once("0.5").started == ["int8"]


def test_scores_of_the_very_same_answers_stay_that(tmp_path: Path) -> None:
    found = Tried(Candidate((part(),)), "dominated", "", 2.0, Timing(p50=1, p90=1, p99=1, calls=3), Scores(0.9, identical=True), done=("did",),
                  compile_s=4.0)
    entry = json.loads(json.dumps(entry_of(found)))
    back = tried_of(found.candidate, entry)
    assert back == found and back.scores.identical
    del entry["compile_s"]
    assert tried_of(found.candidate, entry).compile_s is None, "a journal from before it was noted"


# -- what failed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "outside", "again"), [("timeout", False, True), ("out_of_memory", False, True), ("failed", True, True),
                                                       ("failed", False, False), ("not_applied", False, False)])
def test_what_may_go_otherwise_another_time_is_tried_again(tmp_path: Path, kind: str, outside: bool, again: bool) -> None:
    def refuse(candidate: Candidate) -> FakeWorker:
        world.started.append(candidate.label())
        raise WorkerFailed(kind, "No space left on device", outside=outside)        # type: ignore[arg-type]

    for _ in range(2):
        world = World({"run": 0.5})
        world.start = refuse            # type: ignore[method-assign]
        walk(world, RUN, journal=named(tmp_path))
    assert world.started == ["run"] * again


def test_a_journal_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    for resume in (True, False):
        with pytest.raises(EnvironmentProblem, match="cannot be read") as caught:
            Journal(tmp_path, "k", resume)
        assert "workdir" in caught.value.remedy


# -- which candidate ---------------------------------------------------------------------------------------------------


def test_sets_of_layers_of_one_size_are_two_candidates(tmp_path: Path) -> None:
    ends, top = (Candidate((part(),), frozenset(names)) for names in (("l7", "l9"), ("l0", "l1")))
    assert ends.label() == "int8 (but l7, l9)" and top.label() == "int8 (but l0, l1)" and ends.key() != top.key()
    assert Candidate((part(),), frozenset("abcd")).label() == "int8 (but a and 3 more layers)"
    world = World({"int8": 0.2}, {"int8": 0.03})
    asked: list[list[str]] = []
    start = world.start

    def counting(candidate: Candidate) -> FakeWorker:
        asked.append(sorted(candidate.keep))
        return start(candidate)

    world.start = counting              # type: ignore[method-assign]
    walk(world, INT8, journal=named(tmp_path))
    assert ["layer7", "layer9"] in asked and ["layer0", "layer1"] in asked


# -- what it all depends on ----------------------------------------------------------------------------------------------


def test_a_search_is_known_by_training_versions_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SimpleNamespace(model_hash="m", inputs_hash="i", train_hash="", device="cpu", switches={})
    facts = ModelFacts(torch="2.9", installed={"onnxruntime": "1.20"}, cpu_flags=frozenset(("avx2", "avx512f")))

    def key(facts: ModelFacts = facts, threads: int = 1, **more: Any) -> str:
        return Lab(SimpleNamespace(**{**vars(source), **more}), Path("nowhere"), threads, 0.0, facts=facts).key("latency", {})     # type: ignore[arg-type]

    change = functools.partial(dataclasses.replace, facts)
    others = [key(train_hash="t"), key(device="cuda:1"), key(switches={"products": "high"}), key(threads=2), key(change(torch="2.10")), key(change(installed={"onnxruntime": "1.21"})),
              key(change(cpu_flags=frozenset(("avx2",)))), key(change(capability=(9, 0)))]
    monkeypatch.setattr(module, "__version__", "another")
    others.append(key())
    monkeypatch.undo()
    monkeypatch.setattr(module.hardware, "gpu_name", lambda torch, device: "NVIDIA H200")      # an H100 has the same capability
    others.append(key())
    monkeypatch.undo()
    assert len({key(), *others}) == len(others) + 1
    assert key(change(cpu_flags=frozenset(("avx512f", "avx2")))) == key()


def scored(limit: float, data: Any) -> Any:
    def check(run: Any) -> Any:
        return [float(value < limit) for value in run(data)]
    return check


class Scorer:
    def __init__(self, limit: float) -> None:
        self.limit = limit

    def __call__(self, run: Any) -> float:
        return self.limit

    def method(self, run: Any) -> float:
        return self.limit


def test_a_check_is_known_by_its_code_and_by_what_it_holds() -> None:
    def known(check: Any) -> str:
        return identity.of_callable(torch, check)

    zeros, ones = torch.zeros(3), torch.ones(3)
    assert known(scored(0.1, zeros)) == known(scored(0.1, zeros)) != ""
    both = lambda run: scored(0.1, zeros)(run)          # noqa: E731
    all_of_them = [scored(0.1, zeros), scored(0.2, zeros), scored(0.1, ones), both, Scorer(1.0), Scorer(2.0), Scorer(1.0).method,
                   Scorer(2.0).method, functools.partial(scored, 0.1), functools.partial(scored, 0.2)]
    assert len({known(check) for check in all_of_them}) == len(all_of_them)
    assert known(lambda run: 0.1) != known(lambda run: 0.2), "two in one line"
    assert known(Scorer(1.0)) == known(Scorer(1.0)) and known(functools.reduce) == ""


def test_code_includes_what_is_called_inside_and_through_modules() -> None:
    def made(body: str) -> str:
        space: dict[str, Any] = {}
        exec(f"def helper(x):\n    return {body}\n", space)
        helper = space["helper"]
        return identity.code_of(lambda x: [helper(one) for one in x])

    assert made("x + 1") == made("x + 1") != made("x + 2")


def test_what_scores_rest_on() -> None:
    def known(check: Any, mean: float = 0.9, asked: str = "a", **more: Any) -> dict[str, str]:
        budget = Budget(**{"max_drop": 0.01, **more})
        return rests(torch, check, budget, Jury(Scores(mean), budget, asked=asked).heard)

    check = scored(0.1, torch.zeros(3))
    same = known(check)
    assert known(check) == same
    for other in (known(scored(0.2, torch.zeros(3))), known(check, asked="b"), known(check, 0.8), known(check, metric="f1")):
        assert other["check"] != same["check"]
    other = known(check, max_drop=0.02)
    assert other["check"] == same["check"] and other["budget"] != same["budget"]
    assert known(functools.reduce)["check"] != known(functools.reduce)["check"], "nobody can see what it does"
    assert rests(torch, None) == {"check": "", "budget": ""}


def test_training_is_known_by_data_loss_and_options() -> None:
    data = [(torch.ones(2, 4), torch.ones(2, 4))]
    given = [None, Train(data, torch.nn.functional.mse_loss), Train([(torch.zeros(2, 4), torch.ones(2, 4))], torch.nn.functional.mse_loss),
             Train(data, torch.nn.functional.l1_loss), Train(data, torch.nn.MSELoss()), Train(data, torch.nn.functional.mse_loss, epochs=9),
             Train(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data[0]), shuffle=True), torch.nn.functional.mse_loss),
             Train(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(2, 4)), shuffle=True), torch.nn.functional.mse_loss)]
    known = [identity.of_train(torch, train) for train in given]
    assert len(set(known)) == len(known) and known == [identity.of_train(torch, train) for train in given]


def test_a_line_that_was_changed_is_passed_over(tmp_path: Path) -> None:
    """By hand, or by a disk: a speed that nobody measured won the search, or an entry without its fields ended it."""
    journal = Journal(tmp_path, "k")
    for name in ("a", "b", "c"):
        journal.add(name, {"speedup": 1.5, "timing": [1.0, float("nan")]})
    assert sorted(Journal(tmp_path, "k").known) == ["a", "b", "c"]
    lines = (tmp_path / NAME).read_text().splitlines()
    lines[0] = lines[0].replace("1.5", "9.5")
    del (short := json.loads(lines[2]))["timing"]
    (tmp_path / NAME).write_text("\n".join([*lines[:2], json.dumps(short), 100_000 * "[", ""]))
    assert sorted(Journal(tmp_path, "k").known) == ["b"]
