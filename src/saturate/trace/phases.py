"""The step split: to which part of a step every nanosecond of the recorded steps belongs.

The parts are disjoint and sum to the window (`windows.Window.steps`) exactly. What they are depends on where training
runs, because a step ends when the slower of host and device is done.

On a CPU the training thread's time is split. In this order, the first that holds has the moment:

    input          `DataLoader.__next__`
    sync           a host sync that the recorder labelled (`saturate.sync FILE:LINE WHAT`)
    communication  a collective runs, on any thread, and this thread is in no operator: it waits for it
    backward       `saturate.backward`; without that label what the autograd engine ran, on any thread
    forward        the forward of a labelled module, `DistributedDataParallel.forward`
    optimizer      `Optimizer.step#`, `Optimizer.zero_grad#`; of a step that evaluates a closure what follows the closure's last
                   backward pass
    between        an operator, or up to 200 us of Python between two of the above or of operators; it belongs to forward when
                   a forward or backward pass comes next (the loss, augmentation), else to the optimizer (clipping,
                   averages of weights). Without a recorded optimizer, what follows a backward pass is the optimizer and the
                   rest forward
    idle           nothing of all that: the thread sleeps, waits, or runs Python for longer

On an accelerator the device's time is split. Computation belongs to the part (forward, backward or optimizer, by the rules
above) in which the host launched it; a moment with several belongs to forward before backward before optimizer. Then
come collectives that no computation hides (communication), then copies that neither hides: from the host
(host_to_device), to the host (sync: it waits for them), and on the device, which belong to the part that launched them.
Idle time is input or sync where `gaps` attributes it so, and idle otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

import numpy as np

from saturate.trace.breakdown import COMMUNICATION_OPERATORS, Work, communication, work
from saturate.trace.columns import MEMCPY, Column, HostEvents, Trace
from saturate.trace.copies import FROM_HOST, TO_HOST
from saturate.trace.gaps import INPUT, SYNC, edges, gaps
from saturate.trace.intervals import EMPTY, Intervals, contains, intersect, join, length, subtract, union
from saturate.trace.launches import launching_calls, named, spans, valid
from saturate.trace.windows import CPU, LOADER, STEP, Window, loader, window

PARTS = ("input", "host_to_device", "forward", "backward", "optimizer", "communication", "sync", "idle")

_OPTIMIZER = re.compile(r"^Optimizer\.(step|zero_grad)#")
_UPDATE = re.compile(r"^Optimizer\.step#")
_CLEARING = re.compile(r"^Optimizer\.zero_grad#")
_FORWARD = re.compile(r"^saturate\.module |^(DistributedDataParallel|FullyShardedDataParallel|FSDP)\S*\.forward$")
_BACKWARD = re.compile(r"^saturate\.backward$")
_ENGINE = re.compile(r"^autograd::engine::evaluate_function|Backward\d*$")
#: A wait of the host that the recorder labelled.
LABELLED_SYNC = re.compile(r"^saturate\.sync ")
#: A copy to the device that the recorder labelled: where, and what copies.
LABELLED_UPLOAD = re.compile(r"^saturate\.upload (.+:\d+) (\S+)$", re.DOTALL)
#: A wait of the recorder's own.
DRAIN = re.compile(r"^saturate\.drain$")

#: Python between two operators of one part that is still that part's own.
BRIDGE_NS = 200_000


@dataclass(frozen=True)
class Host:
    """Disjoint stretches of the training thread; what is in none of them is idle."""

    input: Intervals
    sync: Intervals
    communication: Intervals
    optimizer: Intervals
    backward: Intervals
    forward: Intervals


def split(trace: Trace, device: int, launches: Column | None = None, communicating: Column | None = None,
          done: Work | None = None) -> dict[str, int]:
    """Integer nanoseconds by part, over all recorded steps (the span where there are none); they sum to it. `device` is
    one of `windows.devices`; `launches`, `communicating` and `done` are of `launches.launching_calls`,
    `breakdown.communication` and `breakdown.work`, where they are at hand."""
    if device == CPU:
        parts = _of_cpu(trace, window(trace, CPU))
        return {name: length(parts.get(name, EMPTY)) for name in PARTS}
    launches = launching_calls(trace) if launches is None else launches
    view = window(trace, device, launches)
    communicating = communication(trace, launches) if communicating is None else communicating
    done = work(trace, device, view, communicating) if done is None else done
    return _of_device(trace, device, view, launches, communicating, done)


def updating(trace: Trace, device: int, launches: Column, communicating: Column) -> int:
    """Nanoseconds of the recorded steps in an optimizer's own step and its `zero_grad`: without what else comes between a backward and the
    next forward pass (clipping, averages of weights), which `split` counts with them. On an accelerator what these launched."""
    view = window(trace, device, launches)
    own = join(_own(trace, view, _CLEARING), _updates(trace, view, _backward(trace, view)))
    if device == CPU:
        return length(intersect(own, view.steps))
    rows = valid(trace.gpu) & (trace.gpu.device == device) & (launches >= 0) & ~communicating
    rows[rows] = contains(own, trace.calls.start[launches[rows]])
    return length(intersect(_rows(trace, rows), view.steps))


def calibrated(trace: Trace, clocked: dict[str, int]) -> dict[str, int]:
    """The split of steps that ran without a profiler, on a CPU; it sums to `clocked`.

    `clocked`: integer nanoseconds of such steps by what surrounded them on a clock: "input", "forward" (of the trained
    modules), "backward", "optimizer" and "rest". A profiler makes steps of many small operators longer, and not all parts
    alike; but which share of each of these groups waits, computes or idles, only a recording tells. So each group is
    divided as the recording divides it.
    """
    view = window(trace, CPU)
    found = host(trace, view)
    parts = _of_cpu(trace, view)
    groups = {"input": found.input}
    backward = _backward(trace, view)
    for name, around in (("backward", backward), ("forward", _own(trace, view, _FORWARD)),
                         ("optimizer", join(_own(trace, view, _CLEARING), _updates(trace, view, backward)))):
        if clocked.get(name):       # what no clock saw (a function that the script imported by name) is in what was around it
            groups[name] = subtract(intersect(around, view.steps), join(*groups.values()))
    groups["rest"] = subtract(view.steps, join(*groups.values()))
    total = dict.fromkeys(PARTS, 0)
    for group, ns in clocked.items():
        inside = {name: length(intersect(part, groups.get(group, EMPTY))) for name, part in parts.items()}
        for name, share in _divided(ns, inside, "forward" if group == "rest" else group).items():
            total[name] += share
    return total


def _divided(whole: int, weights: dict[str, int], otherwise: str) -> dict[str, int]:
    """`whole` in integers proportional to the weights, by largest remainder; all to `otherwise` where all are 0."""
    weight = sum(weights.values())
    if not weight:
        return {otherwise: whole}
    shares = {name: whole * one // weight for name, one in weights.items()}
    left = whole - sum(shares.values())
    for name in sorted(weights, key=lambda name: -(whole * weights[name] % weight))[:left]:
        shares[name] += 1
    return shares


def _of_cpu(trace: Trace, view: Window) -> dict[str, Intervals]:
    found = host(trace, view)
    parts = {field.name: getattr(found, field.name) for field in fields(found)}
    return {**parts, "idle": subtract(view.steps, join(*parts.values()))}


def host(trace: Trace, view: Window) -> Host:
    """What the training thread did in the window."""
    left = view.steps

    def take(wanted: Intervals) -> Intervals:
        nonlocal left
        taken = intersect(left, wanted)
        left = subtract(left, taken)
        return taken

    backward = _backward(trace, view)
    updates = _updates(trace, view, backward)
    landmarks = {"input": loader(trace, view) or EMPTY, "optimizer": join(_own(trace, view, _CLEARING), updates),
                 "backward": backward, "forward": _own(trace, view, _FORWARD)}
    running = _operators(trace, view)
    fetched = take(landmarks["input"])
    sync = take(_own(trace, view, LABELLED_SYNC))
    waited = take(subtract(_collectives(trace), running))
    named_parts = {name: take(landmarks[name]) for name in ("backward", "forward", "optimizer")}
    landmarks["optimizer"] = updates        # gradients may be cleared before a forward pass or after it
    between = _between(left, running, landmarks)
    return Host(
        input=fetched, sync=sync, communication=waited, backward=named_parts["backward"],
        optimizer=join(named_parts["optimizer"], between["optimizer"]),
        forward=join(named_parts["forward"], between["forward"]),
    )


def _own(trace: Trace, view: Window, pattern: re.Pattern[str]) -> Intervals:
    """Annotations and operators of the training thread whose name matches."""
    found = [(events, _of_thread(trace, view, events, pattern)) for events in (trace.annotations, trace.operators)]
    return join(*(spans(events, rows) for events, rows in found))


def _of_thread(trace: Trace, view: Window, events: HostEvents, pattern: re.Pattern[str]) -> Column:
    rows = named(trace, events.name, pattern)
    if view.thread is not None:
        rows &= events.tid == view.thread
    return np.flatnonzero(rows)


def _updates(trace: Trace, view: Window, backward: Intervals) -> Intervals:
    """The optimizer's own part of its steps. Lightning trains in a closure that the step evaluates: forward pass, loss and its
    own hooks would count for the optimizer. So, where backward passes run inside of a step, only what follows the last of
    them does. An optimizer that evaluates its closure several times (LBFGS) has work of its own between two evaluations, which
    is lost to it here: nothing tells it from the loss of a closure with several backward passes (an equation of derivatives, as in PINNs),
    which takes longer."""
    found = []
    for events in (trace.annotations, trace.operators):
        rows = _of_thread(trace, view, events, _UPDATE)
        start, end = events.start[rows], events.end[rows]
        last = np.searchsorted(backward.end, end, "right") - 1      # of the passes that end inside, where it has any
        done = np.concatenate([backward.end, [0]])[last]            # -1: there is none
        found.append(union(np.where((last >= 0) & (done > start), done, start), end))
    return join(*found)


def _backward(trace: Trace, view: Window) -> Intervals:
    """The recorder's labels, or what the autograd engine ran, on its own threads where it has some."""
    labelled = _own(trace, view, _BACKWARD)
    if len(labelled.start):
        return labelled
    return spans(trace.operators, np.flatnonzero(named(trace, trace.operators.name, _ENGINE)))


def _operators(trace: Trace, view: Window) -> Intervals:
    """When the training thread was in an operator that does not communicate."""
    operators = trace.operators
    apart = named(trace, operators.name, COMMUNICATION_OPERATORS) | named(trace, operators.name, STEP) \
        | named(trace, operators.name, LOADER) | named(trace, operators.name, _OPTIMIZER)
    rows = ~apart if view.thread is None else ~apart & (operators.tid == view.thread)
    return spans(operators, np.flatnonzero(rows))


def _collectives(trace: Trace) -> Intervals:
    return join(*(spans(events, np.flatnonzero(named(trace, events.name, COMMUNICATION_OPERATORS)))
                  for events in (trace.operators, trace.annotations)))


def _between(left: Intervals, running: Intervals, landmarks: dict[str, Intervals]) -> dict[str, Intervals]:
    """What of `left` is work, and whose."""
    silent = subtract(left, running)
    short = silent.end - silent.start <= BRIDGE_NS
    pieces = join(intersect(left, running), Intervals(silent.start[short], silent.end[short]))
    names = list(landmarks)
    start = np.concatenate([landmarks[name].start for name in names])
    kind = np.repeat(np.arange(len(names)), [len(landmarks[name].start) for name in names])
    order = np.argsort(start, kind="stable")
    start, kind = start[order], kind[order]
    nearest = np.searchsorted(start, pieces.start, "left")
    following = _kinds(kind, nearest, names)
    forward = np.isin(following, ("forward", "backward"))
    if not len(landmarks["optimizer"].start):
        forward = _kinds(kind, nearest - 1, names) != "backward"
    return {"forward": Intervals(pieces.start[forward], pieces.end[forward]),
            "optimizer": Intervals(pieces.start[~forward], pieces.end[~forward])}


def _kinds(kind: Column, rows: Column, names: list[str]) -> Column:
    """The names of landmarks by their rows, "" for a row that there is not."""
    known = (rows >= 0) & (rows < len(kind))
    found = np.full(len(rows), "", dtype="U9")
    found[known] = np.array(names)[kind[rows[known]]]
    return found


def _of_device(trace: Trace, device: int, view: Window, launches: Column, communicating: Column,
               done: Work) -> dict[str, int]:
    gpu = trace.gpu
    own = valid(gpu) & (gpu.device == device)
    copies = gpu.kind == MEMCPY
    launched = _launched_in(trace, view, launches)
    left = view.steps
    parts = dict.fromkeys(PARTS, 0)

    def take(name: str, wanted: Intervals) -> None:
        nonlocal left
        before = length(left)
        left = subtract(left, wanted)
        parts[name] += before - length(left)

    for number, name in enumerate(_LAUNCHING):
        take(name, _rows(trace, own & ~copies & ~communicating & (launched == number)))
    take("communication", done.communication)
    from_host, to_host = (named(trace, gpu.name, pattern) & copies for pattern in (FROM_HOST, TO_HOST))
    take("host_to_device", _rows(trace, own & from_host))
    take("sync", _rows(trace, own & to_host))
    for number, name in enumerate(_LAUNCHING):
        take(name, _rows(trace, own & copies & (launched == number)))
    waiting = loader(trace, view)
    for attribute in (gaps, edges):
        causes = attribute(trace, done, view, launches, waiting)
        take("input", causes.of(INPUT))
        take("sync", causes.of(SYNC))
    return parts | {"idle": length(left)}


#: The parts that launch work; unknown launches and those outside all others count as forward.
_LAUNCHING = ("forward", "backward", "optimizer")


def _launched_in(trace: Trace, view: Window, launches: Column) -> Column:
    """For each row of `gpu`, the index into `_LAUNCHING` of what the host did when it launched it. By time, whatever the
    thread: the autograd engine launches from threads of its own while the training thread waits in `backward`."""
    found = host(trace, view)
    result = np.zeros(len(launches), "i1")
    known = np.flatnonzero(launches >= 0)
    time = trace.calls.start[launches[known]]
    for number in (1, 2):
        result[known[contains(getattr(found, _LAUNCHING[number]), time)]] = number
    return result


def _rows(trace: Trace, rows: Column) -> Intervals:
    return union(trace.gpu.start[rows], trace.gpu.end[rows])
