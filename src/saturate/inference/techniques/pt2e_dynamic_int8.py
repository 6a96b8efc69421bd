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
inputs take 7 bits.

How it is applied
-----------------
`torchao.quantization.pt2e` with `X86InductorQuantizer` in its dynamic configuration, on linear layers only; then AOTInductor
with frozen weights. Layers that a repair keeps are not annotated. No calibration is needed.

References
----------
pytorch/ao, torchao/quantization/pt2e (X86InductorQuantizer, dynamic quantization).
"""

from __future__ import annotations

from dataclasses import dataclass

from saturate.inference.techniques import _onnx, _pt2e
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
    """Nothing to choose."""


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    refused = _pt2e.refusal(facts)
    if refused is not None:
        return refused
    if not facts.linears + facts.attentions:
        return Ineligible("no linear layer; convolutions have no such kernel")
    return _onnx.worth_int8(facts, f"{facts.linears} linear layers", _pt2e.NARROWED)


def variants(facts: ModelFacts) -> list[Options]:
    return [Options()]


def bound(facts: ModelFacts) -> float | None:
    return 6.3 if _onnx.vnni(facts) else 1.5       # BERT-base on one core with VNNI


def apply(context: Context, options: Options) -> str:
    program = _pt2e.captured(context)
    graph = _pt2e.prepared(context, program, RECIPE)
    _pt2e.calibrate(context, graph, context.inputs[:1])      # the ranges of weights are read in a forward, too
    return _pt2e.serve(context, TECHNIQUE.id, _pt2e.converted(graph), program)


def active(context: Context, options: Options) -> Proof:
    return _pt2e.proof(context, TECHNIQUE.id)


def as_code(options: Options) -> str:
    return ("# pip install torchao\n"
            "from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e\n"
            "from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86\n"
            "quantizer = x86.X86InductorQuantizer()\n"
            "quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=True))\n"
            "graph = prepare_pt2e(torch.export.export(model.eval(), inputs).module(), quantizer)\n"
            "graph(*inputs)\n"
            "program = torch.export.export(convert_pt2e(graph), inputs)\n"
            "package = torch._inductor.aoti_compile_and_package(program, inductor_configs={'freezing': True})\n"
            "model = torch._inductor.aoti_load_package(package)")
