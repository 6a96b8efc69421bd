"""What the cage refuses is not called the command's own failure, and what the system refuses is not called the cage's."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
from kernel import landlock_abi

from saturate.errors import EnvironmentProblem
from saturate.study import baseline
from saturate.trial import planning, refusals
from saturate.trial.cage import CagePlan
from saturate.trial.outcome import Outcome
from saturate.trial.process import Trial, TrialEnded, TrialSpec, Workload

CRASH = "Traceback (most recent call last):\n  File \"train.py\", line 3, in <module>\n"


def plan(cwd, mode: str, **fields) -> CagePlan:
    return CagePlan(mode, "", "user", str(cwd), str(cwd), str(cwd), str(cwd), guarded=True)._replace(**fields)


@pytest.mark.parametrize(("mode", "kind", "said"), [
    ("overlay", "crashed", "OSError: [Errno 30] Read-only file system: '{here}/run1/a'"),
    ("overlay", "exited", "mkdir: cannot create directory ‘{here}/run1’: Read-only file system"),
    ("intercept", "crashed", "PermissionError: [Errno 13] Permission denied"),
    ("intercept", "exited", "mkdir: cannot create directory 'out': Permission denied"),
    ("intercept", "exited", "train.sh: line 2: out/log: Permission denied"),
    ("intercept", "exited", "cp: cannot create regular file '{here}/x': Operation not permitted"),
])
def test_the_isolation_is_named_where_it_refused(tmp_path, mode, kind, said):
    log = (CRASH if kind == "crashed" else "") + said.format(here=tmp_path) + "\n"
    found = refusals.by_isolation(Outcome(kind, "why"), plan(tmp_path, mode), log)
    assert found is not None and found.kind == "refused_by_isolation"
    assert said.format(here=tmp_path) in found.reason and found.remedy


@pytest.mark.parametrize(("mode", "kind", "log"), [
    ("overlay", "crashed", CRASH + "OSError: [Errno 30] Read-only file system: '/proc/sys/none'\n"),
    ("overlay", "crashed", "OSError: [Errno 30] Read-only file system\n" + CRASH + "ValueError: no\n"),
    ("overlay", "crashed", CRASH + "PermissionError: [Errno 13] Permission denied\n"),
    ("overlay", "out_of_memory_host", "OSError: [Errno 30] Read-only file system\n"),
    ("intercept", "exited", "probe: Permission denied\n" + "step\n" * 20 + "no data\n"),
])
def test_other_failures_stay_the_commands(tmp_path, mode, kind, log, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, how: not str(path).startswith("/proc"))     # root may write anywhere
    assert refusals.by_isolation(Outcome(kind, "why"), plan(tmp_path, mode), log) is None


@pytest.mark.parametrize(("frame", "raised", "ours"), [
    ("wandb/sdk/wandb_run.py", "    raise TypeError(\"Cannot use artifact when in offline mode.\")\nTypeError: Cannot use artifact when in offline mode.", True),
    ("neptune/objects.py", "    raise NeptuneOfflineModeFetchException()\nneptune.exceptions.NeptuneOfflineModeFetchException", True),
    ("wandb/sdk/wandb_init.py", "TypeError: init() got an unexpected keyword argument 'projekt'", False),
    ("huggingface_hub/utils/_http.py", "huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach https://huggingface.co: offline mode is enabled.", False),
])
@pytest.mark.parametrize("mode", ["overlay", "intercept"])
def test_what_a_tracker_does_not_do_offline_is_no_failure_of_the_command(tmp_path, frame, raised, ours, mode):
    log = f"{CRASH}    run.use()\n  File \"/v/lib/python3.11/site-packages/{frame}\", line 31, in use\n{raised}\n"
    found = refusals.by_isolation(Outcome("crashed", "TypeError: why"), plan(tmp_path, mode), log)
    assert (found is not None and found.kind == "refused_by_isolation" and "TypeError: why (trials keep" in found.reason) is ours
    assert refusals.by_isolation(Outcome("crashed", "why"), plan(tmp_path, mode), log + CRASH + "ValueError: offline\n") is None


@pytest.mark.parametrize(("kind", "said", "ours"), [
    ("crashed", "FileNotFoundError: [Errno 2] No such file or directory: '{here}/out/made.bin'", True),
    ("crashed", "RuntimeError: Not found: \"out/made.bin\": No such file or directory Error #2", True),
    ("exited", "cp: cannot stat 'out/made.bin': No such file or directory", True),
    ("exited", "train.sh: line 2: out/log: No such file or directory", True),          # the folder is there in the trial
    ("crashed", "FileNotFoundError: [Errno 2] No such file or directory: 'data/corpus.txt'", False),
    ("crashed", "FileNotFoundError: [Errno 2] No such file or directory: 'mine/corpus.txt'", False),
    ("crashed", "FileNotFoundError: [Errno 2] No such file or directory: 'out/other.bin'", False),
    ("crashed", "ValueError: no 'out/made.bin'", False),
])
@pytest.mark.parametrize("guarded", [True, False])
def test_what_lies_in_the_trial_alone_is_missed_because_of_the_isolation(tmp_path, kind, said, ours, guarded):
    """A library that is not Python's looked for what the script had just made, and that was called a failure of the command."""
    (tmp_path / "mine").mkdir()
    caged = plan(tmp_path, "intercept", guarded=guarded)
    for folder in ("out", "mine"):
        Path(f"{tmp_path}/shadow{tmp_path}/{folder}").mkdir(parents=True)
    Path(f"{tmp_path}/shadow{tmp_path}/out/made.bin").touch()
    said = said.format(here=tmp_path)
    found = refusals.by_isolation(Outcome(kind, "why"), caged, (CRASH if kind == "crashed" else "") + said + "\n")
    assert (found is not None and found.kind == "refused_by_isolation" and said in found.reason) is ours
    assert refusals.by_isolation(Outcome(kind, "why"), plan(tmp_path, "overlay"), said) is None


def test_without_a_guard_nothing_is_refused(tmp_path):
    log = CRASH + "PermissionError: [Errno 13] Permission denied\n"
    assert refusals.by_isolation(Outcome("crashed", "why"), plan(tmp_path, "intercept", guarded=False), log) is None


def test_who_asked_for_interception_is_told_so(tmp_path):
    asked = plan(tmp_path, "intercept", asked=True)
    found = refusals.by_isolation(Outcome("crashed", "why"), asked, CRASH + "PermissionError: [Errno 13] Permission denied\n")
    assert found is not None and "unset SATURATE_ISOLATION" in found.remedy


def test_a_baseline_that_the_guard_stops_is_no_failure_of_the_command(tmp_path):
    if not landlock_abi():
        pytest.skip("no Landlock here")
    argv, environment = [sys.executable, "-c", "import subprocess; subprocess.run(['mkdir', 'out'], check=True)"], dict(os.environ)
    caged = planning.plan(tmp_path, tmp_path / ".saturate" / "t", argv, environment | {planning.OVERRIDE: "intercept"})
    assert caged.guarded
    spec = TrialSpec("t", "test", Path(caged.run_dir), cage=caged.to_json(), redirect=caged.redirect, environment=caged.environment)
    with Trial(Workload(argv, tmp_path, environment, 60.0), spec) as trial, pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
    assert ended.value.outcome.kind == "refused_by_isolation" and "mkdir" in ended.value.outcome.reason
    store = types.SimpleNamespace(trials=lambda: [{"log": "output.log"}])
    with pytest.raises(EnvironmentProblem):
        baseline.failed(types.SimpleNamespace(folder=tmp_path, store=store), ended.value.outcome)
