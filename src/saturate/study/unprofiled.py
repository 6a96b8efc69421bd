"""Compares the steps that a profile recorded with those that it only timed: how much the profiler slowed them, and whether they are alike."""

from __future__ import annotations

import dataclasses
from typing import Any

from saturate.records.analysis import Problem
from saturate.records.observations import Observations
from saturate.study.seen import Seen
from saturate.trace import intervals, windows

#: Input that differs by more than this share of the step is that of different steps.
APART = 0.1
#: So many times as long or as short as those that were timed, steps are others.
OTHERS = 1.5
#: A recorded step that works so many times as long as the usual one did more than a step, and is told where such steps take most of the time.
LONG, MOST = 3.0, 0.5


def factor(seen: Seen, profiled_ms: float | None, recorded_input: float | None) -> float:
    """What a time of the recorded steps is without the profiler, as a factor. It makes waits for values longer as well as
    steps, so their share is kept. Of a CPU's steps without their input (`recorded_input`: its share of the recorded ones),
    because the few that were recorded may hold more or less of it than others."""
    step_ms = seen.step_ms
    if not step_ms or not profiled_ms:
        return 1.0
    if seen.input_share is not None and recorded_input is not None and max(seen.input_share, recorded_input) < 1.0:
        step_ms, profiled_ms = step_ms * (1 - seen.input_share), profiled_ms * (1 - recorded_input)
    return min(1.0, step_ms / profiled_ms)


def uneven(seen: Seen, profiled_ms: float | None, recorded_input: float | None) -> list[Problem]:
    """A note where the loader was waited for longer in the recorded steps than in the clocked ones, or shorter: in time,
    because a profiler stretches the rest of the step, and in share, because a machine's speed changes both."""
    if seen.input_share is None or recorded_input is None or not seen.step_ms or not profiled_ms:
        return []
    clocked_ms, recorded_ms = seen.input_share * seen.step_ms, recorded_input * profiled_ms
    if abs(clocked_ms - recorded_ms) <= APART * seen.step_ms or abs(seen.input_share - recorded_input) <= APART:
        return []
    return [Problem(id="uneven-input", blocks=[], message=(
        f"the loader took {recorded_ms:.1f} ms of each recorded step, and {clocked_ms:.1f} ms of each step without a profiler; "
        "verdict, split and findings go by the latter"))]


def other_steps(step_ms: float | None, split: dict[str, int], steps: int) -> list[Problem]:
    """A note where the steps that the split is of took so much longer, or shorter, than those that were timed that they are no picture
    of them."""
    if not step_ms or not steps:
        return []
    split_ms = sum(split.values()) / steps / 1e6
    if step_ms <= OTHERS * split_ms and split_ms <= OTHERS * step_ms:
        return []
    return [Problem(id="other-steps", blocks=[], message=(
        f"the {steps} steps that the split is of took {split_ms:.1f} ms each, those that were timed {step_ms:.1f} ms: other load on this machine, "
        "a profiler that slows them down, or steps that differ; only shares of the split can be compared with the step"))]


def long_steps(view: windows.Window, waiting: intervals.Intervals | None, device: int) -> list[Problem]:
    """A note where most of the recorded time is that of a few steps which did more than the others. What they wait for their input
    (`waiting`) is told elsewhere: batches may come in bursts. Not where a device computes: the host queues its steps in no time, and the
    last recorded one waits for all."""
    work_ns = [int(last - first) - (intervals.overlap(waiting, intervals.union([first], [last])) if waiting is not None else 0)
               for first, last in zip(view.first, view.last)]
    if not work_ns or device != windows.CPU:
        return []
    usual = sorted(work_ns)[len(work_ns) // 2]
    long = [ns for ns in work_ns if ns > LONG * usual]
    if sum(long) <= MOST * sum(work_ns):
        return []
    return [Problem(id="long-steps", blocks=[], message=(
        f"{len(long)} of the {len(work_ns)} recorded steps took {sum(long) / sum(work_ns):.0%} of their time (up to {max(long) / 1e6:,.0f} ms, a usual one "
        f"{usual / 1e6:,.1f} ms): verdict and findings are mostly of what else happened there: an evaluation, an episode of play, a compilation"))]


def beside_input(base: Observations, input_share: float) -> Observations:
    """Shares of recorded steps as they are where input has this share: the few that were recorded may hold none of the long
    waits, or most of them. What is not input keeps its proportions."""
    recorded = base.input_wait_raw
    if recorded is None or abs(recorded - input_share) <= APART or not max(recorded, input_share) < 1.0:
        return base
    factor = (1 - input_share) / (1 - recorded)

    def scaled(record: Any, *names: str) -> Any:
        known = {name: getattr(record, name) for name in names if getattr(record, name) is not None}
        return dataclasses.replace(record, **{name: min(1.0, factor * share) for name, share in known.items()})

    base = scaled(base, "busy", "overhead", "fp32_matmul", "attention_eager", "elementwise")
    return dataclasses.replace(
        base, step_ms=base.step_ms and base.step_ms / factor,
        kernels=scaled(base.kernels, "short_time"), communication=scaled(base.communication, "exposed"),
        operators=tuple(scaled(one, "share", "recoverable") for one in base.operators))
