"""How long a process may take to prepare."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from saturate.errors import WorkloadFailed
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
    assert allowed[0] == module.LOAD_S and 990 < allowed[1] <= 1000


def test_artifacts_of_those_that_lost_go_and_what_others_stored_stays(tmp_path):
    lab = Lab(None, tmp_path, 1, time.monotonic() + 10)         # type: ignore[arg-type]
    for name in ("earlier", "1", "2"):
        (tmp_path / name).mkdir()
    lab.stored += [tmp_path / "1", tmp_path / "2", tmp_path / "never made"]
    lab.discard(tmp_path / "2")
    assert {path.name for path in tmp_path.iterdir()} == {"earlier", "2"}
    lab.discard(None)           # of a later `pick`: what was kept once is kept
    assert (tmp_path / "2").is_dir()
