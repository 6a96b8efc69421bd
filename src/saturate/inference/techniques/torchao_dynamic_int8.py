"""Multiply in 8-bit integers, with activations rounded anew at each call.

What it does
------------
`torchao` stores the weights of linear layers as 8-bit integers with a scale per output channel. At each call the inputs
are rounded to 8 bits with a scale per row, the product is done in integers, and the result is scaled back.

When it helps
-------------
Transformers and MLPs with many rows per call, on CPUs with integer dot products (AVX512-VNNI, AMX) and on NVIDIA GPUs
since Turing, together with a runtime that compiles. No calibration is needed.

When it hurts
-------------
Few rows per call: rounding the inputs and scaling the result cost more than the product saves (decoding a language model
one sequence at a time, for one). Eagerly, without a compiler, it is mostly slower. Convolutions stay as they are.

Numerics
--------
`precision`: 8 bits, symmetric, per row of the input and per output channel. Rows with single large values lose most.
On a CPU without VNNI sums of two products may exceed 16 bits, so the range is halved there.

How it is applied
-----------------
`quantize_` with `Int8DynamicActivationInt8WeightConfig` on plain linear layers; a small last layer stays as it is, and so
do layers that a repair keeps. On a GPU the rest of the model may compute in bfloat16. Tested on CPUs only.

References
----------
pytorch/ao, torchao/quantization (README, "A8W8 Int8 Dynamic Quantization").
Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", arXiv 2208.07339.
"""

from __future__ import annotations

from dataclasses import dataclass

from saturate.inference.techniques import _onnx, _precision, _torchao
from saturate.inference.techniques._api import Context, Eligible, Ineligible, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="torchao-dynamic-int8",
    title="int8 products of linear layers, inputs rounded at each call",
    numerics="precision",
    stage="number",
    touches=(Touch("number-format"), Touch("module-classes")),
)


@dataclass(frozen=True)
class Options:
    """`bfloat16`: what is not quantized computes in bfloat16. `asymmetric`: inputs have a zero point, which suits activations
    that are mostly positive. `reduce_range`: half of the range, for CPUs without VNNI."""

    bfloat16: bool = False
    asymmetric: bool = False
    reduce_range: bool = False


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    for refused in (_torchao.refusal(facts), _torchao.refusal_for_int8(facts)):
        if refused is not None:
            return refused
    if facts.device == "cuda":
        return Eligible(f"{facts.linears} linear layers, and a GPU with integer tensor cores")
    return _onnx.worth_int8(facts, f"{facts.linears} linear layers", _torchao.NARROWED)


def variants(facts: ModelFacts) -> list[Options]:
    return [Options(bfloat16=True), Options()] if _torchao.bfloat16_helps(facts) else [Options(reduce_range=_torchao.saturates(facts))]


def bound(facts: ModelFacts) -> float | None:
    return 5.2 if facts.device == "cuda" or _onnx.vnni(facts) else 1.5       # BERT-base on one core with VNNI, compiled


def apply(context: Context, options: Options) -> str:
    words = _torchao.in_bfloat16(context, TECHNIQUE.id) if options.bfloat16 else ""
    return words + _torchao.quantize(context, TECHNIQUE.id, _torchao.dynamic_int8(options.asymmetric, options.reduce_range))


def active(context: Context, options: Options) -> Proof:
    return _torchao.proof(context, TECHNIQUE.id)


def as_code(options: Options) -> str:
    given = {"act_mapping_type": "MappingType.ASYMMETRIC"} if options.asymmetric else {}
    given |= {"reduce_range": "True"} if options.reduce_range else {}
    config = f"Int8DynamicActivationInt8WeightConfig({', '.join(f'{name}={value}' for name, value in given.items())})"
    return ("# pip install torchao\n"
            f"from torchao.quantization import Int8DynamicActivationInt8WeightConfig, {'MappingType, ' if options.asymmetric else ''}quantize_\n"
            + (f"{_precision.as_code('bfloat16')}\n" if options.bfloat16 else "")
            + _torchao.quantize_code(config))
