"""Batches are copied to the device from pageable memory, so the host stands still during each copy.

What it means
-------------
A copy from ordinary (pageable) host memory goes through a small pinned buffer of the driver. It is slower than one
from pinned memory, it cannot overlap with computation, and the host waits until it is done.

Evidence
--------
Time and bytes of pageable host-to-device copies per step; how much of the copying is exposed.

Threshold
---------
2 % of the step: the smallest gain that `tune` would keep.

Not to be confused with
-----------------------
Waiting for input: the batch has arrived, only its copy is slow. A host sync in the user's code: the copy is what
waits, and it is reported here once, not again by `host-syncs`. Copies from pinned memory, which are limited by the
bus.

What helps
----------
Pinned batches, copied with `non_blocking=True`. The bound is the copies' time, and as much of the idle time behind
a late host as the host spent waiting for them.

References
----------
NVIDIA, "CUDA C++ Best Practices Guide", section "Pinned Memory". NVIDIA Nsight Systems, expert system rule "CUDA
Async Memcpy with Pageable Memory".
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import at_most, concludes, finding, number, of_step, per_step, percent, reaches
from saturate.findings._host import mendable, uploads, waited
from saturate.records.analysis import Finding
from saturate.records.observations import Observations

RULE = Rule(
    id="pageable-copies",
    title="copies from pageable memory",
    techniques=("pin-memory", "device-prefetch"),
    needs=frozenset({"steps"}),
)

#: Time of pageable copies, of the step.
LEAST = 0.02


def answers(seen: Observations) -> bool:
    return seen.copies.pageable_ms is not None


def detect(seen: Observations) -> Finding | None:
    if seen.device == "cpu" or not concludes(seen, RULE):
        return None
    share = per_step(seen.copies.pageable_ms, seen.step_ms)
    if share is None or not reaches(share, LEAST):
        return None
    size = f"{seen.copies.pageable_bytes / 1e6:.1f} MB" if seen.copies.pageable_bytes is not None else "data"
    return finding(
        RULE,
        seen,
        f"Copying {size} per step from pageable memory takes {percent(share)} of the step.",
        [
            of_step("pageable host-to-device copies", share, LEAST),
            *number("pageable bytes", seen.copies.pageable_bytes, "bytes per step"),
            *number("exposed copies", seen.copies.exposed, "of the step"),
        ],
        at_most(share, mendable(seen, waited(seen, uploads(seen)) or 0.0)),
        advice="pin_memory=True in the DataLoader, and non_blocking=True where batches are moved",
    )
