"""Why a device had nothing to do: each gap is given to one cause, by what launched the event that ended it.

For a gap g between the end of the last event and the start of the next one, which call c launched, in this order:

    unattributed       c is not known
    input              the training thread waited for the loader during half of g or more
    already_launched   c began before g did: a dependency, an event, a peer, or launch latency; not the host's fault
    sync               the thread of c, or the training thread, waited for the device during half or more of the
                       time from the start of g to c
    host_late          the launch simply came too late

Gaps lie inside the device's span. What of the steps lies before or after the span is told apart (edges), by the same
rules with the step's bounds; a tail has no next launch, so it is host_late unless input or sync explains it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from saturate.trace import intervals
from saturate.trace.breakdown import Work
from saturate.trace.columns import MEMCPY, Column, Trace
from saturate.trace.copies import TO_PAGEABLE
from saturate.trace.intervals import EMPTY, Intervals, covered, subtract, union
from saturate.trace.launches import by_thread, named
from saturate.trace.windows import Window

CLASSES = ("input", "host_late", "sync", "already_launched", "unattributed")
INPUT, HOST_LATE, SYNC, ALREADY_LAUNCHED, UNATTRIBUTED = range(5)

#: A cause must cover this share of the gap. A choice of the definitions; how much hangs on it is not known.
COVER = 0.5

#: Calls that return only when the device is done, of CUDA, HIP, and Intel's Unified Runtime and Level Zero. An asynchronous copy is such a call where pageable memory receives.
SYNC_CALLS = re.compile(r"Synchronize|^(cuda|hip)Memcpy(2D|3D|ToSymbol|FromSymbol|WithStream)?(_v\d+)?$|"
                        r"^cuMemcpy(DtoH|HtoD)?(_v\d+)?$|^ur(EventWait|QueueFinish)$")
READS_VALUE = re.compile(r"^aten::(item|_local_scalar_dense)$")


@dataclass(frozen=True)
class Causes:
    """Stretches without work, each with its class."""

    where: Intervals
    cause: Column               # indices into CLASSES

    def of(self, cause: int) -> Intervals:
        rows = self.cause == cause
        return Intervals(self.where.start[rows], self.where.end[rows])

    def total_ns(self, within: Intervals | None = None) -> dict[str, int]:
        """Nanoseconds by class, of all stretches or of what lies `within`."""
        start, end = self.where
        size = end - start if within is None else covered(within, start, end)
        return {name: int(size[self.cause == number].sum()) for number, name in enumerate(CLASSES)}


def gaps(trace: Trace, work: Work, window: Window, launches: Column, waiting: Intervals | None) -> Causes:
    """Causes of the gaps inside the span. `waiting`: the result of `windows.loader`."""
    return _attribute(trace, work, window.thread, subtract(window.span, work.busy), launches, waiting)


def edges(trace: Trace, work: Work, window: Window, launches: Column, waiting: Intervals | None) -> Causes:
    """Causes of what of the steps lies outside the span."""
    return _attribute(trace, work, window.thread, subtract(window.steps, window.span), launches, waiting)


def _attribute(trace: Trace, work: Work, training: int | None, stretches: Intervals, launches: Column,
               waiting: Intervals | None) -> Causes:
    if not len(stretches.start):
        return Causes(EMPTY, np.empty(0, "i1"))
    began, waits = trace.gpu.start[work.rows], _waits(trace, launches)
    at_once = intervals.AT_ONCE
    causes = [_cause(trace, work, training, Intervals(stretches.start[first:first + at_once], stretches.end[first:first + at_once]),
                     launches, waiting or EMPTY, began, waits) for first in range(0, len(stretches.start), at_once)]
    return Causes(stretches, np.concatenate(causes))


def _cause(trace: Trace, work: Work, training: int | None, stretches: Intervals, launches: Column, waiting: Intervals,
           began: Column, waits: dict[int, Intervals]) -> Column:
    """Classes of some stretches. `began`: when the device's rows of work started; `waits`: of `_waits`."""
    start, end = stretches
    size = end - start
    nearest = np.searchsorted(began, end, "left")
    followed = nearest < len(work.rows)         # False: a tail
    call = np.full(len(start), -1, "i8")
    call[followed] = launches[work.rows[nearest[followed]]]
    known = call >= 0
    launched = end.copy()                       # without a next launch the host was late up to the end of the step
    launched[known] = trace.calls.start[call[known]]

    reached = np.clip(launched, start, end)
    synced = np.zeros(len(start), "i8")
    for thread, waited in waits.items():
        # A value read on the training thread also delays what another one (of the backward pass) launches next.
        concerned = known & (trace.calls.tid[np.maximum(call, 0)] == thread) | (thread == training)
        synced[concerned] = np.maximum(synced[concerned], covered(waited, start[concerned], reached[concerned]))
    cause = np.select(
        [followed & ~known,
         covered(waiting, start, end) >= COVER * size,
         known & (launched <= start),
         synced >= COVER * (reached - start)],
        [UNATTRIBUTED, INPUT, ALREADY_LAUNCHED, SYNC], HOST_LATE)
    return cause.astype("i1")


def _waits(trace: Trace, launches: Column) -> dict[int, Intervals]:
    """Per thread, the time in which it waited for the device: `waiting_calls`, and `.item()` around such a call."""
    calls, operators = trace.calls, trace.operators
    reads = np.flatnonzero(named(trace, operators.name, READS_VALUE))
    readers = dict(by_thread(operators, reads))
    waits = {}
    for thread, rows in by_thread(calls, waiting_calls(trace, launches)):
        start, end = calls.start[rows], calls.end[rows]
        around = readers.get(thread, np.empty(0, "i8"))
        # A value read from a tensor on the CPU waits for nothing: only a read with such a call inside it counts.
        first = np.searchsorted(start, operators.start[around], "left")
        holds = start[np.minimum(first, len(start) - 1)] < operators.end[around]
        around = around[holds & (first < len(start))]
        waits[thread] = union(np.concatenate((start, operators.start[around])),
                              np.concatenate((end, operators.end[around])))
    return waits


def waiting_calls(trace: Trace, launches: Column) -> Column:
    """Rows of `calls` during which the host waits for the device, in order."""
    waits = named(trace, trace.calls.name, SYNC_CALLS)
    to_pageable = (trace.gpu.kind == MEMCPY) & (launches >= 0)
    to_pageable[to_pageable] = named(trace, trace.gpu.name[to_pageable], TO_PAGEABLE)
    waits[launches[to_pageable]] = True
    return np.flatnonzero(waits)

