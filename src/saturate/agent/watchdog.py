"""A watch over training under a recipe: NaN, infinity and loss spikes, with the step number.

The loss is copied without waiting for the device and read some steps later, so that watching never synchronises.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any

EVERY = 10              # steps between looks
HISTORY = 50            # losses that "usual" is judged by
SPIKE = 10.0            # times the spread of the history above its median
EXIT_CODE = 5           # with --on-divergence stop: same meaning as "no final set verifies"


class Watchdog:
    def __init__(self, action: str):
        self.action = action
        self.history: list[float] = []
        self._pending: Any = None       # (step, copy of the loss)
        self._warned = False

    def check(self, session: Any) -> None:
        """Called at every step boundary of a run with a recipe."""
        losses, session.losses = session.losses, []
        if session.boundaries % EVERY or not losses:
            return
        if self._pending is not None:
            step, copied = self._pending
            self._judge(step, float(copied.sum()))
        self._pending = session.boundaries, losses[-1].detach().to("cpu", non_blocking=True)

    def _judge(self, step: int, loss: float) -> None:
        problem = divergence(self.history, loss)
        if problem is None:
            self.history = [*self.history, loss][-HISTORY:]
            return
        if self._warned and self.action == "warn":
            return
        self._warned = True
        rank = os.environ.get("RANK")
        where = f" (rank {rank})" if rank else ""
        sys.stderr.write(
            f"saturate: {problem} at step {step}{where}\n"
            "help: run the command without the recipe from the last checkpoint; if it is stable there, tune again\n"
        )
        if self.action == "stop":
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(EXIT_CODE)         # other ranks and workers must not be waited for


def divergence(history: list[float], loss: float) -> str | None:
    """What is wrong with `loss` after `history`, or None."""
    if not math.isfinite(loss):
        return f"the loss became {loss}"
    if len(history) < 10:
        return None
    ordered = sorted(history)
    median = ordered[len(ordered) // 2]
    spread = sorted(abs(value - median) for value in ordered)[len(ordered) // 2]
    if loss > median + SPIKE * max(spread, 0.05 * abs(median)):
        return f"the loss jumped to {loss:.4g} (usual: {median:.4g})"
    return None
