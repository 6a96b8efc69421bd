"""Sets of nanoseconds as sorted, disjoint, half-open intervals in int64 columns. Every operation is exact.

Nothing here is a float: a set's length is a Python integer, and a moment counts once however many streams are busy.
Times must stay within int64 (292 years of nanoseconds), which the readers guarantee.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from saturate.trace.columns import Column


class Intervals(NamedTuple):
    """[start[i], end[i]), in order, neither empty nor touching each other. Build one with `union`."""

    start: Column
    end: Column


#: Intervals that are swept over at a time. A sweep needs some hundred bytes for each.
AT_ONCE = 100_000

EMPTY = Intervals(np.empty(0, "i8"), np.empty(0, "i8"))


def union(start: Any, end: Any) -> Intervals:
    """The set that intervals cover, in any order and however they overlap; empty and reversed ones hold nothing."""
    start, end = np.asarray(start, "i8"), np.asarray(end, "i8")
    filled = start < end
    if not filled.all():
        start, end = start[filled], end[filled]
    if not len(start):
        return EMPTY
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    opens = np.flatnonzero(np.concatenate(([True], start[1:] > reach[:-1])))
    closes = np.append(opens[1:] - 1, len(start) - 1)
    return Intervals(start[opens], reach[closes])


def join(*sets: Intervals) -> Intervals:
    """The union of sets."""
    filled = [s for s in sets if len(s.start)]
    if len(filled) < 2:                 # nothing to merge, and nothing to copy
        return filled[0] if filled else EMPTY
    return union(np.concatenate([s.start for s in filled]), np.concatenate([s.end for s in filled]))


def length(a: Intervals) -> int:
    """Nanoseconds in the set."""
    return int((a.end - a.start).sum())


def intersect(a: Intervals, b: Intervals) -> Intervals:
    return _where(a, b, 3)


def overlap(a: Intervals, b: Intervals) -> int:
    """Nanoseconds in both sets: the length of their intersection, which is not made."""
    stretches = range(0, len(a.start), AT_ONCE)
    return sum(int(covered(b, a.start[first:first + AT_ONCE], a.end[first:first + AT_ONCE]).sum()) for first in stretches)


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """What of `a` is not in `b`."""
    return _where(a, b, 1)


def contains(a: Intervals, time: Any) -> Column:
    """Whether each time lies in the set."""
    time = np.asarray(time, "i8")
    result = np.zeros(time.shape, bool)
    if not len(a.start):
        return result
    for first in range(0, len(time), AT_ONCE):
        some = time[first:first + AT_ONCE]
        row = np.searchsorted(a.start, some, "right") - 1
        result[first:first + AT_ONCE] = (row >= 0) & (some < a.end[np.maximum(row, 0)])
    return result


def covered(a: Intervals, start: Any, end: Any) -> Column:
    """Nanoseconds of the set inside each [start, end)."""
    return np.maximum(_before(a, np.asarray(end, "i8")) - _before(a, np.asarray(start, "i8")), 0)


def _before(a: Intervals, time: Column) -> Column:
    """Nanoseconds of the set before each time."""
    if not len(a.start):
        return np.zeros(time.shape, "i8")
    total = np.concatenate((np.zeros(1, "i8"), np.cumsum(a.end - a.start)))
    row = np.searchsorted(a.start, time, "right")
    return total[row] - np.where(row > 0, np.maximum(a.end[np.maximum(row, 1) - 1] - time, 0), 0)


def between(a: Intervals, low: int, high: int) -> Intervals:
    """What of the set lies in [low, high)."""
    first, last = np.searchsorted(a.end, low, "right"), np.searchsorted(a.start, high, "left")
    if first >= last:
        return EMPTY
    return Intervals(np.maximum(a.start[first:last], low), np.minimum(a.end[first:last], high))


def cuts(*sets: Intervals) -> list[tuple[int, int]]:
    """Stretches of time, one behind the other, that hold all of the sets, and of the largest at most `AT_ONCE` each.

    What is summed over time can be summed over them, in the memory of one.
    """
    filled = [s for s in sets if len(s.start)]
    if not filled:
        return []
    low, high = min(int(s.start[0]) for s in filled), max(int(s.end[-1]) for s in filled)
    bounds = [low, *max(filled, key=lambda s: len(s.start)).start[AT_ONCE::AT_ONCE].tolist(), high]
    return list(zip(bounds[:-1], bounds[1:]))


def _where(a: Intervals, b: Intervals, state: int) -> Intervals:
    """The stretches in `a` alone (state 1), in `b` alone (2) or in both (3)."""
    if len(a.start) + len(b.start) <= AT_ONCE:
        return _sweep(a, b, state)
    pieces = [_sweep(between(a, low, high), between(b, low, high), state) for low, high in cuts(a, b)]
    start, end = np.concatenate([p.start for p in pieces]), np.concatenate([p.end for p in pieces])
    whole = start[1:] != end[:-1]       # a cut through a stretch leaves two that touch
    return Intervals(start[np.concatenate(([True], whole))], end[np.concatenate((whole, [True]))]) if len(start) else EMPTY


def _sweep(a: Intervals, b: Intervals, state: int) -> Intervals:
    """`_where`, by one sweep over all bounds."""
    time = np.concatenate((a.start, a.end, b.start, b.end))
    change = np.repeat(np.array([1, -1, 2, -2], "i1"), [len(a.start), len(a.end), len(b.start), len(b.end)])
    order = np.argsort(time, kind="stable")
    # Both sets are disjoint, but where bounds coincide the sum passes 3 and 0: from -3 to 6, far inside an i1.
    time, states = time[order], np.cumsum(change[order], dtype="i1")
    # Between equal times the state is that of no moment at all; the strict comparison drops it.
    keep = (states[:-1] == state) & (time[:-1] < time[1:])
    return Intervals(time[:-1][keep], time[1:][keep])
