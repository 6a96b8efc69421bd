"""One device of a trace with all tables joined: what the analysis and the rules' observations are made from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from saturate.records.analysis import Problem
from saturate.trace import breakdown, gaps, integrity
from saturate.trace.columns import Column, DeviceInfo, Trace
from saturate.trace.intervals import EMPTY, Intervals, intersect
from saturate.trace.launches import launching_calls
from saturate.trace.windows import CPU, Window, loader, window

#: Kernels below this count as short.
SHORT_NS = 10_000


@dataclass(frozen=True)
class Joined:
    """What all devices of a trace share."""

    trace: Trace
    launches: Column                # per row of `gpu`: the launching row of `calls`, or -1
    communicating: Column           # per row of `gpu`
    problems: list[Problem]


def joined(trace: Trace) -> Joined:
    launches = launching_calls(trace)
    return Joined(trace, launches, breakdown.communication(trace, launches), integrity.problems(trace, launches))


@dataclass(frozen=True)
class View:
    """The window of one device, what it ran there, and why it did not run more."""

    joined: Joined
    device: int
    window: Window
    work: breakdown.Work
    parts: breakdown.Parts          # of the window
    idle: Intervals                 # of the window
    waiting: Intervals | None       # of the window, in the loader; None: not recorded
    idle_ns: dict[str, int]         # `idle` by cause, gaps and edges together; {} on a CPU
    gap_ns: dict[str, int]          # of the span
    edge_ns: dict[str, int]         # of the steps outside the span
    problems: list[Problem]

    @property
    def exposed_wait(self) -> Intervals:
        """In the loader while the device had nothing to do."""
        return EMPTY if self.waiting is None else intersect(self.waiting, self.idle)


def view(of: Joined, device: int) -> View:
    """What the trace holds of one device, or of the host for `CPU`, within its window."""
    trace = of.trace
    here = window(trace, device, of.launches)
    work = breakdown.work(trace, device, here, of.communicating)
    waiting = loader(trace, here)
    seen = View(
        of, device, here, work, breakdown.parts(work, here.steps), breakdown.idle(work, here.steps),
        None if waiting is None else intersect(waiting, here.steps), {}, {}, {},
        of.problems + integrity.of_window(trace, here, work))
    if device == CPU:
        return seen
    inner = gaps.gaps(trace, work, here, of.launches, waiting)
    outer = gaps.edges(trace, work, here, of.launches, waiting)
    edge_ns = outer.total_ns()
    idle_ns = {cause: ns + edge_ns[cause] for cause, ns in inner.total_ns(here.steps).items()}
    return replace(seen, idle_ns=idle_ns, gap_ns=inner.total_ns(), edge_ns=edge_ns)


def facts(trace: Trace, device: int) -> DeviceInfo | None:
    """What the trace states about a device. The only kind described stands for one that it numbers differently."""
    if device in trace.devices:
        return trace.devices[device]
    kinds = {replace(info, id=device) for info in trace.devices.values()}
    return kinds.pop() if len(kinds) == 1 and device != CPU else None
