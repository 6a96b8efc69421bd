"""Store the weights of linear layers as 8-bit integers, and compute in floating point.

What it does
------------
`torchao` keeps the weights of linear layers as 8-bit integers with a scale per output channel. At each call they are
widened on their way into the product, which is done in the model's own floating-point format.

When it helps
-------------
Calls that are bound by reading the weights: few rows per call and large matrices, as in decoding a language model one
sequence at a time. Weights take a quarter of the memory of float32.

When it hurts
-------------
Many rows per call: the product itself is the cost, and it is not faster. Without a runtime that compiles, the widened
weights are written to memory and the advantage is lost.

Numerics
--------
`precision`: weights are rounded to 8 bits, symmetric per output channel; activations are not touched, so this is the
mildest of the integer formats.

How it is applied
-----------------
`quantize_` with `Int8WeightOnlyConfig` on plain linear layers; a small last layer stays as it is, and so do layers that a
repair keeps. Tested on CPUs only.

References
----------
pytorch/ao, torchao/quantization (README, "A16W8 Int8 WeightOnly Quantization").
"""

from __future__ import annotations

from dataclasses import dataclass

from saturate.inference.techniques import _precision, _torchao
from saturate.inference.techniques._api import Context, Eligible, Ineligible, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="torchao-weight-only",
    title="int8 weights of linear layers",
    numerics="precision",
    stage="number",
    touches=(Touch("number-format"), Touch("module-classes")),
)


@dataclass(frozen=True)
class Options:
    """`bfloat16`: everything else computes in bfloat16."""

    bfloat16: bool = False


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    refused = _torchao.refusal(facts)
    return refused if refused is not None else Eligible(f"{facts.linears} linear layers, whose weights shrink to a quarter")


def variants(facts: ModelFacts) -> list[Options]:
    return [Options(bfloat16=True), Options()] if _torchao.bfloat16_helps(facts) else [Options()]


def bound(facts: ModelFacts) -> float | None:
    return 1.6        # decoding an 8B language model on an H100, compiled, over bfloat16


def apply(context: Context, options: Options) -> str:
    config = _torchao.imported().Int8WeightOnlyConfig()
    words = _torchao.in_bfloat16(context, TECHNIQUE.id) if options.bfloat16 else ""
    return words + _torchao.quantize(context, TECHNIQUE.id, config)


def active(context: Context, options: Options) -> Proof:
    return _torchao.proof(context, TECHNIQUE.id)


def as_code(options: Options) -> str:
    return ("# pip install torchao\n"
            "from torchao.quantization import Int8WeightOnlyConfig, quantize_\n"
            + (f"{_precision.as_code('bfloat16')}\n" if options.bfloat16 else "")
            + _torchao.quantize_code("Int8WeightOnlyConfig()"))
