"""Folders that go when the process which held them was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from saturate.inference import folders
from saturate.trial import abandoned, layers

#: Makes a folder, says where, and waits.
HOLDER = """
import sys, time
from pathlib import Path
from saturate.inference import folders
from saturate.trial import layers

def wait(folder):
    (folder / "model.pt").touch()
    print(folder, flush=True)
    time.sleep(600)

if sys.argv[1] == "scratch":
    with folders.scratch("saturate-test-") as folder:
        wait(folder)
wait(layers.make_scratch(Path(sys.argv[1])))
"""


def holder(what: str, there: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, what], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(there)})
    assert process.stdout
    return process, Path(process.stdout.readline().strip())


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_temporary_folder_of_a_killed_process_goes_when_the_next_is_made(there: Path) -> None:
    """`saturate bench` and `generation.optimize` left copies of the model in /tmp, with each kill one more."""
    (there / "saturate-test-mine").mkdir()
    (there / "saturate-test-0123456789ab").symlink_to(there / "saturate-test-mine")
    killed, left = holder("scratch", there)
    other, held = holder("scratch", there)
    try:
        assert left.parent == there and left.is_dir() and held.is_dir()
        kill(killed)
        with folders.scratch("saturate-test-") as mine:
            assert not left.exists() and (held / "model.pt").exists() and mine.is_dir() and mine.stat().st_mode & 0o777 == 0o700
        assert not mine.exists() and (there / "saturate-test-mine").exists() and (there / "saturate-test-0123456789ab").is_symlink()
    finally:
        kill(killed)
        kill(other)


def test_a_folder_under_tmp_goes_with_the_next_process_of_the_user(there: Path) -> None:
    """Where the path of a socket would be too long, TMPDIR is a folder under /tmp: dozens of them were left by kills."""
    long = there / (20 * "long")
    process, left = holder(str(long / "process-1"), there)
    try:
        first = layers.make_scratch(long / "process-2")
        assert left.parent == first.parent == Path("/tmp") and left.is_dir()
        kill(process)
        second = layers.make_scratch(long / "process-3")
        assert not left.exists() and first.is_dir() and second.is_dir(), "what this process works in stays"
        assert layers.make_scratch(long / "process-2") == first
        layers.let_go(first)
        layers.let_go(second)
        third = layers.make_scratch(long / "process-4")
        assert not first.exists() and not second.exists()
        layers.discard(long / "process-4")
        assert not third.exists()
    finally:
        kill(process)


def test_another_process_may_clear_away_the_same_folder_at_the_same_time(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is held, and while what a killed trial has left is removed: an error that blamed the disk."""
    long, mkdir, unlink = there / (20 * "long"), Path.mkdir, os.unlink
    made: list[Path] = []

    def gone(folder: Path, *given: int, **named: int) -> None:
        mkdir(folder, *given, **named)
        made.append(folder)
        if len(made) == 1:
            folder.rmdir()

    def twice(path: str) -> None:
        unlink(path)
        unlink(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", gone)
        scratch = layers.make_scratch(long / "process-1")
    assert made == [scratch, scratch] and scratch.is_dir()
    (scratch / "socket").touch()
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", twice)
        layers.discard(long / "process-1")
    scratch.rmdir()


def test_a_folder_that_is_gone_or_held_is_nobodys_to_remove(tmp_path: Path) -> None:
    assert abandoned.locked(tmp_path / "none") is None
    first = abandoned.locked(tmp_path)
    assert first is not None and abandoned.locked(tmp_path) is None
    os.close(first)
    second = abandoned.locked(tmp_path)
    assert second is not None
    os.close(second)
