"""Train a little with 8-bit rounding in the forward, then run convolutions and linear layers in 8-bit integers.

What it does
------------
Captures the model as a graph with BatchNorm folded, puts fake quantizers around its products, and trains it for a few
epochs with the user's loss: weights and ranges settle where rounding hurts least. Then weights are rounded and the
graph is compiled ahead of time with the CPU's integer kernels.

When it helps
-------------
Where static int8 is fast enough but misses the accuracy budget: small networks, depthwise convolutions, activations with
large values. On x86 CPUs with integer dot products (AVX512-VNNI, AVX-VNNI, AMX).

When it hurts
-------------
It costs training time, and a learning rate that is too high ruins a trained model. Dropout is off and BatchNorm is fixed,
so long trainings overfit.

Numerics
--------
`convergence`: it is another function, trained on the user's data. 8 bits as in static int8, whose forward the training
imitates.

How it is applied
-----------------
`torchao.quantization.pt2e` with the QAT configuration of `X86InductorQuantizer`. Ranges follow the inputs in the first half
of the training and are fixed afterwards. The outputs of the original teach, beside the user's loss; it stops at the
deadline of the candidate. Layers that a repair keeps are not rounded. Then AOTInductor with frozen weights.

References
----------
Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", CVPR 2018.
pytorch/ao, torchao/quantization/pt2e (quantization-aware training).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from saturate.inference.techniques import _onnx, _pt2e, _qat
from saturate.inference.techniques._api import Context, Eligible, Ineligible, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="qat-int8",
    title="int8 graph, trained with rounding, compiled for x86",
    numerics="convergence",
    stage="runtime",
    touches=(Touch("number-format"), Touch("runtime"), Touch("module-classes"), Touch("weights-trained", _qat.ORDER)),
)

PREPARE_S = 120.0

RECIPE = _pt2e.Recipe(qat=True)


@dataclass(frozen=True)
class Options:
    """`reduce_range`: inputs of 7 bits, for CPUs without VNNI. `train` says how long."""

    reduce_range: bool = False


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    refused = _qat.refusal(facts)
    if refused is None:
        refused = _pt2e.refusal(facts)
    if refused is not None:
        return refused
    if not facts.linears + facts.convolutions + facts.attentions:
        return Ineligible("no convolution and no linear layer")
    return _onnx.worth_int8(facts, f"{facts.convolutions} convolutions and {facts.linears} linear layers, and training data", _pt2e.NARROWED)


def variants(facts: ModelFacts) -> list[Options]:
    return [Options(reduce_range=not _onnx.vnni(facts))]


def bound(facts: ModelFacts) -> float | None:
    return 6.8 if _onnx.vnni(facts) else 1.5       # the same program as static int8


def apply(context: Context, options: Options) -> str:
    teacher, program = _qat.original(context), _pt2e.captured(context)
    graph = _pt2e.prepared(context, program, _recipe(options))
    student = _pt2e.served(context.torch, graph, program).eval()
    trained = _qat.recover(context, student, teacher, lambda progress: _fix_ranges(graph, progress))
    return f"{trained}; {_pt2e.serve(context, TECHNIQUE.id, _pt2e.converted(context.torch, graph), program)}"


def _fix_ranges(graph: Any, progress: float) -> None:
    """Ranges follow the inputs in the first half; then weights settle on fixed ones."""
    if progress < 0.5:
        return
    from torchao.quantization.pt2e import disable_observer

    graph.apply(disable_observer)


def _recipe(options: Options) -> _pt2e.Recipe:
    return dataclasses.replace(RECIPE, reduce_range=options.reduce_range)


def active(context: Context, options: Options) -> Proof:
    return _pt2e.proof(context, TECHNIQUE.id)


def as_code(options: Options) -> str:
    return (
        f"{_pt2e.prepare_code(_recipe(options))}"
        "optimizer = torch.optim.AdamW(graph.parameters(), lr=1e-4)\n"
        "for *batch, target in loader:\n"
        "    loss(graph(*batch), target).backward(); optimizer.step(); optimizer.zero_grad()\n"
        f"{_pt2e.serve_code(RECIPE)}")
