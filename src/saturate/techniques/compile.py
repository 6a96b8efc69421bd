"""Compile the model's training forward and backward with `torch.compile`.

What it does
------------
Captures the forward of the outermost trained modules, or of each repeated block inside them, and generates fused kernels
for it and its backward pass.

When it helps
-------------
Models with many small operations (normalization, activation, residuals) and, on GPUs, steps that are bound by launching
kernels; `reduce-overhead` then replays a recorded graph of launches.

When it hurts
-------------
The first steps take from seconds to minutes. Short trainings never earn that time back; the break-even line says when this one
does. Shapes that keep changing cause recompilation, and so do hooks that a script adds to inner modules and removes again; after some
recompilations torch runs the code eagerly. nn.LSTM and similar layers stay eager, together with the rest of the forward that calls
them; where most layers are such, compilation is not offered.

Gradients of compiled code cannot be differentiated. A script that does so (`create_graph=True`, as for a gradient penalty) in the step
that is watched is left alone; one that does so only later fails with torch's error about "double backward". Nor can compiled code be
differentiated in forward mode: while a level of `torch.autograd.forward_ad` is open, the original code runs.

Numerics
--------
`stream`: fused kernels add in another order, and compiled dropout draws other random numbers of the same distribution.

How it is applied
-----------------
A plain function around the module's forward is compiled and used in training mode only: `Module.compile` captures
nothing when the root is one of PyTorch's own classes. With `scope="blocks"` the instances of the block that holds most
parameters share one compiled function, which costs a fraction of the compile time. Dynamo is told to check whether modules got
hooks since they were captured. The backward pass is told not to reuse the memory of what the forward saved ("donated buffers"), because a
script that sometimes keeps its graph (`retain_graph=True`) could then not go through it a second time, and would fail.

Modes that record CUDA graphs are not offered where gradients are added to kept ones (by accumulation, or
`zero_grad(set_to_none=False)`), because torch computed wrong gradients there. What their graphs return is copied, because the next step
overwrites it, and scripts keep losses and outputs. If inductor records no graph (it skips graphs that change their inputs or hold tensors on
the CPU), such a mode counts as not applied.

References
----------
PyTorch documentation, "torch.compiler" and "torch.compile Troubleshooting".
PyTorch recipes, "Reducing torch.compile cold start compilation time with regional compilation".
pytorch/pytorch issues 96693 and 169545 (CUDA graphs and accumulation), 105279 (recompilation).
"""

from __future__ import annotations

import types
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

from saturate.records.facts import Evidence, Facts, ModuleFacts
from saturate.techniques import _common
from saturate.techniques._api import Eligible, Ineligible, NotApplied, Proof, Technique, Touch

ORDER = 90

TECHNIQUE = Technique(
    id="compile",
    title="torch.compile",
    numerics="stream",
    stage="model",
    acts_on="modules",
    touches=(Touch("forward", ORDER), Touch("compiler")),
    slow_start=True,
)

#: A block must repeat this often before compiling it alone pays.
REPEATS = 4
_DIFFERENTIATES = "the script differentiates gradients (create_graph=True), and those of compiled code cannot be"
_DYNAMIC = {"auto": None, "yes": True, "no": False}
#: Modes whose outputs lie, on CUDA, in memory that the next call writes to; reading them after that raises.
RECORDING = ("reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class Options:
    """`mode` is that of `torch.compile`; `dynamic` is "auto", "yes" or "no"; `scope` is "module" or "blocks"."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    dynamic: str = "auto"
    scope: str = "module"

    def __post_init__(self) -> None:
        if self.dynamic not in _DYNAMIC:
            raise ValueError(f"dynamic is {self.dynamic!r}, not one of {', '.join(_DYNAMIC)}")
        if self.scope not in ("module", "blocks"):
            raise ValueError(f"scope is {self.scope!r}, not module or blocks")


def eligible(facts: Facts) -> Eligible | Ineligible:
    if facts.device not in ("cpu", "cuda"):
        return Ineligible(f"not offered on {facts.device or 'unknown'} devices")
    modules = facts.modules
    if not modules:
        return Ineligible("no trained module was seen")
    if why := _common.compiled_already(modules):
        return Ineligible(why)
    if facts.differentiates_gradients:
        return Ineligible(_DIFFERENTIATES)
    if all(map(_is_recurrent, modules)):
        return Ineligible("torch.compile leaves nn.RNN, nn.LSTM and nn.GRU eager, and the rest of the forward that calls them; most layers are such")
    if facts.device == "cpu" and not facts.machine.compiler:
        return Ineligible("compiling for a CPU needs a C++ compiler (g++ or clang++) on PATH")
    return Eligible(f"{len(modules)} trained module(s) that run eagerly")


def _is_recurrent(module: ModuleFacts) -> bool:
    """Whether what the compiler does not capture is as much as what it could."""
    others = module.linears + module.convolutions + module.other_convolutions + module.attentions
    return module.recurrent_nets > 0 and module.recurrent_nets >= others


def variants(facts: Facts) -> list[Options]:
    dynamic = "yes" if facts.shapes > 1 else "auto"
    found = [Options(dynamic=dynamic)]
    if any(module.repeats >= REPEATS for module in _common.wrappable(facts)):
        found.append(Options(dynamic=dynamic, scope="blocks"))
    if facts.device == "cuda" and facts.shapes == 1 and not facts.compiles:     # else shapes were not watched
        if facts.micro_steps == 1 and facts.zero_grad_set_to_none is True:
            found += [Options(mode="reduce-overhead"), Options(mode="max-autotune")]
        else:
            found.append(Options(mode="max-autotune-no-cudagraphs"))
    return found


def bound(facts: Facts) -> float | None:
    return _common.computing(facts)


def apply(context: Any, options: Options) -> str:
    if not context.modules:
        raise NotApplied("no trained module is known")
    if context.differentiates_gradients:
        raise NotApplied(_DIFFERENTIATES)
    compiler = _Compiler(context, options)
    if options.scope == "module":
        count = _common.wrap_all(context, lambda module: context.wrap_forward(module, ORDER, compiler.wrap, around=True))
        _heed_hooks(context)
        _keep_what_is_saved(context)
        return f"forward of {count} module(s) compiled, mode {options.mode}, dynamic {options.dynamic}"
    blocks = [block for module in _common.outermost(context.modules) for block in repeated_blocks(module)]
    if not blocks:
        raise NotApplied(f"no block repeats at least {REPEATS} times")
    for block in blocks:
        context.wrap_forward(block, ORDER, compiler.wrap)
    _heed_hooks(context)
    _keep_what_is_saved(context)
    return f"forward of {len(blocks)} repeated blocks compiled, mode {options.mode}, dynamic {options.dynamic}"


def _heed_hooks(context: Any) -> None:
    """Dynamo does not look whether a module got a hook since it was captured, unless told to: the script's would not be called."""
    config = context.torch._dynamo.config
    if getattr(config, "skip_nnmodule_hook_guards", False):
        context.set_attribute(config, "skip_nnmodule_hook_guards", False)


def _keep_what_is_saved(context: Any) -> None:
    """With donated buffers a backward pass that keeps its graph raises."""
    from torch._functorch import config
    from torch._inductor import config as inductor

    if getattr(config, "donated_buffer", False):
        _set_in_all_threads(context, config, "donated_buffer", False)
        # Inductor's cache of graphs has nothing of it in its keys, and would find code that writes to what was saved. This it has there;
        # it decides on a benchmark below the code alone.
        _set_in_all_threads(context, inductor, "benchmark_harness", not inductor.benchmark_harness)


def _set_in_all_threads(context: Any, config: Any, name: str, value: bool) -> None:
    """What is set counts in the thread that sets it only, in newer versions of torch, and CUDA's backward passes run in others: the default
    counts in all of them."""
    context.set_attribute(config, name, value)
    entry = getattr(config, "_config", {}).get(name)
    if hasattr(entry, "default"):
        context.set_attribute(entry, "default", value)


def repeated_blocks(module: Any) -> list[Any]:
    """The instances of the composite class that repeats at least `REPEATS` times and holds most parameters; where one
    class contains the other, that is the outer one."""
    found: dict[type, list[Any]] = defaultdict(list)
    for child in module.modules():
        has_forward = not type(child).__name__.endswith(("ModuleList", "ModuleDict"))
        if child is not module and has_forward and next(child.children(), None) is not None:
            found[type(child)].append(child)
    repeated = [blocks for blocks in found.values() if len(blocks) >= REPEATS]
    return max(repeated, key=lambda blocks: sum(p.numel() for b in blocks for p in b.parameters()), default=[])


class _Compiler:
    """Makes wrappers that run a compiled function, and counts the graphs that the compiler really captured
    (a frame also counts as compiled when it holds nothing but a graph break)."""

    def __init__(self, context: Any, options: Options):
        self.context = context
        self.options = options
        self.graphs = 0
        self.shared: dict[Any, Any] = {}

    def wrap(self, inner: Any) -> Any:
        torch = self.context.torch
        compiled = self._compiled(inner)
        pending = [True]

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            # The user compiles a function around the model, or differentiates in forward mode, which compiled code cannot.
            if torch.compiler.is_compiling() or _common.in_forward_mode(torch):
                return inner(module, *args, **kwargs)
            if not pending:
                return compiled(module, *args, **kwargs)
            pending.clear()
            before = self._captured()
            output = compiled(module, *args, **kwargs)
            self.graphs += self._captured() - before
            if self.graphs:
                self.context.note(TECHNIQUE.id, f"{self.graphs} graph(s) captured")
            return output

        return forward

    def _compiled(self, inner: Any) -> Any:
        if self.options.scope == "blocks" and inner in self.shared:
            return self.shared[inner]

        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            return inner(module, *args, **kwargs)

        # Dynamo files its results, and counts recompilations, by code object: each function needs one of its own.
        own = types.FunctionType(run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__)
        compiled = self.context.torch.compile(own, mode=self.options.mode, dynamic=_DYNAMIC[self.options.dynamic])
        if self.options.mode in RECORDING and self.context.device == "cuda":
            compiled = _copying(self.context.torch, compiled)
        self.shared[inner] = compiled
        return compiled

    def _captured(self) -> int:
        return int(self.context.torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _copying(torch: Any, compiled: Any) -> Any:
    return lambda *args, **kwargs: _common.map_tensors(compiled(*args, **kwargs), torch.clone, torch)


def active(evidence: Evidence, options: Options) -> Proof:
    seen = evidence.notes.get(TECHNIQUE.id, "")
    if not seen or not evidence.dynamo_frames:
        return Proof(False, "the compiler captured nothing of the wrapped modules")
    if evidence.recompile_limit_hit:
        return Proof(False, "the recompilation limit was hit, so the model runs eagerly again")
    if options.mode in RECORDING and evidence.cuda_graphs is False:
        return Proof(False, f"mode {options.mode} asks for CUDA graphs, and no CUDA graph was recorded: inductor skipped "
                            f"{evidence.cuda_graph_skips or 'all of them'} (TORCH_LOGS=cudagraphs says why)")
    return Proof(True, f"{seen}, {evidence.graph_breaks} graph breaks, {evidence.recompiles} recompilations")


def as_code(options: Options) -> str:
    arguments = f'mode="{options.mode}", dynamic={_DYNAMIC[options.dynamic]}'
    recording = options.mode in RECORDING
    copy, why = (".clone()", "      # each tensor of it: on a GPU the next call writes to what this one returned") if recording else ("", "")
    if options.scope == "module":
        return (
            f"compiled = torch.compile(model, {arguments})      # call it to train; evaluate, save and load `model`\n"
            f"output = compiled(inputs){copy}{why}"
        )
    return (
        "import functools\n"
        "\n"
        f"compiled = torch.compile(type(model.blocks[0]).forward, {arguments})      # model.blocks: those that repeat\n"
        "\n"
        "def forward(block, *args, **kwargs):\n"
        f"    return compiled(block, *args, **kwargs){copy}{why}\n"
        "\n"
        "for block in model.blocks:\n"
        "    block.forward = functools.partial(forward, block)"
    )
