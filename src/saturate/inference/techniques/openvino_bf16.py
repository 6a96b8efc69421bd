"""Execute the model with OpenVINO in bfloat16.

What it does
------------
Exports the module to ONNX in float32; OpenVINO computes convolutions, matrix products and what stands between them in
bfloat16, and keeps in float32 what needs it. Inputs and outputs stay float32.

When it helps
-------------
CPUs with instructions for bfloat16 (AVX512-BF16, AMX), where 8 bits lose too much: 4.6 times as fast as eager torch on a BERT-base on
one thread with AVX512-BF16, 5.8 with AMX (`bench/inference.py`), with the range of float32 and nothing to calibrate.

When it hurts
-------------
Regressions and long sums: 8 bits of precision. Processors without such instructions are refused: nothing would change there.

Numerics
--------
`precision`: products of bfloat16, summed in float32; activations rounded to bfloat16 between layers.

How it is applied
-----------------
torch.onnx.export with dynamo, and OpenVINO's precision hint "bf16".

References
----------
OpenVINO documentation, "Precision Control".
"""

from __future__ import annotations

from dataclasses import dataclass

from saturate.inference.techniques import _onnx, _openvino, _precision
from saturate.inference.techniques._api import Context, Eligible, Ineligible, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="openvino-bf16",
    title="OpenVINO, bfloat16",
    numerics="precision",
    stage="runtime",
    touches=(Touch("runtime"), Touch("number-format"), Touch("module-classes"), Touch("memory-format")),
)

PREPARE_S = 5.0

#: Instruction sets that multiply bfloat16.
FLAGS = frozenset(("avx512_bf16", _precision.AMX, "bf16"))

#: OpenVINO chooses by itself what stays in float32.
WHOLE = True


@dataclass(frozen=True)
class Options:
    """None."""


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    refused = _openvino.refusal(facts)
    if refused is not None:
        return refused
    if not facts.cpu_flags & FLAGS:
        return Ineligible("this CPU has no instructions for bfloat16 (AVX512-BF16, AMX)")
    if not facts.linears and not facts.convolutions:
        return Ineligible("neither convolutions nor Linear layers")
    return Eligible(f"{facts.convolutions} convolutions, {facts.linears} Linear layers; this CPU multiplies bfloat16")


def bound(facts: ModelFacts) -> float | None:
    return 8.6 if _precision.AMX in facts.cpu_flags else 4.8


def apply(context: Context, options: Options) -> str:
    _openvino.needs_float32(context)
    exported = _onnx.export(context)
    _openvino.serve(context, exported, exported.path, TECHNIQUE.id, "bf16")
    return f"OpenVINO in bfloat16 on {context.threads} thread(s); {exported.sizes()}"


def active(context: Context, options: Options) -> Proof:
    return _openvino.proof(context, TECHNIQUE.id, "bf16")


def as_code(options: Options) -> str:
    return f"{_onnx.EXPORT_CODE}{_openvino.call_code('model.onnx', 'bf16')}"
