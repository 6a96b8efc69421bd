"""Modules or tensors stayed on the CPU while training runs on an accelerator.

What it means
-------------
A part of the model, a buffer or a metric lives on the host. Its computation runs there, and its inputs and results
are copied back and forth, so that the device waits.

Evidence
--------
Names of the modules and tensors; the idle time of the device that is not waiting for input.

Threshold
---------
1 module or tensor, and 2 % of the step idle where idle time is known.

Not to be confused with
-----------------------
Training on a CPU. Data that is prepared on the CPU by the loader. Parameters that are offloaded on purpose, to save
memory: they are named here as well.

What helps
----------
`.to(device)` once, before training; registering tensors as buffers, so that they move with the module; creating
them with `device=`.

References
----------
PyTorch documentation, "torch.nn.Module.register_buffer"; PyTorch recipes, "Performance Tuning Guide", section
"Create tensors directly on the target device".
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import concludes, finding, number, of_step, percent, reaches, without
from saturate.records.analysis import Evidence, Finding
from saturate.records.observations import Observations

RULE = Rule(id="off-device", title="parts of the training left on the CPU")

LEFT = 1
#: Idle time of the device, of the step.
IDLE = 0.02
PLACES = 3


def detect(seen: Observations) -> Finding | None:
    left = seen.off_device or ()
    if seen.device == "cpu" or not concludes(seen, RULE) or len(left) < LEFT:
        return None
    idle = None if seen.busy is None else without(1.0 - seen.busy, seen.input_wait)
    if idle is not None and not reaches(idle, IDLE):
        return None
    waits = f", and the device idles in {percent(idle)} of the step" if idle is not None else ""
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    return finding(
        RULE,
        seen,
        f"{left[0]}{more} stayed on the CPU{waits}.",
        [
            *number("left on the CPU", len(left), "modules or tensors", LEFT),
            *(Evidence(metric="left on the CPU", value=1.0, where=name) for name in left[:PLACES]),
            *([of_step("idle, not waiting for input", idle, IDLE)] if idle is not None else []),
        ],
        idle,
        direct=False,
        advice="move them with .to(device) before training, or register them as buffers",
    )
