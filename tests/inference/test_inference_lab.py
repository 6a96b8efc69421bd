"""How long a process may take to prepare."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from saturate.inference import lab as module
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
