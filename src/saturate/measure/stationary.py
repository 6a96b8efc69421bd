"""When warm-up is over, and how many steps a timed block needs."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt
from statistics import fmean, median

from saturate.measure.stats import quantile

#: A verdict on stationarity wants this much time after warm-up, inside the limits on the number of steps below.
SPAN_NS = 400_000_000
LEAST_STEPS, MOST_STEPS = 8, 64

#: Steps this many times longer than nearly all others are events (a compilation, an evaluation), not the step.
EVENT = 3.0

#: Thirds that differ by less than this share are the same speed: a race resolves a drift of this size anyway.
DRIFT = 0.03

#: Thirds may differ by this many standard errors of their difference; beyond it the step time still moves.
ERRORS = 3.0

#: ... as long as that error is below this share of the step, or the tail is long enough to stop asking.
RESOLUTION = 0.10

#: A timed block lasts at least this long.
BLOCK_MS = 300.0


def _event_level(times: Sequence[float]) -> float:
    """Above this a step is an event: relative to the slowest steps that are common, so that every n-th step may be
    slow (two loader workers alternate between 0.4 and 40 ms) and still belong to the step."""
    return EVENT * quantile(times, 0.9)


def _steady(times: Sequence[float]) -> bool:
    """Whether all thirds run at the same speed, events cut off. The noise is that of successive
    differences (von Neumann), which a trend does not inflate."""
    level = _event_level(times)
    cut = [min(t, level) for t in times]
    third = len(cut) // 3
    mean = fmean(cut)
    noise = fmean((b - a) ** 2 for a, b in zip(cut, cut[1:])) / 2
    error = sqrt(2 * noise / third)
    speeds = [fmean(part) for part in (cut[:third], cut[third:-third], cut[-third:])]
    difference = max(speeds) - min(speeds)
    if difference <= DRIFT * mean:
        return True
    resolved = error <= RESOLUTION * mean or len(times) >= MOST_STEPS
    return resolved and difference <= ERRORS * error


def _needed(times: Sequence[float]) -> int:
    """Steps that must follow the end of warm-up before it can be called over."""
    typical = max(1.0, fmean([min(t, _event_level(times)) for t in times]))
    return min(MOST_STEPS, max(LEAST_STEPS, ceil(SPAN_NS / typical)))


def warmed_up(step_ns: Sequence[int]) -> int | None:
    """Index of the first step of the steady state, or None while the step time still moves.

    The answer is the earliest start after which the remaining steps are long enough (0.4 s, 8 to 64 steps) and run
    at one speed in all its thirds. Rare events inside the tail (an evaluation, one late recompilation) do not reset
    it; a run of slow steps does, because then the thirds differ. Call it again with more steps when it says None.
    """
    times = [float(t) for t in step_ns]
    n = len(times)
    if n < LEAST_STEPS:
        return None
    needed = _needed(times[-MOST_STEPS:])
    level = _event_level(times[-needed:])
    start = 0
    while n - start >= needed:
        if times[start] <= level and _steady(times[start:]):
            return start
        # finer at the beginning, where warm-up ends most often; coarser later, to stay linear in practice
        start += max(1, start // 8)
    return None


#: Steps whose times lie within this ratio are no compilation or other passing event.
ALIKE = 1.3


def surely_longer(step_ns: Sequence[int], limit_ns: float) -> bool:
    """Whether the step is longer than `limit_ns` beyond doubt: two or more, alike, and the shortest is."""
    return len(step_ns) >= 2 and min(step_ns) > limit_ns and max(step_ns) <= ALIKE * min(step_ns)


#: How long a host that queues its work runs until it is as far ahead of its device as it usually is. It gets ahead by what its
#: part of a step is shorter than the device's, and the first such step hides a wait that comes in every step; this is for waits
#: that come in every n-th one.
LEAD_MS = 150.0


def lead_steps(step_ms: float, queued: bool) -> int:
    """How many steps to discard after a gate, at least 1. `queued`: the host queues them for an accelerator, which stands idle at
    the gate; what it then waits for the host is no part of a step that it otherwise works through meanwhile."""
    return max(1, ceil(LEAD_MS / step_ms)) if queued else 1


def with_lead(step_ns: Sequence[int]) -> list[int]:
    """The step times of a block that began behind a drained device, as if it had not been drained: the first step takes no longer
    than the second. One that is longer by far is an event, and stays."""
    times = list(step_ns)
    if len(times) > 1 and times[1] < times[0] <= EVENT * times[1]:
        times[0] = times[1]
    return times


def block_steps(
    step_ms: float,
    workers: int = 0,
    prefetch: int = 2,
    *,
    loader_bound: bool = True,
    queued: bool = False,
) -> tuple[int, int]:
    """How many steps to discard after a thaw, and how many to time then: `(skip, steps)`.

    A frozen process continues with a cold cache, so its first step is 4-9 % slow and never counts; a device begins with an empty
    queue (`queued`, see `lead_steps`). When the loop waits for loader workers, batches that were finished before the freeze
    are free afterwards: those (workers x prefetch) are discarded, and the block spans at least twice that queue and whole
    turns of the workers, because their steps alternate. Otherwise the block is as long as `BLOCK_MS`, at least two steps.
    Raises ValueError for a step time that is not positive.
    """
    if not step_ms > 0:
        raise ValueError(f"a step takes a positive time, not {step_ms} ms")
    steps = max(2, ceil(BLOCK_MS / step_ms))
    if workers <= 0 or not loader_bound:
        return lead_steps(step_ms, queued), steps
    queue = workers * max(1, prefetch)
    steps = max(steps, 2 * queue)
    return max(queue, lead_steps(step_ms, queued)), ceil(steps / workers) * workers


#: A turn of a block lasts this long, or one step; where one lasts longer than the other, turns are of no use: the machine has
#: changed its speed by then.
TURN_MS, LONGEST_TURN_MS = 50.0, 1000.0

#: The caches of a thawed process are its own again after this long; in a short turn that would count.
THAW_MS = 10.0


def in_turns(step_ms: float, steps: int) -> tuple[int, int, int]:
    """How a block of so many steps is cut into turns, which two processes run alternately: `(turns, skip, steps)`, the latter two
    of each turn. Together at least as many steps are timed.

    What else runs on a shared machine changes how fast it is many times in a second. Two processes that take turns of a
    twentieth of a second see the same of that, and the same interval takes half the time (`bench/turns.py`).
    """
    if step_ms > LONGEST_TURN_MS:
        return 1, 1, steps
    each = min(steps, ceil(TURN_MS / step_ms))
    return ceil(steps / each), ceil(THAW_MS / step_ms), each


#: Blocks of a process at its beginning and later that differ by more than this share, beyond their noise, are of a training that
#: becomes slower or faster as it goes on. A single pair claims no less anyway.
SHIFT = 0.05


def drifts(block_ms: Sequence[float]) -> bool:
    """Whether the blocks of one process become slower or faster, from the first third of them to the last. Their noise is that of
    second differences, which a steady drift does not inflate; fewer than six tell nothing."""
    third = len(block_ms) // 3
    if third < 2:
        return False
    noise = fmean((a - 2 * b + c) ** 2 for a, b, c in zip(block_ms, block_ms[1:], block_ms[2:])) / 6
    first, last = fmean(block_ms[:third]), fmean(block_ms[-third:])
    return abs(last - first) > SHIFT * min(first, last) + ERRORS * sqrt(2 * noise / third)


def typical_ms(step_ns: Sequence[int]) -> float:
    """Typical step time, milliseconds: the mean with events cut off, because a median misreads alternating steps.
    Raises ValueError when there are no steps."""
    level = _event_level(step_ns)
    usual = [t for t in step_ns if t <= level]
    return fmean(usual or [median(step_ns)]) / 1e6
