"""Execute the model with ONNX Runtime instead of torch, in float32.

What it does
------------
Exports the module to ONNX (free dimensions where batches differ, and for the batch where the model allows it) and runs
the graph with ONNX Runtime: constants folded, normalizations folded into convolutions, attention, GELU and residual
additions fused, weights packed once for the blocked kernels of the processor.

When it helps
-------------
On CPUs, nearly always: twice as fast as eager torch on a ResNet-50, BERT-base and ViT-B/16 of one thread. Small models
gain most, as a call costs microseconds instead of one Python call per layer.

When it hurts
-------------
Models that torch.export does not take (control flow that depends on data) are refused by name. Operators without a fast
kernel in ONNX Runtime can be slower than torch's. Weights are held twice while the program is made.

Numerics
--------
`reordering`: the same float32 operations in another order and with other vector kernels. On a GPU they are float32 as it is:
TensorFloat-32, which ONNX Runtime would use there by itself, is switched off.

How it is applied
-----------------
torch.onnx.export with dynamo, all graph optimizations, as many threads as the candidate has. Inputs reach the session
without a copy. `spin=False` lets waiting threads sleep, which helps where cores are shared. For a model on a GPU the package
onnxruntime-gpu has to be installed; that path was never run.

References
----------
ONNX Runtime documentation, "Graph Optimizations" and "Thread management".
PyTorch documentation, "torch.export-based ONNX Exporter".
"""

from __future__ import annotations

from dataclasses import dataclass

from saturate.inference.techniques import _onnx
from saturate.inference.techniques._api import Context, Eligible, Ineligible, NotApplied, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="onnx-runtime",
    title="ONNX Runtime",
    numerics="reordering",
    stage="runtime",
    touches=(Touch("runtime"), Touch("number-format"), Touch("module-classes"), Touch("memory-format")),
)

PREPARE_S = 5.0


@dataclass(frozen=True)
class Options:
    """spin: whether threads that wait for work keep their core busy."""

    spin: bool = True


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    if facts.device == "cuda":
        refused = _onnx.refusal(facts, ("onnx", "onnxruntime-gpu", "onnxscript"))
    else:
        refused = _onnx.refusal_on_cpu(facts)
    return Eligible("torch.export takes the model, and ONNX Runtime has kernels for this device") if refused is None else refused


def variants(facts: ModelFacts) -> list[Options]:
    return [Options()] if facts.cores == 1 else [Options(), Options(spin=False)]


def bound(facts: ModelFacts) -> float | None:
    return 2.2


def apply(context: Context, options: Options) -> str:
    narrow = {str(parameter.dtype) for parameter in context.model.parameters()} & {"torch.float16", "torch.bfloat16"}
    if narrow and context.device == "cpu":
        raise NotApplied(f"parameters are {', '.join(narrow)} by now; ONNX Runtime's CPU kernels compute float32")
    exported = _onnx.export(context)
    _onnx.serve(context, exported, exported.path, TECHNIQUE.id, options.spin)
    return f"ONNX Runtime on {context.threads} thread(s); {exported.sizes()}"


def active(context: Context, options: Options) -> Proof:
    nodes = _onnx.census(context, TECHNIQUE.id)
    return Proof(bool(nodes), f"ONNX Runtime executes {sum(nodes.values())} nodes" if nodes else "no session was made")


def as_code(options: Options) -> str:
    spin = "" if options.spin else 'options.add_session_config_entry("session.intra_op.allow_spinning", "0")\n'
    return (
        f"{_onnx.EXPORT_CODE}"
        f"{_onnx.call_code('model.onnx', spin)}"
    )
