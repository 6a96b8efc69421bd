"""Chains of elementwise operators, each of which reads and writes whole tensors.

What it means
-------------
Additions, activations, norms and masks do little arithmetic per byte. One after the other they move the same tensor
through memory again and again; fused, it is read and written once.

Evidence
--------
Time of memory-bound elementwise and reduction operators, as a share of the step, without the optimizer and without
the softmax of eager attention; the slowest of them.

Threshold
---------
20 % of the step.

Not to be confused with
-----------------------
Short operators, which cost their launch and not their bytes (`launch-bound`): where the median is below 10 us, 50 %
are below 10 us and the host is late for 15 % of the step. The optimizer's update, which is elementwise as well
(`slow-optimizer`). The softmax of attention (`eager-attention`). Code that is compiled: its elementwise kernels are
fused.

What helps
----------
`torch.compile`, or kernels that fuse by hand. The bound takes all their time; one pass over memory remains.

References
----------
PyTorch recipes, "Performance Tuning Guide", section "Fuse operations". Williams, Waterman and Patterson, "Roofline:
An Insightful Visual Performance Model for Multicore Architectures", 2009.
"""

from __future__ import annotations

import re

from saturate.findings._api import Rule
from saturate.findings._common import at_most, concludes, finding, number, of_step, percent, reaches, without
from saturate.findings._host import HOST_LATE, SHORT_KERNELS, SHORT_US, late
from saturate.records.analysis import Finding
from saturate.records.observations import Observations

RULE = Rule(
    id="elementwise-chains",
    title="chains of elementwise operators",
    techniques=("compile",),
    needs=frozenset({"steps", "kernels"}),
)

#: Elementwise operators, of the step.
LEAST = 0.20
#: Operators over lists of tensors, which are none of the chains: the optimizer's part in these is not theirs to take off.
_LISTS = re.compile(r"^aten::_(foreach|fused)_")


def answers(seen: Observations) -> bool:
    return seen.elementwise is not None or bool(seen.compiler.compiled)


def detect(seen: Observations) -> Finding | None:
    if not concludes(seen, RULE) or seen.compiler.compiled or _launches_cost_more(seen):
        return None
    optimizer = without(seen.optimizer, at_most(*(one.share for one in seen.operators if _LISTS.match(one.name))))
    share = without(seen.elementwise, optimizer)
    if share is None or not reaches(share, LEAST):
        return None
    return finding(
        RULE,
        seen,
        f"Elementwise operators that run one by one take {percent(share)} of the step.",
        [
            of_step("elementwise and reduction operators", share, LEAST),
            *number("taken off for the optimizer", optimizer, "of the step"),
        ],
        share,
        direct=seen.optimizer is not None,
    )


def _launches_cost_more(seen: Observations) -> bool:
    kernels = seen.kernels
    short = (
        reaches(kernels.short_share, SHORT_KERNELS) and kernels.median_us is not None and kernels.median_us < SHORT_US
    )
    return short and reaches(late(seen), HOST_LATE)
