"""Memory goes back to the system and is taken again in every step.

What it means
-------------
The C library maps each large block by itself and returns it when it is freed, and returns the end of its heap. At the
next step the kernel gives the same pages again and clears them, one fault per 4 KiB, while the training waits.

Evidence
--------
Page faults of the training process per step; its time in the kernel, as a share of its processor time.

Threshold
---------
2 % of the processor time: the smallest gain that `tune` would keep. 1024 faults per step, which are 4 MiB.

Not to be confused with
-----------------------
Reading: files cost time in the kernel as well, and those that are mapped into memory cost faults. Loader workers, whose
faults are their own. A GPU's memory, which PyTorch's allocator keeps: there the rule is silent.

What helps
----------
An allocator that keeps what is freed: glibc, told so by variables of the environment, jemalloc or tcmalloc. Huge pages
make each fault serve more.

References
----------
The GNU C Library manual, "Malloc Tunable Parameters". PyTorch recipes, "Performance Tuning Guide", CPU memory allocators.
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import concludes, finding, number, percent, reaches
from saturate.records.analysis import Evidence, Finding
from saturate.records.observations import Observations

RULE = Rule(id="page-faults", title="memory returned and taken again", techniques=("allocator",))

#: Of the training process's processor time; faults per step.
LEAST, LEAST_FAULTS = 0.02, 1024


def detect(seen: Observations) -> Finding | None:
    share, faults = seen.kernel_time, seen.page_faults
    if seen.device != "cpu" or not concludes(seen, RULE) or share is None or not reaches(share, LEAST):
        return None
    if faults is None or not LEAST_FAULTS <= faults < float("inf"):
        return None
    return finding(
        RULE,
        seen,
        f"{faults:,.0f} page faults per step: {percent(share)} of the training's processor time passes in the kernel.",
        [
            Evidence(metric="time in the kernel", value=share, unit="of the processor time", threshold=LEAST),
            *number("page faults", faults, "per step", LEAST_FAULTS),
        ],
        share,
        direct=False,
        advice="an allocator that keeps what is freed",
    )
