"""What only an overlay refuses is not called the command's failure, and what the system refuses as well is."""

from __future__ import annotations

import os

import pytest

from saturate.trial import refusals
from saturate.trial.cage import CagePlan
from saturate.trial.outcome import Outcome

CRASH = "Traceback (most recent call last):\n  File \"train.py\", line 3, in <module>\n"
RENAMED = "OSError: [Errno 18] Invalid cross-device link: 'best' -> 'best.old'"


def refused(tmp_path, line: str, kind: str = "crashed", mode: str = "overlay") -> Outcome | None:
    plan = CagePlan(mode, "", "user", str(tmp_path), str(tmp_path), str(tmp_path), str(tmp_path), guarded=True)
    return refusals.by_isolation(Outcome(kind, "why"), plan, (CRASH if kind == "crashed" else "") + line + "\n")


@pytest.mark.parametrize(("kind", "line"), [
    ("crashed", RENAMED), ("exited", "mv: cannot move 'best' to 'best.old': Invalid cross-device link"),
    ("crashed", "OSError: [Errno 75] Value too large for defined data type: 'log.txt'"),
    ("exited", "train.sh: line 2: log.txt: Value too large for defined data type"),
])
def test_the_trial_goes_on_in_the_other_mode(kind, line, tmp_path):
    """As for an overlay that is refused from the start: see `study.bench`."""
    found = refused(tmp_path, line, kind)
    assert found is not None and found.kind == "cage_refused" and line in found.reason and "SATURATE_ISOLATION=intercept" in found.remedy


def test_what_fails_without_an_overlay_as_well_is_the_commands(tmp_path, monkeypatch):
    assert refused(tmp_path, RENAMED, mode="intercept") is None
    assert refused(tmp_path, "OSError: [Errno 18] Invalid cross-device link: '/proc/x' -> 'best.old'") is None
    monkeypatch.setattr(os, "access", lambda path, how: not str(path).startswith("/proc"))     # root may write anywhere
    assert refused(tmp_path, "OSError: [Errno 75] Value too large for defined data type: '/proc/x'") is None
