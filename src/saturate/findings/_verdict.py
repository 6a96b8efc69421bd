"""What limits a workload as a whole, from the shares of its step."""

from __future__ import annotations

from typing import get_args

from saturate.findings._api import STEPS_TO_CONCLUDE
from saturate.findings._common import at_most, without
from saturate.findings._host import outside, reading, reads, waited
from saturate.records.analysis import Limit
from saturate.records.observations import Observations

#: Work that is not copying, waiting for peers or reading values, of the step, from which the operators are the limit.
WORKING = 0.85
#: Modelled time, of the busy time, from which operators may be judged; and share of it that one class must have.
COVERAGE = 0.60
MAJORITY = 0.50
#: A smaller wait limits nothing.
LEAST_WAIT = 0.05
#: Conclusions of the trace that a verdict rests on: the largest loss is not known where one of the losses is not.
RESTS_ON = frozenset({"busy", "gaps"})


def verdict(seen: Observations) -> Limit:
    """The verdict of the trace where it has one (definition: docs/analysis.md), else the same from what was observed.

    A working device is limited by memory or by arithmetic, whichever class of operators has the most time. Otherwise the largest wait names the
    limit. On a CPU, operators that have next to nothing to do are the host's calls, time outside operators, the loader and reads of values
    stands for a late host, and the time of reads for syncs; a trace alone takes reads for work there, so what was observed comes first. What the
    trace cannot carry is not concluded from the rest either: a device whose records were lost looks like none at all.
    """
    if seen.integrity_blocks & RESTS_ON:
        return "unknown"
    of_trace: Limit = seen.limit if seen.limit in get_args(Limit) else "unknown"  # type: ignore[assignment]
    if seen.steps < STEPS_TO_CONCLUDE or (seen.device != "cpu" and of_trace != "unknown"):
        return of_trace
    observed = _observed(seen)
    return observed if observed != "unknown" else of_trace


def _observed(seen: Observations) -> Limit:
    on_cpu = seen.device == "cpu"
    working = without(seen.busy, seen.communication.exposed, seen.copies.exposed)
    if on_cpu:  # where reads of values and compilation run between other operators
        working = without(working, waited(seen, reads(seen)), seen.compiler.compile_share)
    if working is not None and WORKING <= working <= 1.0:
        return _kind_of_work(seen, working)
    waits: dict[Limit, float | None] = {  # in the order that decides between equal shares
        "input-bound": seen.input_wait,
        "communication-bound": seen.communication.exposed,
        "sync-bound": reading(seen) if on_cpu else seen.sync_idle,
        "host-bound": _of_host(seen) if on_cpu else seen.kernels.host_late,
        "device-wait-bound": seen.device_wait,
    }
    known = {kind: share for kind, share in waits.items() if share is not None and LEAST_WAIT <= share <= 1.0}
    limit: Limit = max(known, key=lambda kind: known[kind], default="unknown")
    # No limit is called copies, and none idle time of unknown cause.
    return limit if known.get(limit, 0.0) > at_most(seen.copies.exposed, seen.unattributed) else "unknown"


def _of_host(seen: Observations) -> float:
    """On a CPU: time outside operators that reads of values do not take, or what is known of it where that is more (a
    compiler runs operators too)."""
    return max(outside(seen) or 0.0, at_most(seen.gc_pause, seen.compiler.compile_share))


def _kind_of_work(seen: Observations, working: float) -> Limit:
    kinds = ("memory", "compute", "latency")
    of = {kind: at_most(*(one.share for one in seen.operators if one.limit == kind)) for kind in kinds}
    modelled = sum(of.values())
    if modelled < COVERAGE * working:
        return "unknown"
    if of["compute"] >= MAJORITY * modelled:
        return "compute-bound"
    if of["memory"] >= MAJORITY * modelled:
        return "memory-bound"
    return "host-bound" if of["latency"] >= MAJORITY * modelled and seen.device == "cpu" else "unknown"
