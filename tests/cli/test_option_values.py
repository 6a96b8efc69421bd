"""Values of options that are refused before anything runs."""

from __future__ import annotations

import pytest

from saturate.cli import main


@pytest.mark.parametrize("options", [
    ["tune", "--only", ""], ["tune", "--only", ","], ["tune", "--skip", " , "], ["optimize", "--only", ""],
    ["fit", "--memory", "9" * 400 + "G"], ["tune", "--fit", "9" * 400 + "G"], ["tune", "--budget", "9" * 400], ["tune", "--timeout", "1e9h"],
    ["profile", "--step", "backward:" + "9" * 5000],
], ids=lambda options: " ".join(options)[:40])
def test_a_value_that_means_nothing_is_refused(options, capsys):
    assert main.main([*options, "--", "true"]) == 2
    shown = capsys.readouterr()
    assert "error[E200]" in shown.err and "Traceback" not in shown.err and not shown.out


@pytest.mark.parametrize("text", ["nan", "101%", "0.4", "x", "-1", "inf"])
def test_what_is_no_confidence_is_called_that(text, capsys):
    assert main.main(["optimize", "m:build", "--inputs", "m:loader", "--check", "m:score", "--max-drop", "1%", f"--confidence={text}"]) == 2
    assert f"'{text}' is not a confidence between 50% and 100%" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["tune", "profile", "fit", "drill", "run"])
@pytest.mark.parametrize(("command", "remedy"), [
    (["CUDA_VISIBLE_DEVICES=0", "python3", "train.py", "a b"], "put env in front: env CUDA_VISIBLE_DEVICES=0 python3 train.py 'a b'"),
    (["python3 train.py"], "drop the quotes: python3 train.py"),
    (["python3 train.py", "--lr", "1"], "drop the quotes: python3 train.py --lr 1"),
    (["A=1 python3 train.py"], "drop the quotes, and put env in front: env A=1 python3 train.py"),
    (["A=1"], "check its spelling, or give its path"), ([""], "check its spelling, or give its path"),
    (["no-such-program train.py"], "check its spelling, or give its path"),
], ids=["variable", "quoted", "half quoted", "quoted variable", "variable alone", "empty", "unknown"])
def test_a_command_as_a_shell_would_have_it_is_told_how_to_write_it(verb, command, remedy, capsys, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("schema = 1\n")
    assert main.main([verb, *([str(recipe)] if verb == "run" else []), "--", *command]) == 2
    assert capsys.readouterr().err.splitlines()[1:2] == [f"help: {remedy}"]
