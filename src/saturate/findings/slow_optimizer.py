"""The optimizer's update takes a large part of the step and is not fused.

What it means
-------------
Updating parameters one tensor at a time, or one operation at a time, costs many launches and several passes over
the parameters. A fused update does it in one.

Evidence
--------
Time in the optimizer's step as a share of the step; its class; whether it is fused; the number of tensors.

Threshold
---------
10 % of the step.

Not to be confused with
-----------------------
A fused update, which is limited by memory and does not get faster. What else is done between a backward and the next
forward pass: clipping, averages of weights, logging. LBFGS, whose step runs forward and backward again. Communication or
reads of values inside the step of a distributed optimizer.

What helps
----------
`fused=True` where the optimizer has it; for parameters that are updated by hand, tensor by tensor, `torch._foreach_*` or an
optimizer of torch; accumulating gradients, so that fewer updates are made, changes the
training.

References
----------
PyTorch documentation, "torch.optim", section on foreach and fused implementations.
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import concludes, finding, number, of_step, percent, reaches
from saturate.records.analysis import Finding
from saturate.records.observations import Observations

RULE = Rule(id="slow-optimizer", title="slow optimizer", techniques=("fused-optimizer",), needs=frozenset({"steps"}))

#: The optimizer, of the step.
LEAST = 0.10
#: Their step contains the rest of the training step.
_CLOSURES = ("LBFGS",)


def answers(seen: Observations) -> bool:
    return seen.update is not None or seen.optimizer is not None


def detect(seen: Observations) -> Finding | None:
    share = seen.optimizer if seen.update is None or seen.updated_by_hand else seen.update
    if not concludes(seen, RULE) or share is None or not reaches(share, LEAST):
        return None
    if seen.optimizer_fused or seen.optimizer_kind in _CLOSURES:
        return None
    if seen.updated_by_hand:
        return finding(
            RULE, seen, f"The update by hand takes {percent(share)} of the step.", [of_step("update", share, LEAST)], share,
            direct=False, techniques=(), advice="torch._foreach_* over all parameters at once, or an optimizer of torch",
        )
    tensors = f" over {seen.optimizer_tensors} tensors" if seen.optimizer_tensors is not None else ""
    return finding(
        RULE,
        seen,
        f"The update of {seen.optimizer_kind or 'the optimizer'}{tensors} takes {percent(share)} of the step.",
        [of_step("optimizer", share, LEAST), *number("parameter tensors", seen.optimizer_tensors, "tensors")],
        share,
        direct=seen.optimizer_fused is False,
        advice="fused=True, where this optimizer has it",
    )
