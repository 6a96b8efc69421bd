"""Let float32 products use TensorFloat-32 on NVIDIA GPUs since Ampere.

What it does
------------
Rounds the inputs of float32 matrix products and convolutions to 10 bits of significand, so that tensor cores compute them.

When it helps
-------------
Transformers in float32: PyTorch allows it for convolutions by default, for matrix products not.

When it hurts
-------------
Never in speed. Weights stay float32, so models that wait for their weights gain nothing; a narrower format does both.

Numerics
--------
`precision`: 10 of 23 explicit bits, with the range of float32; sums stay in float32.

How it is applied
-----------------
`torch.set_float32_matmul_precision("high")`, which holds for the process, also after loading; not applied where the user's
process computes its products so already. Written against torch 2.13 and never run on a GPU.

References
----------
PyTorch documentation, "CUDA semantics", section "TensorFloat-32 (TF32) on Ampere (and later) devices".
"""

from __future__ import annotations

from dataclasses import dataclass

from saturate.inference import session
from saturate.inference.techniques import _precision
from saturate.inference.techniques._api import Context, Eligible, Ineligible, NotApplied, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="tf32-products",
    title="TensorFloat-32 products",
    numerics="precision",
    stage="session",
    touches=(Touch("number-format"),),
)

#: A switch of the process has no layers.
WHOLE = True


@dataclass(frozen=True)
class Options:
    """Nothing to choose."""


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    if facts.device != "cuda" or facts.capability is None or tuple(facts.capability) < (8, 0):
        return Ineligible("TensorFloat-32 needs an NVIDIA GPU of compute capability 8.0 or later")
    refusal = _precision.refusal(facts, "TensorFloat-32")
    if refusal is not None:     # a refusal is false
        return refusal
    return Eligible("float32 products on a GPU with TensorFloat-32")


def bound(facts: ModelFacts) -> float | None:
    return 3.0


def apply(context: Context, options: Options) -> str:
    if context.device != "cuda":
        raise NotApplied("only GPUs compute in TensorFloat-32")
    if session.float32_products(context.torch) != "highest":
        raise NotApplied("the model runs with TensorFloat-32 products already")
    session.switch(context, "float32_products", "high")
    return "TensorFloat-32 allowed in matrix products and convolutions"


def active(context: Context, options: Options) -> Proof:
    if "float32_products" not in session.switches(context):
        return Proof(False, "it was not switched on")
    found = session.float32_products(context.torch)
    return Proof(found == "high", f"torch's precision of float32 products is {found!r}")


def as_code(options: Options) -> str:
    return 'torch.set_float32_matmul_precision("high")'
