"""A profile whose last window fails: what was recorded before it is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tune_kit import TRAINING, Folder

from saturate.records.facts import Facts
from saturate.study import memory
from saturate.study import profile as study_profile
from saturate.study.seen import Seen
from saturate.trial.outcome import Outcome
from saturate.trial.process import TrialEnded

#: What the window "modules", and no other, makes use of.
BROKEN = """
import torch
class Broken(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self, *hooks):
        raise RuntimeError("broken on purpose")
torch.autograd.graph.saved_tensors_hooks = Broken
"""


RECORDED = {"steps": 5, "syncs": []}


@pytest.mark.parametrize(("kind", "record", "traces", "kept"), [
    ("agent_failed", RECORDED, ["trace.json.gz"], True), ("agent_failed", RECORDED, [], True),     # nsys has not written its trace yet
    ("agent_failed", {}, [], False), ("agent_failed", {"problem": "the script profiles itself"}, [], False),
    ("crashed", RECORDED, ["trace.json.gz"], False)])
def test_only_our_own_failure_behind_the_recording_is_no_end(kind, record, traces, kept, monkeypatch):
    """A command that fails by itself is reported before anything else."""
    def windows(study, live, seen, *rest):
        seen.record = record
        seen.traces += map(Path, traces)
        raise TrialEnded(Outcome(kind, "KeyError: 'x'"))

    monkeypatch.setattr(study_profile.baseline, "observe", lambda study, live: {"facts": {}, "memory_bytes": 1})
    monkeypatch.setattr(study_profile, "_windows", windows)
    trial = SimpleNamespace(thaw=lambda: None, supervisor=SimpleNamespace(pid=os.getpid()))
    live = SimpleNamespace(trial=trial, step_ms=1.0, startup_s=1.0, stationary=True)
    said: list[str] = []
    seen = study_profile._look(SimpleNamespace(say=said.append), live, None, "torch", False)       # type: ignore[arg-type]
    assert study_profile._recorded_before_our_failure(seen) is kept
    assert list(seen.notes) == ["modules" if kept else "windows"] and "KeyError: 'x'" in str(seen.notes)
    assert ("own code failed" in said[-1]) is kept


@pytest.mark.parametrize(("record", "kept"), [(RECORDED, ["trace-rank0.json.gz", "trace-rank1.json.gz"]),
                                              ({"problem": "the trace could not be written (No space left on device)"}, [])])
def test_no_trace_is_read_where_the_recording_has_a_problem(record, kept, tmp_path):
    """Of two ranks the first could not write its own: the other's would be read as if it were of the only one."""
    for rank in (0, 1):
        (tmp_path / "t001").mkdir(exist_ok=True)
        (tmp_path / "t001" / f"trace-rank{rank}.json.gz").touch()
    seen = Seen(Facts(), record=record)
    study_profile._keep_traces(SimpleNamespace(folder=tmp_path), tmp_path / "t001", seen)      # type: ignore[arg-type]
    assert [path.name for path in seen.traces] == [path.name for path in sorted(tmp_path.glob("*.gz"))] == kept


def test_a_trace_keeps_the_number_of_its_rank_and_a_missing_one_is_said(tmp_path):
    """Of four, that of rank 2 was called rank 1's, and nothing said that rank 1 had none."""
    (tmp_path / "t001").mkdir()
    for rank in (0, 2):
        (tmp_path / "t001" / f"trace-rank{rank}.json.gz").touch()
    said: list[str] = []
    seen = Seen(Facts(), record={**RECORDED, "others": {1: "the script runs torch.profiler itself", 2: "it ended before its last step"}})
    study_profile._keep_traces(SimpleNamespace(folder=tmp_path, say=said.append), tmp_path / "t001", seen)     # type: ignore[arg-type]
    assert [path.name for path in seen.traces] == ["trace-rank0.json.gz", "trace-rank2.json.gz"]
    assert said == [seen.notes["ranks"]] == ["rank 1 was not recorded: the script runs torch.profiler itself"]


def test_lines_that_are_not_known_have_their_reason():
    def why(**modules):
        return memory.breakdown(Seen(Facts(), modules=modules, notes={"modules": "it failed"}), str).unknown["lines"]

    assert why(memory_lines=[], memory_lines_unknown="the allocator keeps no history") == "the allocator keeps no history"
    assert why(memory_lines=[], memory_lines_unknown="") == why() == "it failed"


def test_a_profile_without_its_last_window(tmp_path):
    folder = Folder(tmp_path)
    folder.write("train.py", BROKEN + TRAINING + "\nwhile True: step()\n")
    done = subprocess.run([sys.executable, "-m", "saturate", "profile", "--json", "--steps", "3", "--", sys.executable, "train.py"],
                          cwd=tmp_path, env=folder.environment() | {"XDG_CACHE_HOME": str(tmp_path / "cache")}, capture_output=True, text=True,
                          timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["recorded_steps"] == 3 and found["step_ms"] > 0 and found["modules"] == []
    assert found["unknown"]["modules"] == "saturate's own code failed behind the recording: RuntimeError: broken on purpose"
    assert found["memory"]["unknown"]["lines"] == found["unknown"]["modules"] and Path(found["report"]).is_file()
