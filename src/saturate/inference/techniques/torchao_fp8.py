"""Multiply in 8-bit floating point, on GPUs that have it.

What it does
------------
`torchao` stores the weights of linear layers as float8 (e4m3) with a scale per output row. At each call inputs are rounded
to float8 with a scale per row, and tensor cores multiply both. The rest of the model computes in bfloat16.

When it helps
-------------
Transformers on GPUs with float8 tensor cores (compute capability 8.9 and later: Ada, Hopper, Blackwell), with a runtime
that compiles: up to twice the rate of bfloat16, and half its memory for weights.

When it hurts
-------------
Small matrices, and without a compiler: rounding the inputs costs more than the product saves. One scale per tensor was
slower than bfloat16 in torchao's own table, so rows it is.

Numerics
--------
`precision`: 3 bits of mantissa, scales per row of the input and of the weight, sums in float32. Milder than int8 where
single values are large.

How it is applied
-----------------
The model is cast to bfloat16, inputs and outputs stay as they are; then `quantize_` with
`Float8DynamicActivationFloat8WeightConfig` by rows, on layers whose sides divide by 16. Untested: no such GPU was there.

References
----------
pytorch/ao, torchao/quantization (README, "A8W8 Float8 Dynamic Quantization with Rowwise Scaling").
Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from saturate.inference.techniques import _precision, _torchao
from saturate.inference.techniques._api import Context, Eligible, Ineligible, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="torchao-fp8",
    title="float8 products of linear layers",
    numerics="precision",
    stage="number",
    touches=(Touch("number-format"), Touch("module-classes")),
    status="experimental",
)

#: The first compute capability with float8 tensor cores.
CAPABILITY = (8, 9)

#: Sides of a weight must divide by this (torch._scaled_mm).
DIVISOR = 16


@dataclass(frozen=True)
class Options:
    """`weight_only`: products in bfloat16 from float8 weights, for calls that are bound by reading weights."""

    weight_only: bool = False


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    refused = _torchao.refusal(facts)
    if refused is None:
        refused = _torchao.refusal_below(facts, CAPABILITY, "float8 tensor cores")
    return refused if refused is not None else Eligible(f"{facts.linears} linear layers, and a device with float8 tensor cores")


def variants(facts: ModelFacts) -> list[Options]:
    return [Options(), Options(weight_only=True)]


def bound(facts: ModelFacts) -> float | None:
    return 4.0        # twice bfloat16, which is twice float32 in TF32


def apply(context: Context, options: Options) -> str:
    quantization = _torchao.imported()
    words = _torchao.in_bfloat16(context, TECHNIQUE.id)
    if options.weight_only:
        config = quantization.Float8WeightOnlyConfig()
    else:
        config = quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow())

    def fits(layer: Any) -> bool:
        return layer.in_features % DIVISOR == 0 and layer.out_features % DIVISOR == 0

    return words + _torchao.quantize(context, TECHNIQUE.id, config, fits)


def active(context: Context, options: Options) -> Proof:
    return _torchao.proof(context, TECHNIQUE.id)


def as_code(options: Options) -> str:
    config = "Float8WeightOnlyConfig" if options.weight_only else "Float8DynamicActivationFloat8WeightConfig"
    argument = "" if options.weight_only else "granularity=PerRow()"
    return ("# pip install torchao\n"
            f"from torchao.quantization import {config}, {'' if options.weight_only else 'PerRow, '}quantize_\n"
            f"{_precision.as_code('bfloat16')}\n"
            + _torchao.quantize_code(f"{config}({argument})", f"layer.in_features % {DIVISOR} == 0 and layer.out_features % {DIVISOR} == 0"))
