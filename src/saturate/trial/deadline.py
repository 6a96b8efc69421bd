"""Waits for another process until a deadline, and no longer, whatever that process does.

Standard library only.
"""

from __future__ import annotations

import time


class Deadline:
    """A moment (time.monotonic) until which something is waited for.

    One looks also when the time is over: it may be over because this process was stopped (Ctrl-Z), and what came meanwhile did come.
    Where something comes at every look, that goes on for `longer_s`, and no longer.
    """

    def __init__(self, at: float, longer_s: float):
        self.at, self.longer_s = at, longer_s
        self._first_late: float | None = None

    def left(self) -> float:
        """Seconds that the next look may wait, 0 when the time is over. Raises TimeoutError where a look more than `longer_s` ago came
        late already."""
        now = time.monotonic()
        if now < self.at:
            return self.at - now
        if self._first_late is None:
            self._first_late = now
        if now - self._first_late > self.longer_s:
            raise TimeoutError
        return 0.0
