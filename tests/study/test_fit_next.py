"""What `saturate fit` and `saturate drill` say to type next: the same question, not another one."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from saturate.cli import drill as drill_verb
from saturate.cli import fit as fit_verb
from saturate.cli import main
from saturate.errors import StudyLocked
from saturate.study import drill, fit, once
from saturate.study.fit import Asked
from saturate.study.state import Request

LINE = ["--memory", "700MB", "--target", "throughput", "--max", "64", "--knob=--batch-size", "--step", "backward:4", "--dir", "/data/st"]


def asked(line: list[str]) -> Asked:
    parser = argparse.ArgumentParser()
    fit_verb.configure(parser)
    given = parser.parse_args(line)
    request = Request(argv=["python", "t.py"], cwd=Path.cwd(), environment={}, directory=given.dir.absolute(), budget_s=given.budget, step=given.step)
    return Asked(request, given.memory, given.target, given.knob, given.most)


def options_of(command: str) -> list[str]:
    verb, *words = shlex.split(command)[1:]
    assert verb == "fit"
    return words[:words.index("--")]


def test_the_options_of_a_fit_ask_the_same_question_again():
    first = asked(LINE)
    assert asked(first.options()) == first and first.memory_bytes == 700_000_000
    assert asked([]).options() == []
    assert asked(options_of(fit.nothing(first, "for a test").next_command)) == first


@pytest.mark.parametrize(("words", "source", "knob"), [
    (["--batch_size", "16", "--eval_batch_size", "4"], "", "--batch_size"),
    (["--epochs", "3"], "parser.add_argument('--test-batch-size')\nparser.add_argument('--train_batch_size', type=int)", "--train_batch_size"),
    (["--epochs", "3"], "", "--batch-size"),
])
def test_a_refused_command_is_searched_by_the_argument_that_it_has(words, source, knob, tmp_path):
    """`--knob=--batch-size` ended every script that spells it otherwise."""
    (tmp_path / "t.py").write_text(source)
    first = asked(["--memory", "700MB"])
    given = Request(argv=["python", "t.py", *words], cwd=tmp_path, environment={}, directory=first.request.directory)
    refused = SimpleNamespace(verdict="refused", micro_batch=None)
    assert asked(options_of(fit._next(Asked(given, first.memory_bytes), refused, None))).knob == knob


def unproved(**changes):
    return SimpleNamespace(trials=0, likely=None, tried=[], left_s=lambda: 0.0, **changes)


def test_a_budget_that_ended_is_longer_the_next_time():
    """Before anything was measured, `tune` was proposed, and the limit was rounded up."""
    first = asked([*LINE, "--budget", "2m"])
    nothing = fit.nothing(first, "for a test")
    assert fit._for_want_of_time(unproved())
    longer = asked(options_of(fit._next(first, nothing, ["--budget", "6m"])))
    assert longer.request.budget_s == 360.0 and longer.memory_bytes == 700_000_000 and longer.options() == first.options()


def test_a_budget_that_ended_before_the_first_steps_says_so():
    """It said no more than that it had ended."""
    silent = unproved(facts={}, limit_bytes=1, best=None)
    silent.tried = [SimpleNamespace(outcome="out_of_time", reason="the budget ended", micro_batch=None)]
    assert "before the first training steps" in fit._verdict(silent, None, "", "", False)[1]


def test_a_size_that_fails_by_itself_does_not_ask_for_time():
    failed = SimpleNamespace(trials=2, likely=None, tried=[SimpleNamespace(reason="it crashed")], left_s=lambda: 30.0)
    assert not fit._for_want_of_time(failed)
    first = asked(LINE)
    assert fit._next(first, fit.nothing(first, "it crashed"), None) == "saturate tune --step backward:4 --dir /data/st -- python t.py"


@pytest.mark.parametrize("accelerated", [False, True])
def test_a_limit_that_must_be_said_is_asked_for_before_anything_runs(accelerated, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fit.gpus, "possible", lambda: accelerated)
    def begin(directory):
        raise StudyLocked("it begins")

    monkeypatch.setattr(once, "StudyLock", begin)
    assert main.main(["fit", "--", "true"]) == (3 if accelerated else 2)
    assert ("it begins" if accelerated else "say how much memory") in capsys.readouterr().err


def test_a_drill_that_could_not_be_carried_out_is_begun_again_with_its_options():
    request = drill.Request(["python", "t.py"], Path.cwd(), {}, Path("/data/a b"), resume_args=["--resume", "c.pt"], kills=3, steps=40,
                            step="backward:4", seed=7)
    parser = argparse.ArgumentParser()
    drill_verb.configure(parser)
    words = shlex.split(drill_verb.nothing(request, "for a test").next_command)
    given = parser.parse_args(words[2:words.index("--")])
    assert (given.resume_args, given.kills, given.steps, given.step, given.seed, given.dir) == (
        ["--resume", "c.pt"], 3, 40, "backward:4", 7, Path("/data/a b"))
