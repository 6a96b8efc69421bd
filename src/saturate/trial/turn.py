"""The controller's end of a turn: see `agent.turn`."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path


class Turn:
    """Held from its construction on, until it is `given`."""

    def __init__(self, path: Path):
        self.path = path
        self.given_at: float | None = None          # time.monotonic
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except OSError:
            os.close(self._descriptor)
            raise

    def give(self) -> None:
        if self.given_at is None:
            self.given_at = time.monotonic()
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)    # closing would not do: a fork of this process may have it, too
            os.close(self._descriptor)
