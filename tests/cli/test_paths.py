"""Paths that nobody may look at, or that are none, and what `--json` prints where a verb ends before it has an answer."""

from __future__ import annotations

import errno
import json
import pathlib

import pytest

from saturate.cli.main import main
from saturate.machine import ceilings

LONG = "x" * 300


@pytest.mark.parametrize("words", [["checkpoint", "verify", LONG], ["checkpoint", "export", LONG], ["checkpoint", "gc", "--look-in", LONG],
                                   ["report", "--dir", LONG], ["pack", LONG, "packed"], ["optimize", f"{LONG}/m.py:build", "--inputs", "a:b"]])
def test_a_path_that_is_none_is_no_bug_of_ours(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = main(words)
    err = capsys.readouterr().err
    assert code in (2, 3) and "Traceback" not in err and "help: " in err, err


def test_a_folder_that_may_not_be_entered_is_named(tmp_path, monkeypatch, capsys):
    """As root sees none, the system's answer is played."""
    place = tmp_path / "secret" / "a.pt"
    look = pathlib.Path.stat

    def refused(self, **how):
        if "secret" in self.parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return look(self, **how)

    monkeypatch.setattr(pathlib.Path, "stat", refused)
    assert main(["checkpoint", "verify", str(place)]) == 3
    err = capsys.readouterr().err
    assert f"{place.parent}" in err and "cannot be reached" in err and "who may read" in err and "Traceback" not in err, err


def test_a_cache_of_ceilings_that_cannot_be_searched_is_passed_by(tmp_path, monkeypatch):
    """A home of somebody else's, as in containers, ended every analysis with a traceback."""
    def refused(self, pattern):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(type(tmp_path), "glob", refused)
    found = ceilings.kept(where=tmp_path)
    assert found.records == [] and "Permission denied" in found.notes[0]


@pytest.mark.parametrize("words", [["checkpoint", "verify", "--store", "nowhere"], ["checkpoint", "gc", "--store", "nowhere"],
                                   ["checkpoint", "advise", "--", "false"]])
def test_json_is_one_object_also_where_a_verb_fails(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    at = words.index("--") if "--" in words else len(words)
    code = main([*words[:at], "--json", *words[at:]])
    out = capsys.readouterr().out
    found = json.loads(out)
    assert code in (3, 4) and found["schema"] == 1 and found["error"]["message"] and found["error"]["code"].startswith("E")
    assert main(["checkpoint", "verify", "--json", "nothing.pt"]) == 2 and capsys.readouterr().out == ""
