"""Whatever the command does: a named outcome with cause and fix, the promised exit code, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import tune_kit
from tune_kit import TRAINING, Folder, no_traceback_of_ours, recipe_is_empty, untouched

from saturate.study.store import StudyLock
from saturate.study.verification import too_slow
from saturate.techniques import _registry
from saturate.trial import process
from saturate.trial.process import TrialEnded

FOREVER = "\nwhile True: step()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    path = tmp_path / "user"
    path.mkdir()
    (path / "data.txt").write_text("precious")
    return Folder(path)


@dataclass(frozen=True)
class Case:
    source: str
    code: int
    says: str                       # on standard error
    options: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()      # instead of the source


CASES = {
    "crashes at import": Case("import json, no_such_module", 4, "No module named 'no_such_module'"),
    "does not parse": Case("def broken(:", 4, "SyntaxError"),
    "exits with a code": Case("import sys; print('bad flag'); sys.exit(7)", 4, "exit code 7: bad flag"),
    "exits with a code, silent": Case("import sys; sys.exit(7)", 4, "exit code 7"),
    "hangs before training": Case("import time; time.sleep(1000)", 4, "hung: nothing was printed, and no training step was seen for 2 s", ("--timeout", "2s")),
    "hangs and traps SIGTERM": Case("""
        import signal, time
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
        while True: time.sleep(1)
        """, 4, "hung", ("--timeout", "2s")),
    "prints for ever": Case(
        "", 4, "it printed, but no training step was seen", ("--timeout", "2s"), ("sh", "-c", "while :; do echo .; sleep 0.1; done")),
    "never trains": Case("print('hello')", 0, "does not train"),
    "prints a lot": Case("line = 'x' * (1 << 20)\nfor _ in range(300): print(line)\nraise ValueError('at the end')", 4, "at the end"),
    "kills itself": Case("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 4, "SIGKILL"),
    "aborts": Case("import os; os.abort()", 4, "SIGABRT"),
    "no memory on the host": Case("raise MemoryError", 4, "out of memory host: MemoryError"),
    "no memory for a tensor": Case("import torch; torch.empty(1 << 50)", 4, "out of memory host"),
    "no memory on the device": Case("raise RuntimeError('CUDA out of memory. Tried to allocate')", 4, "out of memory device"),
    "no shared memory": Case(
        "raise RuntimeError('DataLoader worker (pid 7) is killed by signal: Bus error.')", 4, "docker run --shm-size"),
    "a worker is killed": Case("""
        import os, signal, torch
        from torch.utils.data import DataLoader
        class Rows:
            def __len__(self): return 8
            def __getitem__(self, index): os.kill(os.getpid(), signal.SIGKILL)
        for _ in DataLoader(Rows(), num_workers=1): pass
        """, 4, "is killed by signal: Killed, "),
    "no disk": Case("raise OSError(28, 'No space left on device')", 4, "disk full"),
    "closes its output": Case("import os; os.close(1); os.close(2)", 0, "does not train"),
    "kills its parent": Case("import os, time; os.kill(os.getppid(), 9); time.sleep(100)", 4, "supervisor died"),
    "leaves daemons": Case("""
        import os, signal, time
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    while True: time.sleep(1)
                os._exit(0)
            os.wait()
        """, 0, "does not train"),
    "daemons outlive a killed parent": Case("""
        import os, time
        if os.fork() == 0:
            os.setsid()
            while True: time.sleep(1)
        os.kill(os.getppid(), 9); time.sleep(100)
        """, 4, "supervisor died"),
    "changes the folder": Case("""
        import os
        open('new.txt', 'w').write('x'); os.unlink('data.txt'); os.unlink('train.py')
        open(os.path.join(os.path.dirname(os.getcwd()), 'outside.txt'), 'w').write('x')
        os.chdir('/'); os.mkdir('tmp/of-a-bad-script'); raise ValueError('after all this')
        """, 4, "after all this"),
    "crashes in step 3": Case(
        TRAINING + "for i in range(9):\n    step()\n    if i == 2: raise ValueError('in step 3')", 4, "ValueError: in step 3"),
    "exits in step 3": Case(TRAINING + "for _ in range(3): step()", 0, "ended after 3 training steps"),
    "exits in step 3 of a forked child": Case(
        TRAINING + "def train():\n    for _ in range(3): step()\nimport multiprocessing\n"
        "child = multiprocessing.get_context('fork').Process(target=train); child.start(); child.join()", 0, "ended after 3 training steps"),
    "crashes after measuring began": Case(
        TRAINING + "for i in range(99):\n    step()\n    if i == 40: raise ValueError('in step 40')", 4, "ValueError: in step 40"),
    "ends after measuring began": Case(TRAINING + "for _ in range(40): step()", 0, "more steps"),
    "is killed while it is measured": Case(
        TRAINING + "for _ in range(20): step()\nos.kill(os.getpid(), signal.SIGKILL)", 4, "SIGKILL"),
    "kills its parent while it is measured": Case(
        TRAINING + "for _ in range(20): step()\nos.kill(os.getppid(), signal.SIGKILL)" + FOREVER, 4, "supervisor died"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_end_of_a_command_has_a_name(name, folder):
    case = CASES[name]
    folder.write("train.py", case.source)
    with untouched(folder.path.parent):
        ended = folder.tune(*case.options, argv=case.argv)
        assert not folder.alive()
    assert ended.code == case.code, ended.stderr
    assert case.says in ended.stderr
    assert no_traceback_of_ours(ended.stderr)
    assert ended.result.verdict == "inconclusive"
    assert ended.result.verified is None
    assert ended.result.verified_reason
    assert recipe_is_empty(ended.result)
    assert {t.fate for t in ended.result.techniques} == {"not_tried"}
    ids = [t.id for t in ended.result.techniques]
    assert ids == list(_registry.load()), "one entry for each technique"
    assert not Path("/tmp/of-a-bad-script").exists()
    logs = sum(path.stat().st_size for path in folder.path.glob(".saturate/*/t*/output.log"))
    assert logs < 2 * 1024 * 1024
    if case.code:
        assert "error[E4" in ended.stderr and "help: " in ended.stderr


def test_a_bug_of_our_own_leaves_an_object_a_recipe_and_a_code(folder, monkeypatch):
    """Seen: a traceback, exit code 1, and no recipe in a folder that held a study."""
    folder.write("train.py", TRAINING)
    monkeypatch.setattr("tune_kit._SATURATE", "from saturate.study import baseline\nbaseline.establish = None\n" + tune_kit._SATURATE)
    ended = folder.tune()
    assert ended.code == 3 and "Traceback" in ended.stderr and "error[E370]" in ended.stderr
    assert "saturate itself failed: TypeError" in ended.result.verified_reason
    assert recipe_is_empty(ended.result)


def test_a_missing_script_is_the_commands_own_failure(folder):
    ended = folder.tune(argv=(sys.executable, "missing.py"))
    assert ended.code == 4
    assert "can't open file" in ended.stderr
    assert ended.result.verdict == "inconclusive"


def test_a_missing_command_is_a_usage_error(folder):
    ended = folder.tune(argv=("no-such-command-anywhere", "train.py"))
    assert (ended.code, ended.stdout) == (2, "")
    assert "no-such-command-anywhere" in ended.stderr and "help: " in ended.stderr


def test_a_hang_between_two_blocks_is_noticed(script, start):
    trial = start(str(script(TRAINING + "for _ in range(30): step()\ntime.sleep(1000)")))
    trial.wait_ready()
    trial.workload = replace(trial.workload, timeout_s=1.0)
    with pytest.raises(TrialEnded) as ended:
        while True:
            trial.run_block(0, 10)
    assert ended.value.outcome.kind == "hung"
    assert "--timeout" in ended.value.outcome.remedy


def test_a_block_of_long_steps_is_no_hang(script, start, monkeypatch):
    """It says nothing until its end: 48 steps of 24 s, as many as eight loader workers get ahead, were hung after 300 s."""
    monkeypatch.setattr(process, "SLOWER", 50)      # a busy machine makes them longer by more than twice
    trial = start(str(script("import time\n" + TRAINING + "while True: step(); time.sleep(0.1)")))
    trial.wait_ready()
    trial.run_block(0, 2)
    trial.workload = replace(trial.workload, timeout_s=0.5)
    assert len(trial.run_block(0, 15).timed_ns) == 15


#: Prints until what it starts says that it trains: beside other load, Python alone takes longer to start than what is called a silence here.
PRINTS = ("sh", "-c", 'while [ ! -e trains ]; do echo .; sleep 0.1; done & exec "$@"', "sh", sys.executable)

#: It trains without a word, and hangs after as many steps as it is told.
SILENT = TRAINING + """
for _ in range(int(sys.argv[1])): step(); open("trains", "w").close(); time.sleep(0.5)
time.sleep(1000)
"""


@pytest.mark.parametrize("hangs", [False, True])
def test_a_verification_run_shows_life_by_each_update(hangs, script, start, monkeypatch):
    """Fifty updates of 24 s, or of 6 s without a word, were hung: it comes to the gate after the last one only."""
    monkeypatch.setattr(process, "PATIENCE", 100)
    path = script(SILENT)
    capture = {"folder": str(path.parent), "updates": 10, "seed": 20, "aligned": False, "perturb": None}
    step = {"token": "S0", "count": 1, "tokens": ["B", "S0"]}
    trial = start(*PRINTS, str(path), "4" if hangs else "10", capture=capture, step=step, timeout_s=4.0)
    if not hangs:
        trial.wait_ready()
        return
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
    assert (ended.value.outcome.kind, ended.value.outcome.reason) == ("hung", "no sign of progress for 4 s")


def test_a_budget_that_one_verification_run_exceeds() -> None:
    assert too_slow(step_ms=500.0, budget_s=26.0) is None
    assert "--budget 4m" in (too_slow(step_ms=500.0, budget_s=25.0) or "")


def test_steps_too_long_for_the_budget_are_not_waited_for(folder):
    """Three show what a step is, two how long it takes, two what it consists of; and there is no silence meanwhile."""
    (folder.path / "train.py").write_text(TRAINING + "\nimport time\nwhile True: time.sleep(1); step(); print('one more', flush=True)\n")
    ended = folder.tune("--budget", "40s")
    assert ended.code == 0 and re.search(r"52 updates of [1-9]\.\d s take longer than the whole budget", ended.result.verified_reason), ended.stderr
    assert re.search(r"baseline: starting .*\n.*it trains; .* was found after \d+\.\d s", ended.stderr), ended.stderr
    [log] = (folder.path / ".saturate").rglob("output.log")
    assert log.read_text().count("one more") <= 8


def test_a_budget_that_starting_uses_up(folder):
    (folder.path / "train.py").write_text(TRAINING + "\nwhile True: step()\n")
    ended = folder.tune("--budget", "1s")
    assert ended.code == 0 and ended.result.speedup is None and ended.result.verified is None, ended.stderr
    assert "noise:" not in ended.stderr, "nothing is begun when the budget is over"
    assert not list((folder.path / ".saturate").rglob("t002")), "not even the first verification run"
    needed = re.search(r"the budget of 1 s ends before .* give it --budget (\d+m)", ended.result.verified_reason)
    assert "Undecided within the budget" in ended.stderr and needed and re.search(rf"next      (?:\S* -m |\S*/)?saturate tune .*--budget {needed[1]} -- ", ended.stderr)


@pytest.mark.slow
def test_slow_steps_do_not_outlast_the_budget_by_minutes(folder):
    (folder.path / "train.py").write_text(TRAINING + "\nwhile True: step(); time.sleep(0.6)\n")
    began = time.monotonic()
    ended = folder.tune()
    assert ended.code == 0 and ended.result.verified is None and "longer than the whole budget" in ended.result.verified_reason
    assert "--budget" in ended.stderr and time.monotonic() - began < 60     # one verification run would take 31 s


def test_what_prints_is_not_hung(script, start, monkeypatch):
    """Tokenising takes longer than any silence that is a hang, but it shows that it goes on."""
    monkeypatch.setattr(process, "PATIENCE", 100)
    trial = start(*PRINTS, str(script("import time\ntime.sleep(3.5)\n" + TRAINING + FOREVER)))
    trial.workload = replace(trial.workload, timeout_s=3.0)
    assert trial.wait_ready()["rank"] == 0


def test_an_endless_command_that_ignores_us_is_told_so(script, start):
    trial = start("-I", str(script("import time\nwhile True: time.sleep(1)")))
    trial.workload = replace(trial.workload, timeout_s=0.5)
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
    assert ended.value.outcome.kind == "no_agent" and "-I" in ended.value.outcome.remedy


def test_a_trial_whose_supervisor_is_gone_is_over(script, start):
    """Without it nothing can be frozen, so a race would measure both at once."""
    trial = start(str(script(TRAINING + FOREVER)))
    trial.wait_ready()
    trial.run_block(0, 2)
    trial.supervisor.kill()
    trial.supervisor.wait()
    with pytest.raises(TrialEnded) as ended:
        trial.freeze()
    assert ended.value.outcome.kind == "supervisor_died"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)], ids=lambda n: n.name)
def test_a_signal_ends_a_tune_in_order(number, folder):
    folder.write("train.py", TRAINING + FOREVER)
    with untouched(folder.path.parent), folder.start() as process:
        _wait_for(process, "noise:")
        process.send_signal(number)
        process.send_signal(number)         # an impatient user must not end the cleaning up
        stdout, stderr = process.communicate(timeout=60)
        assert not folder.alive()
    assert process.returncode == 130, stderr
    assert no_traceback_of_ours(stderr)
    result = json.loads(stdout)
    assert result["verdict"] == "inconclusive" and result["baseline"]["step_ms"] > 0
    assert Path(result["recipe"]).exists() and Path(result["report"]).exists()
    assert "nothing is kept so far; the same command goes on from here" in stderr


def _wait_for(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    seen = ""
    while words not in seen:
        line = process.stderr.readline()
        assert line, f"it ended without saying {words!r}: {seen}"
        seen += line


# -- folders -------------------------------------------------------------------------------------------------------


def test_two_tunes_in_one_folder(folder):
    folder.write("train.py", "print('hello')")
    lock = StudyLock(folder.path / ".saturate")
    try:
        ended = folder.tune()
    finally:
        lock.release()
    assert ended.code == 3
    assert "error[E310]" in ended.stderr and f"process {os.getpid()}" in ended.stderr and "--dir" in ended.stderr
    assert ended.result.verdict == "inconclusive" and recipe_is_empty(ended.result)
    assert folder.tune().code in (0, 6)     # once the other one has ended; 6: the machine is noisy


def test_a_study_folder_that_cannot_be(folder):
    folder.write("train.py", "print('hello')")
    with untouched(folder.path):
        ended = folder.tune("--dir", "data.txt/below")
    assert ended.code == 3
    assert "error[E300]" in ended.stderr and "--dir" in ended.stderr
    assert recipe_is_empty(ended.result) and ended.result.report == ""


def _in_a_namespace(commands: str) -> tuple[str, ...]:
    """Run what follows behind some mounts that only it sees."""
    unshare = shutil.which("unshare")
    options = ("-m",) if os.geteuid() == 0 else ("-mr",)
    if unshare is None or subprocess.run([unshare, *options, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine does not allow mount namespaces")
    return (unshare, *options, "sh", "-ec", f'{commands}; exec "$@"', "sh")


def test_a_read_only_folder(folder):
    folder.write("train.py", "print('hello')")
    prefix = _in_a_namespace(f"mount --bind {folder.path} {folder.path}; mount -o remount,bind,ro {folder.path}; cd {folder.path}")
    ended = folder.tune(prefix=prefix)
    assert ended.code == 3
    assert "Read-only file system" in ended.stderr and "--dir" in ended.stderr
    assert ended.result.verdict == "inconclusive" and recipe_is_empty(ended.result)


@pytest.mark.parametrize("size", ["8k", "40k", "80k", "120k", "300k"])
def test_a_full_disk_has_a_name(size, folder):
    """The disk fills up at different moments: lock, study file, run folder, log, report."""
    folder.write("train.py", "print('x' * 400_000)\nraise ValueError('at the end')")
    study = folder.path / ".saturate"
    study.mkdir()
    prefix = _in_a_namespace(f"mount -t tmpfs -o size={size} none {study}")
    ended = folder.tune(prefix=prefix)
    assert ended.code in (3, 4), ended.stderr
    assert no_traceback_of_ours(ended.stderr)
    assert "Traceback" not in ended.stderr or ended.code == 4
    assert "full" in ended.stderr or "No space left" in ended.stderr, ended.stderr
    assert "help: free space" in ended.stderr
    assert ended.result.verdict == "inconclusive"
    assert not folder.alive()


def test_a_dev_shm_that_is_really_full(folder):
    """Not only the message of one: a batch from a worker that has no room there."""
    folder.write("train.py", """
        import torch
        from torch.utils.data import DataLoader
        for batch in DataLoader(torch.zeros(64, 1 << 20), batch_size=8, num_workers=1): print(batch.shape)
        """)
    ended = folder.tune(prefix=_in_a_namespace("mount -t tmpfs -o size=1m none /dev/shm"))
    assert ended.code == 4 and "error[E4" in ended.stderr and "docker run --shm-size" in ended.stderr, ended.stderr
    assert ended.result.verdict == "inconclusive" and recipe_is_empty(ended.result)
    assert not folder.alive()


# -- streams and codes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_standard_streams(closed, folder):
    folder.write("train.py", "print('hello')")
    ended = folder.tune(prefix=("sh", "-c", f'exec "$@" {closed}', "sh"))
    assert ended.code == 0, ended.stderr
    assert no_traceback_of_ours(ended.stderr)
    if "1" not in closed:
        assert ended.result.verdict == "inconclusive"


def test_who_no_longer_reads_the_messages_changes_no_exit_code(folder):
    """`saturate tune --json 2>&1 >result.json | head -1`: 141, though all was done and told."""
    folder.write("train.py", "print('hello')")
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(folder.command(), cwd=folder.path, env=folder.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=writer, text=True) as process:
        os.close(writer)
        stdout, _ = process.communicate(timeout=180)
    assert process.returncode == 0 and json.loads(stdout)["verdict"] == "inconclusive"


@pytest.mark.parametrize("source, code", [
    ("import sys; sys.exit(7)", 7),
    ("import os; os.kill(os.getpid(), 9)", -9),
    ("raise ValueError", 1),
    ("import os\ntry: os.write(1, b'x')\nexcept OSError: os._exit(23)", 23),
])
def test_run_passes_the_commands_end_through(source, code, folder):
    folder.write("train.py", source)
    (folder.path / "empty.toml").touch()
    close = ("sh", "-c", 'exec "$@" 1>&-', "sh") if code == 23 else ()
    done = subprocess.run([*close, sys.executable, "-m", "saturate", "run", "empty.toml", "--", sys.executable, "train.py"],
                          cwd=folder.path, env=folder.environment(), capture_output=True, check=False)
    assert done.returncode == code, done.stderr
