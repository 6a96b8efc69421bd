"""The study file: what was answered stays, damage has a name, and nothing that is not ours is changed."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from tune_kit import Folder

from saturate.errors import EnvironmentProblem, StudyDamaged, StudyLocked, UsageError
from saturate.study import store as stores
from saturate.study.store import NAME, Store, StudyLock, find_unfinished, new_run


def filled(folder: Path) -> Path:
    store = Store(folder)
    store.set_meta("identity", "one")
    for number in range(200):
        store.set_answer(f"question {number}", {"text": "x" * 100})
    store.add_round("race", 0, 1, 2.0, 1.0, 0.69)
    store.close()
    return folder / NAME


def test_what_was_written_is_read_back(tmp_path):
    store = Store(tmp_path)
    store.set_answer("q", {"a": [1, None]})
    store.add_round("race", 1, 1, 2.0, 1.0, 0.5)
    store.add_round("race", 0, 2, 2.0, 1.0, 0.4)
    store.add_round("race", 0, 1, 2.0, 1.0, 0.3)
    store.add_round("race", 0, 1, 2.0, 1.0, 0.3)        # the same round again, after a kill
    store.set_trial("t001", {"id": "t001"})
    store.add_seconds("noise", 1.0)
    store.add_seconds("noise", 0.5)
    store.close()
    store = Store(tmp_path)
    assert store.answer("q") == {"a": [1, None]} and store.answer("p") is None
    assert [[ratio for _, _, ratio in pair] for pair in store.rounds("race")] == [[0.3, 0.4], [0.5]]
    assert store.trials() == [{"id": "t001"}]
    assert store.phases() == [("noise", 1.5)]


def test_a_kill_loses_nothing_that_was_written(tmp_path):
    code = f"""
import os, pathlib
from saturate.study.store import Store
store = Store(pathlib.Path({str(tmp_path)!r}))
for number in range(50): store.set_answer(str(number), number)
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    store = Store(tmp_path)
    assert [store.answer(str(number)) for number in range(50)] == list(range(50))


DAMAGE = {
    "garbage": lambda data: os.urandom(len(data)),
    "text": lambda data: b"not a study\n" * 100,
    "truncated": lambda data: data[: len(data) // 2],
    "half a page": lambda data: data[:2000],
    "a page of zeros": lambda data: data[:8192] + bytes(4096) + data[12288:],
    "zeros at the end": lambda data: data[:-4096] + bytes(4096),
    "zeros in the header": lambda data: bytes(100) + data[100:],
    "garbage in the schema": lambda data: data[:100] + os.urandom(900) + data[1000:],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_has_a_name_and_stays_as_it_is(name, tmp_path):
    path = filled(tmp_path)
    data = DAMAGE[name](path.read_bytes())
    path.write_bytes(data)
    with pytest.raises(StudyDamaged) as error:
        Store(tmp_path)
    assert str(path) in error.value.message
    assert error.value.cause and str(tmp_path) in error.value.remedy
    assert path.read_bytes() == data


def test_damage_that_only_shows_later_has_a_name(tmp_path):
    path = filled(tmp_path)
    with sqlite3.connect(path) as db:
        db.execute("update answers set value = '{half' where question = 'question 7'")
        db.execute("update answers set value = 7 where question = 'question 8'")
        db.execute("drop table rounds")
    store = Store(tmp_path)
    for ask in (lambda: store.answer("question 7"), lambda: store.rounds("race")):
        with pytest.raises(StudyDamaged):
            ask()


def test_a_study_of_another_version_is_left_alone(tmp_path):
    path = filled(tmp_path)
    with sqlite3.connect(path) as db:
        db.execute("update meta set value = '99' where key = 'version'")
        db.execute("drop table rounds")
    db.close()
    before = path.read_bytes()
    with pytest.raises(StudyDamaged, match="another version.*99"):
        Store(tmp_path)
    assert path.read_bytes() == before


def test_somebody_elses_database_is_left_alone(tmp_path):
    with sqlite3.connect(tmp_path / NAME) as db:
        db.execute("create table customers (name text)")
    db.close()
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(StudyDamaged, match="not a readable study"):
        Store(tmp_path)
    assert (tmp_path / NAME).read_bytes() == before


def test_a_full_disk_is_not_damage(tmp_path):
    store = Store(tmp_path)
    pages = store._execute("pragma page_count")[0][0]
    store._execute(f"pragma max_page_count = {pages}")          # what SQLite answers then is what a full disk makes it answer
    with pytest.raises(EnvironmentProblem) as error:
        for number in range(1000):
            store.set_answer(str(number), "x" * 1000)
    assert not isinstance(error.value, StudyDamaged)
    assert "free space" in error.value.remedy


def test_a_study_file_that_cannot_be_opened(tmp_path):
    (tmp_path / NAME).mkdir()
    with pytest.raises(EnvironmentProblem) as error:
        Store(tmp_path)
    assert not isinstance(error.value, StudyDamaged)


def test_rollback_journal_where_a_log_cannot_be(tmp_path, monkeypatch):
    assert Store(tmp_path / "here")._execute("pragma journal_mode") == [("wal",)]
    for kind in ("nfs4", "fuse.sshfs", "fuse.glusterfs", "fuse"):
        monkeypatch.setattr(stores, "_file_system", lambda folder, kind=kind: kind)
        assert Store(tmp_path / kind)._execute("pragma journal_mode") == [("delete",)], kind


def test_rollback_journal_where_a_log_proves_impossible(tmp_path):
    """On a file system that no list knows of: its memory cannot be shared, as here, where something else has that file's name."""
    (tmp_path / f"{NAME}-shm").mkdir()
    store = Store(tmp_path)
    store.set_answer("q", 1)
    assert store._execute("pragma journal_mode") == [("delete",)]
    again = Store(tmp_path)         # the file is nobody's own
    again.set_answer("p", 2)
    assert (store.answer("p"), again.answer("q")) == (2, 1)


def test_the_file_system_is_that_of_the_deepest_mount():
    assert stores._file_system(Path("/proc/self")) == "proc"
    assert stores._file_system(Path("/")) not in ("", "proc")


# -- finding -------------------------------------------------------------------------------------------------------


def test_the_newest_unfinished_study_of_the_same_request_is_found(tmp_path):
    for moment, (name, identity, finished) in enumerate(
            [("old", "one", False), ("new", "one", False), ("done", "one", True), ("other", "two", False)]):
        store = Store(tmp_path / name)
        store.set_meta("identity", identity)
        store.set_meta("finished", finished)
        store.close()
        os.utime(tmp_path / name / NAME, (moment, moment))
    problems: list[EnvironmentProblem] = []
    assert find_unfinished(tmp_path, "one", problems.append) == tmp_path / "new"
    assert find_unfinished(tmp_path, "three", problems.append) is None
    assert not problems


def test_an_unreadable_study_is_told_of_and_passed_by(tmp_path):
    filled(tmp_path / "good")
    filled(tmp_path / "bad").write_bytes(b"x" * 5000)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / NAME).touch()
    problems: list[EnvironmentProblem] = []
    os.utime(tmp_path / "good" / NAME, (1, 1))          # so that the bad one is looked at first
    assert find_unfinished(tmp_path, "one", problems.append) == tmp_path / "good"
    assert len(problems) == 1 and "bad" in problems[0].message


def test_a_damaged_study_does_not_stop_a_tune(tmp_path):
    folder = Folder(tmp_path)
    folder.write("train.py", "print('hello')")
    damaged = filled(tmp_path / ".saturate" / "old")
    damaged.write_bytes(b"x" * 5000)
    ended = folder.tune()
    assert ended.code == 0
    assert "warning[E320]" in ended.stderr and str(damaged) in ended.stderr
    assert damaged.read_bytes() == b"x" * 5000
    assert ended.result.verdict == "inconclusive"


def test_run_folders_never_collide(tmp_path):
    assert len({new_run(tmp_path, "abcdef123") for _ in range(5)}) == 5


# -- the lock ------------------------------------------------------------------------------------------------------


def test_one_process_per_folder_and_the_lock_dies_with_it(tmp_path):
    code = f"""
import pathlib, sys, time
from saturate.study.store import StudyLock
lock = StudyLock(pathlib.Path({str(tmp_path)!r}))
print("held", flush=True); time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(StudyLocked) as error:
            StudyLock(tmp_path)
        assert error.value.evidence == f"process {holder.pid}"
        holder.kill()
    StudyLock(tmp_path).release()


def test_who_holds_the_lock_discards_what_killed_trials_left(tmp_path):
    """Of all runs: a fit, a profile or a drill is not resumed, and the command of a tune may not be given again."""
    run = new_run(tmp_path, "abcdef123")
    left = [run / name for name in ("t001/layers/0/upper/checkpoint.bin", "t001/layers.json", "t002/shadow/tmp/file", "t004/supervise.json", "chain/layers/0/upper/last.pt", "chain/layers.json", "chain/p1/supervise.json")]
    left.append(stores.layers.scratch_folder(run.resolve() / "t003") / "socket")
    kept = [run / name for name in ("recipe.toml", "fit.json", "t001/output.log", "t003/output.log", "t001/plan.json", "chain/p1/output.log", "caches/home/layers.json")]
    kept += [tmp_path / name for name in ("model/layers/first.py", "model/net/layers.json", "cache/layers/one", "abcdef-notes/t001/layers/one")]
    for path in (*left, *kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    (run / "t001" / "layers" / "0" / "work").mkdir(mode=0)         # as overlayfs leaves it
    StudyLock(tmp_path).release()
    assert [path for path in left if path.exists()] == [] and not (run / "t001" / "layers").exists()
    assert all(path.exists() for path in kept)


def test_what_cannot_be_discarded_stops_no_study(tmp_path, monkeypatch):
    trials = [new_run(tmp_path, "abcdef123") / "t001" for _ in range(2)]
    for trial in trials:
        (trial / "shadow").mkdir(parents=True)
    refused = []

    def refuse(folder):
        refused.append(folder)
        raise PermissionError(folder)

    monkeypatch.setattr(stores.layers, "discard", refuse)
    StudyLock(tmp_path).release()
    assert sorted(refused) == sorted(trials)


@pytest.mark.parametrize("names", [("train.py",), ("lock",), ("cache/mine.txt", "lock"), (".gitignore", "train.py"), (".gitignore",)])
def test_a_folder_of_the_users_is_no_study_folder(names, tmp_path):
    """Trials would write to its `cache`, and `lock` would be emptied."""
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("the user's")
    with pytest.raises(UsageError) as error:
        StudyLock(tmp_path)
    assert error.value.remedy == f"name a new folder: --dir {tmp_path / 'saturate'}"
    assert all((tmp_path / name).read_text() == "the user's" for name in names) and len(list(tmp_path.iterdir())) == len(names)
    StudyLock(tmp_path / "saturate").release()


@pytest.mark.parametrize("makes", [
    lambda folder: StudyLock(folder).release(), lambda folder: new_run(folder, "abcdef123"), lambda folder: folder.mkdir(),
    lambda folder: (folder / "cache").mkdir(parents=True) or StudyLock(new_run(folder, "abcdef123").parent).release(),
])
def test_a_folder_of_an_earlier_study_is_worked_in_again(makes, tmp_path):
    makes(tmp_path / "study")
    StudyLock(tmp_path / "study").release()


def test_the_folder_for_studies_is_saturates_whatever_lies_in_it(tmp_path):
    (tmp_path / ".saturate").mkdir()
    (tmp_path / ".saturate" / "kept.toml").touch()
    StudyLock(tmp_path / ".saturate").release()


def test_a_lock_that_cannot_be_taken(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem) as error:
        StudyLock(tmp_path / "file" / "below")
    assert "--dir" in error.value.remedy


def test_what_a_link_leads_to_is_not_cleared_away(tmp_path):
    """A run folder may have come with the repository; models have folders called `layers`."""
    model = tmp_path / "model"
    (model / "layers").mkdir(parents=True)
    (model / "layers" / "first.py").touch()
    run = new_run(tmp_path / "study", "abcdef123")
    (run / "t001").symlink_to(model)
    (run.parent / "fedcba-0101-000000").symlink_to(tmp_path)
    StudyLock(tmp_path / "study").release()
    assert (model / "layers" / "first.py").exists()


def test_links_that_lead_round_in_a_loop_stop_no_study(tmp_path):
    (tmp_path / "abcdef-0101-000000").symlink_to("abcdef-0101-000000")
    run = new_run(tmp_path, "abcdef123")
    for name, leads_to in (("t001", "t001"), ("t002", "p1"), ("p1", "t002")):
        (run / name).symlink_to(leads_to)
    StudyLock(tmp_path).release()
    assert sorted(path.name for path in run.iterdir()) == ["p1", "t001", "t002"], "what is not understood is left as it is"


def test_a_path_that_is_too_long_for_sqlite_is_told_so(tmp_path):
    """In a folder this deep no study could be made, and the advice was to free some space."""
    deep = tmp_path.joinpath(*3 * [200 * "d"])
    with pytest.raises(EnvironmentProblem) as caught:
        Store(deep)
    assert "shorter" in caught.value.remedy and "--dir" in caught.value.remedy


@pytest.mark.parametrize("change", [
    "update answers set value = '[]' where question = 'asked'",
    "update answers set question = 'asked' where question = 'another'",
    "update meta set value = '1' where key = 'identity'",
    "update rounds set log_ratio = 9.0",
    "update rounds set a_ms = 'fast'",
    "update trials set record = '{\"id\": \"t9\"}'",
    "update phases set seconds = 'x'",
    "update phases set seconds = -1e308",
], ids=str)
def test_an_entry_that_is_not_as_it_was_written_has_a_name(change, tmp_path):
    """Such an answer ended a study as an error of saturate's own, and did so again each time; or it was believed."""
    store = Store(tmp_path)
    store.set_meta("identity", "a")
    store.set_answer("asked", {"step_ms": 1.5})
    store.set_answer("another", {"step_ms": 2.5})
    store.add_round("race", 0, 1, 3, 4.5, -0.0)
    store.set_trial("t1", {"id": "t1"})
    store.add_seconds("noise", 1.5)
    def everything():
        return store.meta("identity"), store.answer("asked"), store.rounds("race"), store.trials(), store.phases()

    assert everything() == ("a", {"step_ms": 1.5}, [[(3.0, 4.5, 0.0)]], [{"id": "t1"}], [("noise", 1.5)])
    with sqlite3.connect(tmp_path / NAME) as db:
        if "another" in change:
            db.execute("delete from answers where question = 'asked'")
        db.execute(change)
    with pytest.raises(StudyDamaged):
        everything()


def test_an_entry_that_is_no_json_is_damage_though_its_digest_fits(tmp_path):
    """One study out of a tarball stopped every new one in its folder with a traceback."""
    for number, text in enumerate(("{", "[" * 100_000)):
        study = Store(tmp_path / f"abcdef-0101-00000{number}")
        study._write("meta", "identity", text)
        with pytest.raises(StudyDamaged, match="not a readable study"):
            study.meta("identity")
        study.close()
    told = []
    assert find_unfinished(tmp_path, "x", told.append) is None and len(told) == 2
