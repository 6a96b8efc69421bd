"""A clock that is always on one part of the step: what is inside another part counts for the inner one only."""

from __future__ import annotations

import functools
import threading
from typing import Any

#: What nothing surrounds: the loss, clipping, Python.
REST = "rest"


class PartClock:
    """Laps sum to the time since `start`, in integer nanoseconds. Calls from other threads do not count."""

    def __init__(self, clock: Any):
        self.ns: dict[str, int] = {}
        self._clock = clock
        self._open = [REST]
        self._last = 0
        self._thread = threading.get_ident()

    def start(self) -> None:
        self._last = self._clock()

    def lap(self) -> dict[str, int]:
        """Nanoseconds by part since `start` or the last lap; what is open goes on."""
        self._charge()
        taken, self.ns = self.ns, {}
        return taken

    def around(self, part: str, original: Any) -> Any:
        """`original`, on the clock of `part`."""

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            self.enter(part)
            try:
                return original(*args, **kwargs)
            finally:
                self.leave()

        return timed

    def enter(self, part: str) -> None:
        self._charge()
        self._open.append(part)

    def leave(self) -> None:
        self._charge()
        if len(self._open) > 1:         # the window may begin inside a part
            self._open.pop()

    def _charge(self) -> None:
        now = self._clock()
        self.ns[self._open[-1]] = self.ns.get(self._open[-1], 0) + now - self._last
        self._last = now
