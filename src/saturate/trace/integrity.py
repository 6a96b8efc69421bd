"""What is wrong with a trace, and which conclusions it therefore cannot carry.

A problem blocks only what it can falsify: records lost on the device make the busy time a guess and block it; records
lost on the host leave the busy time exact and block only who launched what. Conclusions:

    steps            the step as a denominator          kernels         how many, how long, how late
    busy             busy and idle, the parts           communication   its length, its exposure and overlap
    gaps             why the device was idle            occupancy       how full it was
    roofline         operators against the ceilings
"""

from __future__ import annotations

import re

import numpy as np

from saturate.records.analysis import Integrity, Problem
from saturate.trace.breakdown import Work
from saturate.trace.columns import KERNEL, Column, Trace
from saturate.trace.intervals import covered, intersect, length, subtract, union
from saturate.trace.launches import GRAPH_LAUNCH, ambiguous, by_thread, named, of_several_processes, spans, valid
from saturate.trace.windows import CPU, Window, devices

CONCLUSIONS = ("steps", "busy", "gaps", "kernels", "communication", "occupancy", "roofline")
EVERYTHING = list(CONCLUSIONS)
OF_THE_DEVICE = [name for name in CONCLUSIONS if name != "steps"]

MATCHED_AT_LEAST = 0.95         # kernels whose launching call was recorded; launching calls whose kernel was
ZERO_AT_MOST = 0.01             # device events of no duration
HIDDEN_AT_MOST = 0.01           # of the span: the most that such events can hide before busy time is a guess
REVERSED_AT_MOST = 0.01         # device events that end before they start
EARLY_AT_MOST = 0.01            # kernels that start before the call that launches them
EARLY_NS = 10_000               # and by no more than this: so far two clocks that were set to each other drift apart
OUTSIDE_AT_MOST = 0.05          # of the busy time: outside the steps
REPLAYED_AT_MOST = 0.05         # kernels replayed from a graph, before operators and launches mean little
OVERHEAD_AT_MOST = 0.05         # of the window: the profiler's own work

LAUNCH = re.compile(r"^(cuda|cu|hip|hipExt|hipModule|hipExtModule)Launch\w*Kernel")
#: Whatever makes a device of any backend work: a launch of CUDA's or HIP's, of a graph, or one of Intel's Unified Runtime.
ANY_LAUNCH = re.compile(rf"{LAUNCH.pattern}|{GRAPH_LAUNCH.pattern}|EnqueueKernelLaunch")
BEGIN_CAPTURE, END_CAPTURE = re.compile(r"StreamBeginCapture"), re.compile(r"StreamEndCapture")
#: What Kineto calls the profiler's own activity (category `overhead`).
OVERHEAD = re.compile(r"^(Instrumentation|Resource|Activity Buffer Request|Buffer Flush|CUPTI.*Overhead|"
                      r"Profiler Overhead|Lazy Function Loading|Command Buffer Full)", re.IGNORECASE)

#: Kineto's names for the calls of a backend, where it is one that is not read: `mtia_runtime`.
OTHER_RUNTIME = re.compile(r"^[a-z]\w*_runtime$")

#: Operators that only accelerators have. `cudnn_is_acceptable` and its like ask on any device, and answer no.
NOT_ON_A_CPU = re.compile(r"^aten::_?((cudnn|miopen|mps)_(?!is_)|thnn_fused_|lstm_mps|scaled_dot_product_attention_math_for_mps|"
                          r"(scaled_dot_product_)?(flash|efficient|cudnn)_attention(_forward|_backward)?$)")

#: Problems that readers report, or who saw the recording (`study.unheard`), and what each blocks. One that is not listed here
#: blocks nothing.
READING = {"truncated": EVERYTHING, "lost-records": OF_THE_DEVICE, "lost-calls": ["gaps", "roofline"],
           "unknown-accelerator": OF_THE_DEVICE}


def problems(trace: Trace, launches: Column) -> list[Problem]:
    """Everything wrong with the trace as a whole; what concerns one device's window is in `of_window`."""
    found = [Problem(id=id, message=message, blocks=_blocks(trace, id)) for id, message in trace.problems]
    if devices(trace) in ([], [CPU]):
        found += _no_accelerator(trace)
    else:
        found += _reversed(trace) + _zero(trace) + _unmatched(trace, launches) + _lost(trace, launches)
        found += _of_several_processes(trace)
        found += _early(trace, launches)
        found += _replayed(trace, launches)
    return found


def _blocks(trace: Trace, id: str) -> list[str]:
    """Of a graph that was recorded as a whole, what ran inside is not known: kernels, and communication among them."""
    if id != "whole-graphs":
        return EVERYTHING if id == "no-events" else READING.get(id, [])
    kernels = (trace.gpu.kind == KERNEL) & valid(trace.gpu)
    time = trace.gpu.end - trace.gpu.start
    graphs = int(time[kernels & (trace.gpu.graph == 1)].sum())
    return ["kernels", "communication", "occupancy", "roofline"] if graphs > REPLAYED_AT_MOST * int(time[kernels].sum()) else []


def of_window(trace: Trace, window: Window, work: Work) -> list[Problem]:
    """What is wrong with one device's window."""
    found = []
    if window.ahead is not None:
        found.append(Problem(id="host-ahead", blocks=["steps"], message=(
            f"the device took {window.ahead:.1f} times as long for what was launched in the recorded steps as they lasted on the host, which "
            "only queues its work: the device's steps are longer; record more steps, or call torch.cuda.synchronize() at the end of each")))
    elif window.kind == "span":
        found.append(Problem(id="no-steps", blocks=["steps"], message=(
            "no steps are marked (ProfilerStep#n: call profiler.step() in each); shares are of the device's span")))
    if window.untold:
        found.append(Problem(id="unmatched-kernels", blocks=["steps", "gaps", "roofline"], message=(
            "several processes marked steps, and nothing tells which of them launched this device's work")))
    busy = length(work.busy)
    outside = length(subtract(work.busy, window.steps))
    if busy and outside > OUTSIDE_AT_MOST * busy:
        found.append(Problem(id="work-outside-steps", blocks=[], message=(
            f"{outside / busy:.0%} of the busy time lies outside the recorded steps, and not in their shares")))
    found += _silent_steps(trace, window)
    profiler = spans(trace.annotations, np.flatnonzero(named(trace, trace.annotations.name, OVERHEAD)))
    overhead = length(intersect(profiler, window.steps))
    if overhead > OVERHEAD_AT_MOST * length(window.steps):
        found.append(Problem(id="profiler-overhead", blocks=[], message=(
            f"the profiler's own work took {overhead / length(window.steps):.0%} of the window")))
    return found


def _silent_steps(trace: Trace, window: Window) -> list[Problem]:
    """Steps in which operators ran as in the others, and nothing was called or done on a device: a profiler whose buffers are full stops to
    record both, and goes on with operators."""
    if not len(trace.calls.start) or not len(trace.operators.start) or not len(trace.gpu.start):
        return []
    first, last = window.first, window.last

    def begun(start: Column) -> Column:
        return np.searchsorted(start, last, "left") - np.searchsorted(start, first, "left")

    rows = valid(trace.gpu)
    worked = covered(union(trace.gpu.start[rows], trace.gpu.end[rows]), first, last) > 0
    silent, operators = (begun(trace.calls.start) == 0) & ~worked, begun(trace.operators.start)
    if not silent.any() or silent.all():
        return []
    silent &= (operators > 0) & (2 * operators >= np.median(operators[~silent]))
    count = int(silent.sum())
    if not count:
        return []
    return [Problem(id="lost-records", blocks=OF_THE_DEVICE, message=(
        f"{count} of {len(first)} steps hold operators as the others do, but neither a call nor an event of a device: records were lost, and "
        "the device was busier than the trace shows"))]


def _no_accelerator(trace: Trace) -> list[Problem]:
    if any(id in ("unknown-accelerator", "no-events") for id, _ in trace.problems):        # said by who knows more
        return []
    others = [f"{name} ({count:,})" for name, count in trace.left_out.items() if OTHER_RUNTIME.match(name)]
    if others:
        return [Problem(id="unknown-accelerator", blocks=OF_THE_DEVICE, message=(
            f"an accelerator of a kind that is not read was at work: {', '.join(others)}; the CPU's operators alone do "
            "not tell what limits it"))]
    if any("busy" in READING.get(id, ()) for id, _ in trace.problems):      # none was read, which does not say that there was none
        return [Problem(id="unknown-accelerator", blocks=OF_THE_DEVICE, message=(
            "no event of an accelerator could be read, and events were lost: whether one was at work is not known"))]
    launches = int(named(trace, trace.calls.name, ANY_LAUNCH).sum())
    if launches:
        return [Problem(id="unknown-accelerator", blocks=OF_THE_DEVICE, message=(
            f"{launches:,} launch{'es were' if launches > 1 else ' was'} recorded, and no event of the device that they made work: the profiler delivered none (as under "
            "WSL, beside another profiler, or where its clock is another), so what the device did is not known"))]
    elsewhere = np.unique(trace.operators.name[named(trace, trace.operators.name, NOT_ON_A_CPU)])
    if len(elsewhere):
        return [Problem(id="unknown-accelerator", blocks=OF_THE_DEVICE, message=(
            f"{(name := trace.names[elsewhere[0]])} runs on accelerators only, and none of their events were recorded: what the device "
            f"did is not known; {'torch.profiler records none of Apple devices' if 'mps' in name else 'record ProfilerActivity.CUDA too'}"))]
    if devices(trace):
        return [Problem(id="no-accelerator", blocks=[], message=(
            "no accelerator events: this is about the CPU's operators, and no device has gaps to explain"))]
    return [Problem(id="no-accelerator", blocks=EVERYTHING, message=(
        "no accelerator events and no operators: record with ProfilerActivity.CPU and ProfilerActivity.CUDA"))]


def _reversed(trace: Trace) -> list[Problem]:
    total = len(trace.gpu.start)
    count = int((trace.gpu.end < trace.gpu.start).sum())
    if not count:
        return []
    blocks = OF_THE_DEVICE if count > REVERSED_AT_MOST * total else []
    return [Problem(id="negative-durations", blocks=blocks, message=(
        f"{count} of {total} device events end before they start; they are left out"))]


def _zero(trace: Trace) -> list[Problem]:
    """Events of no duration. Where the clock counts microseconds a short kernel may read 0: each hides less than one,
    and what they hide together is bounded. Where it counts nanoseconds the duration was lost; nothing bounds it."""
    gpu = trace.gpu
    total, empty = len(gpu.start), gpu.end == gpu.start
    count, unplaced = int(empty.sum()), int((empty & (gpu.start == 0)).sum())
    if count <= ZERO_AT_MOST * total:
        return []
    tick = resolution_ns(trace)
    rows = valid(gpu)
    span = int(gpu.end[rows].max() - gpu.start[rows].min()) if rows.any() else 0
    hidden = count * tick
    bounded = tick > 1 and not unplaced and hidden <= HIDDEN_AT_MOST * span and 2 * count <= total      # most of them are not rounded
    message = f"{count} of {total} device events have no duration"
    if bounded:
        message += f"; at this clock of {tick} ns they hide at most {hidden / span:.2%} of the span"
    else:
        message += ", so how long the device worked is not known"
    return [Problem(id="zero-durations", message=message, blocks=[] if bounded else OF_THE_DEVICE)]


def resolution_ns(trace: Trace) -> int:
    """The tick of the device events' clock: 1000 where every time is a whole microsecond, else 1."""
    whole = not (trace.gpu.start % 1000).any() and not (trace.gpu.end % 1000).any()
    return 1000 if whole and len(trace.gpu.start) else 1


def _unmatched(trace: Trace, launches: Column) -> list[Problem]:
    kernels = np.flatnonzero(trace.gpu.kind == KERNEL)
    lost = kernels[launches[kernels] < 0]
    if len(lost) <= (1 - MATCHED_AT_LEAST) * len(kernels):
        return []
    if not len(trace.calls.start):
        return [Problem(id="unmatched-kernels", blocks=["gaps", "roofline"], message=(
            "no launching calls were recorded, so gaps and kernels cannot be given to what launched them"))]
    early = int(_before_recording(trace, lost).sum())
    matched = len(kernels) - len(lost)
    if len(lost) - early > (1 - MATCHED_AT_LEAST) * len(kernels):
        return [Problem(id="unmatched-kernels", blocks=["gaps", "roofline"], message=(
            f"only {matched} of {len(kernels)} kernels have a recorded launch" + _sharing(trace)))]
    return [Problem(id="launched-before-recording", blocks=[], message=(
        f"{early} of {len(kernels)} kernels were launched before the recording began: the gaps before them are "
        "unattributed and their operators unknown"))]


def _of_several_processes(trace: Trace) -> list[Problem]:
    count = int(of_several_processes(trace.calls, trace.gpu).sum())
    if not count:
        return []
    return [Problem(id="duplicate-ids", blocks=[], message=(
        f"{count:,} calls of several processes share correlation ids, and neither device nor external id tells which of them "
        "launched what: they count as none"))]


def _early(trace: Trace, launches: Column) -> list[Problem]:
    """Kernels that start before their call, which cannot be: the device's clock and the host's do not agree. How long each
    kernel took is known, but steps, waits and launches are the host's times. Profilers convert one clock into the other, and
    where nothing is queued a kernel starts a few microseconds after its call: a drift of as much moves no more than the bounds of
    gaps, by that much, and is a note."""
    rows = np.flatnonzero((trace.gpu.kind == KERNEL) & (launches >= 0) & valid(trace.gpu))
    ahead = trace.calls.start[launches[rows]] - trace.gpu.start[rows]
    drifted, apart = int((ahead > 0).sum()), int((ahead > EARLY_NS).sum())
    if drifted <= EARLY_AT_MOST * len(rows):
        return []
    message = (f"{drifted} of {len(rows)} kernels start before the calls that launch them, by up to {ahead.max() / 1e6:,.3f} ms: the "
               "device's clock and the host's do not agree")
    if apart > EARLY_AT_MOST * len(rows):
        return [Problem(id="kernels-before-launch", blocks=["busy", "gaps", "kernels"], message=message)]
    return [Problem(id="kernels-before-launch", blocks=[], message=(
        f"{message}, nearly always by at most {EARLY_NS // 1000} us: gaps and launch delays are no more exact than that"))]


def _sharing(trace: Trace) -> str:
    count = int(ambiguous(trace.calls, trace.gpu).sum())
    return f" of their own: {count} calls share correlation ids with other calls" if count else ""


def _before_recording(trace: Trace, rows: Column) -> Column:
    """Whether rows of `gpu` were launched before the first recorded call: correlations count up within a process."""
    calls, early = trace.calls, np.zeros(len(rows), bool)
    pids = trace.gpu.pid[rows]
    for pid in np.unique(pids).tolist():
        recorded = calls.correlation[(calls.correlation > 0) & ((calls.pid == pid) | (pid < 0))]
        if len(recorded):
            early |= (pids == pid) & (trace.gpu.correlation[rows] < recorded.min())
    return early & (trace.gpu.correlation[rows] > 0)


def _lost(trace: Trace, launches: Column) -> list[Problem]:
    """Launches without a kernel: the profiler dropped records, so the device looks idler than it was."""
    own = ~ambiguous(trace.calls, trace.gpu)       # whether the others' kernels arrived cannot be told
    launching = np.flatnonzero(named(trace, trace.calls.name, LAUNCH) & ~_captured(trace) & own)
    graphs = np.flatnonzero(named(trace, trace.calls.name, GRAPH_LAUNCH) & own)
    arrived = np.zeros(len(trace.calls.start), bool)
    arrived[launches[launches >= 0]] = True
    if not arrived.any():
        return []       # unmatched, all of them: nothing says that they are lost
    # What was launched after the last call that arrived may have run after the recording ended: that is no loss. But what was
    # launched when the device had ended its last event for good would have been next.
    last, ended = trace.calls.start[arrived].max(), trace.gpu.end[valid(trace.gpu)].max()
    found = []
    for rows, what in ((launching, "kernel launches"), (graphs, "graph launches")):
        rows = rows[(trace.calls.start[rows] <= last) | (trace.calls.start[rows] > ended)]
        missing = int((~arrived[rows] & ~_nested(trace, rows, arrived)).sum())
        if missing > (1 - MATCHED_AT_LEAST) * len(rows):
            found.append(Problem(id="lost-records", blocks=OF_THE_DEVICE, message=(
                f"{missing} of {len(rows)} {what} have no device event: records were lost, and the device was busier "
                "than the trace shows")))
    return found


def _nested(trace: Trace, rows: Column, arrived: Column) -> Column:
    """Whether each call is around or in one that arrived: a runtime call and its driver call launch one kernel."""
    calls = trace.calls
    result = np.zeros(len(calls.start), bool)
    for _, part in by_thread(calls, rows):
        result[part] = covered(spans(calls, part[arrived[part]]), calls.start[part], calls.end[part]) > 0
    return result[rows]


def _captured(trace: Trace) -> Column:
    """Whether each call happened while its thread captured a graph: such a launch runs nothing yet."""
    calls = trace.calls
    begins, ends = named(trace, calls.name, BEGIN_CAPTURE), named(trace, calls.name, END_CAPTURE)
    captured = np.zeros(len(calls.start), bool)
    if begins.any():
        for _, rows in by_thread(calls):
            depth = np.cumsum(begins[rows].astype("i4") - ends[rows].astype("i4"))
            captured[rows] = depth > 0
    return captured


def _replayed(trace: Trace, launches: Column) -> list[Problem]:
    kernels = trace.gpu.kind == KERNEL
    total, count = int(kernels.sum()), int((kernels & replayed(trace, launches)).sum())
    if not total or count <= REPLAYED_AT_MOST * total:
        return []
    return [Problem(id="graph-replay", blocks=["roofline"], message=(
        f"{count / total:.0%} of the kernels were replayed from a captured graph: they belong to its one launch and "
        "to no operator"))]


def replayed(trace: Trace, launches: Column) -> Column:
    """Whether each row of `gpu` was replayed from a captured graph."""
    graphs = named(trace, trace.calls.name, GRAPH_LAUNCH)
    by_graph = np.zeros(len(launches), bool)
    known = launches >= 0
    by_graph[known] = graphs[launches[known]]
    return by_graph | (trace.gpu.graph == 1)


def blocked(found: list[Problem]) -> dict[str, str]:
    """Conclusion -> why it cannot be drawn."""
    reasons: dict[str, list[str]] = {}
    for problem in found:
        for conclusion in problem.blocks:
            reasons.setdefault(conclusion, []).append(problem.message)
    return {conclusion: "; ".join(messages) for conclusion, messages in reasons.items()}


def verdict(found: list[Problem]) -> Integrity:
    """`ok`: nothing is blocked."""
    return Integrity(ok=not any(problem.blocks for problem in found), problems=found)
