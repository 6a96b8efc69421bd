"""The supervisor leaves nothing of a trial behind, whatever ends it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import types
import uuid
from pathlib import Path

import pytest
from waiting import until

from saturate.study.ending import OURS
from saturate.trial import cage, launch, process, standard_input, starting, supervise, tree
from saturate.trial.process import Trial, TrialEnded, TrialSpec, Workload

TRAINING = """
import sys, torch
model = torch.nn.Linear(8, 1); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
def train():
    while True:
        optimizer.zero_grad(); model(torch.randn(4, 8)).pow(2).mean().backward(); optimizer.step()
"""


def test_shared_memory_of_a_killed_trial_is_removed_and_nothing_else(script, start):
    """A /dev/shm that fills up from trial to trial would fail the later ones (without overlays it is the real one)."""
    name = f"saturate-test-{uuid.uuid4().hex[:8]}"
    older, newer, foreign = (Path("/dev/shm", f"{name}-{kind}") for kind in ("older", "newer", "foreign"))
    older.write_bytes(b"the user's")
    try:
        trial = start(str(script(f"""
{TRAINING}
from multiprocessing import shared_memory
opened = open({str(older)!r}, "rb")
made = shared_memory.SharedMemory({newer.name!r}, create=True, size=4096)
train()
""")))
        trial.wait_ready()
        foreign.write_bytes(b"another program's")
        assert newer.exists()
        trial.stop()
        assert not newer.exists()
        assert older.exists() and foreign.exists()
    finally:
        for path in (older, newer, foreign):
            path.unlink(missing_ok=True)


def test_what_is_only_read_in_shared_memory_is_not_the_trials():
    """Another program may have put it there meanwhile."""
    path = Path("/dev/shm", f"saturate-test-{uuid.uuid4().hex[:8]}")
    path.write_bytes(b"another program's")
    try:
        with open(path, "rb"):
            assert str(path) not in tree.shared_memory([os.getpid()])
            with open(path, "ab"):
                assert str(path) in tree.shared_memory([os.getpid()])
    finally:
        path.unlink()


def test_what_cannot_be_set_up_is_said_where_the_output_goes(start, monkeypatch):
    """And not on the supervisor's own standard error, which nobody reads: "exit code 126 without a word" names no cause."""
    monkeypatch.setattr(standard_input, "source", lambda: ("/no/such/input", 0))
    with pytest.raises(TrialEnded, match="not_started: standard input: .*/no/such/input"):
        start("-c", "print(1)").wait_ready()


def test_a_script_without_its_interpreter_is_told_what_it_lacks(start, tmp_path):
    path = tmp_path / "train.sh"
    path.write_text("python train.py\n")
    path.chmod(0o755)
    with pytest.raises(TrialEnded, match="command_not_found") as ended:
        start(str(path)).wait_ready()
    assert "#!/bin/sh" in ended.value.outcome.remedy


def test_a_working_directory_that_is_gone_is_not_a_command_that_is_missing(tmp_path, clean_environment):
    spec = TrialSpec("t", "test", tmp_path / "t")
    with Trial(Workload([sys.executable, "-c", "1"], tmp_path / "gone", clean_environment), spec) as trial, \
            pytest.raises(TrialEnded, match="not_started: working directory"):
        trial.wait_ready()


def test_standard_input_that_may_not_be_opened_again_is_withheld(tmp_path, monkeypatch):
    with open(tmp_path / "given", "w+b") as given:
        given.write(b"unread")
        given.seek(0)
        before = os.dup(0)
        try:
            os.dup2(given.fileno(), 0)
            assert standard_input.source()[0].endswith("/fd/0") and standard_input.withheld() == ""

            def closed(path, *_):
                raise PermissionError(13, "Permission denied", path)

            monkeypatch.setattr(os, "open", closed)
            assert standard_input.source() == (os.devnull, 0)
            assert standard_input.withheld() == standard_input.CLOSED_INPUT
        finally:
            os.dup2(before, 0)
            os.close(before)


def test_a_cage_that_fails_behind_its_new_root_says_why(monkeypatch):
    """What was mounted has other paths then: to take it back would fail, and hide the cause."""
    def build(stage):
        stage.pivoted = True
        raise FileNotFoundError(2, "No such file or directory", "/work")

    monkeypatch.setattr(cage, "_unshare", lambda plan: None)
    stage = types.SimpleNamespace(build=lambda: build(stage), unwind=lambda: pytest.fail("it must not be taken back"))
    monkeypatch.setattr(cage, "_Stage", lambda plan: stage)
    with pytest.raises(cage.CageRefused, match="/work") as refused:
        cage.enter(cage.CagePlan("overlay", "", "root", "/work", "/run", "/", "/"))
    assert not refused.value.usable


def test_output_that_exceeds_the_log_is_a_sign_of_life(tmp_path):
    trial = types.SimpleNamespace(log=tmp_path / "output.log")
    assert process.Trial._printed(trial) == (0, 0)
    log = supervise.Log(trial.log)
    seen = set()
    for _ in range(12):
        log.write(100 * 1024 * b"x")
        seen.add(process.Trial._printed(trial))
        time.sleep(0.02)            # a file's time moves with the kernel's clock tick
    log.close()
    assert len(seen) == 12


def test_the_environment_that_it_was_told_lies_nowhere(start, clean_environment, tmp_path):
    """A token in it would stay for good, were both killed."""
    clean_environment["MY_API_TOKEN"] = token = uuid.uuid4().hex
    trial = start("-c", "import time; print('begun', flush=True); time.sleep(100)")
    until(lambda: "begun" in trial.output())
    assert trial.log.parent == trial.spec.folder
    assert [path for path in tmp_path.rglob("*") if path.is_file() and token in path.read_text("utf-8", "replace")] == []


def test_a_frozen_trial_ends_with_its_controller(script, start):
    """End of file on the supervisor's input is all that a controller killed with SIGKILL leaves."""
    trial = start(str(script(TRAINING + "train()")))
    hello = trial.wait_ready()
    trial.freeze()
    assert tree.state(hello["pid"]) in ("T", "t")
    trial.supervisor.stdin.close()
    trial.supervisor.wait(timeout=60)
    assert not Path(f"/proc/{hello['pid']}").exists()


def test_the_workload_dies_with_its_supervisor(script, start):
    """Should the supervisor be killed too, nobody is left to end the workload but the kernel."""
    trial = start(str(script(TRAINING + "train()")))
    pid = trial.wait_ready()["pid"]
    trial.freeze()
    trial.supervisor.kill()
    trial.supervisor.wait()
    until(lambda: tree.state(pid) in ("Z", "X", ""))


def test_who_is_told_of_children_that_stop_does_not_see_them_frozen(script, start):
    """A shell with job control went on behind its training, after a few of some hundred freezes, and "the script ended"."""
    trial = start("-c", """
import os, sys, time
child = os.fork()
while child == 0:
    time.sleep(0.0005)
print("waits", flush=True)
sys.exit(os.waitpid(child, os.WUNTRACED)[1] and 3)
""")
    until(lambda: "waits" in trial.output())
    for _ in range(200):
        assert tree.freeze(trial.supervisor.pid)
        assert not [process for process in tree.descendants(trial.supervisor.pid) if tree.state(process) not in ("T", "t")]
        tree.thaw(trial.supervisor.pid)
        time.sleep(0.002)
    assert len(tree.descendants(trial.supervisor.pid)) == 2


@pytest.mark.parametrize(("waits", "first"), [("R", "T"), ("D", "D")])
def test_a_child_is_stopped_when_its_parent_stands_still_however_long_that_waits_for_a_core(waits, first, monkeypatch):
    """On a busy machine that took longer than 20 ms, and a shell with job control went on as above. Who waits for its child to start a
    program (vfork) cannot stand still before that has."""
    now, stopped = [0.0], {}

    def state(process):
        if process == 2 and 3 in stopped and waits == "D":
            return "T"
        return "T" if process in stopped and (process == 3 or (waits == "R" and now[0] > stopped[2] + 5.0)) else waits if process == 2 else "S"

    def signalled(process, number):
        if process == 3:
            assert state(2) == first
        stopped.setdefault(process, now[0])

    monkeypatch.setattr(tree, "children", lambda process: {1: [2], 2: [3]}.get(process, []))
    monkeypatch.setattr(tree, "state", state)
    monkeypatch.setattr(tree, "_signal", signalled)
    monkeypatch.setattr(tree, "time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + 0.01)))
    assert tree.freeze(1) and set(stopped) == {2, 3}


def test_an_interrupted_end_is_taken_up_again(script, start, monkeypatch):
    """Ctrl-C in the middle of ending a trial must not leave its processes to run on."""
    trial = start(str(script(TRAINING + "train()")))
    pid = trial.wait_ready()["pid"]
    monkeypatch.setattr(trial, "thaw", lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        trial.stop()
    monkeypatch.undo()
    assert os.path.exists(f"/proc/{pid}")
    assert trial.stop().kind == "ok"
    assert not os.path.exists(f"/proc/{pid}")


def test_a_daemon_does_not_survive_its_trial(script, start):
    trial = start(str(script("""
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
        open("daemon.pid", "w").write(str(os.getpid()))
        while True: time.sleep(1)
    os._exit(0)
while not os.path.exists("daemon.pid") or not open("daemon.pid").read(): time.sleep(0.01)
""")))
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
    assert ended.value.outcome.kind == "never_trained"
    pid = int((Path(trial.workload.cwd) / "daemon.pid").read_text())
    assert tree.state(pid) == ""


def test_a_supervisor_that_cannot_work_says_why(tmp_path):
    """No process more for this user, no descriptor, no room for the log: that was called a supervisor which the command had killed."""
    spec = tmp_path / "supervise.json"
    spec.write_text(json.dumps({"log": str(tmp_path / "gone" / "output.log"), "import_root": str(launch.PACKAGE.parent)}))
    done = subprocess.run([sys.executable, "-I", "-S", supervise.__file__, str(spec)], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["ended"] == "not_started" and "FileNotFoundError" in report["why"]
    assert starting.not_started(report, "").kind == "not_started" and not spec.exists()


@pytest.mark.parametrize("number, remedy", [(errno.EAGAIN, "processes"), (errno.EMFILE, "open files"), (errno.ENOMEM, "memory"), (errno.ENOSPC, "free space")])
def test_limits_of_this_user_are_not_the_commands_fault(number, remedy):
    why = f"OSError: {OSError(number, os.strerror(number))}"
    found = starting.not_started({"ended": "not_started", "why": why}, "")
    assert found.kind in OURS and why in found.reason and remedy in found.remedy
    if number != errno.ENOSPC:
        found = starting.not_started({"ended": "exit", "code": 126}, f"saturate: could not start: program: {why}")
        assert found.kind in OURS and remedy in found.remedy


def test_why_nothing_could_be_started_is_told_whatever_the_folder_is_called(tmp_path):
    """The kernel's message names a folder that is no UTF-8, which ended as an exception of the command's own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        cage.enter = lambda plan: (_ for _ in ()).throw(cage.CageRefused(os.fsdecode(b"mount overlay on /caf\xe9"), usable=False))
        plan = cage.CagePlan("overlay", "", "root", "/work", "/run", "/", "/").to_json()
        try:
            supervise._run_workload({"cwd": str(tmp_path), "cage": plan}, writer, None)
        finally:
            os._exit(1)             # never: this process would go on with the tests
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        assert file.read() == "saturate: could not start: isolation: CageRefused: mount overlay on /caf\\udce9\n"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 97


def test_what_is_gone_from_shared_memory_meanwhile_ends_no_supervisor(monkeypatch):
    path = "/dev/shm/saturate-test-gone"
    found = types.SimpleNamespace(descendants=lambda pid: [], kill=lambda pid: [], shared_memory=lambda processes: set() if list(processes) else {path})
    monkeypatch.setattr(os.path, "exists", lambda name: name == path)
    supervise._kill(found, set())
