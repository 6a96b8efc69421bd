"""Trainings that the agent cannot live in, or that are none of the trial's processes: the cause is named, and at once."""

from __future__ import annotations

import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

from saturate.agent import application
from saturate.errors import UsageError
from saturate.trial import endings, planning, process, tree
from saturate.trial.process import TrialEnded

OLD = "import sys\nsys.version_info = (3, 10, 0, 'final', 0)\n"
TRAINS = "import time, torch\nprint('trains', flush=True)\ntime.sleep(300)\n"
#: How long a trial may take to see that nobody will come. Its command goes on for five minutes.
SOON_S = 100.0


@pytest.fixture
def project(tmp_path: Path, clean_environment: dict[str, str]) -> Path:
    """A folder on PYTHONPATH with a `torch` that does nothing."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "torch.py").touch()
    clean_environment["PYTHONPATH"] = str(tmp_path / "site")
    return tmp_path / "site"


@pytest.mark.parametrize("intercepted", [False, True])
@pytest.mark.parametrize(("file", "text", "said"), [
    ("sitecustomize.py", OLD, "needs Python >= 3.11 in the workload, found 3.10"),
    ("saturate.py", "", "has a module of that name itself"),
])
def test_an_environment_that_the_agent_cannot_live_in(file, text, said, intercepted, project, script, start, tmp_path):
    (project / file).write_text(text, encoding="utf-8")
    redirect = {"root": str(tmp_path / "shadow"), "allowed": [str(tmp_path)]} if intercepted else None
    trial = start(str(script(TRAINS)), redirect=redirect, timeout_s=120.0)
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
    outcome = ended.value.outcome
    assert outcome.kind == "no_agent" and said in outcome.reason and "Python 3.11" in outcome.remedy
    assert time.monotonic() - trial.started < SOON_S


@pytest.mark.parametrize("intercepted", [False, True])
def test_a_torch_that_has_not_what_the_agent_listens_to(intercepted, project, script, start, tmp_path):
    redirect = {"root": str(tmp_path / "shadow"), "allowed": [str(tmp_path)]} if intercepted else None
    trial = start(str(script(TRAINS)), redirect=redirect, timeout_s=120.0)
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
    assert ended.value.outcome.kind in ("no_agent", "agent_failed") and "AttributeError" in ended.value.outcome.reason
    assert time.monotonic() - trial.started < SOON_S


def test_one_that_ends_by_itself_is_not_called_one_that_does_not_train(project, script, start):
    (project / "sitecustomize.py").write_text(OLD, encoding="utf-8")
    with pytest.raises(TrialEnded) as ended:
        start(str(script("import torch"))).wait_ready()
    assert ended.value.outcome.kind == "no_agent" and "found 3.10" in ended.value.outcome.reason


def test_who_follows_a_trial_without_a_gate_is_told_as_well(project, script, start):
    (project / "sitecustomize.py").write_text(OLD, encoding="utf-8")
    trial = start(str(script(TRAINS)))
    assert until(trial.finished, seconds=SOON_S).kind == "no_agent"


@pytest.mark.parametrize("intercepted", [False, True])
def test_a_helper_of_another_python_that_does_not_train_is_passed_over(intercepted, project, script, start, tmp_path):
    (project / "sitecustomize.py").write_text(OLD, encoding="utf-8")
    redirect = {"root": str(tmp_path / "shadow"), "allowed": [str(tmp_path)]} if intercepted else None
    with pytest.raises(TrialEnded) as ended:
        start(str(script("print('converts data')")), redirect=redirect).wait_ready()
    assert ended.value.outcome.kind == "never_trained"


def test_an_agent_that_fails_before_anything_trains_leaves_word(tmp_path):
    session = types.SimpleNamespace(phase="asleep", plan={"mode": "trial", "ended": str(tmp_path / "ended"), "socket": "none"})
    application.report_failure(session, "Traceback (most recent call last):\n  File \"x\"\nAttributeError: no torch.autograd\n")
    outcome = endings.absent(tmp_path)
    assert outcome is not None and (outcome.kind, outcome.reason) == ("agent_failed", "AttributeError: no torch.autograd")


DAEMON = """
import json, socket, subprocess
listener = socket.socket(socket.AF_UNIX)
listener.bind("daemon")
listener.listen()
print("listens", flush=True)
connection, _ = listener.accept()
job = json.loads(connection.makefile().readline())
child = subprocess.Popen(job["argv"], env=job["environment"])
print(child.pid, flush=True)
connection.sendall(str(child.wait()).encode())
"""
CLIENT = """
import json, os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect("daemon")
connection.sendall(json.dumps({"argv": [sys.executable, "train.py"], "environment": dict(os.environ)}).encode() + b"\\n")
sys.exit(int(connection.recv(100) or b"1"))
"""
ENDLESS = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
while True:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def daemon(tmp_path: Path, script) -> Iterator[subprocess.Popen[str]]:
    """As Slurm's: it starts what its clients ask for."""
    started = subprocess.Popen([sys.executable, str(script(DAEMON, "daemon.py"))], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None and started.stdout.readline() == "listens\n"
    yield started
    tree.kill(started.pid)
    started.kill()
    started.wait()


def test_a_training_that_a_daemon_starts_is_not_taken_for_the_trials_own(daemon, script, start):
    script(ENDLESS)
    trial = start(str(script(CLIENT, "client.py")), timeout_s=120.0)
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
    assert ended.value.outcome.kind == "no_agent" and "Slurm" in ended.value.outcome.reason
    training = int(daemon.stdout.readline())
    until(lambda: tree.state(training) in ("", "Z"), "it trains on, and writes for real")


def test_a_script_that_closes_what_is_not_its_own_is_told_so(script, start, monkeypatch):
    """Seen: "the process that trained ended, or became another program", and more steps were asked for."""
    monkeypatch.setattr(process, "GRACE_S", 3.0)
    trial = start(str(script("import os\n" + ENDLESS + "    if os.path.exists('close'): os.closerange(3, 256)\n")))
    trial.wait_ready()
    (trial.workload.cwd / "close").touch()
    with pytest.raises(TrialEnded) as ended:
        trial.run_block(1, 20)
    assert ended.value.outcome.kind == "no_agent" and "os.closerange" in ended.value.outcome.reason


def test_who_a_process_is_does_not_depend_on_what_a_script_puts_in_the_place_of_getpid(script, start):
    trial = start(str(script("import os\n" + ENDLESS + "    if os.path.exists('replace'): os.getpid = lambda: 42\n")))
    trial.wait_ready()
    (trial.workload.cwd / "replace").touch()
    assert len(trial.run_block(1, 20).timed_ns) == 20


@pytest.mark.parametrize(("goes_on", "kind"), [("", "never_trained"), ("sleep 60", "hung")])
def test_what_in_a_shell_script_keeps_the_agent_out_is_named_where_no_training_is_seen(goes_on, kind, script, start):
    """Seen: it was said not to train, or to need a longer budget."""
    text = f"true\nenv -i {sys.executable} -c 'print(1)'\n{goes_on}\n"
    with pytest.raises(TrialEnded) as ended:
        start("bash", str(script(text, "train.sh")), timeout_s=3.0 if goes_on else 120.0).wait_ready()
    outcome = ended.value.outcome
    assert outcome.kind == kind and "train.sh starts Python by env" in outcome.reason and "line 2 of " in outcome.reason and "PYTHONPATH" in outcome.remedy


@pytest.mark.parametrize("command", [("env", "-i"), ("env", "-u", "WANDB_MODE"), ("env", "-uWANDB_MODE")])
def test_what_a_trial_needs_is_there_behind_a_cleared_environment(command, script, start):
    trial = start(*command, sys.executable, str(script("import os\nprint(os.environ.get('WANDB_MODE'))")), environment={"WANDB_MODE": "offline"})
    with pytest.raises(TrialEnded):
        trial.wait_ready()
    assert trial.output() == "offline\n"


@pytest.mark.parametrize("command", [
    ("srun", "python", "train.py"), ("timeout", "9", "/usr/bin/srun", "python", "train.py"), ("sbatch", "train.sh"), ("ssh", "host", "python", "train.py"),
    ("docker", "run", "image", "python", "train.py"), ("podman", "exec", "here", "python", "train.py"), ("systemd-run", "--user", "python", "train.py"),
    ("docker", "compose", "-f", "train.yml", "up", "trainer"), ("docker", "start", "-a", "trainer"), ("docker-compose", "run", "trainer"), ("qsub", "train.sh"),
])
def test_a_command_that_a_service_starts_is_refused_before_it_begins(command, tmp_path):
    with pytest.raises(UsageError) as refused:
        planning.plan(tmp_path, tmp_path / ".saturate" / "t", list(command), {})
    assert "cannot be isolated" in refused.value.message and refused.value.remedy
    assert not (tmp_path / ".saturate").exists()


@pytest.mark.parametrize("command", [
    ("python", "train.py", "srun"), ("systemd-run", "--scope", "python", "train.py"), ("docker", "ps"), ("my-trainer", "srun"),
])
def test_a_command_of_its_own_is_not_refused(command, tmp_path):
    assert planning.plan(tmp_path, tmp_path / ".saturate" / "t", list(command), {planning.OVERRIDE: "intercept"}).mode == "intercept"
