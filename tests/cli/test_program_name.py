"""What the command that a summary ends with begins with: what saturate is called where it runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from saturate.cli import _output


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A project with saturate in its virtual environment, and nothing of this name on the PATH."""
    folder = tmp_path / "project" / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("saturate", "python"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder


@pytest.mark.parametrize("colour", [("", "", ""), ("\x1b[2m", "\x1b[0m\x1b[1m", "\x1b[0m")])
def test_the_path_it_was_started_by(installed, monkeypatch, colour):
    monkeypatch.setattr(sys, "argv", [".venv/bin/saturate", "tune"])
    before, between, after = colour
    summary = f"1.2x faster\nwhy       next saturate tune\n{before}next      {between}saturate run r.toml -- python train.py{after}"
    assert _output.with_program(summary) == summary.replace("saturate run", ".venv/bin/saturate run")


def test_its_name_where_the_shell_finds_it(installed, monkeypatch):
    monkeypatch.setenv("PATH", str(installed))
    monkeypatch.setattr(sys, "argv", [str(installed / "saturate"), "tune"])
    assert _output.program() == "saturate"


def test_another_one_of_its_name_is_not_meant(installed, tmp_path, monkeypatch):
    (tmp_path / "saturate").write_text("#!/bin/sh\n")
    (tmp_path / "saturate").chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(installed / "saturate"), "tune"])
    assert _output.program() == ".venv/bin/saturate"


def test_from_elsewhere_and_in_its_own_folder(installed, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(installed / "saturate")])
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert _output.program() == str(installed / "saturate")
    monkeypatch.chdir(installed)
    assert _output.program() == "./saturate"


def test_as_a_module(installed, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(Path(_output.__file__).resolve().parent.parent / "__main__.py"), "tune"])
    assert _output.program() == ".venv/bin/python -m saturate"
    monkeypatch.setenv("PATH", str(installed))
    assert _output.program() == "saturate"


def test_inside_another_program(installed, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert _output.program() == "saturate"


def test_a_script_that_changes_the_working_directory_does_not_move_the_shell(installed, tmp_path, monkeypatch):
    """`build()` changed into the project: what was printed was to be found from there only."""
    monkeypatch.setattr(sys, "argv", [str(installed / "saturate")])
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    with _output.of_a_verb():
        monkeypatch.chdir(tmp_path / "project")
        assert _output.program() == str(installed / "saturate")
    assert _output.program() == ".venv/bin/saturate"
