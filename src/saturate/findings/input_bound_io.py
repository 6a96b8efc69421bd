"""The step waits for the next batch because fetching it waits for storage.

What it means
-------------
The code below the dataset spends most of its time waiting, not computing: for a disk, a network file system or a
download.

Evidence
--------
Exposed wait for input; share of the fetch that waited for storage, where the system counts it; CPU time of the
fetch over its wall time; bytes read from storage per second; the slowest line below the dataset.

Threshold
---------
The wait is at least 10 % of the step, and the fetch either waits for storage during at least 50 % of its time, or
computes during less than 50 % of the time in which a core was free for it. The latter says nothing of workers while
all cores are busy, also in the time in which the training waits: other programs have them.

Not to be confused with
-----------------------
Expensive decoding, where the fetch computes. Waiting for a core that is busy with something else, which does not
count. A batch that is too small.

What helps
----------
More workers wait for storage at the same time, also on few cores. Reading large files in sequence instead of many
small ones, a copy on a local disk, or a data set that is kept in memory remove the wait itself.

References
----------
PyTorch documentation, "torch.utils.data", section "Multi-process data loading". Amazon SageMaker Debugger, rule
IOBottleneck (I/O wait above 50 % while the device is below 10 %).
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import number, percent, reaches
from saturate.findings._input import FETCH_COMPUTES, FETCH_WAITS, cores, waiting, waits
from saturate.records.analysis import Finding
from saturate.records.observations import Observations

RULE = Rule(
    id="input-bound-io",
    title="making a batch waits for storage",
    techniques=("loader-workers", "dataset-cache"),
    needs=frozenset({"steps", "busy"}),
    fields=frozenset({"data_wait"}),
)


def detect(seen: Observations) -> Finding | None:
    if not waits(RULE, seen, "io"):
        return None
    loader = seen.loader
    if loader.io_wait is not None and reaches(loader.io_wait, FETCH_WAITS):
        because = f"a fetch waits for storage during {percent(loader.io_wait)} of its time"
    else:
        because = (
            f"a fetch computes during only {percent(loader.fetch_cpu or 0.0)} of its time and waits for the rest"
        )
    evidence = [
        *number("fetch time that waits for storage", loader.io_wait, "of the fetch", FETCH_WAITS),
        *number("fetch time that computes", loader.fetch_cpu, "of the fetch", FETCH_COMPUTES),
        *number("read from storage", loader.read_bytes_per_s, "bytes per second"),
        *number("loader workers", loader.num_workers, "processes"),
        *cores(loader),
    ]
    # CPU time below wall time is what waiting for a lock or a peer looks like too.
    direct = reaches(loader.io_wait, FETCH_WAITS)
    return waiting(
        RULE, seen, because, evidence, "read large files in sequence, from a local disk or from memory", direct
    )
