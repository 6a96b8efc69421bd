"""Let float32 matrix products use TensorFloat-32 on NVIDIA GPUs since Ampere.

What it does
------------
Allows cuBLAS to round the inputs of float32 matrix products to 10 bits of significand, and so to use tensor cores.
Convolutions are allowed to do so by PyTorch's own default; matrix products are not.

When it helps
-------------
Transformers and other models bound by float32 matrix products. Results and accumulation stay in float32, so it asks
nothing of the model.

When it hurts
-------------
Never in speed, as a rule. Computations that need all bits of float32 (solvers, large distances) lose accuracy, also
outside the model, because the setting is global.

Numerics
--------
`precision`: the inputs of a product keep 10 of their 23 explicit bits; the range of float32 remains.

How it is applied
-----------------
`torch.backends.cuda.matmul.allow_tf32` is set after the script's own setup ran; if the script uses the newer
`fp32_precision` setting, that one is set instead, because PyTorch refuses to mix the two.

References
----------
PyTorch documentation, "CUDA semantics", section "TensorFloat-32 (TF32) on Ampere (and later) devices".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from saturate.records.facts import Evidence, Facts
from saturate.techniques import _common
from saturate.techniques._api import Eligible, Ineligible, Proof, Technique, Touch

TECHNIQUE = Technique(
    id="tf32",
    title="TensorFloat-32 matrix products",
    numerics="precision",
    stage="model",
    acts_on="process",
    touches=(Touch("float32-matmul"),),
)


@dataclass(frozen=True)
class Options:
    """Nothing to choose."""


def eligible(facts: Facts) -> Eligible | Ineligible:
    if facts.device != "cuda" or facts.rocm or not facts.capability or tuple(facts.capability) < (8, 0):
        return Ineligible("TensorFloat-32 needs an NVIDIA GPU of compute capability 8.0 or later")
    if facts.tf32_matmul:
        return Ineligible("the script already allows TensorFloat-32")
    if not any("float32" in module.dtypes for module in facts.modules):
        return Ineligible("no trained module with float32 parameters was seen")
    if not _common.multiplies(facts):
        return Ineligible("no matrix products were seen; convolutions use TensorFloat-32 by default")
    return Eligible("float32 matrix products on a device with TensorFloat-32")


def bound(facts: Facts) -> float | None:
    return _common.computing(facts)


def apply(context: Any, options: Options) -> str:
    matmul = context.torch.backends.cuda.matmul
    try:
        context.set_attribute(matmul, "allow_tf32", True)
    except RuntimeError:        # the script used the newer setting; reading the older one is then an error
        context.set_attribute(matmul, "fp32_precision", "tf32")
    return "TensorFloat-32 allowed in matrix products"


def active(evidence: Evidence, options: Options) -> Proof:
    if evidence.allow_tf32:
        return Proof(True, "torch reports that TensorFloat-32 is allowed in matrix products")
    return Proof(False, "TensorFloat-32 is not allowed in matrix products")


def as_code(options: Options) -> str:
    return 'torch.set_float32_matmul_precision("high")'
