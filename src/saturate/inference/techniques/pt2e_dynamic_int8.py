"""Run linear layers in 8-bit integers, with inputs rounded anew at each call, in a graph compiled for x86.

What it does
------------
Captures the model as a graph, rounds the weights of linear layers to 8 bits per output channel, and lets each call find
the range of each layer's input before rounding it. The graph is compiled ahead of time with the CPU's integer kernels.

When it helps
-------------
Transformers on x86 CPUs with integer dot products, where calibrated ranges cost too much accuracy: a range of its own
for each call follows the input.

When it hurts
-------------
Small layers: finding the range reads the whole input once more. Convolutions have no such kernel and stay in float32.

Numerics
--------
`precision`: 8 bits per tensor for inputs, per output channel for weights, sums of 32 bits. On a CPU without VNNI
inputs take 7 bits. Ranges include 0, as torch has them; its compiler leaves that out (torch 2.13), so that it is computed in front of it.

How it is applied
-----------------
`torchao.quantization.pt2e` with `X86InductorQuantizer` in its dynamic configuration, on linear layers only; then AOTInductor
with frozen weights. Layers that a repair keeps are not annotated. No calibration is needed. Where the CPU has AMX, also with all else under
autocast to bfloat16, as `pt2e-static-int8`.

References
----------
pytorch/ao, torchao/quantization/pt2e (X86InductorQuantizer, dynamic quantization).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from saturate.inference.techniques import _onnx, _precision, _pt2e
from saturate.inference.techniques._api import Context, Eligible, Ineligible, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="pt2e-dynamic-int8",
    title="int8 linear layers with ranges found at each call, compiled for x86",
    numerics="precision",
    stage="runtime",
    touches=(Touch("number-format"), Touch("runtime"), Touch("module-classes")),
)

PREPARE_S = 45.0

RECIPE = _pt2e.Recipe(dynamic=True)


@dataclass(frozen=True)
class Options:
    """`reduce_range`: inputs of 7 bits, for CPUs without VNNI. `bfloat16`: what is not in integers is computed under autocast."""

    reduce_range: bool = False
    bfloat16: bool = False


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    refused = _pt2e.refusal(facts)
    if refused is not None:
        return refused
    if not facts.linears + facts.attentions:
        return Ineligible("no linear layer; convolutions have no such kernel")
    return _onnx.worth_int8(facts, f"{facts.linears} linear layers", _pt2e.NARROWED)


def variants(facts: ModelFacts) -> list[Options]:
    return [Options(reduce_range=not _onnx.vnni(facts), bfloat16=bfloat16) for bfloat16 in _pt2e.rest_in_bfloat16(facts)]


def bound(facts: ModelFacts) -> float | None:
    if not _onnx.vnni(facts):
        return 1.5
    return 7.3 if _precision.AMX in facts.cpu_flags else 6.3       # BERT-base on one core


def apply(context: Context, options: Options) -> str:
    program = _pt2e.captured(context)
    graph = _pt2e.prepared(context, program, _recipe(options))
    _pt2e.calibrate(context, graph, context.inputs[:1])      # the ranges of weights are read in a forward, too
    return _pt2e.serve(context, TECHNIQUE.id, _pt2e.converted(context.torch, graph), program, options.bfloat16)


def _recipe(options: Options) -> _pt2e.Recipe:
    return dataclasses.replace(RECIPE, reduce_range=options.reduce_range)


def active(context: Context, options: Options) -> Proof:
    return _pt2e.proof(context, TECHNIQUE.id)


def as_code(options: Options) -> str:
    return (
        f"{_pt2e.prepare_code(_recipe(options))}"
        "graph(*inputs)\n"
        f"{_pt2e.serve_code(RECIPE, options.bfloat16)}")
