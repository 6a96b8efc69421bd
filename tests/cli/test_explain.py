"""`saturate explain` of findings and limits."""

from __future__ import annotations

import importlib.metadata
import types
import typing

import pytest

from saturate.cli import explain, main
from saturate.findings import _api, _registry
from saturate.records.analysis import Limit


def call(capsys, *words: str) -> tuple[int, str, str]:
    code = main.main(["explain", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def broken_rule(monkeypatch):
    """A third party's rule that cannot be imported."""
    real = importlib.metadata.entry_points
    entry = types.SimpleNamespace(value="no_such_package.rule")
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [entry] if group == _registry.GROUP else real(group=group)
    )


def test_every_limit_has_a_meaning():
    assert set(explain.LIMITS) == set(typing.get_args(Limit))


def test_everything_it_lists_is_explained(capsys):
    contents = call(capsys)[1]
    assert "\nfindings\n" in contents and "\nlimits\n" in contents
    for word in [*explain.LIMITS, *_registry.load()]:
        code, out, _ = call(capsys, word)
        assert code == 0 and len(out.split()) > 8, word
        assert f"\n  {word} " in contents


def test_a_finding_shows_its_documentation_and_what_tune_tries(capsys):
    out = call(capsys, "Launch_Bound")[1]
    assert out.startswith("launch-bound: many short operators\n")
    assert "tune tries compile, fused-optimizer, zero-grad-none" in out
    assert "Many short operators: launching them takes longer than running them." in out
    assert all(f"\n{heading}\n" in out for heading in _api.HEADINGS)
    assert "no technique addresses it" in call(capsys, "stragglers")[1]


def test_a_limit_and_a_finding_of_one_name(capsys):
    out = call(capsys, "input-bound")[1]
    assert "input-bound (limit)" in out and "input-bound: waiting for input" in out


def test_a_mistyped_finding_is_guessed(capsys):
    code, _, err = call(capsys, "lunch-bound")
    assert code == 2 and "did you mean 'launch-bound'?" in err


def test_a_broken_rule_hides_nothing_else(capsys, broken_rule):
    assert call(capsys, "E240")[0] == 0, "what the error means"
    assert "input-bound (limit)" in call(capsys, "input-bound")[1]
    assert call(capsys, "compile")[0] == 0
    code, _, err = call(capsys, "gc-pauses")
    assert code == 2 and "the rule no_such_package.rule does not load" in err
