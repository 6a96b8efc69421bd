"""The device is idle although its next work was already launched.

What it means
-------------
The kernel after the gap was in the queue before the gap began. So the host was in time: the kernel waited for
another stream, for an event, for a peer, or for the device's own launch of one kernel after another.

Evidence
--------
Idle time before kernels that had been launched when the previous work ended, as a share of the step; beside it the
idle time because a launch came too late.

Threshold
---------
15 % of the step, and more than the host-late idle time.

Not to be confused with
-----------------------
Launch-bound: launching faster, or with CUDA graphs, does not shorten a wait for an event or a peer. Communication
kernels that run and wait inside: those are busy time, and `exposed-communication` counts them. A batch that is too
small.

What helps
----------
With several devices: look at the peer that arrives last (`saturate analyze` with the traces of all ranks). With
one: look for streams that wait for each other. Gaps of a few microseconds between short kernels vanish when the
kernels are fused: where 50 % of the kernels take less than 10 us, the compiler is named.

References
----------
Definition of already-launched gaps: docs/analysis.md. HolisticTraceAnalysis counts gaps below 30 ns between two
kernels as `kernel_wait`, and most of these as `other`.
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import concludes, finding, number, of_step, percent, reaches
from saturate.findings._host import SHORT_KERNELS
from saturate.records.analysis import Finding
from saturate.records.observations import Observations

RULE = Rule(
    id="device-waits",
    title="idle with work in the queue",
    techniques=("compile",),
    needs=frozenset({"steps", "gaps"}),
)

#: Idle although the next work was launched, of the step.
LEAST = 0.15


def detect(seen: Observations) -> Finding | None:
    wait, late = seen.device_wait, seen.kernels.host_late
    if not concludes(seen, RULE) or wait is None or late is None or not reaches(wait, LEAST) or not late < wait:
        return None
    several = (seen.communication.world_size or 1) > 1
    cause = "peers, events or other streams" if several else "events or other streams"
    return finding(
        RULE,
        seen,
        f"In {percent(wait)} of the step the device is idle with work in its queue: it waits for {cause}.",
        [
            of_step("idle with work in the queue", wait, LEAST),
            *number("idle because a launch came too late", late, "of the step"),
            *number("ranks", seen.communication.world_size, "processes"),
        ],
        wait,
        direct=False,
        techniques=RULE.techniques if reaches(seen.kernels.short_share, SHORT_KERNELS) else (),
        advice="analyze the traces of all ranks together to see who is late"
        if several
        else "look for streams that wait for each other",
    )
