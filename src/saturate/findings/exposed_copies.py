"""Copies to the device that no computation hides: it waits for data that could have come while it computed.

What it means
-------------
Batches lie in pinned memory, so their copies could run while the device computes, but they run between its kernels.
HIP does not record in which memory they lie; then they may have to be pinned first.

Evidence
--------
Time in which only copies to the device run, as a share of the step; bytes from pinned memory per step.

Threshold
---------
10 % of the step, less what copies from pageable memory take.

Not to be confused with
-----------------------
Copies from pageable memory, which no stream can hide (`pageable-copies`). Copies to the host: those are results that are
read, logged or saved. Waiting for input: the batch has arrived, only its copy is not done.

What helps
----------
Copying the next batch while this one is computed on. Copying less: integers or bytes instead of floats, made into
floats on the device. The bound is the time in which only these copies run.

References
----------
PyTorch documentation, "CUDA semantics", section "Use pinned memory buffers". NVIDIA, "CUDA C++ Best Practices Guide",
section "Asynchronous and Overlapping Transfers with Computation".
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import concludes, finding, number, of_step, per_step, percent, reaches, without
from saturate.records.analysis import Finding
from saturate.records.observations import Observations

RULE = Rule(
    id="exposed-copies",
    title="copies that are not hidden",
    techniques=("pin-memory", "device-prefetch"),
    needs=frozenset({"steps", "busy"}),
)

#: Copies to the device alone, of the step.
LEAST = 0.10


def detect(seen: Observations) -> Finding | None:
    exposed = seen.copies.exposed_from_host
    if seen.device == "cpu" or not concludes(seen, RULE) or not reaches(exposed, 0.0):
        return None
    share = without(exposed, per_step(seen.copies.pageable_ms, seen.step_ms))
    if share is None or not reaches(share, LEAST):
        return None
    pinned = seen.copies.pageable_ms is not None  # what is left of the share is
    return finding(
        RULE,
        seen,
        f"Nothing but copies to the device runs in {percent(share)} of the step.",
        [
            of_step("exposed host-to-device copies", share, LEAST),
            *number("pinned bytes", seen.copies.pinned_bytes, "bytes per step"),
        ],
        share,
        direct=pinned,
        techniques=("device-prefetch",) if pinned else None,
        advice="the next batch copied on a stream of its own while this one is computed on",
    )
