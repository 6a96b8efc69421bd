"""Compute in float16, with outputs in the original format.

What it does
------------
Casts the module's parameters, buffers and floating-point inputs to float16 and its outputs back; or, with `autocast`,
leaves them alone and lets torch cast what products and convolutions read.

When it helps
-------------
GPUs with tensor cores: NVIDIA since Volta. Three more bits of significand than bfloat16 at the same speed.

When it hurts
-------------
Activations beyond 65504 become infinite; autocast keeps normalizations and softmax in float32, the rest has no rescue.
CPUs compute it no faster than float32, as a rule.

Numerics
--------
`precision`: 11 bits of significand, a range of 6e-8 to 65504. What became infinite or NaN is seen by the guards.

How it is applied
-----------------
In place, tied weights stay tied. Modules that a repair keeps stay in float32 with casts at their borders. The proof is the
dtype that products were seen to give in a forward of real inputs.

References
----------
Micikevicius et al., "Mixed Precision Training", 2018.
PyTorch documentation, "Automatic Mixed Precision package - torch.amp".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from saturate.inference.techniques import _precision
from saturate.inference.techniques._api import Context, Eligible, Ineligible, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="fp16",
    title="float16",
    numerics="precision",
    stage="number",
    touches=(Touch("number-format"),),
)


@dataclass(frozen=True)
class Options:
    """`autocast`: the weights stay as they are, and torch casts at each product."""

    autocast: bool = False


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    refusal = _precision.refusal(facts, "float16")
    if refusal is not None:     # a refusal is false
        return refusal
    if facts.device != "cuda":
        return Ineligible("float16 is offered on GPUs only: CPUs compute it no faster than float32")
    if facts.capability is None or tuple(facts.capability) < (7, 0):
        return Ineligible("float16 tensor cores need compute capability 7.0 or later")
    return Eligible("products in float32 on a GPU with float16 units")


def variants(facts: ModelFacts) -> Sequence[Options]:
    return [Options(), Options(autocast=True)]


def bound(facts: ModelFacts) -> float | None:
    return 4.0


def apply(context: Context, options: Options) -> str:
    return _precision.apply(context, context.torch.float16, options.autocast, TECHNIQUE.id)


def active(context: Context, options: Options) -> Proof:
    return _precision.active(context, TECHNIQUE.id)


def as_code(options: Options) -> str:
    return _precision.as_code("float16", options.autocast)
