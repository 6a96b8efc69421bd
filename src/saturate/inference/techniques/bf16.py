"""Compute in bfloat16, with outputs in the original format.

What it does
------------
Casts the module's parameters, buffers and floating-point inputs to bfloat16 and its outputs back; or, with `autocast`,
leaves them alone and lets torch cast what products and convolutions read.

When it helps
-------------
Processors with bfloat16 arithmetic: NVIDIA since Ampere, x86 with AVX512-BF16 or AMX. Half the memory too, so models that
wait for their weights gain without any arithmetic units. Under autocast weights stay float32 and are cast at each call:
that wins only where a cast module loses (normalizations, code that mixes in float32 tensors of its own).

When it hurts
-------------
Models that compute positions or other large numbers in floating point: bfloat16 counts to 256. A model that creates
float32 tensors in its forward and multiplies them with its weights raises; autocast does not.

Numerics
--------
`precision`: 8 bits of significand with the range of float32, so nothing overflows that did not before.

How it is applied
-----------------
In place, tied weights stay tied. Modules that a repair keeps stay in float32 with casts at their borders. The proof is the
dtype that products were seen to give in a forward of real inputs.

References
----------
Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", 2019.
PyTorch documentation, "Automatic Mixed Precision package - torch.amp".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from saturate.inference.techniques import _precision
from saturate.inference.techniques._api import Context, Eligible, Ineligible, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="bf16",
    title="bfloat16",
    numerics="precision",
    stage="number",
    touches=(Touch("number-format"),),
)


@dataclass(frozen=True)
class Options:
    """`autocast`: the weights stay as they are, and torch casts at each product."""

    autocast: bool = False


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    refusal = _precision.refusal(facts, "bfloat16")
    if refusal is not None:     # a refusal is false
        return refusal
    if facts.device == "cuda":
        if facts.capability is None or tuple(facts.capability) < (8, 0):
            return Ineligible("bfloat16 needs an NVIDIA GPU of compute capability 8.0 or later")
        return Eligible("products in float32 on a GPU with bfloat16 units")
    if facts.device != "cpu":
        return Ineligible(f"not offered on {facts.device or 'unknown'} devices")
    if not facts.cpu_flags & {"avx512_bf16", _precision.AMX}:
        return Ineligible("this CPU has no bfloat16 arithmetic (AVX512-BF16 or AMX)")
    return Eligible("products in float32 on a CPU with bfloat16 arithmetic")


def variants(facts: ModelFacts) -> Sequence[Options]:
    return [Options(), Options(autocast=True)]


def bound(facts: ModelFacts) -> float | None:
    return 7.0 if _precision.AMX in facts.cpu_flags else 4.0      # a prior for the order of trials, not a claim


def apply(context: Context, options: Options) -> str:
    return _precision.apply(context, context.torch.bfloat16, options.autocast, TECHNIQUE.id)


def active(context: Context, options: Options) -> Proof:
    return _precision.active(context, TECHNIQUE.id)


def as_code(options: Options) -> str:
    return _precision.as_code("bfloat16", options.autocast)
