"""Matrix products in int8 with ONNX Runtime; activations are quantized on the fly, so nothing is calibrated.

What it does
------------
Exports the module to ONNX and replaces each product of an activation with a constant matrix by an integer product:
weights are int8 per output channel, and the range of each activation is found in every call. Convolutions and products of
two activations (attention scores) stay in float32.

When it helps
-------------
Transformers and other models of Linear layers on CPUs with VNNI. Activations whose
range differs from input to input keep their accuracy, as no range is fixed.

When it hurts
-------------
Convolutions quantized this way are slower than in float32, so they are not. CPUs without VNNI gain less.

Numerics
--------
`precision`: int8 weights per channel, uint8 activations per tensor and call.

How it is applied
-----------------
onnxruntime.quantization.quantize_dynamic on MatMul and Gemm only. Modules that must stay in float32 are excluded by the
module names that the exporter writes beside each node. Without VNNI weights get 7 bits (`reduce_range`).

References
----------
ONNX Runtime documentation, "Quantize ONNX Models", dynamic quantization.
"""

from __future__ import annotations

from dataclasses import dataclass

from saturate.inference.techniques import _onnx, _onnx_int8
from saturate.inference.techniques._api import Context, Eligible, Ineligible, NotApplied, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="onnx-int8-dynamic",
    title="ONNX Runtime, dynamic int8",
    numerics="precision",
    stage="runtime",
    touches=(Touch("runtime"), Touch("number-format"), Touch("module-classes"), Touch("memory-format")),
)

PREPARE_S = 6.0


@dataclass(frozen=True)
class Options:
    """per_channel: one scale per output channel. reduce_range: weights of 7 bits, for CPUs without VNNI."""

    per_channel: bool = True
    reduce_range: bool = False


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    refused = _onnx.refusal_on_cpu(facts)
    if refused is not None:
        return refused
    if not facts.linears and not facts.attentions:
        return Ineligible("no Linear layer: only products with constant matrices are quantized")
    if facts.convolutions > facts.linears:
        return Ineligible(f"{facts.convolutions} convolutions and {facts.linears} Linear layers: only Linear layers "
                          "are quantized in this way")
    return _onnx.worth_int8(facts, f"{facts.linears} Linear layers")


def variants(facts: ModelFacts) -> list[Options]:
    reduce = not _onnx.vnni(facts)
    return [Options(reduce_range=reduce), Options(per_channel=False, reduce_range=reduce)]


def bound(facts: ModelFacts) -> float | None:
    return 6.1 if _onnx.vnni(facts) else 2.5


def apply(context: Context, options: Options) -> str:
    quantization = _onnx.files.require("onnxruntime.quantization")
    exported = _onnx.export(context)
    prepared, path = context.folder / "prepared.onnx", context.folder / "int8.onnx"
    model, large = _onnx_int8.prepare(exported.path, prepared)
    left = _onnx_int8.excluded(exported, model, context.keep)
    if not any(node.op_type in ("MatMul", "Gemm") and node.name not in left for node in model.graph.node):
        raise NotApplied("the graph has no matrix product to quantize")
    quantization.quantize_dynamic(prepared, path, op_types_to_quantize=["MatMul"], per_channel=options.per_channel,
                                  reduce_range=options.reduce_range, weight_type=quantization.QuantType.QInt8,
                                  nodes_to_exclude=left, use_external_data_format=large)
    _onnx.serve(context, exported, path, TECHNIQUE.id)
    return f"int8 products on {context.threads} thread(s), activations quantized in each call; {exported.sizes()}"


def active(context: Context, options: Options) -> Proof:
    return _onnx.integer_proof(context, TECHNIQUE.id)


def as_code(options: Options) -> str:
    return (
        f"{_onnx.EXPORT_CODE}{_onnx_int8.PREPARE_CODE}"
        'quantize_dynamic("prepared.onnx", "int8.onnx", op_types_to_quantize=["MatMul"], weight_type=QuantType.QInt8,\n'
        f"                 per_channel={options.per_channel}, reduce_range={options.reduce_range})\n"
        f"{_onnx.call_code('int8.onnx')}"
    )
