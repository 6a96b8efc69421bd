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
    no_program,
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
    if (why := no_program(facts)) is not None:
        return Ineligible(why)
    return Eligible("launches can be recorded for one shape")


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
        "from torch.utils._pytree import tree_leaves, tree_map\n"
        "static = tree_map(lambda x: x.clone() if torch.is_tensor(x) else x, inputs)\n"
        "aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()\n"
        "aside.wait_stream(torch.cuda.current_stream())\n"
        "with torch.no_grad(), torch.cuda.stream(aside):      # libraries choose kernels and take memory before recording\n"
        "    for _ in range(3):\n"
        "        model(*static)\n"
        "torch.cuda.current_stream().wait_stream(aside)\n"
        "with torch.no_grad(), torch.cuda.graph(graph):\n"
        "    recorded = model(*static)\n"
        "def model(*inputs):\n"
        "    for held, given in zip(tree_leaves(static), tree_leaves(inputs)):\n"
        "        if torch.is_tensor(held):\n"
        "            held.copy_(given)\n"
        "    graph.replay()\n"
        "    return recorded      # the next call writes to it"
    )
