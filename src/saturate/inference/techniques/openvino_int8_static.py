"""Convolutions and matrix products in int8 with OpenVINO; ranges of activations come from calibration batches.

What it does
------------
Exports the module to ONNX, runs the calibration batches through it to learn the range of every activation, and writes a graph
whose activations are uint8 and whose weights are int8 per output channel (U8S8), as `onnx-int8-static` does. OpenVINO then executes
whole chains of layers in integers, with what stands between them fused.

When it helps
-------------
CPUs with VNNI. Of a transformer OpenVINO makes more in 8 bits than ONNX Runtime does: 7.1 times as fast as eager torch on a BERT-base
on one thread, where the same file was at 5.4 there; on a ResNet-50 8.0 and 7.2 (`bench/inference.py`).

When it hurts
-------------
A range per tensor that is fixed beforehand costs accuracy at activations with outliers. CPUs without VNNI add pairs of products
in 16 bits, which saturate, so weights get 7 bits.

Numerics
--------
`precision`: int8 weights per channel, uint8 activations per tensor, int32 sums, float32 between integer chains.

How it is applied
-----------------
onnxruntime.quantization.quantize_static in QDQ format, whose pairs OpenVINO turns into integer layers. `method` chooses the
ranges: the whole of what was seen (minmax), without its rarest values (percentile), or where least information is lost (entropy).
Normalizations, and scales and shifts behind them, stay in float32; `products` leaves everything but convolutions and products with
constant matrices there; with `attention` the products of two activations are computed in int8 as well. OpenVINO's kernels take
signed integers for these, so their operands get ranges around zero, but for what a softmax gives. Modules that must stay in float32
are excluded by name, and read their inputs as they were before rounding; so do sums, which OpenVINO 2026.4 computes wrongly of 8-bit
integers where a batch has more than one sample, and without `products` normalizations (its compiler crashes at some), masks and what they
are put before: a range that holds a mask holds little else.

References
----------
OpenVINO documentation, "Quantized models".
Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", 2018.
"""

from __future__ import annotations

from dataclasses import dataclass

from saturate.inference.techniques import _onnx, _onnx_int8, _openvino
from saturate.inference.techniques._api import Context, Eligible, Ineligible, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="openvino-int8-static",
    title="OpenVINO, static int8",
    numerics="precision",
    stage="runtime",
    touches=(Touch("runtime"), Touch("number-format"), Touch("module-classes"), Touch("memory-format")),
)

PREPARE_S = 8.0


@dataclass(frozen=True)
class Options:
    """method: how ranges are chosen. products: quantize convolutions and products with constant matrices only. attention: with that,
    products of two activations as well. reduce_range: weights of 7 bits, for CPUs without VNNI. batches: at most so many are used
    for calibration."""

    method: str = "minmax"
    products: bool = False
    reduce_range: bool = False
    batches: int = 32
    attention: bool = False


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    refused = _openvino.refusal(facts, ("onnx", "onnxruntime", "onnxscript", "openvino"))
    return _onnx_int8.about_static(facts) if refused is None else refused


def variants(facts: ModelFacts) -> list[Options]:
    reduce = not _onnx.vnni(facts)
    if facts.linears <= facts.convolutions:
        return [Options(method, reduce_range=reduce) for method in ("minmax", "percentile")]
    signed = facts.attentions > 0 and not reduce        # without VNNI, products of two full ranges saturate
    usual = [Options("minmax", products=True, reduce_range=reduce, attention=attention) for attention in (signed, False)]
    return [*dict.fromkeys(usual), Options("percentile", products=True, reduce_range=reduce)]


def bound(facts: ModelFacts) -> float | None:
    convolutional = facts.convolutions > facts.linears
    if not _onnx.vnni(facts):
        return 4.0 if convolutional else 3.0
    if convolutional:
        return 13.7 if "amx_int8" in facts.cpu_flags else 8.5
    return 7.5


def apply(context: Context, options: Options) -> str:
    _openvino.needs_float32(context)
    exported, path, ranges = _onnx_int8.static(
        context, options.method, options.products, options.reduce_range, options.batches, _openvino.unrounded(options.products),
        options.attention)
    _openvino.serve(context, exported, path, TECHNIQUE.id)
    return f"int8 with {ranges}, {context.threads} thread(s); {exported.sizes()}"


def active(context: Context, options: Options) -> Proof:
    return _openvino.proof(context, TECHNIQUE.id, _openvino.INTEGER)


def as_code(options: Options) -> str:
    apart = _openvino.unrounded_code(options.products)
    code = _onnx_int8.static_code(options.method, options.products, options.reduce_range, apart, options.attention)
    return f"{code}{_onnx_int8.UNROUNDED_CODE}{_openvino.call_code('int8.onnx')}"
