"""The exclusive parts of every single step: whether they are alike, or a few of them carry the loss."""

from __future__ import annotations

from saturate.records.analysis import StepParts
from saturate.trace.breakdown import Work
from saturate.trace.columns import Column
from saturate.trace.intervals import between, covered, join, subtract
from saturate.trace.windows import Window

#: Steps that are kept: more are not drawn, and a record of a long trace stays small.
MOST = 1000

#: Steps that are looked at together: all of a long trace would need as much memory again.
TOGETHER = 50


def each_step(window: Window, work: Work) -> list[StepParts]:
    """Parts of the first `MOST` steps, in order; [] where there are none. Definitions: `breakdown`."""
    first, last = window.first[:MOST], window.last[:MOST]
    return [part for at in range(0, len(first), TOGETHER)
            for part in _parts(first[at:at + TOGETHER], last[at:at + TOGETHER], int(first[0]), work)]


def _parts(first: Column, last: Column, origin: int, work: Work) -> list[StepParts]:
    compute, collectives, copies, busy = (between(part, int(first[0]), int(last.max()))
                                          for part in (work.compute, work.communication, work.copies, work.busy))
    exposed = subtract(collectives, compute)
    moved = subtract(copies, join(compute, collectives))
    columns = [covered(part, first, last) for part in (compute, exposed, moved, busy)]
    return [
        StepParts(
            start_ns=int(start) - origin,
            compute_ns=int(compute),
            exposed_communication_ns=int(communication),
            exposed_copy_ns=int(copied),
            idle_ns=int(end - start - busy),
        )
        for start, end, compute, communication, copied, busy in zip(first, last, *columns)
    ]
