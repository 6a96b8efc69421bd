"""`saturate explain` of findings and limits."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest

from saturate.cli import _meanings, explain, main
from saturate.findings import _api, _registry
from saturate.records import drill, fit, inference, result
from saturate.records.analysis import Limit
from saturate.report.inference_words import MEANINGS, VERDICTS
from saturate.study import diagnose
from saturate.trace import integrity
from saturate.trial.outcome import KINDS


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


def test_what_is_no_difference_may_be_slower():
    """Seen in docs/public-scripts.md: "no difference: compile -22%", and here "too small to matter"."""
    from saturate.measure import race

    slower = race.Estimate(log_ratio=-0.15, low=-0.36, high=0.01, pairs=3, rounds=18)
    assert race.verdict(slower) == "no_difference"
    for said in (explain.VERDICTS["no_difference"], explain.FATES["no_difference"]):
        assert "too small" not in said and "changes the step time by less" not in said and ("slower" in said or "loses" in said)


def test_what_is_inconclusive_may_be_unverified():
    """`tune` names this page behind "Cannot verify, so nothing is claimed", of a script that does not repeat itself: its interval was clear."""
    for said in (explain.VERDICTS["inconclusive"], explain.FATES["inconclusive"]):
        assert "verified" in said and "reason" in said


@pytest.mark.parametrize(("explained", "printed"), [
    (explain.VERDICTS, typing.get_args(result.Verdict)), (explain.FATES, typing.get_args(result.Fate)),
    (_meanings.FIT_VERDICTS, typing.get_args(fit.FitVerdict)), (_meanings.FIT_SIZES, typing.get_args(fit.SizeOutcome)),
    (_meanings.DRILL_OUTCOMES, typing.get_args(drill.Outcome)), (_meanings.TRIAL_OUTCOMES, KINDS),
    (VERDICTS, typing.get_args(inference.SearchVerdict)),
], ids=["verdicts", "fates", "fit", "sizes", "drill", "trials", "optimize"])
def test_every_word_that_a_record_may_hold_has_a_meaning(explained, printed):
    assert set(explained) == set(printed)
    for word in printed:
        said = explain.explanation(word)
        assert explained[word] in said and len(explained[word].split()) > 5


def test_every_fate_of_an_inference_candidate_has_a_meaning():
    assert set(MEANINGS) | set(explain.FATES) >= set(typing.get_args(inference.Fate))


def problems_of_traces() -> set[str]:
    """The ids of problems that the sources name: `Problem(id=...)`, `_say("...")`, and pairs of an id and a message."""
    found = set(integrity.READING)
    files = [*Path(integrity.__file__).parent.glob("*.py"), Path(explain.__file__).with_name("_analysis.py"),
             *Path(diagnose.__file__).parent.glob("*.py")]
    for node in (node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Problem":
            found |= {word.value.value for word in node.keywords if word.arg == "id" and isinstance(word.value, ast.Constant)}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "_say":
            found.add(node.args[0].value)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "append" and isinstance(node.args[0], ast.Tuple):
            found |= {part.value for part in ast.walk(node.args[0].elts[0]) if isinstance(part, ast.Constant) and "-" in str(part.value)}
        elif isinstance(node, ast.Tuple):
            found |= {part.value for part in node.elts if isinstance(part, ast.Constant) and isinstance(part.value, str)
                      and re.fullmatch("[a-z]+(-[a-z]+)+", part.value)} & set(_meanings.TRACE_PROBLEMS)
    return {word for word in found if isinstance(word, str) and re.fullmatch("[a-z]+(-[a-z]+)*", word)}


def test_every_problem_of_a_trace_has_a_meaning():
    assert problems_of_traces() == set(_meanings.TRACE_PROBLEMS)
    assert "problem of a trace" in explain.explanation("lost-records")


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
    assert "tune tries compile, merged-micro-batches, fused-optimizer, zero-grad-none" in out
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


@pytest.mark.parametrize("word", ["gc-freeze", "launch-bound", "E210", ""])
def test_without_docstrings_everything_loads_and_the_missing_text_is_explained(word):
    done = subprocess.run([sys.executable, "-m", "saturate", "explain", *word.split()], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONOPTIMIZE": "2"})
    assert done.returncode == 0, done.stderr
    assert "Common base class" not in done.stdout
    assert word == "" or "PYTHONOPTIMIZE=2" in done.stdout
