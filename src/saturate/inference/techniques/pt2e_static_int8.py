"""Run convolutions and linear layers in 8-bit integers, with ranges learned from calibration inputs.

What it does
------------
Captures the model as a graph, watches the range of every tensor that enters or leaves a product while calibration
inputs run through it, rounds weights to 8 bits per output channel and activations to 8 bits per tensor, and compiles the
graph ahead of time with the CPU's integer kernels. Sums and activations after a product are done in the same kernel.

When it helps
-------------
Convolutional networks and transformers on x86 CPUs with integer dot products (AVX512-VNNI, AVX-VNNI, AMX): the largest
gain of all number formats there.

When it hurts
-------------
Activations with rare large values: one range per tensor leaves few steps for all others. Inputs unlike the calibration
inputs. CPUs without VNNI: ranges are halved there so that sums do not saturate, and less is gained than with it.

Numerics
--------
`precision`: 8 bits for weights and for inputs of products; sums are 32 bits, everything between products is float32, or with
`bfloat16` what autocast makes of it.
The same program may give other results on a CPU without VNNI.

How it is applied
-----------------
`torchao.quantization.pt2e` with `X86InductorQuantizer`, BatchNorm folded first; then AOTInductor with frozen weights. Where the CPU
has AMX, which multiplies bfloat16 many times as fast as float32, also with the graph under autocast: of a transformer's time in
8 bits, attention and what lies between layers are a large part there. Layers that a repair keeps are not annotated (with `bfloat16`
they are computed in that). Elementwise products (gates) stay in float32. A converted graph that is not
lowered is slower than float32, so lowered products are counted.

References
----------
pytorch/ao, torchao/quantization/pt2e (X86InductorQuantizer).
Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", CVPR 2018.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from saturate.inference.techniques import _onnx, _precision, _pt2e
from saturate.inference.techniques._api import Context, Eligible, Ineligible, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="pt2e-static-int8",
    title="int8 graph with calibrated ranges, compiled for x86",
    numerics="precision",
    stage="runtime",
    touches=(Touch("number-format"), Touch("runtime"), Touch("module-classes")),
)

PREPARE_S = 45.0


RECIPE = _pt2e.Recipe()


@dataclass(frozen=True)
class Options:
    """`batches`: at most so many calibration batches. `reduce_range`: inputs of 7 bits, for CPUs without VNNI. `bfloat16`: what is
    not in integers is computed under autocast."""

    batches: int = 32
    reduce_range: bool = False
    bfloat16: bool = False


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    refused = _pt2e.refusal(facts)
    if refused is not None:
        return refused
    if not facts.calibration_samples:
        return Ineligible("there are no calibration inputs to learn ranges from")
    if not facts.linears + facts.convolutions + facts.attentions:
        return Ineligible("no convolution and no linear layer")
    return _onnx.worth_int8(facts, f"{facts.convolutions} convolutions and {facts.linears} linear layers", _pt2e.NARROWED)


def variants(facts: ModelFacts) -> list[Options]:
    return [Options(reduce_range=not _onnx.vnni(facts), bfloat16=bfloat16) for bfloat16 in _pt2e.rest_in_bfloat16(facts)]


def bound(facts: ModelFacts) -> float | None:
    if not _onnx.vnni(facts):
        return 1.5
    return 8.0 if _precision.AMX in facts.cpu_flags else 6.8       # BERT-base on one core


def apply(context: Context, options: Options) -> str:
    program = _pt2e.captured(context)
    graph = _pt2e.prepared(context, program, _recipe(options))
    count = _pt2e.calibrate(context, graph, context.calibration[: options.batches])
    return f"{_pt2e.serve(context, TECHNIQUE.id, _pt2e.converted(context.torch, graph), program, options.bfloat16)}, ranges from {count} batches"


def _recipe(options: Options) -> _pt2e.Recipe:
    return dataclasses.replace(RECIPE, reduce_range=options.reduce_range)


def active(context: Context, options: Options) -> Proof:
    return _pt2e.proof(context, TECHNIQUE.id)


def as_code(options: Options) -> str:
    return (
        f"{_pt2e.prepare_code(_recipe(options))}"
        f"for batch in calibration[:{options.batches}]:\n"
        "    graph(*batch)\n"
        f"{_pt2e.serve_code(RECIPE, options.bfloat16)}")
