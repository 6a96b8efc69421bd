"""Compile the model with `torch.compile` (inductor) for inference.

What it does
------------
Captures the forward and generates fused kernels for it. On CPUs the weights are frozen into the program: folded
normalizations, and weights laid out once as the kernels want them.

When it helps
-------------
Nearly always where kernels are small or can be fused; on CPUs freezing the weights decides.
`max-autotune` measures kernels while it compiles, `reduce-overhead` replays launches as CUDA graphs.

When it hurts
-------------
The first call compiles, also after each load, and so does the first call of another shape. Code that depends on data
splits the graph; many splits leave nothing to fuse.

Numerics
--------
`reordering`: fused kernels add in another order, folded normalizations round at another place.

How it is applied
-----------------
A plain function around the module is compiled: `torch.compile(module)` captures nothing where the root is one of
PyTorch's own classes. Varying shapes get one program with open sizes instead of one program each. The proof is dynamo's
count of graphs (one more for each shape that it was compiled for again); graph breaks are reported with it, and a model that
reached the recompilation limit counts as not compiled. Stored as an exported program that is compiled again after loading.

References
----------
PyTorch documentation, "torch.compiler" and "torch.compile Troubleshooting".
torch/_inductor/config.py, `freezing`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saturate.inference import runtimes
from saturate.inference.formats import exported
from saturate.inference.techniques._api import Context, Eligible, Ineligible, Proof, Technique, Touch, no_program
from saturate.machine import facts as machine
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="compile-inference",
    title="torch.compile",
    numerics="reordering",
    stage="runtime",
    touches=(Touch("runtime"),),
)

PREPARE_S = 25.0

#: What other techniques put between the operators, casts for one, is compiled with them.
COMPILES = True


@dataclass(frozen=True)
class Options:
    """`mode` is that of `torch.compile`; `freezing` folds the weights in; `dynamic` leaves sizes open from the start."""

    mode: str = "default"
    freezing: bool = True
    dynamic: bool = False

    def __post_init__(self) -> None:
        if self.mode not in runtimes.MODES:
            raise ValueError(f"mode is {self.mode!r}, not one of {', '.join(runtimes.MODES)}")


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    if facts.device not in ("cpu", "cuda"):
        return Ineligible(f"not offered on {facts.device or 'unknown'} devices")
    if facts.device == "cpu" and not machine.compiler(os.environ):
        return Ineligible("compiling for a CPU needs a C++ compiler (g++ or clang++) on PATH")
    if (why := no_program(facts)) is not None:
        return Ineligible(why)
    return Eligible("runs eagerly")


def variants(facts: ModelFacts) -> Sequence[Options]:
    dynamic = facts.varying_shapes
    if facts.device == "cpu":
        return [Options(dynamic=dynamic), Options(mode="max-autotune", dynamic=dynamic)]
    modes = ["default", "max-autotune-no-cudagraphs"] if dynamic else ["reduce-overhead", "max-autotune", "default"]
    return [Options(mode=mode, freezing=False, dynamic=dynamic) for mode in modes]


def bound(facts: ModelFacts) -> float | None:
    return 2.0


def apply(context: Context, options: Options) -> str:
    import torch._dynamo as dynamo

    settings = {"kind": "compile", "mode": options.mode, "freezing": options.freezing, "dynamic": options.dynamic}
    dynamo.reset()
    dynamo.utils.counters.clear()
    model = context.model
    context.call = runtimes.executed(context.torch, model, settings)
    context.save = lambda folder: exported.save(context, folder, settings, model)
    context.notes[TECHNIQUE.id] = "set"
    return f"compiled by inductor, mode {options.mode}{', weights frozen' if options.freezing else ''}"


def active(context: Context, options: Options) -> Proof:
    if TECHNIQUE.id not in context.notes:
        return Proof(False, "nothing was compiled")
    import torch._dynamo as dynamo

    counters = dynamo.utils.counters
    graphs, breaks = int(counters["stats"]["unique_graphs"]), counters["graph_break"]
    if not graphs:
        return Proof(False, "the compiler captured nothing of the model")
    if _limit_hit(counters):
        return Proof(False, "the recompilation limit was reached, so the model runs eagerly again")
    words = f"{graphs} graph(s), {sum(breaks.values())} graph break(s)"
    reason = next((str(key).splitlines()[0] for key in breaks), "")
    return Proof(True, f"{words}: {reason[:120]}" if reason else words)


def _limit_hit(counters: Any) -> bool:
    """Whether dynamo gave up on a function that it had compiled for too many shapes."""
    words = ("recompile_limit", "cache_size_limit")
    return any(word in str(key) for kind in ("unimplemented", "graph_break") for key in counters[kind] for word in words)


def as_code(options: Options) -> str:
    lines = ["torch._inductor.config.freezing = True"] if options.freezing else []
    dynamic = ", dynamic=True" if options.dynamic else ""
    lines += ["eager = model",
              f'model = torch.compile(lambda *inputs: eager(*inputs), mode="{options.mode}"{dynamic})']
    return "\n".join(lines)
