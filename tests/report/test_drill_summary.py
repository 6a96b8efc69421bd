"""The summary of a drill: short, the verdict first, the next command last, nothing that a terminal could act on."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from saturate.records.drill import Drill, DrillResult, Outcome, Saved
from saturate.report import drill as report
from saturate.report.cells import cells
from saturate.study.drill_remedies import REMEDIES
from saturate.verify.resume import OUTCOMES


def kill(at: int, outcome: str = "repeats_data", **changes: object) -> Drill:
    values = {"moment": "update", "killed_at_update": at, "resumed_at_update": at - 4, "lost_updates": 4, "recovery_s": 3.21,
              "outcome": outcome, "reason": "16 of the 48 samples that this epoch had already used came again", **changes}
    return Drill(**values)  # type: ignore[arg-type]


def result(verdict: str = "repeats_data", kills: int = 2, **changes: object) -> DrillResult:
    drills = [kill(10 * k) for k in range(1, kills + 1)] + [kill(10 * kills + 10, "cannot_load", moment="save", recovery_s=None, resumed_at_update=None, lost_updates=None)]
    values = {"run": "a1", "command": ["python", "train.py"], "resume_command": ["python", "train.py"], "verdict": verdict,
              "reason": drills[0].reason, "remedy": REMEDIES[verdict], "drills": drills, "reference_updates": 60,
              "saves_seen": [Saved(update=6 * k, files=["c.pt"]) for k in range(1, 9)], "record": "/home/u/.saturate/a1/drill.json",
              "notes": ["a note"], "next_command": "saturate drill -- python train.py", **changes}
    return DrillResult(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("verdict", OUTCOMES)
@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("kills", [1, 2, 20])
def test_it_is_short(verdict: str, width: int, kills: int) -> None:
    lines = report.summary(result(verdict, kills), width=width, color=False).splitlines()
    assert len(lines) <= report.MAX_LINES and lines[0] == report.cut(report.TITLES[verdict], width)
    assert lines[-1] == "next      saturate drill -- python train.py"
    assert all(cells(line) <= width for line in lines if not line.startswith(("record", "next")))
    assert any(line.startswith("killed") for line in lines)


def test_what_it_says_of_a_kill() -> None:
    text = report.summary(result(), width=120, color=False)
    assert "update 10: repeats data, 4 lost, back in 3.2 s" in text and "update 30, in a save: cannot load" in text
    assert "after" not in text.splitlines()[3] and "6, 12, 18" in text


def test_colour_and_hostile_text() -> None:
    assert "\x1b[1;31mThis" in report.summary(result(), width=80, color=True)
    bad = report.summary(result(reason="a\x1b[2Jb\n\nc", record="/x\x1b[0m", next_command="saturate\x07 x", notes=["\x1b"]), width=80, color=False)
    assert "\x1b" not in bad and "\x07" not in bad


def test_every_outcome_has_words() -> None:
    assert set(get_args(Outcome)) == set(OUTCOMES) == set(report.TITLES) == set(REMEDIES)
    assert msgspec.json.decode(msgspec.json.encode(result()), type=DrillResult) == result()
