"""The device waits for Python code between operators that is not launching.

What it means
-------------
The host is late although the kernels are long enough to keep it ahead, or, on a CPU, far more time passes between
operators than calling them can take. Something else runs inside the step: logging, metrics, saving, preprocessing
in the loop, a lock.

Evidence
--------
On an accelerator: idle time because a launch came too late, beside kernels that are not short. On a CPU: time
outside operators and the loader, in all and per operator.

Threshold
---------
15 % of the step, after collector pauses, compilation, and on an accelerator waits of the host, on a CPU
communication and reads of values are taken off; and on an accelerator less than 50 % of the kernels below 10 us, on a CPU more than 50
us outside operators for each of them.

Not to be confused with
-----------------------
Many short operators (`launch-bound`). Reads of values (`host-syncs`): they empty the queue, and the host can be late for as long as it waited;
on a CPU `tolist`, `print` and the like run outside operators themselves. Compilation, collector pauses, and waiting for input or for a slow
peer, which have rules of their own.

What helps
----------
Moving the code out of the step, to another thread, or to every so many steps. A sampling profiler such as py-spy
shows the lines.

References
----------
Definition of host-late idle time: docs/analysis.md.
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import (
    below,
    concludes,
    finding,
    number,
    of_step,
    per_step,
    percent,
    reaches,
    recorded_ms,
    without,
)
from saturate.findings._host import HOST_LATE, LAUNCH_US, SHORT_KERNELS, late, outside_us, tells_who_is_late, waited
from saturate.records.analysis import Finding
from saturate.records.observations import Observations

RULE = Rule(id="slow-host-code", title="other code between operators", needs=frozenset({"steps", "gaps", "kernels"}))

_ADVICE = "move it out of the step, or do it every so many steps; a sampling profiler shows the lines"


answers = tells_who_is_late


def detect(seen: Observations) -> Finding | None:
    if not concludes(seen, RULE):
        return None
    return _on_cpu(seen) if seen.device == "cpu" else _on_device(seen)


def _on_device(seen: Observations) -> Finding | None:
    kernels, lost = seen.kernels, without(late(seen), waited(seen, seen.syncs))
    if lost is None or not reaches(lost, HOST_LATE) or not below(kernels.short_share, SHORT_KERNELS):
        return None
    if kernels.graph_replay or seen.off_device or (seen.device_wait or 0.0) > lost:
        return None
    return finding(
        RULE,
        seen,
        f"The device waits for the host in {percent(lost)} of the step, although its kernels are not short.",
        [
            of_step("idle because a launch came too late", lost, HOST_LATE),
            *number("kernels below 10 us", kernels.short_share, "of the kernels", SHORT_KERNELS),
        ],
        lost,
        direct=False,
        advice=_ADVICE,
    )


def _on_cpu(seen: Observations) -> Finding | None:
    each = outside_us(seen)
    lost = without(late(seen), per_step(seen.communication.late_ms_per_step, recorded_ms(seen)))
    if lost is None or each is None or not reaches(lost, HOST_LATE) or not each > LAUNCH_US:
        return None
    return finding(
        RULE,
        seen,
        f"{percent(lost)} of the step passes outside operators, the loader and reads of values, {each:,.0f} us for each operator.",
        [of_step("time outside operators and reads of values", lost, HOST_LATE), *number("outside, per operator", each, "us", LAUNCH_US)],
        lost,
        direct=False,
        advice=_ADVICE,
    )
