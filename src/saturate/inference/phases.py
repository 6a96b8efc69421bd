"""How long each phase of a search took, and how late something may surely end before it is not begun at all."""

from __future__ import annotations

import time

from saturate.records.result import Phase

#: How late something may surely end before it is not begun at all: this share of the time that was given, and of a short one so many
#: seconds. As `tune` has it.
SLACK_SHARE, LEAST_SLACK_S = 0.2, 30.0


class Phases:
    """One after the other: each begins where the one before has ended. `began`: time.monotonic()."""

    def __init__(self, began: float):
        self.found: list[Phase] = []
        self._since = began

    def end(self, name: str) -> None:
        now = time.monotonic()
        self.found.append(Phase(name=name, seconds=round(now - self._since, 1)))
        self._since = now


def slack_s(given_s: float) -> float:
    return max(SLACK_SHARE * given_s, LEAST_SLACK_S)
