"""Time by label: `record_function`, NVTX ranges, and what torch itself marks (`Optimizer.step#AdamW.step`)."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from saturate.trace.columns import Column, HostEvents, Trace, rows_where
from saturate.trace.integrity import OVERHEAD
from saturate.trace.intervals import contains
from saturate.trace.launches import by_thread, named, spans
from saturate.trace.windows import STEP

#: A label with a running number in it ("batch 17") makes a name per event; the longest are enough to read.
MOST = 200

#: What autograd's engine calls the run of a node.
ENGINE = re.compile(r"^autograd::engine::evaluate_function")


def labels(trace: Trace, launches: Column) -> tuple[list[dict[str, Any]], int]:
    """The labels by total time, and how many names were left out.

    `count` and `total_ns` are of the host's ranges, one inside another of the same name counted once. `device_ns`
    sums what the range's own thread launched inside it, over all streams, and what the threads of autograd did that it waited for; None
    where no launch of the trace is known. Steps and the profiler's own work are not labels.
    """
    names = trace.annotations.name
    rows = np.flatnonzero(~(named(trace, names, STEP) | named(trace, names, OVERHEAD)))
    rows = _outermost(trace.annotations, rows)
    size = len(trace.names)
    count = np.bincount(trace.annotations.name[rows], minlength=size)
    total, device = np.zeros(size, "i8"), np.zeros(size, "i8")
    np.add.at(total, trace.annotations.name[rows], trace.annotations.end[rows] - trace.annotations.start[rows])
    np.add.at(device, trace.annotations.name[rows], launched_ns(trace, launches, trace.annotations, rows))
    known = bool((launches >= 0).any())
    present = np.flatnonzero(count)
    present = present[np.argsort(-total[present], kind="stable")]
    table = [{"name": trace.names[name], "count": int(count[name]), "total_ns": int(total[name]),
              "device_ns": int(device[name]) if known else None} for name in present[:MOST].tolist()]
    return table, max(0, len(present) - MOST)


def launched_ns(trace: Trace, launches: Column, events: HostEvents, rows: Column) -> Column:
    """For each row of a host table: device time launched inside it by its thread, and by those that worked for it, summed over
    streams."""
    launched = rows_where(launches >= 0)
    calls = launches[launched]
    thread, time = trace.calls.tid[calls], trace.calls.start[calls]
    whose = _on_whose_behalf(trace)[thread]
    spent = np.maximum(trace.gpu.end[launched] - trace.gpu.start[launched], 0)
    result = np.zeros(len(rows), "i8")
    for number in np.unique(events.tid[rows]).tolist():
        here = rows_where((thread == number) | (whose == number))
        here = here[np.argsort(time[here], kind="stable")]
        total = np.concatenate((np.zeros(1, "i8"), np.cumsum(spent[here])))
        own = events.tid[rows] == number
        first = np.searchsorted(time[here], events.start[rows[own]], "left")
        last = np.searchsorted(time[here], events.end[rows[own]], "left")
        result[own] = total[np.maximum(last, first)] - total[first]
    return result


def _on_whose_behalf(trace: Trace) -> Column:
    """For each thread itself, but for one that only runs backward passes (autograd has such a thread for each device) the one of its process
    that holds the steps, else the one that ran most operators: it waits in `backward` meanwhile."""
    operators = trace.operators
    whose = np.arange(len(trace.threads))
    engine = named(trace, operators.name, ENGINE)
    if not engine.any():
        return whose
    steps = named(trace, trace.annotations.name, STEP)
    ran, own, marked = (np.bincount(tid, minlength=len(whose)) for tid in (
        operators.tid, operators.tid[_within_engine(trace, engine)], trace.annotations.tid[steps]))
    process = np.full(len(whose), -1, "i8")
    process[operators.tid] = operators.pid
    helper = (ran > 0) & (own == ran)
    for thread in np.flatnonzero(helper).tolist():
        others = np.flatnonzero((process == process[thread]) & (ran > 0) & ~helper)
        if len(others):
            whose[thread] = others[np.lexsort((-ran[others], -marked[others]))[0]]
    return whose


def _within_engine(trace: Trace, engine: Column) -> Column:
    """Whether each operator is one of autograd's engine, or inside one on its thread."""
    operators, found = trace.operators, engine.copy()
    for thread, rows in by_thread(operators, rows_where(engine)):
        own = rows_where(operators.tid == thread)
        found[own] |= contains(spans(operators, rows), operators.start[own])
    return found


def _outermost(events: HostEvents, rows: Column) -> Column:
    """Rows that do not lie inside an earlier one of the same name and thread."""
    kept = []
    for _, part in by_thread(events, rows):
        part = part[np.lexsort((-events.end[part], events.start[part], events.name[part]))]
        name, end = events.name[part], events.end[part]
        first = np.flatnonzero(np.concatenate(([True], name[1:] != name[:-1])))
        for group in np.split(np.arange(len(part)), first[1:]):
            reach = np.maximum.accumulate(end[group])
            kept.append(part[group[np.concatenate(([True], end[group][1:] > reach[:-1]))]])
    return np.sort(np.concatenate(kept)) if kept else np.empty(0, "i8")
