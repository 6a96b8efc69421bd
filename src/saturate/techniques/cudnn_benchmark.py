"""Let cuDNN time its convolution algorithms and keep the fastest one for each shape.

What it does
------------
Sets `torch.backends.cudnn.benchmark`: the first convolution of each new shape tries several algorithms.

When it helps
-------------
Convolutional networks on CUDA whose input shapes stay the same.

When it hurts
-------------
Shapes that keep changing: each new one is timed again. The fastest algorithm may need more workspace memory.

Numerics
--------
`reordering`: another algorithm adds in another order. Which one wins can differ from run to run.

How it is applied
-----------------
The flag is set when the script builds its first loader or optimizer, in verification runs too: torch keeps the algorithm of each shape
that it has seen, with the flag or without, and so the flag does nothing for shapes whose first convolution is over. It is set once more
when the step is known, for shapes that come later, in case the script has switched it off. A script that asks for deterministic
algorithms keeps them: cuDNN then chooses among the deterministic ones only.

References
----------
PyTorch documentation, "torch.backends", section "torch.backends.cudnn".
PyTorch recipes, "Performance Tuning Guide", section "Enable cuDNN auto-tuner".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from saturate.records.facts import Evidence, Facts
from saturate.techniques import _common
from saturate.techniques._api import Eligible, Ineligible, Proof, Technique, Touch

TECHNIQUE = Technique(
    id="cudnn-benchmark",
    title="cuDNN algorithm search",
    numerics="reordering",
    stage="model",
    acts_on="process",
    touches=(Touch("cudnn-benchmark"),),
)

#: With more shapes than this in the few observed steps, timing algorithms for each costs more than it gives.
MANY_SHAPES = 8


@dataclass(frozen=True)
class Options:
    """Nothing to choose."""


def eligible(facts: Facts) -> Eligible | Ineligible:
    if facts.device != "cuda":
        return Ineligible("cuDNN only runs on CUDA devices")
    if facts.cudnn_benchmark:
        return Ineligible("the script already sets it")
    if not _common.convolves(facts):
        return Ineligible("the trained modules hold no convolutions")
    if facts.shapes > MANY_SHAPES:
        return Ineligible(f"{facts.shapes} input shapes were seen; each would be timed again")
    if facts.compiles:
        return Eligible(f"convolutions on CUDA; {_common.NOT_WATCHED}")
    return Eligible("convolutions on CUDA with few input shapes")


def bound(facts: Facts) -> float | None:
    return _common.computing(facts)


def prepare(context: Any, options: Options) -> None:
    """Before the first convolution: torch looks for a shape's algorithm among those that it has chosen before, and does not ask again."""
    apply(context, options)


def apply(context: Any, options: Options) -> str:
    context.set_attribute(context.torch.backends.cudnn, "benchmark", True)
    return "torch.backends.cudnn.benchmark = True"


def active(evidence: Evidence, options: Options) -> Proof:
    if evidence.cudnn_benchmark:
        return Proof(True, "torch.backends.cudnn.benchmark is set")
    return Proof(False, "torch.backends.cudnn.benchmark is not set")


def as_code(options: Options) -> str:
    return "torch.backends.cudnn.benchmark = True"
