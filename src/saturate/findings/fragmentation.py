"""The device's memory is full of holes, and the allocator has to give back and ask again.

What it means
-------------
The allocator keeps freed blocks for the next request of their size. When shapes change, the blocks no longer fit:
memory is reserved but not usable. A request that then fails makes it return everything to the driver and try again,
which waits for the device.

Evidence
--------
Allocator retries; memory reserved and not used at the peak, of what is reserved; what is reserved, of the device's memory.

Threshold
---------
1 retry; or 30 % of the reserved memory unused at the peak while 90 % of the device's memory is reserved.

Not to be confused with
-----------------------
A model that needs the memory: then little of what is reserved is unused. Reserved memory on a device with room to
spare, which costs nothing.

What helps
----------
Expandable segments in the allocator's settings, padding inputs to few sizes, or less memory at the peak. How much
time the retries take is not observed, so there is no bound.

References
----------
PyTorch documentation, "CUDA semantics", section "Memory management" (`num_alloc_retries`, `expandable_segments`).
TraceML compares reserved with allocated memory (a factor of 2).
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import concludes, finding, number, percent, reaches
from saturate.records.analysis import Finding
from saturate.records.observations import Observations

RULE = Rule(id="fragmentation", title="fragmented device memory", techniques=("allocator",))

RETRIES = 1
#: Reserved and not used, of reserved; and reserved, of the device's memory.
UNUSED = 0.30
FULL = 0.90


def answers(seen: Observations) -> bool:
    return seen.memory.fragmentation is not None or seen.memory.allocator_retries is not None


def detect(seen: Observations) -> Finding | None:
    memory = seen.memory
    retried = memory.allocator_retries is not None and memory.allocator_retries >= RETRIES
    holes = reaches(memory.fragmentation, UNUSED) and reaches(memory.held, FULL)
    if seen.device == "cpu" or not concludes(seen, RULE) or not (retried or holes):
        return None
    says = [f"the allocator had to free and retry {memory.allocator_retries} times"] if retried else []
    if holes:
        says.append(
            f"{percent(memory.fragmentation or 0.0)} of the reserved memory is unused although the device is full"
        )
    return finding(
        RULE,
        seen,
        f"At the peak {' and '.join(says)}.",
        [
            *number("allocator retries", memory.allocator_retries, "retries", RETRIES),
            *number("reserved and unused", memory.fragmentation, "of the reserved memory", UNUSED),
            *number("reserved", memory.held, "of the device's memory", FULL),
        ],
        None,
        direct=retried,
        advice="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or fewer different shapes",
    )
