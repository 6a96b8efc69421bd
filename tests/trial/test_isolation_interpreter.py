"""Interception, where the interpreter writes and lists by functions that are not in `os`, and where a path exists in the view only."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from isolation_kit import run_caged, script, snapshot

from saturate.trial import landlock, planning
from saturate.trial.layers import discard


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def intercepted(work: Path, code: str, *in_front: str, **variables: str) -> str:
    """What a script prints whose writes are intercepted, with no other guard."""
    argv = [*in_front, sys.executable, str(script(work, "train.py", code))]
    environ = {"HOME": str(work.parent), "PATH": os.environ["PATH"], planning.OVERRIDE: "intercept"} | variables
    plan = planning.plan(work, work / ".saturate" / "t", argv, environ)
    assert plan.mode == "intercept" and not plan.guarded
    before = snapshot(work.parent)
    try:
        done = run_caged(plan, argv, environ)
    finally:
        discard(Path(plan.run_dir), plan)
    assert done.returncode == 0, done.stderr
    assert snapshot(work.parent) == before
    return done.stdout


@pytest.fixture(autouse=True)
def no_landlock(monkeypatch):
    monkeypatch.setattr(landlock, "abi", lambda: 0)


@pytest.mark.parametrize("in_front", [(), ("env", "-u", "PYTHONDONTWRITEBYTECODE"), ("env", "-u", "PYTHONPATH")])
def test_what_is_imported_leaves_no_bytecode(work, in_front):
    script(work, "helper.py", "answer = 42\n")
    assert intercepted(work, "import helper; print(helper.answer)", *in_front) == "42\n"
    assert not (work / "__pycache__").exists()


def test_raw_files_are_redirected_and_are_what_open_makes(work):
    (work / "x.txt").write_text("old")
    assert intercepted(work, """
        import abc, io
        with io.FileIO("x.txt", "w") as file:
            file.write(b"new")
        print(open("x.txt").read(), file.name, isinstance(open("x.txt", "rb").raw, io.FileIO), isinstance(io.BytesIO(), io.FileIO))
        class Own(io.FileIO, abc.ABC): pass
        print(Own("x.txt").read(), isinstance(open("x.txt", "rb").raw, Own), isinstance(Own("x.txt"), io.FileIO))
    """) == "new x.txt True False\nb'new' False True\n"
    assert (work / "x.txt").read_text() == "old"


def test_folders_behind_a_link_or_a_working_directory_of_the_trial_are_not_empty(work):
    data = work.parent / "imagenet"
    (data / "cats").mkdir(parents=True)
    (data / "cats" / "1.png").touch()
    assert intercepted(work, f"""
        import glob, os
        os.symlink({str(data)!r}, "data")
        print([(top, folders, files) for top, folders, files in os.walk("data")])
        os.makedirs("outputs/1")
        os.chdir("outputs/1")
        print(glob.glob("../../data/*"), glob.glob("../../../imagenet/*/*"), [entry.name for entry in os.scandir(b"../../../imagenet")])
    """) == "[('data', ['cats'], []), ('data/cats', [], ['1.png'])]\n['../../data/cats'] ['../../../imagenet/cats/1.png'] [b'cats']\n"


@pytest.mark.parametrize("in_front", [("env", "-u", "TMPDIR"), ("env", "TMPDIR=/tmp"), ("env", "TMPDIR=")])
def test_temporary_files_lie_in_the_run_folder_whatever_the_command_says(work, in_front):
    folder = Path(intercepted(work, "import os, tempfile; print(tempfile.gettempdir())", *in_front).strip())
    assert folder == work / ".saturate" / "t" / "tmp" or folder.name.startswith("saturate-")


@pytest.mark.parametrize("kept", [False, True])
def test_what_is_downloaded_into_a_home_without_caches_is_there_for_the_next_trial_and_for_all_of_python(work, kept):
    """Each trial downloaded it anew, and a model's own code could not be imported from there."""
    if kept:
        (work.parent / ".cache").mkdir()
    code = """
        import os, pathlib, sys
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "modules"
        print(cache.exists(), end=" ")
        cache.mkdir(parents=True, exist_ok=True)
        (cache / "downloaded.py").write_text("answer = 42")
        sys.path.insert(0, str(cache))
        import downloaded
        print(downloaded.answer, cache.is_relative_to(pathlib.Path.home() / ".cache"))
        if cache.is_relative_to(pathlib.Path.home() / ".cache"):
            (cache / "downloaded.py").unlink(), cache.rmdir()
    """
    assert intercepted(work, code) == f"False 42 {kept}\n"
    assert intercepted(work, code) == f"{not kept} 42 {kept}\n"
    chosen = {"XDG_CACHE_HOME": str(work / "mine")}
    (work / "mine").mkdir()
    assert planning.plan(work, work / ".saturate" / "t", ["python"], {"HOME": str(work.parent), planning.OVERRIDE: "intercept"} | chosen
                         ).environment.get("XDG_CACHE_HOME") is None
