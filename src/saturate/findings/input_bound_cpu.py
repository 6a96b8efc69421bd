"""The step waits for the next batch because making it takes too much CPU.

What it means
-------------
Reading storage is not the problem: the code that decodes, augments, tokenises or collates computes for longer than
the device needs for a step. Either it runs in the training process, which can then do nothing else, or every core
is busy.

Evidence
--------
Exposed wait for input; CPU time of the fetch over its wall time; number of workers; busy cores of those that the
process may use; the slowest line below the dataset.

Threshold
---------
The wait is at least 10 % of the step, the fetch computes during at least 50 % of its time (in which a core was free
for it), and either there are no workers, or fewer than 0.3 cores (on large machines: fewer than 10 % of them) are
free.

Not to be confused with
-----------------------
Slow storage, where a fetch takes long without computing. Too few workers, where workers compute and cores are free:
adding workers does not help when no core is free. A batch that is too small.

What helps
----------
For rows of a `TensorDataset`, which are stacked one by one, a batch of them in one operation. Workers, where there are
none and cores are free. Otherwise less work per sample: a faster decoder, decoding to the size that is needed,
transforms on whole batches or on the device, or preparing the data once and storing the result.

References
----------
PyTorch documentation, "torch.utils.data", section "Multi-process data loading". gpuprof separates the same causes:
CPU-limited above 80 % CPU, I/O-limited by throughput.
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import number, percent
from saturate.findings._input import FETCH_COMPUTES, cores, waiting, waits
from saturate.records.analysis import Finding
from saturate.records.observations import Observations

RULE = Rule(
    id="input-bound-cpu",
    title="making a batch takes too much CPU",
    techniques=("batch-assembly", "loader-workers", "dataset-cache"),
    needs=frozenset({"steps", "busy"}),
    fields=frozenset({"data_wait"}),
)


def detect(seen: Observations) -> Finding | None:
    if not waits(RULE, seen, "cpu"):
        return None
    loader = seen.loader
    if loader.num_workers == 0:
        because = "batches are made in the training process"
    else:
        because = f"all {loader.cpu_count:g} cores are busy"
    if loader.fetch_cpu is not None:
        because += f", and a fetch computes for {percent(loader.fetch_cpu)} of its time"
    evidence = [
        *number("fetch time that computes", loader.fetch_cpu, "of the fetch", FETCH_COMPUTES),
        *number("loader workers", loader.num_workers, "processes"),
        *cores(loader),
    ]
    return waiting(
        RULE,
        seen,
        because,
        evidence,
        "make a batch cheaper: decode less, transform whole batches, or prepare the data once",
    )
