"""The small verbs: recipe, explain, techniques, report."""

from __future__ import annotations

import importlib.metadata
import json
import os
import types
import typing

import pytest

from saturate import errors
from saturate.cli import explain, main, techniques
from saturate.records import recipe as recipes
from saturate.records import result
from saturate.records.recipe import Entry, MadeFor, MeasuredEvidence, Recipe
from saturate.techniques import _api, _registry

RECIPE = Recipe(
    made_for=MadeFor(device="cpu", cpu="Some CPU", torch="2.13.0", script="ab" * 32),
    evidence=MeasuredEvidence(baseline_ms=200.0, tuned_ms=100.0, speedup=2.0, speedup_ci=(1.9, 2.1), verified=True),
    techniques=[Entry(id="bf16-autocast", gain=0.5, gain_ci=(0.4, 0.6), numerics="precision", why="matrix products\x1b[31m dominate")],
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "recipe.toml"
    recipes.write(path, RECIPE)
    return path


def call(capsys, *words):
    code = main.main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_recipe_show(capsys, file):
    code, out, _ = call(capsys, "recipe", "show", file)
    assert code == 0
    assert out == (
        "1 technique, 2.00x [1.90x, 2.10x], 200 -> 100 ms per step, verified\n"
        "made for: Some CPU, torch 2.13.0, script abababababab\n\n"
        "bf16-autocast\n  +50.0 % [+40.0 %, +60.0 %]\n  numerics: precision\n  matrix products [31m dominate\n")


def test_recipe_show_of_an_empty_file(capsys, tmp_path):
    (tmp_path / "e.toml").touch()
    assert call(capsys, "recipe", "show", tmp_path / "e.toml")[:2] == (0, "This recipe changes nothing.\n")
    assert call(capsys, "recipe", "show", "--as-code", tmp_path / "e.toml")[:2] == (0, "# This recipe changes nothing.\n")


def test_recipe_show_json_has_the_keys_of_the_file(capsys, file):
    shown = json.loads(call(capsys, "recipe", "show", file, "--json")[1])
    assert shown["schema"] == 1 and shown["technique"][0]["id"] == "bf16-autocast" and shown["evidence"]["speedup_ci"] == [1.9, 2.1]


def test_recipe_as_code_is_python(capsys, file):
    code, out, _ = call(capsys, "recipe", "show", file, "--as-code")
    assert code == 0 and out.startswith("# bf16-autocast: ")
    assert "torch" in out


def test_recipe_as_code_refuses_what_does_not_validate(capsys, tmp_path):
    path = tmp_path / "r.toml"
    recipes.write(path, Recipe(techniques=[Entry(id="bf16-autocats")]))
    code, out, err = call(capsys, "recipe", "show", path, "--as-code")
    assert (code, out) == (2, "") and "did you mean 'bf16-autocast'?" in err


def test_recipe_validate(capsys, file, tmp_path):
    assert call(capsys, "recipe", "validate", file)[:2] == (0, f"{file} is a valid recipe\n")
    bad = tmp_path / "bad.toml"
    bad.write_text("schema = 1\n[[technique]]\nid = 'bf16-autocats'\n")
    code, out, _ = call(capsys, "recipe", "validate", bad)
    assert code == 2 and out.startswith(f"{bad}:3  technique 1, id: unknown technique") and "did you mean 'bf16-autocast'?" in out
    code, out, _ = call(capsys, "recipe", "validate", "--json", bad)
    shown = json.loads(out)
    assert code == 2 and shown["valid"] is False and shown["problems"][0]["line"] == 3
    assert call(capsys, "recipe", "validate", "/dev/zero")[0] == 2


def test_recipe_diff(capsys, file, tmp_path):
    assert call(capsys, "recipe", "diff", file, file)[:2] == (0, "no differences\n")
    (tmp_path / "e.toml").touch()
    out = call(capsys, "recipe", "diff", file, tmp_path / "e.toml")[1]
    assert "- technique bf16-autocast" in out and "evidence.verified: true -> (none)" in out


def test_recipe_without_an_action(capsys):
    code, _, err = call(capsys, "recipe")
    assert code == 2 and "show | diff | validate" in err
    assert "did you mean 'validate'?" in call(capsys, "recipe", "valdate", "x")[2]


def test_explain_covers_every_word_of_the_records():
    assert tuple(explain.VERDICTS) == typing.get_args(result.Verdict)
    assert tuple(explain.FATES) == typing.get_args(result.Fate)
    assert tuple(explain.NUMERICS) == _api.NUMERICS


def test_explain_everything_it_lists(capsys):
    for word in [*explain.VERDICTS, *explain.FATES, *explain.NUMERICS, *errors.catalogue(), *_registry.load()]:
        code, out, _ = call(capsys, "explain", word)
        assert code == 0 and len(out.split()) > 8, word
    contents = call(capsys, "explain")[1]
    assert "bf16-autocast" in contents and "E210" in contents and "rejected_numerics" in contents


def test_explain_a_technique_shows_its_documentation(capsys):
    out = call(capsys, "explain", "BF16_autocast")[1]
    assert all(heading in out for heading in _api.HEADINGS)


def test_explain_a_word_with_two_meanings(capsys):
    out = call(capsys, "explain", "no-difference")[1]
    assert "(verdict)" in out and "(fate)" in out


def test_explain_errors_by_code_and_name_with_their_exit_code(capsys):
    assert call(capsys, "explain", "e310")[1] == call(capsys, "explain", "StudyLocked")[1]
    assert "exit code 3" in call(capsys, "explain", "E310")[1]


def test_explain_an_unknown_word(capsys):
    code, _, err = call(capsys, "explain", "bf16-autocats")
    assert code == 2 and "did you mean 'bf16-autocast'?" in err
    assert "did you mean 'E330'?" in call(capsys, "explain", "E33")[2]


def test_techniques(capsys):
    code, out, _ = call(capsys, "techniques")
    assert code == 0
    assert out.splitlines()[0].split() == ["id", "numerics", "stage", "title"]
    shown = json.loads(call(capsys, "techniques", "--json")[1])
    assert [row["id"] for row in shown["techniques"]] == list(_registry.load())
    assert {row["source"] for row in shown["techniques"]} == {"saturate"} and shown["broken"] == []


def test_a_broken_third_party_technique_is_named_and_hides_nothing(capsys, monkeypatch):
    package = types.SimpleNamespace(name="fast-stuff", version="2.0")
    entry = types.SimpleNamespace(value="fast_stuff.magic", dist=package)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] if group == _registry.GROUP else [])
    code, out, _ = call(capsys, "techniques")
    assert code == 2
    assert "bf16-autocast" in out
    assert "broken: fast_stuff.magic, from fast-stuff 2.0" in out and "No module named 'fast_stuff'" in out
    broken = json.loads(call(capsys, "techniques", "--json")[1])["broken"]
    assert broken[0]["source"] == "fast-stuff 2.0"
    assert call(capsys, "explain", "E220")[0] == 0, "what an error means can be read although a technique is broken"


def test_a_third_party_technique_says_where_it_comes_from(capsys, monkeypatch):
    item = techniques.Found("x.y", "fast-stuff 2.0", types.SimpleNamespace(TECHNIQUE=_api.Technique("y", "Y", "exact", "model", ())), None)
    monkeypatch.setattr(techniques, "installed", lambda inference: [item])
    assert "Y  [from fast-stuff 2.0]" in call(capsys, "techniques")[1]


def test_report_prints_the_newest(capsys, tmp_path):
    code, _, err = call(capsys, "report", "--dir", tmp_path)
    assert code == 2 and "no report" in err
    for age, name in enumerate(("new/report.html", "old/report.html")):
        path = tmp_path / name
        path.parent.mkdir()
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
    assert call(capsys, "report", "--dir", tmp_path)[1] == f"{tmp_path}/new/report.html\n"


@pytest.mark.parametrize("verb, reason", [
    ("tune", lambda found: found["verified_reason"]), ("profile", lambda found: found["unknown"]["verdict"]),
    ("fit", lambda found: found["reason"]), ("drill", lambda found: found["reason"]),
])
def test_even_an_error_of_our_own_prints_the_object(verb, reason, capsys, monkeypatch, tmp_path):
    """Whoever reads the JSON must not meet an empty file; the traceback is still ours to show."""
    def broken(*_, **__):
        raise KeyError("stamps")

    monkeypatch.setattr(f"saturate.study.{verb}.{verb}", broken)
    code, out, err = call(capsys, verb, "--json", "--dir", tmp_path, "--", "true", os.fsdecode(b"data\xff.csv"))
    assert code == 3 and "Traceback" in err and "error[E370] saturate itself failed: KeyError: 'stamps'" in err
    found = json.loads(out)
    assert found["command"] == ["true", "data?.csv"] and "saturate itself failed: KeyError: 'stamps'" in reason(found)
