"""The step waits for the next batch, and what the pipeline is short of is not known.

What it means
-------------
Training asks the loader for a batch and gets it late, while the device has nothing left to do. Only this exposed
part counts: a loader that is slow behind a busy device costs nothing.

Evidence
--------
Time in the loader's `__next__` on the training thread while the device is idle, as a share of the step; beside it
the same with hidden time included. On a CPU there is no device to hide behind, so both are the same.

Threshold
---------
10 % of the step. What the pipeline is short of is told by `input-bound-cpu`, `input-bound-io` and
`input-bound-workers`; this rule speaks where a trace shows the wait but not its cause.

Not to be confused with
-----------------------
A batch that is too small: idle time that is spent waiting for input does not get shorter with a larger batch. A
host that is late with its launches: waiting for data also makes launches late, so input is looked at first. Slow
copies to the device, which come after the batch has arrived.

What helps
----------
More loader workers, decoding less or earlier, and storage that is nearer; for rows of a `TensorDataset`, a batch of
them in one operation. `saturate profile` tells which.

References
----------
PyTorch documentation, "torch.utils.data", section "Single- and Multi-process Data Loading". TensorBoard's PyTorch
profiler plugin warned from 5 % of unexposed loader time; TraceML warns from 10 % and calls 20 % critical.
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._input import waiting, waits
from saturate.records.analysis import Finding
from saturate.records.observations import Observations

RULE = Rule(
    id="input-bound",
    title="waiting for input",
    techniques=("batch-assembly", "loader-workers", "dataset-cache"),
    needs=frozenset({"steps", "busy"}),
    fields=frozenset({"data_wait"}),
)


def detect(seen: Observations) -> Finding | None:
    if not waits(RULE, seen, None):
        return None
    advice = "find out what input is short of: saturate profile shows CPU, storage and workers"
    return waiting(RULE, seen, "what the input is short of was not observed", [], advice)
