"""One process at a time works in a folder, and nothing but that process holds it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from saturate.errors import EnvironmentProblem, StudyLocked
from saturate.trial.lock import FolderLock


def test_the_second_one_is_told_who_the_first_is_and_what_to_do(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "new", "--workdir DIR"), pytest.raises(StudyLocked) as caught:
        FolderLock(tmp_path / "new", "--workdir DIR")
    assert str(os.getpid()) in caught.value.evidence and caught.value.cause and "--workdir DIR" in caught.value.remedy
    (tmp_path / "new" / "lock").write_text("12345678901")
    with FolderLock(tmp_path / "new"):
        assert (tmp_path / "new" / "lock").read_text() == str(os.getpid()), "and nothing of the one before"


def test_a_fork_and_a_child_do_not_keep_what_was_killed_from_letting_go(tmp_path: Path) -> None:
    """As a loader's worker that outlives the search, or a program that it started."""
    script = ("import os, subprocess, sys, time, pathlib\nfrom saturate.trial.lock import FolderLock\n"
              f"lock = FolderLock(pathlib.Path({str(tmp_path)!r}))\n"
              "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
              "fork = os.fork() or time.sleep(60)\nprint(child.pid, fork, flush=True)\ntime.sleep(60)\n")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}) as holder:
        assert holder.stdout
        pids = [int(word) for word in holder.stdout.readline().split()]
        with pytest.raises(StudyLocked):
            FolderLock(tmp_path)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                try:
                    FolderLock(tmp_path).release()
                    break
                except StudyLocked:
                    time.sleep(0.05)
            else:
                pytest.fail("somebody holds the lock of a process that is gone")
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="cannot write in"):
        FolderLock(tmp_path / "file" / "below")


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    """The number of the process would be written over what it leads to."""
    (tmp_path / "thesis").write_text("the user's")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "lock").symlink_to(tmp_path / "thesis")
    with pytest.raises(EnvironmentProblem, match="cannot write in"):
        FolderLock(tmp_path / "folder")
    assert (tmp_path / "thesis").read_text() == "the user's"


def test_a_full_disk_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """"Choose a writable folder", it said of one that is."""
    def full(self: FolderLock, folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FolderLock, "_make", full)
    with pytest.raises(EnvironmentProblem) as caught:
        FolderLock(tmp_path / "study")
    assert caught.value.remedy.startswith("free space there")
