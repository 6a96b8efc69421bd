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
