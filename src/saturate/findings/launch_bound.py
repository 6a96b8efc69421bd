"""Many short operators: launching them takes longer than running them.

What it means
-------------
Every operator costs the host some microseconds of Python, dispatch and launch, whatever its size. Where kernels are
shorter than that, the device waits for the next launch most of the time. On a CPU the same host both launches and
computes, and most of the step is overhead around tiny operators.

Evidence
--------
On an accelerator: idle time because a launch came too late; the share of kernels below 10 us; how soon kernels
start after their launch, or how shallow the queue is. On a CPU: time outside operators, in all and per operator;
the median operator; time in operators that are little more than their call (docs/analysis.md, `latency`).

Threshold
---------
On an accelerator: host-late idle of 15 % of the step, 50 % of the kernels shorter than 10 us, after all waits of
the host were taken off. Of full confidence where the host is never ahead: kernels start at most 20 us after their
launch (median), or 50 % of them find at most one other in the queue. A host that is ahead in one part of the step
may be late in another, so else the confidence is lower. On a CPU: 15 % of the step outside operators, a median
operator below 10 us, and at most 50 us outside operators for each of them: more than that is not launching. Or 50 %
of the step in operators that are little more than their call, with less confidence: a profiler makes calls longer.

Not to be confused with
-----------------------
Gaps whose kernel was already launched: those wait on the device, and no faster launch shortens them. Waiting for input, which makes launches
late as well. Collector pauses, compilation and waits of the host, which are taken off. Reads of values, which are short operators too (on a CPU:
where there are at least 10 % as many reads as operators). Sleep, on a CPU: a loop that waits outside of its loader and of reads (`time.sleep`, a
lock, a file, a socket) looks the same in a trace, which does not tell whether a thread was on a core. A replayed graph, whose kernels have no
launches of their own. A batch that is too small: that is one way to get short kernels, and changing it changes the training.

What helps
----------
Fewer launches: `torch.compile` (with CUDA graphs), fused optimizers, operations on whole tensors in place of loops, and fewer and
larger micro-steps where gradients are accumulated.
The bound on an accelerator is the idle time; on a CPU the time of operators below 10 us counts as overhead too.

References
----------
HolisticTraceAnalysis, "CUDA Kernel Launch Statistics" (short kernels: shorter than their launch; launches above 50
us are outliers). NVIDIA, "Accelerating PyTorch with CUDA Graphs".
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import at_most, concludes, finding, number, of_step, percent, reaches, without
from saturate.findings._host import (
    HOST_LATE,
    LAUNCH_DELAY_US,
    LAUNCH_US,
    SHALLOW_QUEUE,
    SHORT_KERNELS,
    SHORT_US,
    late,
    loops_over_elements,
    never_ahead,
    outside_us,
    read_in_operators,
    tells_who_is_late,
    waited,
)
from saturate.records.analysis import Finding
from saturate.records.observations import Observations

#: Operators of a CPU that are little more than their call, of the step.
CALLS = 0.50

RULE = Rule(
    id="launch-bound",
    title="many short operators",
    techniques=("compile", "merged-micro-batches", "fused-optimizer", "zero-grad-none"),
    needs=frozenset({"steps", "gaps", "kernels"}),
)


answers = tells_who_is_late


def detect(seen: Observations) -> Finding | None:
    if not concludes(seen, RULE):
        return None
    return _between_calls(seen) or _calls(seen) if seen.device == "cpu" else _on_device(seen)


def _on_device(seen: Observations) -> Finding | None:
    kernels, paced = seen.kernels, never_ahead(seen.kernels)
    lost = without(late(seen), waited(seen, seen.syncs))
    if lost is None or not reaches(lost, HOST_LATE) or not reaches(kernels.short_share, SHORT_KERNELS):
        return None
    if paced is None or kernels.graph_replay or (seen.device_wait or 0.0) > lost:
        return None
    short = kernels.short_share or 0.0
    return finding(
        RULE,
        seen,
        f"The device waits for launches in {percent(lost)} of the step; {percent(short)} of the kernels are short.",
        [
            of_step("idle because a launch came too late", lost, HOST_LATE),
            *number("kernels below 10 us", short, "of the kernels", SHORT_KERNELS),
            *number("median launch delay", kernels.median_launch_delay_us, "us", LAUNCH_DELAY_US),
            *number("kernels that find an empty queue", kernels.queue_shallow, "of the kernels", SHALLOW_QUEUE),
            *number("kernels", kernels.count_per_step, "per step"),
            *number("median kernel", kernels.median_us, "us"),
        ],
        lost,
        direct=paced,
    )


def _between_calls(seen: Observations) -> Finding | None:
    # What the interpreter does around reads of values is theirs, and is not told apart from the reads.
    kernels, outside, each = seen.kernels, without(late(seen), waited(seen, read_in_operators(seen))), outside_us(seen)
    if outside is None or each is None or kernels.median_us is None or loops_over_elements(seen):
        return None
    if not reaches(outside, HOST_LATE) or not kernels.median_us < SHORT_US or not each <= LAUNCH_US:
        return None
    return finding(
        RULE,
        seen,
        f"{percent(outside)} of the step passes around {kernels.count_per_step or 0.0:,.0f} operators of {kernels.median_us:.1f} us.",
        [
            of_step("time outside operators and reads of values", outside, HOST_LATE),
            *number("outside, per operator", each, "us", LAUNCH_US),
            *number("median operator", kernels.median_us, "us", SHORT_US),
            *number("operators", kernels.count_per_step, "per step"),
            *number("operators below 10 us", kernels.short_share, "of the operators"),
            *number("time in operators below 10 us", kernels.short_time, "of the step"),
        ],
        at_most(outside, kernels.short_time),
    )


def _calls(seen: Observations) -> Finding | None:
    """On a CPU that is busy: with operators whose work is next to nothing."""
    calls = at_most(*(one.share for one in seen.operators if one.limit == "latency"))
    if not reaches(calls, CALLS) or loops_over_elements(seen):
        return None
    return finding(
        RULE,
        seen,
        f"{percent(calls)} of the step passes in operators that are little more than their call.",
        [
            of_step("operators that are little more than their call", calls, CALLS),
            *number("median operator", seen.kernels.median_us, "us"),
            *number("operators", seen.kernels.count_per_step, "per step"),
        ],
        at_most(calls, late(seen)),
        direct=False,
    )
