"""kill -9 at any moment loses at most the running round (where processes do not live at once, the running pair); the same command goes on."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from tune_kit import TRAINING, Folder, no_traceback_of_ours, untouched
from waiting import until

from saturate.study import bench as study_bench
from saturate.study import state
from saturate.study.bench import Bench
from saturate.study.candidates import Candidate
from saturate.study.live import timed_losses
from saturate.study.state import Request
from saturate.study.store import NAME, Store
from saturate.techniques import _registry
from saturate.trial import layers, supervised
from saturate.trial.process import Workload

OPTIONS = ("--only", "fused-optimizer")
FOREVER = "\nwhile True: step()\n"


def contents(study: Path) -> dict[str, dict[tuple, tuple]]:
    """Every row of the study file by its key, without its digest, but for the highest memory seen so far, which grows, and a single
    round of a pair, which says nothing."""
    keys = {"meta": 1, "answers": 1, "rounds": 3, "trials": 1}
    found: dict[str, dict[tuple, tuple]] = {}
    with closing(sqlite3.connect(study / NAME)) as db:
        tables = {name for name, in db.execute("select name from sqlite_master where type = 'table'")}
        for table, width in keys.items():
            rows = db.execute(f"select * from {table}") if table in tables else ()
            found[table] = {row[:width]: row[width:-1] for row in rows if not str(row[0]).startswith("peak ")}
    many = Counter(key[:2] for key in found["rounds"])
    found["rounds"] = {key: row for key, row in found["rounds"].items() if many[key[:2]] > 1}
    return found


def test_killed_again_and_again_it_goes_on(tmp_path):
    """Each attempt is killed a little later than the one before got to, at a random moment."""
    folder = Folder(tmp_path)
    folder.write("train.py", TRAINING + FOREVER)
    chance = random.Random(7)
    known: dict[str, dict[tuple, tuple]] = {}
    with untouched(tmp_path):
        for patience in (0.4, 3.0, 6.0):
            with folder.start(*OPTIONS) as process:
                if patience > 1.0:          # else it is killed before it has a study, or soon after
                    until(lambda: list(tmp_path.glob(f".saturate/*/{NAME}")))
                time.sleep(patience * chance.uniform(0.6, 1.4))
                process.send_signal(signal.SIGKILL)
                process.communicate()
            assert not folder.wait_until_nothing_lives()
            studies = [path.parent for path in tmp_path.glob(f".saturate/*/{NAME}")]
            assert len(studies) <= 1
            if studies:
                now = contents(studies[0])
                for table, rows in known.items():
                    assert rows.items() <= now[table].items(), table
                known = now
        ended = folder.tune(*OPTIONS)
    assert ended.code in (0, 6), ended.stderr
    assert "resuming" in ended.stderr and no_traceback_of_ours(ended.stderr)
    assert ended.result.baseline.step_ms
    assert not folder.alive()
    studies = [path.parent for path in tmp_path.glob(f".saturate/*/{NAME}")]
    assert len(studies) == 1
    after = contents(studies[0])
    for table in ("answers", "rounds", "trials"):
        assert known[table].items() <= after[table].items(), f"{table}: what was finished was measured again"
    purposes = [json.loads(record)["purpose"] for record, in after["trials"].values()]
    assert purposes.count("baseline") == 1


def test_a_finished_study_is_not_resumed(tmp_path):
    folder = Folder(tmp_path)
    folder.write("train.py", "print('hello')")
    runs = [folder.tune().result.run for _ in range(2)]
    assert runs[0] != runs[1]


def test_an_interrupted_study_is_resumed_by_the_same_command_only(tmp_path):
    folder = Folder(tmp_path)
    folder.write("train.py", "import time; time.sleep(100)")
    with folder.start(*OPTIONS) as process:
        while not list(tmp_path.glob(".saturate/*/t001/output.log")):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    assert "nothing is kept so far; the same command goes on from here" in stderr
    run = json.loads(stdout)["run"]
    assert folder.tune("--only", "gc-freeze", "--timeout", "1s").result.run != run
    other = folder.tune(*OPTIONS, "--timeout", "1s", prefix=("env", "WIDTH=7"))
    assert other.result.run != run
    assert "an interrupted study was not gone on with: the environment changed since" in other.stderr
    assert folder.tune(*OPTIONS, "--timeout", "1s").result.run == run


def test_another_environment_asks_another_question(tmp_path):
    """`WIDTH=1024 saturate tune` after a kill of `saturate tune` went on with the answers of the other width."""
    def seen(**environment: str) -> str:
        request = Request([sys.executable, "train.py"], tmp_path, {"PATH": os.defpath, **environment}, tmp_path)
        return request.surroundings()["the environment"]

    others = [{}, {"WIDTH": "1024"}, {"WIDTH": "512"}, {"OMP_NUM_THREADS": "1"}, {"SLURM_NTASKS": "2"}, {"WINDOW": "24"}, {"LINES": "100"}]
    assert len({seen(**other) for other in others}) == len(others)
    here = {"TERM": "xterm", "SHLVL": "1", "_": "/usr/bin/env", "OLDPWD": "/", "WINDOWID": "7", "TMUX_PANE": "%1", "SSH_TTY": "/dev/pts/1",
            "SSH_CONNECTION": "::1 5 ::1 22", "DBUS_SESSION_BUS_ADDRESS": "unix:path=/run", "XDG_SESSION_ID": "3", "SLURM_JOB_ID": "12"}
    assert seen(**here) == seen(), "from another terminal, login or job it resumes"
    assert seen(**{f"MY_{name}": value for name, value in here.items()}) != seen()


def test_another_interpreter_asks_another_question(tmp_path):
    seen = set()
    for version in ("python3.10", "python3.11"):
        (tmp_path / version).touch(mode=0o755)
        (tmp_path / "python").unlink(missing_ok=True)
        (tmp_path / "python").symlink_to(version)
        for word in ("./python", "python"):
            request = Request([word], tmp_path, {"PATH": str(tmp_path)}, tmp_path)
            seen.add((request.identity(), request.surroundings()["the interpreter"]))
    assert len(seen) == 4


def test_trainings_recorded_in_another_format_are_recorded_anew(tmp_path, monkeypatch):
    request = Request([sys.executable, "train.py"], tmp_path, {}, tmp_path)
    before = request.surroundings()
    monkeypatch.setattr(state, "SCHEMA", state.SCHEMA + 1)
    assert request.surroundings() != before


@pytest.mark.parametrize(("owner", "name", "found"), [
    (state.machine, "cpu_name", "another processor"), (state.machine, "cpu_count", 1.5), (state.gpus, "driver_version", "1.2"),
    (state.gpus, "observe", [SimpleNamespace(name="another device")]),
], ids=["processor", "cores", "driver", "device"])
def test_another_machine_asks_another_question(owner, name, found, tmp_path, monkeypatch):
    """A home folder may be that of several, and a job may get another node: what one measured and recorded was gone on with on the other."""
    request = Request([sys.executable, "train.py"], tmp_path, {}, tmp_path)
    before = request.surroundings()
    assert request.surroundings() == before
    monkeypatch.setattr(owner, name, lambda *_: found)
    other = request.surroundings()
    assert [kind for kind in before if other[kind] != before[kind]] == ["the machine"]


def test_another_standard_input_asks_another_question(tmp_path):
    """`python - < train.py` names no script."""
    code = ("import pathlib, sys; from saturate.study.state import Request; path = pathlib.Path('/tmp')\n"
            "print(Request(['python', '-'], path, {}, path).surroundings()['standard input'])")
    seen = []
    for text in ("width = 1", "width = 2", "width = 1"):
        (tmp_path / "train.py").write_text(text)
        with open(tmp_path / "train.py") as stdin:
            done = subprocess.run([sys.executable, "-c", code], stdin=stdin, capture_output=True, text=True, check=True, timeout=60)
        seen.append(done.stdout)
    assert seen[0] == seen[2] != seen[1]


def test_code_that_is_changed_while_it_is_measured(tmp_path):
    """Two programs would be compared. Put back, the study goes on; left so, another begins, of which the recipe is."""
    folder = Folder(tmp_path)
    folder.write("config.yaml", "lr: 1")
    model = folder.write("steps.py", TRAINING)
    folder.write("train.py", "from steps import step" + FOREVER)
    argv = (sys.executable, "train.py", "--config=config.yaml")
    with folder.start(*OPTIONS, argv=argv) as process:
        while not list(tmp_path.glob(".saturate/*/t002/output.log")):
            time.sleep(0.05)
        with model.open("a") as file:
            file.write("def step(): raise SystemExit('half written')\n")
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 3 and f"was changed while it was measured\ncause: {model}\n" in stderr, stderr
    assert no_traceback_of_ours(stderr) and not folder.alive()
    first = json.loads(stdout)
    assert first["verified"] is None and first["verdict"] != "faster"
    model.write_text(TRAINING)
    ended = folder.tune(*OPTIONS, argv=argv)
    assert ended.code in (0, 6) and ended.result.run == first["run"], ended.stderr
    with folder.start(*OPTIONS, argv=argv) as process:
        while not (folders := list(tmp_path.glob(".saturate/*/t003"))) or {path.parent.name for path in folders} == {first["run"]}:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    (tmp_path / "config.yaml").write_text("lr: 2")
    ended = folder.tune(*OPTIONS, argv=argv)
    assert "an interrupted study was not gone on with: " in ended.stderr and "config.yaml changed since" in ended.stderr
    assert ended.result.run not in {path.parent.name for path in folders}


@pytest.fixture
def bench(tmp_path):
    def make() -> Bench:
        return Bench(Workload(["true"], tmp_path, {}), tmp_path / "study", tmp_path, Store(tmp_path / "study"), 10.0, print)

    return make


def test_trials_of_a_killed_study_are_cleared_and_their_numbers_not_given_again(bench, tmp_path):
    """Trials end in another order than they began: the number of ended ones says nothing about which folders are taken."""
    for identity in ("t001", "t002", "t003", "t004"):
        (tmp_path / "study" / identity / "layers" / "0" / "work").mkdir(parents=True)
        (tmp_path / "study" / identity / "capture.jsonl").write_text(identity)
    (tmp_path / "study" / "t003" / "layers" / "0" / "work").chmod(0)        # as overlayfs leaves it
    store = Store(tmp_path / "study")
    for identity in ("t001", "t004"):
        store.set_trial(identity, {"id": identity})
    store.close()
    started = bench().start("anything", ())
    started.stop()
    assert started.spec.id == "t005"
    assert (tmp_path / "study" / "t004" / "capture.jsonl").read_text() == "t004"
    assert not (tmp_path / "study" / "t002").exists() and not (tmp_path / "study" / "t003").exists()
    shutil.rmtree(tmp_path / "study")


def test_a_trial_that_cannot_be_started_leaves_nothing(bench, tmp_path, monkeypatch):
    """Of a limit on processes, or a full disk: what it was told holds the user's environment."""
    def refused(*words, **options):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    made = bench()
    made.start("the cage is rehearsed in a process, too", ()).stop()
    before = {path for path in tmp_path.rglob("*") if path.parent.name != "trackers"}
    monkeypatch.setattr(supervised.subprocess, "Popen", refused)
    with pytest.raises(BlockingIOError):
        made.start("anything", ())
    left = {path.name for path in tmp_path.rglob("*") if path not in before and path.is_file()}
    assert left == {"plan.json"} and not (tmp_path / "study" / "t002" / "layers").exists() and made.living == made.living[:1]


def test_what_an_interruption_ends_is_filed_as_what_it_is(bench, tmp_path):
    """A tuned trial was filed as the baseline: with its losses, which the baseline is compared with, and its memory."""
    made, module = bench(), _registry.load()["gc-freeze"]
    chosen = (Candidate(module, module.Options()),)
    made.start("race B", chosen).losses = [3.0]
    made.close()
    (record,) = made.store.trials()
    assert record["techniques"] == ["gc-freeze"]
    assert made.store.answer(timed_losses(chosen)) == [3.0] and made.store.answer(timed_losses(())) is None


def test_a_killed_study_has_used_what_passed_until_its_last_trial(bench, monkeypatch):
    """Its budget began anew with each kill."""
    made, clock = bench(), [time.monotonic()]
    trial = made.start("anything", ())
    trial.stop()
    monkeypatch.setattr(study_bench.time, "monotonic", lambda: clock[0] + 50.0)
    made.finish(trial, ())
    ((name, seconds),) = made.store.phases()
    assert name == "total" and 45.0 < seconds < 60.0


def test_what_an_interrupted_clearing_away_has_left_goes_at_the_end(bench, tmp_path, monkeypatch):
    """Ctrl-C while a trial's files are removed: they lay there until the next study in that folder."""
    made = bench()
    trial = made.start("anything", ())

    def interrupted(folder, plan=None):
        (folder / "layers" / "0").mkdir(parents=True, exist_ok=True)       # it may have been ended before it made any
        raise KeyboardInterrupt

    monkeypatch.setattr(study_bench, "discard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.finish(trial, ())
    (tmp_path / "study" / "t002" / "rehearsal" / "layers" / "0" / "work").mkdir(parents=True, mode=0)
    assert made.living == [] and layers.left_behind(tmp_path / "study" / "t001")
    made.close()
    assert not any(layers.left_behind(folder) for folder in (tmp_path / "study").glob("t*"))
    assert (tmp_path / "study" / "t001" / "output.log").exists()
