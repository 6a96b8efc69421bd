"""One thing that the doctor looked at, and how a look that fails or hangs is kept from the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

#: ok; note: works, could be better; problem: `tune` cannot work; unknown: could not be found out.
STATUSES = ("ok", "note", "problem", "unknown")


@dataclass(frozen=True)
class Check:
    """What one probe found. `fix` is a command or a step, empty when there is nothing to do. `values` are the numbers
    behind `found`, for programs; what could not be measured is None or absent, never zero."""

    name: str
    status: str
    found: str
    fix: str = ""
    values: dict[str, Any] = field(default_factory=dict)


Probe = Callable[[], Check]


def isolated(name: str, probe: Probe) -> Check:
    """The probe's answer; a probe that breaks answers `unknown`."""
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 - whatever is broken here is what the doctor reports, and it goes on
        return Check(name, "unknown", f"this check itself failed: {type(error).__name__}: {error}")


def within(seconds: float, name: str, probe: Probe) -> Check:
    """The probe's answer, or `unknown` after `seconds`: a dead network file system blocks whoever touches it, and
    nothing can interrupt that. The blocked thread is left behind; it does not keep the process alive."""
    answers: list[Check] = []
    thread = threading.Thread(target=lambda: answers.append(isolated(name, probe)), name=f"doctor-{name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if answers:
        return answers[0]
    return Check(name, "unknown", f"no answer within {seconds:g} s: does its file system hang?",
                 "look at `dmesg` and `mount`, or choose another folder")
