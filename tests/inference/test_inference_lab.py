"""How long a process may take to prepare."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saturate.errors import WorkloadFailed
from saturate.inference import checking
from saturate.inference import lab as module
from saturate.inference.accuracy import Budget, Scores
from saturate.inference.api import running_model
from saturate.inference.candidates import Candidate
from saturate.inference.confirm import NotDeployable
from saturate.inference.lab import Lab
from saturate.inference.process import WorkerFailed
from saturate.inference.search import Tried
from saturate.records.inference import ModelFacts

torch = pytest.importorskip("torch")


def test_what_was_found_may_be_prepared_again_although_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[float] = []

    def start(*given: Any, prepare_s: float, **more: Any) -> Any:
        allowed.append(prepare_s)
        raise WorkerFailed("failed", "for a test")

    monkeypatch.setattr(module, "Worker", start)
    lab = Lab(None, tmp_path, 1, time.monotonic() - 10)         # type: ignore[arg-type]
    with pytest.raises(NotDeployable, match="for a test"):
        lab.deploy(Tried(Candidate(), "dominated", "", prepare_s=50.0, first_call_s=10.0))
    with pytest.raises(WorkerFailed):
        lab.load(tmp_path)
    with pytest.raises(WorkerFailed):
        lab.start(Candidate())
    assert allowed == [240.0, module.LOAD_S, 30.0]


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
    assert allowed[0] == module.LOAD_S and 990 < allowed[1] <= 1000


def test_what_was_stored_has_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.artifact, "store", lambda folder, *given, **more: folder)
    monkeypatch.setattr(module.artifact, "read", lambda folder: SimpleNamespace(files=[SimpleNamespace(size_bytes=5), SimpleNamespace(size_bytes=7)]))
    lab = Lab(SimpleNamespace(inputs=lambda torch: []), tmp_path, 1, time.monotonic(), facts=ModelFacts())      # type: ignore[arg-type]
    found = Tried(Candidate(), "dominated", "")
    lab._stored(SimpleNamespace(store=lambda *given: None), found)                                              # type: ignore[arg-type]
    assert found.size_bytes == found.record().size_bytes == 12


def test_only_the_very_same_answers_are_called_identical(tmp_path: Path) -> None:
    """Another candidate may have the same score for other answers."""
    lab = Lab(None, tmp_path, 1, 0.0, check=lambda run: float(run() is not None), budget=Budget(0.0), scores=Scores(1.0))      # type: ignore[arg-type]
    same = SimpleNamespace(run=lambda: torch.ones(2))
    lab.answers = checking.scored(lab.check, same.run).answers
    first, second = lab.score(same), lab.score(SimpleNamespace(run=lambda: torch.zeros(2)))        # type: ignore[arg-type]
    assert first.mean == second.mean and lab.judge(first).verdict == "pass" and lab.judge(second).verdict == "undecided"
