"""How `saturate tune` ends: its exit code, and what is printed then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from saturate.cli import main
from saturate.cli import tune as verb
from saturate.records import recipe as recipes
from saturate.records.result import SCHEMA, TuneResult
from saturate.study import tune

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
import studies


@pytest.mark.parametrize(("name", "code", "title"), [
    ("too_noisy", 6, "Too noisy to decide"),
    ("unverified", 5, ""),
    ("big_win", 0, "1.79x"),
    ("nothing_helps", 0, "Nothing safe helps"),
    ("empty", 0, "Undecided within the budget"),
])
def test_the_exit_code_agrees_with_the_headline(name, code, title, monkeypatch, capsys):
    record = studies.ALL[name]()
    monkeypatch.setattr(tune, "tune", lambda request, say, on_end: (record, None))
    assert main.main(["tune", "--json", "--", "true"]) == code
    shown = capsys.readouterr()
    assert json.loads(shown.out)["verdict"] == record.result.verdict
    assert title in shown.err and ("error[E600]" in shown.err) is (code == 6)


def test_an_object_for_a_folder_that_is_gone(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code = main.main(["tune", "--json", "--", sys.executable, "train.py"])
    monkeypatch.chdir(tmp_path)
    shown = capsys.readouterr()
    result = msgspec.json.decode(shown.out, type=TuneResult)
    assert (code, result.verdict, result.verified_reason) == (3, "inconclusive", "the working directory was removed")
    assert "the working directory was removed" in shown.err


@pytest.mark.parametrize("library", ["msgspec", "tomlkit"])
def test_an_object_without_a_library_of_ours(library, tmp_path):
    """Also without the one that makes it otherwise. Standard output was empty."""
    code = f"import sys; sys.modules[{library!r}] = None; from saturate.cli import main; sys.exit(main.main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, "tune", "--json", "--", sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3 and f"cannot use the library {library}" in done.stderr, done.stderr
    assert msgspec.json.decode(done.stdout, type=TuneResult).verified_reason == f"saturate cannot use the library {library}, which it needs"


def test_the_object_of_a_tune_that_could_not_begin_is_like_any_other(monkeypatch, capsys):
    bad = os.fsdecode(b"caf\xe9")
    monkeypatch.setattr(tune, "tune", lambda request, say, on_end: (_ for _ in ()).throw(ZeroDivisionError()))
    assert main.main(["tune", "--json", "--", "true", bad]) == 3
    shown = json.loads(capsys.readouterr().out)
    assert shown["command"] == ["true", "caf?"]
    assert recipes.read(shown["recipe"]) == recipes.Recipe(), "it always names a recipe that exists"
    assert msgspec.to_builtins(msgspec.convert(shown, TuneResult)) == shown and shown["schema"] == SCHEMA


def test_an_interrupted_tune_names_its_recipe_only_where_something_is_kept() -> None:
    kept = studies.big_win().result
    nothing = msgspec.structs.replace(kept, techniques=[one for one in kept.techniques if one.fate != "kept"])
    assert verb._stands(kept) == f"best so far: {kept.recipe}" and verb._stands(nothing) == "nothing is kept so far"
