"""The step waits for the next batch although cores are free: too few loader workers.

What it means
-------------
The workers compute and are too slow together, while cores that could run more of them are idle.

Evidence
--------
Exposed wait for input; number of workers; CPU time of the workers over wall time; busy cores of those that the
process may use.

Threshold
---------
The wait is at least 10 % of the step, workers compute during at least 50 % of their time (in which a core was free
for them), there are fewer of them than cores, and at least 0.3 cores (on large machines: 10 % of them) are free.

Not to be confused with
-----------------------
Slow storage, where the workers wait: more of them help then too, but do not remove the cause. Expensive decoding
with all cores busy, where more workers only wait for a core. A batch that is too small.

What helps
----------
More workers; and workers that stay alive between epochs, if epochs are short. Rows of a `TensorDataset` need fewer of
them where a batch is made in one operation.

References
----------
PyTorch documentation, "torch.utils.data", parameters `num_workers` and `persistent_workers`. Amazon SageMaker
Debugger, rule Dataloader (workers between 70 % and 200 % of the cores).
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import number, percent
from saturate.findings._input import FETCH_COMPUTES, cores, waiting, waits
from saturate.records.analysis import Finding
from saturate.records.observations import Observations

RULE = Rule(
    id="input-bound-workers",
    title="too few loader workers",
    techniques=("batch-assembly", "loader-workers"),
    needs=frozenset({"steps", "busy"}),
    fields=frozenset({"data_wait"}),
)


def detect(seen: Observations) -> Finding | None:
    if not waits(RULE, seen, "workers"):
        return None
    loader = seen.loader
    workers = "1 worker computes" if loader.num_workers == 1 else f"{loader.num_workers} workers compute"
    free = (loader.cpu_count or 0.0) - (loader.busy_cores or 0.0)
    evidence = [
        *number("loader workers", loader.num_workers, "processes"),
        *number("worker time that computes", loader.fetch_cpu, "of the time", FETCH_COMPUTES),
        *cores(loader),
    ]
    because = f"{workers} for {percent(loader.fetch_cpu or 0.0)} of the time, "
    because += f"and {free:.1f} of {loader.cpu_count:g} cores are free"
    return waiting(RULE, seen, because, evidence, "raise num_workers of the DataLoader")
