"""How `saturate tune` ends: its exit code, and what is printed then."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from saturate.cli import main
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
    monkeypatch.setattr(tune, "tune", lambda request, say: (record, None))
    assert main.main(["tune", "--json", "--", "true"]) == code
    shown = capsys.readouterr()
    assert json.loads(shown.out)["verdict"] == record.result.verdict
    assert title in shown.err and ("error[E600]" in shown.err) is (code == 6)
