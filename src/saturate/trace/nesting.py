"""Operators call operators: which one is innermost at a moment, and how long each ran outside those it called.

Spans of one thread are taken to nest properly, as a call stack does. Spans without a length hold nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from saturate.trace import intervals
from saturate.trace.columns import Column, HostEvents, row_type, rows_where

#: Rows that are looked at together.
PART = 1 << 20


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

    def own(self) -> Column:
        """For each position its time without that of what it called, nanoseconds."""
        parent = self.parents()
        inner = parent >= 0
        time = self.end - self.start
        exclusive = time.copy()
        np.subtract.at(exclusive, parent[inner], time[inner])
        return np.maximum(exclusive, 0)         # spans that overlap without nesting leave less than nothing


def nest(events: HostEvents, rows: Column) -> Nest:
    """Of rows of one thread."""
    rows = rows[events.end[rows] > events.start[rows]]
    start, end = events.start[rows], events.end[rows]
    if ((start[1:] < start[:-1]) | ((start[1:] == start[:-1]) & (end[1:] > end[:-1]))).any():
        order = np.lexsort((-end, start))
        rows, start, end = rows[order], start[order], end[order]
    # Whoever started before and has not ended yet is around it. Small numbers, of millions of rows.
    depth = (np.arange(len(rows)) - np.searchsorted(np.sort(end), start, "right")).astype("i4")
    order = np.argsort(depth, kind="stable")
    levels = np.split(order, np.flatnonzero(np.diff(depth[order])) + 1) if len(rows) else []
    return Nest(rows, start, end, levels)


def innermost(events: HostEvents, rows: Column, thread: Column, time: Column) -> Column:
    """The row of `rows` that is innermost on each thread at each time, -1 where none is. `rows` are in order of start."""
    found = np.full(len(time), -1, row_type(events.start))
    for number in np.unique(thread).tolist():
        here = rows_where(thread == number)
        here = here[np.argsort(time[here], kind="stable")]
        own = rows[events.tid[rows] == number]
        done, running = 0, own[:0]
        for first in range(0, len(here), intervals.AT_ONCE):
            some = here[first:first + intervals.AT_ONCE]
            times = time[some]
            # What starts until the last of these times, and what was still running after those before.
            began = int(np.searchsorted(own, np.searchsorted(events.start, times[-1], "right")))
            # Most operators of a long trace are around no launch. In parts: they are the longest table there is.
            new = np.array_split(own[done:began], (began - done) // PART + 1)
            around = np.concatenate([_around(times, events, part) for part in (running, *new)])
            found[some] = nest(events, around).innermost(times)
            running = np.concatenate([part[events.end[part] > times[-1]] for part in (running, *new)])
            done = began
    return found


def _around(times: Column, events: HostEvents, rows: Column) -> Column:
    """Those of the rows in whose span any of the sorted times is."""
    return rows[np.searchsorted(times, events.start[rows]) < np.searchsorted(times, events.end[rows])]
