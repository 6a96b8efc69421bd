"""What `optimize` refuses before anything starts."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import os
import platform
import re
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import saturate
from saturate.errors import (
    CheckUnusable,
    EnvironmentProblem,
    NothingFaster,
    SaturateError,
    UsageError,
    WorkloadFailed,
)
from saturate.inference import api, folders, jury, plan, samples
from saturate.inference.failures import WorkerFailed
from saturate.inference.lab import Lab
from saturate.inference.techniques import _registry
from saturate.inference.techniques._api import FOR_ALL_S, Train
from saturate.records.inference import ModelFacts

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(("more", "words"), [
    ({"budget": saturate.Budget(max_drop=0.01)}, "a budget needs a check"), ({"check": 0.5}, "check is not callable"),
    ({"check": min, "budget": 0.01}, "the budget is 0.01"), ({"check": min, "budget": 0}, "the budget is 0"),
    ({"objective": "speed"}, "no objective 'speed'"), ({"limits": {"p95_ms": 3}}, "no limit 'p95_ms'"),
    ({"limits": {"p99_ms": -1}}, "p99_ms is -1"), ({"limits": {"p99_ms": math.inf}}, "p99_ms is inf"), ({"limits": [("p99_ms", 3)]}, "limits is a list"),
    ({"only": None, "skip": None, "threads": 0}, "threads is 0"),
    ({"time": "soon"}, "time is 'soon'"), ({"only": ["onnx-runtme"]}, "no inference technique"),
    ({"train": [1, 2]}, "`train` is a list"), ({"train": ([], 3)}, "`train.loss` cannot be called"),
    ({"train": (3, max)}, "`train.loader` is a int"), ({"train": ([],)}, "`train` is a tuple of 1"), ({"train": ([], max, 1, 2)}, "a tuple of 4"),
    ({"threads": 0}, "threads is 0"), ({"threads": -1}, "threads is -1"), ({"threads": 1.5}, "threads is 1.5"), ({"threads": True}, "threads is True")])
def test_arguments_that_mean_nothing(tmp_path: Any, more: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        saturate.optimize(torch.nn.Linear(4, 2), [(torch.zeros(8, 4),)], **{"workdir": tmp_path / "run", "time": "5s", **more})


def test_samples_that_cannot_be_counted_are_refused_before_a_search_for_throughput(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="throughput needs inputs with a batch dimension"):
        saturate.optimize(torch.nn.Bilinear(4, 4, 2), [(torch.zeros(4, 4), torch.zeros(3, 4))], objective="throughput",
                          workdir=tmp_path / "run", time="5s")


def test_inputs_of_which_nobody_can_make_others_are_refused_by_name_for_throughput(tmp_path: Path) -> None:
    """It was a TypeError of ours."""
    class Takes(torch.nn.Module):
        def forward(self, x: Any, how: Any) -> Any:
            return x * 2

    with pytest.raises(UsageError, match="other batch sizes can be made") as caught:
        saturate.optimize(Takes(), [(torch.zeros(4, 4), torch.device("cpu"))], objective="throughput", workdir=tmp_path / "run", time="5s")
    assert "torch.device" in str(caught.value.cause)


def test_a_search_without_a_workdir_leaves_the_command_lines_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`saturate optimize` refused its own default afterwards: a folder that holds something, and in which no search has worked."""
    monkeypatch.chdir(tmp_path)
    killed = tmp_path / "work" / "processes" / "process-0123abcd"
    (killed / "scratch").mkdir(parents=True)
    (tmp_path / "work" / "lock").touch()
    (tmp_path / "work" / "source").mkdir(mode=0o700)
    for workdir in (None, "work"):
        saturate.optimize(torch.nn.Linear(4, 2), [(torch.zeros(8, 4),)] * 2, workdir=workdir, time="3s", only=["tf32-products"], threads=1,
                          progress=lambda text: None)
    assert folders.workplace(Path(".saturate/optimize")) == tmp_path / ".saturate" / "optimize"
    assert list((tmp_path / ".saturate").glob("*/report.html")) and not (killed / "scratch").exists()


def test_a_time_that_starting_takes_up_is_told_before_a_check_takes_as_much_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: of 60 seconds starting had taken 45, and the check went on for five minutes although nothing could be tried any more."""
    asked: list[int] = []
    monkeypatch.setattr(api, "for_all_s", lambda notes: 1000.0 * (float(notes[FOR_ALL_S]) > 0.0))
    result = saturate.optimize(torch.nn.Linear(4, 2), [(torch.zeros(8, 4),)], check=lambda run: asked.append(1) or [1.0] * 30, workdir=tmp_path / "run",
                               time="1s", threads=1, progress=lambda text: None)
    assert result._search.start_s < 0, "the model's next process finds what this one found out"
    assert not asked and result.record.verdict == "inconclusive" and result.record.max_drop == 0.01
    assert "the time ended before the first candidate's turn, give it " in repr(result) and "m: start " in repr(result)
    assert [phase.name for phase in result.record.phases][:2] == ["start", "search"] and {row.fate for row in result.record.candidates} == {"not_tried", "not_applicable"}
    with pytest.raises(NothingFaster, match="nothing was tried"):
        result.pick(max_drop=0.5)


@pytest.mark.parametrize("time", ["soon", None, float("nan"), -1, 0])
def test_a_time_that_is_none_ends_a_pick_before_its_folder_is_touched(tmp_path: Path, time: Any) -> None:
    lab = SimpleNamespace(budget=saturate.Budget(max_drop=0.1), folder=tmp_path / "run")
    with pytest.raises(UsageError, match="time is"):
        saturate.Result(None, None, lab).pick(0.1, time)    # type: ignore[arg-type]
    assert not lab.folder.exists()


def test_a_pick_takes_its_time_as_a_search_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lab = SimpleNamespace(budget=saturate.Budget(max_drop=0.1), folder=tmp_path, source=SimpleNamespace(folder=tmp_path, identity=""))
    monkeypatch.setattr("saturate.inference.result.Source.open", lambda *given: None)
    monkeypatch.setattr(saturate.Result, "_picked", lambda self, drop, seconds: seconds)
    assert saturate.Result(None, None, lab).pick(0.1, "20m") == 1200.0      # type: ignore[arg-type,comparison-overlap]


@pytest.mark.parametrize("files", [{"program/main.c": "years of work"}, {"lock": "my lock"}, {"lock": "1234", "result.json": "{}"},
                                   {"lock": "1234", "source/model.py": "a package"}])
def test_a_folder_that_no_search_has_left_is_not_written_in(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for search in (lambda: saturate.optimize(torch.nn.Linear(4, 2), [(torch.zeros(8, 4),)], workdir=tmp_path, time="5s"),
                   lambda: saturate.generation.optimize(torch.nn.Embedding(4, 4), [[1], [2]], max_new_tokens=1, workdir=tmp_path)):
        with pytest.raises(UsageError, match="is not empty, and no search has worked in it"):
            search()
    left = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == files


def test_the_folder_of_an_earlier_search_is_one_to_go_on_in(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert folders.workplace(folder) == folder and not folder.exists()
    folder.mkdir()
    assert folders.workplace(folder) == folder
    (folder / "lock").write_text("4711")            # killed before it wrote anything else
    assert folders.workplace(folder) == folder
    (folder / "source").mkdir(mode=0o700)
    (folder / "my notes").write_text("")
    assert folders.workplace(folder) == folder
    (folder / "source").rmdir()
    (folder / "candidates.jsonl").write_text("")    # of a search for a way to generate, in this process
    assert folders.workplace(folder) == folder


def test_a_folder_stays_where_it_is_when_the_user_s_code_goes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)

    def loader() -> Any:
        os.chdir(tmp_path / "data")
        yield (torch.zeros(8, 4),)

    saturate.optimize(torch.nn.Linear(4, 2), loader(), workdir="runs", time="3s", only=["tf32-products"], threads=1, progress=lambda text: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "runs"] and not list((tmp_path / "data").iterdir())
    assert (tmp_path / "runs" / "source" / "model.pt").exists()


def test_a_builder_that_returns_nothing_is_named(tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="the model is None") as caught:
        saturate.optimize(None, [(torch.zeros(8, 4),)], workdir=tmp_path / "run", time="5s")
    assert "return" in caught.value.remedy and not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["only", "skip"])
def test_one_technique_may_be_named_without_a_list(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Stopped(Exception):
        pass

    def known(registry: Any, only: Any, skip: Any) -> None:
        given.update(only=only, skip=skip)
        raise Stopped

    monkeypatch.setattr(api, "known", known)
    for ids in ("tf32-products", iter(["tf32-products"])):
        with pytest.raises(Stopped):
            saturate.optimize(torch.nn.Linear(4, 2), [(torch.zeros(8, 4),)], workdir=tmp_path / "run", time="5s", **{name: ids})
        assert given == {"only": (), "skip": (), name: ("tf32-products",)}


def test_what_is_public_is_there_and_nothing_else() -> None:
    assert {"optimize", "load", "Budget", "Train", "Result", "generation"} <= set(dir(saturate))
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        saturate.optimise       # noqa: B018


def test_what_was_found_for_another_aim_is_not_taken_over() -> None:
    source = SimpleNamespace(model_hash="m", inputs_hash="i", train_hash="", device="cpu", switches={})
    lab = Lab(source, Path("nowhere"), 1, 0.0, facts=ModelFacts())         # type: ignore[arg-type]
    keys = {lab.key(objective, limits) for objective in api.OBJECTIVES for limits in ({}, {"p99_ms": 3.0}, {"p99_ms": 4.0})}
    assert len(keys) == 9 and lab.key("latency", {}) in keys


def test_what_keeps_candidates_away_is_said_first() -> None:
    answer = [[torch.ones(2)]]
    facts = ModelFacts(training_mode=True, exportable=False, export_problem="it branches on data")
    lab = SimpleNamespace(facts=None, threads=1, observe=lambda worker: None, reference=answer, again=answer)
    notes = api.observe_baseline(lab, SimpleNamespace(ready=SimpleNamespace(facts=facts)), None)
    assert [note.partition(":")[0] for note in notes] == ["the model cannot be exported", "the model came in training mode"]


@pytest.mark.parametrize(("flags", "told"), [({"avx2"}, {"inputs", "weights", "inputs and weights"}), ({"avx2", "avx512_vnni"}, set())])
def test_what_a_cpu_without_vnni_changes_is_noted_of_each_format(flags: set[str], told: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    installed = dict.fromkeys(("torchao", "onnx", "onnxruntime", "onnxscript", "openvino"), "1.0")
    facts = ModelFacts(torch="2.13.0", dtypes=("float32",), linears=9, calibration_samples=64, trainable=True, installed=installed, cpu_flags=frozenset(flags))
    notes = plan.pool(_registry.load(), facts, check=True).notes()
    assert {re.search("no VNNI: (.*) get 7 bits", note)[1] for note in notes} == told       # type: ignore[index]
    named = {id for note in notes for id in note.partition(": ")[0].split(", ")}
    assert named == ({id for id in _registry.load() if "int8" in id} if told else set())
    assert not plan.pool(_registry.load(), facts, check=False).notes(), "none of them is tried"


@pytest.mark.slow
def test_a_result_of_a_cpu_without_vnni_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao", reason="the extra saturate[inference]")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    allowed = api.allowed
    monkeypatch.setattr(api, "allowed", lambda *given, **more: dataclasses.replace(allowed(*given, **more), cpu_flags=frozenset({"avx2"})))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).eval()
    x = torch.randn(40, 16)
    labels = model(x).argmax(1)
    result = saturate.optimize(model, [(torch.randn(8, 16),) for _ in range(4)], check=lambda run: run(x).argmax(1) == labels, threads=1,
                               only="torchao-dynamic-int8", time="20s", workdir=tmp_path / "run", progress=lambda text: None)
    said = "torchao-dynamic-int8: this CPU has no VNNI: inputs and weights get 7 bits"
    assert said in result.table() and said in Path(result.record.report).read_text()
    assert said in (tmp_path / "run" / "result.json").read_text()


def test_a_check_that_breaks_in_the_middle_ends_the_search_and_rejects_nothing(tmp_path: Path) -> None:
    """Its data is gone, for one: that was held against each candidate, and what one had shown was never looked at again."""
    pytest.importorskip("torchao", reason="the extra saturate[inference]")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).eval()
    data = tmp_path / "data.pt"
    x = torch.randn(40, 16)
    torch.save((x, model(x).argmax(1)), data)
    calls = itertools.count(1)

    def check(run: Any) -> Any:
        if next(calls) == 4:                # the first three are about the model
            data.rename(tmp_path / "elsewhere.pt")
        x, labels = torch.load(data)
        return run(x).argmax(1) == labels

    def search() -> Any:
        return saturate.optimize(model, [(torch.randn(8, 16, generator=torch.Generator().manual_seed(1)),)] * 4, check=check, threads=1,
                                 only="torchao-dynamic-int8", time="60s", workdir=tmp_path / "run", progress=lambda text: None)

    with pytest.raises(CheckUnusable, match="the check works no more: .*data.pt") as caught:
        search()
    record = caught.value.record            # type: ignore[attr-defined]
    assert not [one for one in record.candidates if one.fate.startswith("rejected")], record.candidates
    assert record.verdict == "inconclusive" and record.notes[0].startswith("the check works no more")
    (tmp_path / "elsewhere.pt").rename(data)
    row = next(one for one in search().record.candidates if one.id.startswith("torchao-dynamic-int8"))
    assert row.accuracy is not None or row.fate == "slower", row


@pytest.mark.parametrize("answer", [torch.full((4, 2), float("nan")), torch.zeros(0, 2)])
def test_a_model_that_answers_with_no_number_is_named(answer: Any) -> None:
    lab = SimpleNamespace(facts=None, threads=1, observe=lambda worker: None, reference=[[answer]], again=[[answer]])
    with pytest.raises(WorkloadFailed, match="hold no number"):
        api.observe_baseline(lab, SimpleNamespace(ready=SimpleNamespace(facts=ModelFacts())), None)


def test_what_cannot_be_compared_is_said() -> None:
    answer = [[torch.tensor([1.0, float("nan"), 2.0, float("-inf")]), torch.arange(4)]]
    lab = SimpleNamespace(facts=None, threads=1, observe=lambda worker: None, reference=answer, again=answer)
    notes = api.observe_baseline(lab, SimpleNamespace(ready=SimpleNamespace(facts=ModelFacts())), None)
    assert "12.5 % of what the model answers with is NaN" in notes[0]


@pytest.mark.parametrize(("kind", "outside", "error", "words"), [
    ("disk_full", True, EnvironmentProblem, "the model's process cannot work"), ("out_of_memory", True, EnvironmentProblem, "ended from outside"),
    ("failed", True, EnvironmentProblem, "ended from outside"), ("failed", False, WorkloadFailed, "does not run on its inputs"),
    ("out_of_memory", False, WorkloadFailed, "does not run on its inputs"), ("timeout", False, WorkloadFailed, "takes too long")])
def test_what_ends_the_model_from_outside_is_not_its_own_fault(kind: Any, outside: bool, error: type[Exception], words: str) -> None:
    with pytest.raises(SaturateError, match=words) as caught, api.running_model():
        raise WorkerFailed(kind, "it says why", outside=outside)
    assert type(caught.value) is error and caught.value.cause == "it says why" and caught.value.remedy


def test_a_model_that_needs_what_was_put_into_sys_modules_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that are missing are often replaced so. "The model does not run on its inputs", it was told, and nothing of its imports."""
    (tmp_path / "needs_a_library.py").write_text("import library_that_is_missing\nfrom torch.nn import Linear\nclass Net(Linear): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "library_that_is_missing", types.ModuleType("library_that_is_missing"))
    net = importlib.import_module("needs_a_library").Net(4, 4)
    with pytest.raises(WorkloadFailed, match="cannot be made in a process of its own") as caught:
        api.optimize(net, [(torch.randn(2, 4),)] * 2, time=1.0, workdir=tmp_path / "w", progress=lambda text: None)
    assert caught.value.cause == "ModuleNotFoundError: No module named 'library_that_is_missing'" and "sys.modules" in caught.value.remedy


VALIDATION = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))


def scored_samples() -> samples.Seen:
    found = samples.Seen()
    found.add((VALIDATION,))
    return found


def training(*, leak: bool = False) -> list[Any]:
    """More batches than are looked at one by one, the last of which the check may score."""
    others = torch.Generator().manual_seed(1)
    batches = [(torch.randn(8, 4, generator=others), torch.zeros(8)) for _ in range(600)]
    return [*batches, (VALIDATION, torch.zeros(40))] if leak else batches


class Raises:
    def __iter__(self) -> Any:
        yield torch.zeros(8, 4), torch.zeros(8)
        raise RuntimeError("my loader broke")


def test_training_data_that_the_check_scores_is_refused_wherever_it_is() -> None:
    assert jury.apart(Train(training(), max), scored_samples(), 60.0) == []
    with pytest.raises(CheckUnusable, match="training data is among") as caught:
        jury.apart(Train(training(leak=True), max), scored_samples(), 60.0)
    assert "40 of 40 samples that the check scores" in caught.value.cause or "40 of 4840" in caught.value.cause


def test_looking_through_training_data_leaves_the_users_random_numbers() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 4), torch.zeros(8)), batch_size=4, shuffle=True)
    before = torch.get_rng_state()
    jury.apart(Train(loader, len), scored_samples(), 10.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_training_data_that_was_not_looked_at_is_said() -> None:
    assert "the first 1 batches" in jury.apart(Train(training(), max), scored_samples(), 0.0)[0]
    assert jury.apart(Train(itertools.repeat((torch.zeros(8, 4), torch.zeros(8))), max), scored_samples(), 0.2)


@pytest.mark.parametrize(("loader", "error", "words"), [
    (Raises(), WorkloadFailed, "my loader broke"), ([{"x": torch.zeros(8, 4)}], UsageError, "yields dict"),
    ([torch.zeros(8, 4)], UsageError, "yields Tensor"), ([(torch.zeros(8, 4),)], UsageError, "yields tuple")])
def test_a_training_loader_that_is_none_is_named(loader: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        jury.apart(Train(loader, max), scored_samples(), 60.0)
    assert words in caught.value.card()


def test_no_more_threads_are_offered_than_a_candidate_may_use():
    """With OMP_NUM_THREADS=1, say, a variant with one for each core would be started, and then refused."""
    from saturate.inference.techniques import threads

    alone = api.allowed(ModelFacts(threads=1, cores=8), 1, asked=False)
    assert not threads.eligible(alone) and threads.variants(alone) == []
    physical = api.allowed(ModelFacts(threads=4, cores=8), 4, asked=False)
    assert {one.count for one in threads.variants(physical)} <= {1, 2, 3}
    assert api.allowed(ModelFacts(threads=1, cores=2), 8, asked=True) == ModelFacts(threads=8, cores=8)


def test_a_workdir_that_torch_cannot_map_files_in_is_refused(tmp_path):
    """Else the model "does not run on its inputs"."""
    with pytest.raises(UsageError, match="cannot be used") as caught:
        folders.workplace(tmp_path / os.fsdecode(b"w\xff"))
    assert "not UTF-8" in caught.value.cause and "--workdir" in caught.value.remedy
