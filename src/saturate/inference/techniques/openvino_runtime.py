"""Execute the model with OpenVINO instead of torch, in float32.

What it does
------------
Exports the module to ONNX (free dimensions where batches differ, and for the batch where the model allows it) and lets
OpenVINO compile the graph for this processor: constants and normalizations folded, chains of elementwise operators made into
one kernel each, attention fused, weights packed once.

When it helps
-------------
On x86 CPUs, most of all for transformers: 2.5 times as fast as eager torch on a BERT-base on one thread of a processor with AVX-512,
where ONNX Runtime was at 2.1 (`bench/inference.py`).

When it hurts
-------------
Models that torch.export does not take (control flow that depends on data) are refused by name. A size that was not seen before
is planned anew at its first call. Weights are held twice while the program is made. What is no error in OpenVINO: integers of
64 bits are computed with 32 (inputs that exceed them are refused when they come; results that do are not seen), an index beyond an
embedding answers zeros, ReLU and clamp make a number of NaN, and sums of 8-bit integers stop at the largest instead of wrapping.

Numerics
--------
`reordering`: the same float32 operations in another order and with other vector kernels. OpenVINO would choose bfloat16 by
itself where the processor has it, and is told not to.

How it is applied
-----------------
torch.onnx.export with dynamo, one stream, as many threads as the candidate has, none of them bound to a core. Inputs reach it
without a copy.

References
----------
OpenVINO documentation, "CPU Device" and "Precision Control".
"""

from __future__ import annotations

from dataclasses import dataclass

from saturate.inference.techniques import _onnx, _openvino
from saturate.inference.techniques._api import Context, Eligible, Ineligible, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="openvino-runtime",
    title="OpenVINO",
    numerics="reordering",
    stage="runtime",
    touches=(Touch("runtime"), Touch("number-format"), Touch("module-classes"), Touch("memory-format")),
)

PREPARE_S = 5.0


@dataclass(frozen=True)
class Options:
    """None."""


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    refused = _openvino.refusal(facts)
    return Eligible("torch.export takes the model, and OpenVINO has kernels for this processor") if refused is None else refused


def bound(facts: ModelFacts) -> float | None:
    return 2.6


def apply(context: Context, options: Options) -> str:
    _openvino.needs_float32(context)
    exported = _onnx.export(context)
    _openvino.serve(context, exported, exported.path, TECHNIQUE.id)
    return f"OpenVINO on {context.threads} thread(s); {exported.sizes()}"


def active(context: Context, options: Options) -> Proof:
    nodes = _openvino.census(context, TECHNIQUE.id)
    return Proof(bool(nodes), f"OpenVINO executes {sum(nodes.values())} nodes" if nodes else "no program was made")


def as_code(options: Options) -> str:
    return f"{_onnx.EXPORT_CODE}{_openvino.call_code('model.onnx')}"
