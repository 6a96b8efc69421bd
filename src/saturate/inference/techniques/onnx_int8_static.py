"""Convolutions and matrix products in int8 with ONNX Runtime; ranges of activations come from calibration batches.

What it does
------------
Exports the module to ONNX, runs the calibration batches through it to learn the range of every activation, and writes
a graph whose activations are uint8 and whose weights are int8 per output channel (U8S8). ONNX Runtime then executes whole
chains of layers in integers.

When it helps
-------------
Convolutional models on CPUs with VNNI, where every layer stays in integers (`bench/inference.py` races it on a ResNet-50).

When it hurts
-------------
Transformers: a range per tensor that is fixed beforehand costs accuracy at activations with outliers; dynamic ranges are
as fast there. CPUs without VNNI add pairs of products in 16 bits, which saturate, so weights get 7 bits.
S8S8, ONNX Runtime's default, does not use VNNI's instructions as U8S8 does, so it is not tried.

Numerics
--------
`precision`: int8 weights per channel, uint8 activations per tensor, int32 sums, float32 between integer chains.

How it is applied
-----------------
onnxruntime.quantization.quantize_static in QDQ format. `method` chooses the ranges: the whole of what was seen (minmax),
without its rarest values (percentile), or where least information is lost (entropy). Normalizations, and
scales and shifts behind them, stay in float32; `products` leaves everything but convolutions and products with constant matrices
there. Modules that must stay in float32 are excluded by name, and read their inputs as they were before rounding.

References
----------
ONNX Runtime documentation, "Quantize ONNX Models", static quantization.
Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", 2018.
"""

from __future__ import annotations

from dataclasses import dataclass

from saturate.inference.techniques import _onnx, _onnx_int8
from saturate.inference.techniques._api import Context, Eligible, Ineligible, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="onnx-int8-static",
    title="ONNX Runtime, static int8",
    numerics="precision",
    stage="runtime",
    touches=(Touch("runtime"), Touch("number-format"), Touch("module-classes"), Touch("memory-format")),
)

PREPARE_S = 8.0


@dataclass(frozen=True)
class Options:
    """method: how ranges are chosen. products: quantize convolutions and products with constant matrices only.
    reduce_range: weights of 7 bits, for CPUs without VNNI. batches: at most so many are used for calibration."""

    method: str = "minmax"
    products: bool = False
    reduce_range: bool = False
    batches: int = 32


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    refused = _onnx.refusal_on_cpu(facts)
    return _onnx_int8.about_static(facts) if refused is None else refused


def variants(facts: ModelFacts) -> list[Options]:
    reduce = not _onnx.vnni(facts)
    products = facts.linears > facts.convolutions
    return [Options(method, products, reduce) for method in ("minmax", "percentile")]


def bound(facts: ModelFacts) -> float | None:
    convolutional = facts.convolutions > facts.linears
    if not _onnx.vnni(facts):
        return 3.4 if convolutional else 2.5
    return 7.5 if convolutional else 5.5


def apply(context: Context, options: Options) -> str:
    exported, path, ranges = _onnx_int8.static(
        context, options.method, options.products, options.reduce_range, options.batches,
        lambda node: not options.products and node.op_type in _onnx_int8.SHARES)
    _onnx.serve(context, exported, path, TECHNIQUE.id)
    return f"int8 with {ranges}, {context.threads} thread(s); {exported.sizes()}"


def active(context: Context, options: Options) -> Proof:
    return _onnx.integer_proof(context, TECHNIQUE.id)


def as_code(options: Options) -> str:
    apart = "" if options.products else _onnx_int8.apart_code(f"def alone(node):\n    return node.op_type in {_onnx_int8.SHARES}\n")
    code = _onnx_int8.static_code(options.method, options.products, options.reduce_range, apart)
    return f"{code}{_onnx_int8.UNROUNDED_CODE * bool(apart)}{_onnx.call_code('int8.onnx')}"
