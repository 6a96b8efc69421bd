"""What processes that ended before they came to the gate have left for the controller, in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from saturate.trial.outcome import LastWords, Outcome, stayed_out


def last(folder: Path) -> LastWords | None:
    """Of the process that trained the longest, of those that ended before they came to the gate."""
    found = filter(None, map(_word, folder.glob("ended-*.json")))
    return max(found, key=lambda word: word.steps, default=None)


def absent(folder: Path) -> Outcome | None:
    """Why the agent is not in a process that imported torch; None where it is, or none has."""
    found = map(_left, folder.glob("ended-stayed-out-*.json"))
    return next((stayed_out(**word) for word in found if word), None)


def cut(folder: Path) -> bool:
    """Whether a process that trained found its connection closed."""
    return any(folder.glob("ended-cut-*"))


def _word(path: Path) -> LastWords | None:
    try:
        return LastWords(**_left(path))
    except TypeError:
        return None


def _left(path: Path) -> dict[str, Any]:
    """{} where a full disk, or a kill, kept a process from writing all of it, or it has not come to that yet."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
