"""Joins between the tables of a trace: which call launched a device event, which operator surrounds a call."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from saturate.trace import intervals
from saturate.trace.columns import Column, GpuEvents, HostEvents, Trace, row_type
from saturate.trace.intervals import Intervals, join, union

GRAPH_LAUNCH = re.compile(r"GraphLaunch")


def named(trace: Trace, names: Column, pattern: re.Pattern[str]) -> Column:
    """Whether each row's name matches (`search`). Each distinct name is looked at once."""
    if not len(names):
        return np.zeros(0, bool)
    return np.fromiter((pattern.search(name) is not None for name in trace.names), bool, len(trace.names))[names]


def valid(gpu: GpuEvents) -> Column:
    """Rows that can be work: not those that end before they start, nor those whose times were lost (both 0)."""
    return (gpu.end >= gpu.start) & ~((gpu.start == 0) & (gpu.end == 0))


def launching_calls(trace: Trace) -> Column:
    """For each row of `gpu` the row of `calls` that launched it, -1 where none is known.

    Joined by correlation within the process; by correlation alone where the reader could not tell the process. Of
    several calls with one correlation (a runtime call and the driver call in it) the first, the outer one, is taken;
    of calls that are not in one another, or of several processes, none: which of them launched what cannot be told.
    """
    gpu, calls = trace.gpu, trace.calls
    if not len(calls.start) or not len(gpu.start):
        return np.full(len(gpu.start), -1, row_type(calls.start))
    pids = np.unique(np.concatenate((calls.pid, gpu.pid)))
    if len(pids[pids >= 0]) <= 1:
        call = _first(calls.correlation, gpu.correlation)
    else:
        ids, dense = np.unique(np.concatenate((calls.correlation, gpu.correlation)), return_inverse=True)
        process = np.searchsorted(pids, np.concatenate((calls.pid, gpu.pid)))
        key = process * len(ids) + dense
        call = _first(key[:len(calls.start)], key[len(calls.start):])
        lost = (gpu.pid < 0) & (call < 0)
        call[lost] = _first(dense[:len(calls.start)], dense[len(calls.start):][lost])
    call[gpu.correlation <= 0] = -1         # 0 is CUPTI's "unknown"
    shared = ambiguous(calls, gpu)
    if shared.any():
        call[shared[call] & (call >= 0)] = -1
    return call


def ambiguous(calls: HostEvents, gpu: GpuEvents) -> Column:
    """Whether each call shares its correlation with another one of its process that is not around it or in it, or with
    one of another process where a device event has it whose process is not known."""
    return _repeated(calls) | of_several_processes(calls, gpu)


def of_several_processes(calls: HostEvents, gpu: GpuEvents) -> Column:
    """Whether each call's correlation is that of a device event of unknown process, and calls of several have it."""
    shared = np.zeros(len(calls.start), bool)
    asked = gpu.correlation[(gpu.pid < 0) & (gpu.correlation > 0)]
    if not len(asked) or not len(calls.start) or (calls.pid == calls.pid[0]).all():
        return shared
    rows = np.flatnonzero(np.isin(calls.correlation, asked))
    rows = rows[np.lexsort((calls.pid[rows], calls.correlation[rows]))]
    ids, pids = calls.correlation[rows], calls.pid[rows]
    mixed = ids[1:][(ids[1:] == ids[:-1]) & (pids[1:] != pids[:-1])]
    shared[rows[np.isin(ids, mixed)]] = True
    return shared


def _repeated(calls: HostEvents) -> Column:
    """Whether each call shares its correlation with another one of its process that is not around it or in it."""
    shared = np.zeros(len(calls.start), bool)
    ids = np.sort(calls.correlation)
    if not (ids[1:] == ids[:-1])[ids[1:] > 0].any():        # as in most traces: the search is for the others
        return shared
    rows = np.flatnonzero(calls.correlation > 0)
    rows = rows[np.lexsort((calls.correlation[rows], calls.pid[rows]))]     # stable: of a group, in order of start
    ids, pids = calls.correlation[rows], calls.pid[rows]
    new = np.append(True, (ids[1:] != ids[:-1]) | (pids[1:] != pids[:-1]))
    group = np.cumsum(new) - 1
    outer = rows[new][group]
    apart = (calls.start[rows] >= calls.end[outer]) | (calls.tid[rows] != calls.tid[outer])
    apart &= rows != outer
    shared[rows] = np.isin(group, group[apart])
    return shared


def _first(keys: Column, wanted: Column) -> Column:
    """The first row of `keys` that equals each wanted key, or -1."""
    low, high = int(keys.min()), int(keys.max())
    if high - low <= 8 * len(keys):         # counted up, as correlations are: a table is faster than a search
        table = np.full(high - low + 1, -1, row_type(keys))
        table[keys[::-1] - low] = np.arange(len(keys), dtype=table.dtype)[::-1]     # of equal keys the first row stays
        return np.where((wanted >= low) & (wanted <= high), table[np.clip(wanted, low, high) - low], -1)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    place = np.minimum(np.searchsorted(ordered, wanted, "left"), len(keys) - 1)
    return np.where(ordered[place] == wanted, order[place], -1).astype(row_type(keys))


def by_thread(events: HostEvents, rows: Column | None = None) -> Iterator[tuple[int, Column]]:
    """(thread, rows of it, in order of start) of a table, or of the given rows of it."""
    rows = np.arange(len(events.start), dtype=row_type(events.start)) if rows is None else rows
    rows = rows[np.argsort(events.tid[rows], kind="stable")]
    threads, first = np.unique(events.tid[rows], return_index=True)
    yield from zip(threads.tolist(), np.split(rows, first[1:]))


def spans(events: HostEvents, rows: Column) -> Intervals:
    """The time that rows of a table cover. In parts: nested events leave little of their number."""
    parts = (rows[first:first + intervals.AT_ONCE] for first in range(0, len(rows), intervals.AT_ONCE))
    return join(*[union(events.start[part], events.end[part]) for part in parts])


def leaves(events: HostEvents) -> Column:
    """Whether each row has no other row of its thread inside it: what really ran, where operators call operators."""
    result = np.zeros(len(events.start), bool)
    for _, rows in by_thread(events):
        # Parents before children: by start, the longer first. A row is a leaf when the next one starts after its end.
        rows = rows[np.lexsort((-events.end[rows], events.start[rows]))]
        result[rows] = np.append(events.start[rows[1:]] >= events.end[rows[:-1]], True)
    return result
