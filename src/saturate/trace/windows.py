"""Which stretch of time an analysis is about: the recorded steps, and the device's own span."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from saturate.trace.columns import KERNEL, Column, Trace, rows_where
from saturate.trace.intervals import EMPTY, Intervals, union
from saturate.trace.launches import named, spans, valid

#: The id under which the host's own operators are analysed, where a trace holds no accelerator events.
CPU = -1

#: From the first to the last event of what was launched in the steps, the device may take so many times as long as they took on the host.
#: Where it takes longer, the host only queued its work, and its steps are not the device's.
AHEAD_AT_MOST = 1.25

STEP = re.compile(r"^ProfilerStep#?\s*\d*")
LOADER = re.compile(r"^enumerate\(Data(Loader|Pipe)\)#")


@dataclass(frozen=True)
class Window:
    """`steps` is the union of all `ProfilerStep#n`, none skipped, or the span where there are none, or none of the device (`kind`).

    `span` runs from the device's first start to its last end (on a CPU: from the first recorded event to the last).
    `thread` is the training thread, an index into `Trace.threads`: the one that holds the steps, else the one with
    most operator time. `first` and `last` bound each single step. `untold`: several processes marked steps, and which
    of them used the device is not known. `ahead`: how many times as long as the steps the device took for what was
    launched in them, where that is so much longer that what the host marked are not the device's steps.
    """

    kind: Literal["steps", "span"]
    steps: Intervals
    span: Intervals
    thread: int | None
    first: Column
    last: Column
    untold: bool = False
    ahead: float | None = None

    @property
    def count(self) -> int:
        """Steps; 0 where the window is the span."""
        return len(self.first)


def devices(trace: Trace) -> list[int]:
    """Ids of the devices that did something; [CPU] for a trace of operators only; [] for a trace of nothing."""
    ids = np.unique(trace.gpu.device[valid(trace.gpu)]).tolist()
    if ids:
        return ids
    return [CPU] if len(trace.operators.start) else []


def window(trace: Trace, device: int, launches: Column | None = None) -> Window:
    """The window of one device: steps of the processes that launched its work, where the trace tells them apart. `launches` (of
    `launches.launching_calls`) tell whether the host was so far ahead that its steps are not the device's."""
    span = _span(trace, device)
    steps = np.flatnonzero(named(trace, trace.annotations.name, STEP))
    untold = False
    if device != CPU:
        pids = np.unique(trace.gpu.pid[trace.gpu.device == device])
        own = steps[np.isin(trace.annotations.pid[steps], pids)]
        steps = own if len(own) else steps
        untold = not (pids >= 0).any() and len(np.unique(trace.annotations.pid[steps])) > 1
    steps = steps[trace.annotations.end[steps] > trace.annotations.start[steps]]
    first, last = trace.annotations.start[steps], trace.annotations.end[steps]
    if len(steps):
        threads, count = np.unique(trace.annotations.tid[steps], return_counts=True)
        thread = int(threads[np.argmax(count)])
        ahead = 0.0 if device == CPU or launches is None else _stretched(trace, device, launches, int(first.min()), int(last.max()))
        if ahead > AHEAD_AT_MOST:
            return Window("span", span, span, thread, first[:0], last[:0], untold, ahead)
        return Window("steps", union(first, last), span, thread, first, last, untold)
    return Window("span", span, span, _busiest_thread(trace), first, last)


def _stretched(trace: Trace, device: int, launches: Column, began: int, ended: int) -> float:
    """How many times as long as from `began` to `ended` the device took for what was launched then."""
    rows = launched_within(trace, device, launches, began, ended)
    if not len(rows) or ended <= began:
        return 0.0
    start = max(began, int(trace.gpu.start[rows].min()))        # one that starts before its call has a wrong time
    return (int(trace.gpu.end[rows].max()) - start) / (ended - began)


def launched_within(trace: Trace, device: int, launches: Column, began: int, ended: int) -> Column:
    """The device's events whose launching call began in this time."""
    rows = np.flatnonzero(valid(trace.gpu) & (trace.gpu.device == device) & (launches >= 0))
    called = trace.calls.start[launches[rows]]
    return rows[(called >= began) & (called <= ended)]


def _span(trace: Trace, device: int) -> Intervals:
    if device == CPU:
        start = np.concatenate((trace.operators.start, trace.annotations.start))
        end = np.concatenate((trace.operators.end, trace.annotations.end))
    else:
        rows = valid(trace.gpu) & (trace.gpu.device == device)
        start, end = trace.gpu.start[rows], trace.gpu.end[rows]
    return union([start.min()], [end.max()]) if len(start) else EMPTY


def _busiest_thread(trace: Trace) -> int | None:
    operators = trace.operators
    if not len(operators.start):
        return None
    threads, dense = np.unique(operators.tid, return_inverse=True)
    time = np.zeros(len(threads), "i8")
    np.add.at(time, dense, operators.end - operators.start)     # integers: bincount's weights are floats
    return int(threads[np.argmax(time)])


def loader(trace: Trace, window: Window) -> Intervals | None:
    """Time in `DataLoader.__next__` of the training thread; None where it recorded none, which is not 0, or is not known."""
    if window.untold:
        return None
    rows = np.flatnonzero(named(trace, trace.annotations.name, LOADER))
    rows = rows[trace.annotations.tid[rows] == window.thread] if window.thread is not None else rows
    return spans(trace.annotations, rows) if len(rows) else None


def kernels_of(trace: Trace, device: int) -> Column:
    """Rows of `gpu` that are kernels of a device."""
    return rows_where(valid(trace.gpu) & (trace.gpu.device == device) & (trace.gpu.kind == KERNEL))
