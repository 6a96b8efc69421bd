"""Python's garbage collector stops the training thread.

What it means
-------------
The collector walks over all container objects that are alive: modules, data sets, libraries. The more there are,
the longer each pause, and the host launches nothing during it.

Evidence
--------
Time in collections on the training thread, as a share of the step; collections per step; the line of the script, or of a
library, that asks for them by `gc.collect()`.

Threshold
---------
2 % of the step: the smallest gain that `tune` would keep. A call of `gc.collect()` is what they come from where it takes
50 % of the pauses.

Not to be confused with
-----------------------
Other Python code between operators: the collector reports its own beginning and end. A rank that is late for
another reason; pauses that strike different ranks at different times make all of them wait.

What helps
----------
Freezing what is alive after the first steps and collecting less often; or collecting at a chosen place. Where most of the
time is that of a call of `gc.collect()`, leaving it out, or calling it every so many steps: no threshold makes such a call rarer.

References
----------
Python documentation, "gc - Garbage Collector interface", `gc.freeze` and `gc.callbacks`.
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import concludes, finding, number, of_step, percent, reaches
from saturate.records.analysis import Finding
from saturate.records.observations import Observations

RULE = Rule(id="gc-pauses", title="garbage collector pauses", techniques=("gc-freeze",))

#: Pauses of the collector, of the step.
LEAST = 0.02
#: Of the pauses, from which a call of `gc.collect()` is what they come from.
MOSTLY = 0.5


def detect(seen: Observations) -> Finding | None:
    share = seen.gc_pause
    if not concludes(seen, RULE) or share is None or not reaches(share, LEAST):
        return None
    called = number("called by gc.collect()", seen.gc_called_share, "of the step", where=seen.gc_called)
    by_call = reaches(seen.gc_called_share, MOSTLY * share) and bool(seen.gc_called)
    return finding(
        RULE,
        seen,
        f"The garbage collector pauses the training for {percent(share)} of the step"
        f"{f', most of it called by gc.collect() at {seen.gc_called}' if by_call else ''}.",
        [
            of_step("collector pauses", share, LEAST),
            *number("collections", seen.gc_collections_per_step, "per step"),
            *called,
        ],
        share,
        advice="leave gc.collect() out of the step, or call it every so many steps"
        if by_call
        else "gc.freeze() after the first steps, and a larger threshold",
    )
