"""The batch is too small to fill the device, and nothing else explains the time.

What it means
-------------
Each kernel has so little work that it costs its launch or its latency. With more samples per step the same kernels
would take hardly longer.

Evidence
--------
Short kernels behind which the host is always late, or operators limited by latency; memory that is free; and that
waiting for input, for values, for peers and for the queue are all excluded.

Threshold
---------
15 % of the step is host-late idle before kernels of which 50 % take less than 10 us, or 25 % of the step is in
operators limited by latency; at most 50 % of the device's memory is used; and input, reads of values,
communication, collector and compilation take less than 5 % each, gaps with work in the queue less than 15 %.

Not to be confused with
-----------------------
Almost everything: idle time with another cause does not go away with a larger batch. So this rule speaks last, and
only when all the others are known and excluded.

What helps
----------
A larger batch, which changes the training (learning rate, convergence), so no technique does it by default. Fewer
launches help at the same batch: see `launch-bound`.

References
----------
NVIDIA, "Deep Learning Performance: Get Started with Deep Learning Performance", on choosing batch sizes.
TensorBoard's PyTorch profiler plugin advised larger batches below 50 % utilisation, also where input was the cause:
the mistake that this rule avoids.
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import at_most, below, concludes, finding, number, of_step, percent, reaches
from saturate.findings._host import HOST_LATE, SHORT_KERNELS, never_ahead
from saturate.records.analysis import Finding
from saturate.records.observations import Observations

RULE = Rule(
    id="small-batch", title="batch too small for the device", needs=frozenset({"steps", "busy", "gaps", "kernels"})
)

#: Operators limited by latency, of the step.
LATENCY = 0.25
#: Memory in use, of the device's.
ROOM = 0.50
#: Other causes, of the step: they must be known to be less.
OTHER_CAUSE = 0.05
DEVICE_WAIT = 0.15


def answers(seen: Observations) -> bool:
    return None not in (seen.memory.used, seen.input_wait, seen.sync_idle, seen.device_wait)


def detect(seen: Observations) -> Finding | None:
    if seen.device == "cpu" or not concludes(seen, RULE) or not _others_are_excluded(seen):
        return None
    kernels, used = seen.kernels, seen.memory.used
    late = kernels.host_late
    if late is None or not 0.0 <= late <= 1.0 or used is None or not 0.0 <= used <= ROOM:
        return None
    latency = at_most(*(one.share for one in seen.operators if one.limit == "latency"))
    launches = reaches(late, HOST_LATE) and reaches(kernels.short_share, SHORT_KERNELS) and bool(never_ahead(kernels))
    if not launches and not reaches(latency, LATENCY):
        return None
    lost = at_most(late, latency)
    size = f" of {seen.batch_size}" if seen.batch_size is not None else ""
    return finding(
        RULE,
        seen,
        f"A batch{size} leaves the device waiting for launches or latency in {percent(lost)} of the step.",
        [
            of_step("idle because a launch came too late", late, HOST_LATE),
            of_step("operators limited by latency", latency, LATENCY),
            *number("kernels below 10 us", kernels.short_share, "of the kernels", SHORT_KERNELS),
            *number("memory in use", used, "of the device's memory", ROOM),
            *number("batch", seen.batch_size, "samples"),
        ],
        lost,
        direct=False,
        advice="a larger batch, if the training allows it: it changes the training",
    )


def _others_are_excluded(seen: Observations) -> bool:
    """Whether every other cause is known, and small. What a live profile alone can tell counts where it was told."""
    peers = seen.communication.exposed
    must = (seen.input_wait, seen.sync_idle, 0.0 if peers is None and seen.communication.world_size == 1 else peers)
    may = (seen.gc_pause, seen.compiler.compile_share)
    return (
        all(below(share, OTHER_CAUSE) for share in must)
        and all(share is None or below(share, OTHER_CAUSE) for share in may)
        and below(seen.device_wait, DEVICE_WAIT)
        and not seen.off_device
    )
