"""How long a process may take to prepare."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from saturate.errors import EnvironmentProblem, WorkloadFailed
from saturate.inference import lab as module
from saturate.inference.api import running_model
from saturate.inference.candidates import Candidate
from saturate.inference.confirm import NotDeployable
from saturate.inference.lab import Lab
from saturate.inference.process import WorkerFailed
from saturate.inference.search import Tried


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
        with pytest.raises(NotDeployable, match="storing took longer"):
            Lab(None, tmp_path, 1, time.monotonic() + left_s).deploy(                   # type: ignore[arg-type]
                Tried(Candidate(), "dominated", "", prepare_s=50.0, first_call_s=10.0))
    assert allowed == [module.LOAD_S + 240, module.STORE_S]


def test_an_artifact_that_a_full_disk_keeps_from_loading_is_not_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*given: Any, **more: Any) -> Any:
        raise WorkerFailed("disk_full", "OSError: No space left on device")

    monkeypatch.setattr(module, "Worker", start)
    with pytest.raises(EnvironmentProblem, match="cannot be loaded") as caught:
        Lab(None, tmp_path, 1, time.monotonic()).load(tmp_path)         # type: ignore[arg-type]
    assert "No space left" in caught.value.cause and "--workdir" in caught.value.remedy
