"""What counts as a cache, and which folders get an overlay: no folder that holds anything else, and none for the sake of a stream."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from saturate.trial import elsewhere, planning


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def caches(home: Path, named: tuple[Path, ...] = (), **variables: object) -> set[str]:
    environ = {"HOME": str(home)} | {name: str(value) for name, value in variables.items()}
    return set(planning._caches(environ, home / "work" / ".saturate", named))


@pytest.mark.parametrize("variable", ["MPLCONFIGDIR", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "TORCH_HOME"])
def test_a_variable_that_names_a_general_folder_makes_it_no_cache(variable, home):
    usual = caches(home)
    assert caches(home, **{variable: "/tmp"}) == caches(home, **{variable: "/"}) == usual
    assert caches(home, **{variable: home}) == caches(home, **{variable: home.parent}) == usual
    assert caches(home, TMPDIR=home / "scratch", **{variable: home / "scratch"}) == usual
    assert caches(home, (home / "data" / "out",), **{variable: home / "data"}) == usual
    assert caches(home, **{variable: home / "kept"}) == usual | {str(home / "kept")}


def test_hugging_faces_folder_may_hold_more_than_caches(home, tmp_path):
    data = tmp_path / "data"
    added = caches(home, (data,), HF_HOME=data) - caches(home)
    assert added == {str(data / name) for name in ("assets", "datasets", "hub", "modules", "xet")}
    assert str(data / "datasets") not in caches(home, (data / "datasets" / "mine",), HF_HOME=data)


def test_what_the_command_writes_into_is_not_a_cache(home, tmp_path):
    (tmp_path / "data").mkdir()
    environ = {"HOME": str(home), "TORCH_HOME": str(tmp_path / "data"), "HF_HOME": str(tmp_path / "data"), planning.OVERRIDE: "intercept"}
    argv = [sys.executable, "train.py", f"--output_dir={tmp_path / 'data' / 'out'}"]
    plan = planning.plan(tmp_path, tmp_path / ".saturate" / "t", argv, environ)
    allowed = plan.redirect["allowed"]
    assert str(tmp_path / "data" / "hub") in allowed and str(tmp_path / "data") not in allowed


def test_a_stream_among_the_arguments_is_no_folder_to_write_into(home, tmp_path):
    """An overlay is tried where a command names a folder, and nobody can create a file beside a descriptor."""
    words = ["train.py", "/dev/stdout", "--log=/proc/self/fd/2", "/sys/kernel", str(tmp_path / "out")]
    assert planning._places(words, tmp_path) == {tmp_path}


def test_one_folder_that_cannot_be_covered_does_not_expose_the_others(home, tmp_path, monkeypatch):
    folders = [tmp_path / "elsewhere" / name for name in ("stick", "data")]
    for folder in folders:
        folder.mkdir(parents=True)

    def rehearse(plan, places):
        if str(folders[0]) in plan.overlays:
            return False, f"mount overlay on {folders[0]}: Invalid argument (the file system cannot hold layers)"
        return True, "overlays"

    monkeypatch.setattr(planning, "_rehearse", rehearse)
    monkeypatch.setattr(planning, "_foreign", lambda plan: "")
    monkeypatch.setattr(planning.os, "geteuid", lambda: 4242)
    monkeypatch.setattr(elsewhere, "writable", lambda: folders)
    work = home / "work"
    work.mkdir()
    monkeypatch.setattr(planning, "_user_overlays", lambda *_: (str(home),))
    plan = planning.plan(work, work / ".saturate" / "t", [sys.executable, "train.py"], {"HOME": str(home)})
    assert plan.mode == "overlay" and plan.overlays == tuple(sorted(map(str, (folders[1], home))))
