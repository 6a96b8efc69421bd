"""After how many steps a recipe has paid for its longer start."""

from __future__ import annotations

from math import ceil


def steps(baseline_ms: float, tuned_ms: float, extra_startup_s: float) -> int | None:
    """Steps of training after which the tuned run is ahead in wall-clock time; None: never, it is not faster.

    `extra_startup_s` is how much longer the tuned run takes until its step time is stationary (compile, warm-up),
    compared with the baseline; negative or zero means that it is ahead from the first step (0).
    """
    gain_ms = baseline_ms - tuned_ms
    if gain_ms <= 0:
        return None
    return max(0, ceil(extra_startup_s * 1000 / gain_ms))
