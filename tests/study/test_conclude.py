"""The last moments of a study: when it counts as finished, and what its record says of what was not measured."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from saturate.study import summary, tune
from saturate.study.ending import Interrupted


@pytest.fixture
def study(monkeypatch):
    """A study that was measured; `kept` is what its store was told."""
    kept = {}
    store = SimpleNamespace(add_seconds=lambda phase, seconds: None, set_meta=kept.__setitem__)
    request = SimpleNamespace(argv=["true"], cwd=Path(), environment={}, timeout_s=1.0, directory=Path(), budget_s=60.0, limit_bytes=None)
    monkeypatch.setattr(tune, "Bench", lambda *arguments: SimpleNamespace(close=lambda: None, isolation=""))
    monkeypatch.setattr(tune, "_measure", lambda study, bench: None)
    monkeypatch.setattr(summary, "record_of", lambda study: "record")
    monkeypatch.setattr(summary, "write", lambda study, record: None)
    return SimpleNamespace(request=request, store=store, folder=Path(), say=lambda line: None, error=None, started=0.0, isolation="", kept=kept)


def test_a_study_is_finished_when_all_of_it_is_written(study, monkeypatch):
    monkeypatch.setattr(summary, "write", lambda study, record: study.kept.update(written="finished" not in study.kept))
    assert tune._work(study) == ("record", None)
    assert study.kept == {"written": True, "finished": True}


@pytest.mark.parametrize("moment", ["record_of", "write"])
def test_an_interrupt_while_the_record_is_made_loses_nothing(moment, study, monkeypatch):
    """The record was lost, and the same command began another study, for this one was called finished."""
    calls = []

    def late(*arguments):
        calls.append(moment)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return "record"

    monkeypatch.setattr(summary, moment, late)
    with pytest.raises(Interrupted) as ended:
        tune._work(study)
    assert ended.value.record == "record" and len(calls) == 2 and "finished" not in study.kept
