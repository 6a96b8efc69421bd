"""Record the model's kernels as a CUDA graph and replay it.

What it does
------------
Runs the model once while CUDA records what is launched, for each shape of the inputs; later calls copy their inputs into
the recorded buffers and launch everything at once.

When it helps
-------------
Small batches on fast GPUs, where launching kernels takes longer than running them.

When it hurts
-------------
Each shape keeps buffers of its own. Models that synchronise, branch on data or allocate on the host cannot be recorded.

Numerics
--------
`exact`: the same kernels on the same data.

How it is applied
-----------------
Own recording (`saturate.inference.runtimes.CudaGraphs`) after three calls on a stream aside; at most eight shapes, others
run as before. Stored as an exported program that is recorded again after loading.

References
----------
PyTorch documentation, "CUDA semantics", section "CUDA Graphs".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from saturate.inference import runtimes
from saturate.inference.formats import exported
from saturate.inference.techniques._api import (
    Context,
    Eligible,
    Ineligible,
    NotApplied,
    Proof,
    Technique,
    Touch,
    unrepeatable,
)
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="cuda-graphs",
    title="CUDA graphs",
    numerics="exact",
    stage="runtime",
    touches=(Touch("runtime"),),
    status="experimental",
)


@dataclass(frozen=True)
class Options:
    """Nothing to choose."""


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    if facts.device != "cuda":
        return Ineligible("only CUDA devices have launches to record")
    if facts.varying_shapes:
        return Ineligible("the shapes of the inputs vary; each would be recorded")
    if (why := unrepeatable(facts)) is not None:
        return Ineligible(why)
    return Eligible("launches can be recorded for one shape")


def variants(facts: ModelFacts) -> Sequence[Options]:
    return [Options()]


def bound(facts: ModelFacts) -> float | None:
    return 3.0


def apply(context: Context, options: Options) -> str:
    if context.device != "cuda":
        raise NotApplied("there is no CUDA device to record on")
    settings, model = {"kind": "cuda-graphs"}, context.model
    context.call = runtimes.executed(context.torch, model, settings)
    context.save = lambda folder: exported.save(context, folder, settings, model)
    return "launches recorded for each shape, and replayed"


def active(context: Context, options: Options) -> Proof:
    recorded = len(getattr(context.call, "recorded", ()))
    return Proof(recorded > 0, f"{recorded} shape(s) recorded")


def as_code(options: Options) -> str:
    return (
        "static = tuple(x.clone() for x in inputs)\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.no_grad(), torch.cuda.graph(graph):      # after a few calls of model(*static) on another stream\n"
        "    answers = model(*static)\n"
        "for held, given in zip(static, inputs):\n"
        "    held.copy_(given)\n"
        "graph.replay()      # answers now holds those to `inputs`"
    )
