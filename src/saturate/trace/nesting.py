"""Operators call operators: which one is innermost at a moment, and how long each ran outside those it called.

Spans of one thread are taken to nest properly, as a call stack does. Spans without a length hold nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from saturate.trace.columns import Column, HostEvents
from saturate.trace.launches import by_thread


@dataclass(frozen=True)
class Nest:
    """Spans of one thread. `rows` lists the callers before the called; `levels[d]` are positions in `rows`, at depth
    d."""

    rows: Column
    start: Column
    end: Column
    levels: list[Column]

    def innermost(self, time: Column) -> Column:
        """The row that is innermost at each time, -1 where none is."""
        found = np.full(len(time), -1, "i8")
        open_ = np.arange(len(time))
        for level in reversed(self.levels):
            place = np.searchsorted(self.start[level], time[open_], "right") - 1
            candidate = level[np.maximum(place, 0)]
            inside = (place >= 0) & (time[open_] < self.end[candidate])
            found[open_[inside]] = self.rows[candidate[inside]]
            open_ = open_[~inside]
            if not len(open_):
                break
        return found

    def parents(self) -> Column:
        """For each position the position of its caller, -1 at the outermost."""
        parent = np.full(len(self.rows), -1, "i8")
        for outer, inner in zip(self.levels, self.levels[1:]):
            parent[inner] = outer[np.maximum(np.searchsorted(outer, inner) - 1, 0)]
        return parent


def nest(events: HostEvents, rows: Column) -> Nest:
    """Of rows of one thread."""
    rows = rows[events.end[rows] > events.start[rows]]
    rows = rows[np.lexsort((-events.end[rows], events.start[rows]))]
    start, end = events.start[rows], events.end[rows]
    # Whoever started before and has not ended yet is around it.
    depth = np.arange(len(rows)) - np.searchsorted(np.sort(end), start, "right")
    order = np.argsort(depth, kind="stable")
    levels = np.split(order, np.flatnonzero(np.diff(depth[order])) + 1) if len(rows) else []
    return Nest(rows, start, end, levels)


def innermost(events: HostEvents, rows: Column, thread: Column, time: Column) -> Column:
    """The row of `rows` that is innermost on each thread at each time, -1 where none is."""
    found = np.full(len(time), -1, "i8")
    wanted = np.unique(thread)
    for number, own in by_thread(events, rows[np.isin(events.tid[rows], wanted)]):
        here = np.flatnonzero(thread == number)
        found[here] = nest(events, own).innermost(time[here])
    return found
