"""Compute activations again in the backward pass instead of keeping them.

What it does
------------
The forward of chosen blocks keeps only what went in; the backward runs it once more. A block can be recomputed whole, or
but for its matrix products, convolutions and attention, whose results are kept.

When it helps
-------------
Where memory is short: a larger batch, longer sequences or a larger model fit. Recomputing every block of a transformer
keeps a small part of its activations, for about a third more arithmetic; recomputing what is cheap frees less, for a few
percent.

When it hurts
-------------
Always in time: with memory to spare it only slows the training down, so without a memory limit it is not tried.

Numerics
--------
`reordering`: the same operators on the same inputs and random numbers, and so the same bits, but for one thing: without a
cache of keys and values (below) attention gets both in another layout, which some kernels add up in another order (with
dropout in the attention on a CPU, for one). In the first step each block's forward runs twice on copies of its arguments
and buffers; a block that gives other bits, changes an argument, an attribute or something else that it reaches (a list of
auxiliary losses, a counter), has a random generator of its own, is passed an object that it may change (a key-value
cache), whose inside has hooks, or in which ranks speak to each other (SyncBatchNorm, tensor and expert parallelism: each
rank decides for itself what it recomputes) is left alone. Buffers that a forward changes (running statistics) are as they were
while it runs again, and are updated once. Not seen are a buffer of more than 64 KiB that a forward first changes in a later
step (in a branch that is seldom taken), which is updated twice there, and what a script changes only in later steps between
a forward and its backward (weights that it replaces, a schedule).

How it is applied
-----------------
The forward of each block is wrapped, in training mode and outside of autocast, in `torch.utils.checkpoint`. The first
step recomputes all of them and measures, storage by storage, what each leaves for the backward and how long its forward
takes. (Where something that a block reaches is set behind its forward in that step, as Hugging Face's classification
models do with a setting of theirs, the next step is measured instead; what is set there again leaves the block alone.)
From then on `mode="blocks"` recomputes every n-th block, `mode="operators"` all of them but for their products, and
`mode="budget"` the cheapest set that keeps the activations of the model and its loss, at their peak, within
`budget_bytes` (or `share` of what they took). Inputs that are larger than the measured ones recompute more. Blocks are
the modules that repeat, else the children of the trained module. Hugging Face models are told not to build a cache of
keys and values in training (through an adapter of PEFT as well), unless the script passes `past_key_values` or
`use_cache`, or wants a tuple; a script that uses that cache all the same gets an error that says so. (Outputs that are
read by number lack its place: read them by name.) What the script compiles, captures in a CUDA graph, differentiates by
`torch.func` or in forward mode, or recomputes itself, is left alone.

References
----------
Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023.
PyTorch documentation, "torch.utils.checkpoint".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saturate.records.facts import Evidence, Facts
from saturate.techniques import _activations, _blocks, _budget, _checkpointing, _common, _shortage
from saturate.techniques._api import Eligible, Ineligible, NotApplied, Proof, Technique, Touch

TECHNIQUE = Technique(
    id="activation-checkpointing",
    title="activation checkpointing",
    numerics="reordering",
    stage="model",
    # A compiler decides by itself what its backward recomputes, and would trace through the measuring.
    touches=(Touch("forward", _checkpointing.ORDER), Touch("saved-tensors"), Touch("compiler")),
)

#: Applied before the first forward, whose activations would be what does not fit.
EARLY = True

_SHARDED = ("FSDP", "FullyShardedDataParallel")

_COMPILED = "the script compiles its model, and a compiler decides itself what to recompute"

_MODES = ("blocks", "operators", "budget")


@dataclass(frozen=True)
class Options:
    """`mode` is "blocks" (every n-th, n = `every`), "operators" or "budget". A budget is `budget_bytes` of activations, or
    where that is 0, `share` of what they take without recomputing."""

    mode: str = "budget"
    every: int = 1
    budget_bytes: int = 0
    share: float = 0.5

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise ValueError(f"mode is {self.mode!r}, not one of {', '.join(_MODES)}")
        if self.every < 1:
            raise ValueError(f"every is {self.every}, not a whole number from 1")
        if self.budget_bytes < 0:
            raise ValueError(f"budget_bytes is {self.budget_bytes}, less than nothing")
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}, not above 0 and at most 1")


def eligible(facts: Facts) -> Eligible | Ineligible:
    if not facts.modules:
        return Ineligible("no trained module was seen")
    if facts.checkpointed:
        return Ineligible("the script recomputes activations itself")
    if why := _common.compiled_already(facts.modules):
        return Ineligible(f"{why}, and a compiler decides itself what to recompute")
    short = _shortage.shortage(facts)
    if not short:
        return Ineligible("it trades time for memory, and memory is not short (`tune --fit` sets a limit)")
    return Eligible(short)


def variants(facts: Facts) -> list[Options]:
    return [Options(share=0.75), Options(share=0.5), Options(share=0.25), Options(mode="blocks")]


def apply(context: Any, options: Options) -> str:
    if not context.modules:
        raise NotApplied("no trained module is known")
    roots = [root for root in context.modules if not _common.is_compiled(root)]
    if not roots:
        raise NotApplied(_COMPILED)
    if any(getattr(part, "gradient_checkpointing", False) for root in roots for part in root.modules()):
        raise NotApplied("the script recomputes activations itself")
    if any(type(part).__name__.startswith(_SHARDED) for root in roots for part in root.modules()):
        raise NotApplied("parameters are sharded, and gathered for each forward")

    def plan(profile: _budget.Profile, growth: float) -> Sequence[str]:
        return modes(profile, options, growth)

    def report(line: str) -> None:
        context.note(TECHNIQUE.id, line)

    def refuse(reason: str) -> None:
        _shortage.refuse(context, TECHNIQUE.id, reason)

    found = [(f"{type(root).__name__}.{name}", block) for root in _common.outermost(roots) for name, block in _named_blocks(root)]
    count = _checkpointing.Checkpointing(context, plan, report, refuse).install(roots, found)
    return f"forward of {count} blocks wrapped to be recomputed, mode {options.mode}"


def _named_blocks(root: Any) -> list[tuple[str, Any]]:
    names = {id(module): name for name, module in root.named_modules()}
    return [(names[id(block)], block) for block in _blocks.blocks(root)]


def modes(profile: _budget.Profile, options: Options, growth: float = 1.0) -> Sequence[str]:
    """The mode of each block for inputs `growth` times the measured ones. Raises NotApplied when nothing can be done, or
    nothing has to be."""
    if options.mode == "blocks":
        return profile.uniform(_budget.WHOLE, options.every)
    if options.mode == "operators":
        if not profile.usable(_budget.OPERATORS):
            raise NotApplied(f"no block can be recomputed but for its products: {profile.why_no_products}")
        return profile.uniform(_budget.OPERATORS)
    plain, least = (profile.peak(policy) for policy in ([_budget.KEEP] * len(profile.costs), profile.uniform(_budget.WHOLE)))
    found = _budget.choose(profile, (options.budget_bytes or options.share * plain) / growth)
    if found is None and least >= plain:        # what a block is given is held as well, and its results are there twice for a while
        raise NotApplied(f"recomputing saves nothing: the peak would be {_common.mebibytes(least)} of activations, without it {_common.mebibytes(plain)}")
    if found is None:
        raise NotApplied(f"with every block recomputed, {_common.mebibytes(least)} of {_common.mebibytes(plain)} of activations remain")
    if all(mode == _budget.KEEP for mode in found):
        raise NotApplied(f"nothing has to be recomputed: the activations take {_common.mebibytes(plain)}")
    return found


def active(evidence: Evidence, options: Options) -> Proof:
    seen = evidence.notes.get(TECHNIQUE.id, "")
    return Proof(bool(seen), seen or _shortage.refusal(evidence.notes, TECHNIQUE.id) or "no block was recomputed as planned")


def as_code(options: Options) -> str:
    blocks, names, sketch, before, contexts = "model.blocks", "checkpoint", "", "", ""
    if options.mode == "blocks":
        blocks += f"[::{options.every}]"
    elif options.mode == "budget":
        limit = f"{options.budget_bytes} bytes" if options.budget_bytes else f"{options.share:.0%} of what they take otherwise"
        sketch = (
            "# A sketch: saturate measures what each block leaves, and recomputes the cheapest that keep activations within\n"
            f"# {limit}. Here it is the first ones, as many as you find to be needed.\n"
        )
        blocks, before = f"{blocks}[:needed]", "needed = len(model.blocks)\n"
    else:
        names, contexts = "CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts", ", context_fn=contexts"
        before = (
            "".join(["PRODUCTS = {\n", *(f"    {name!r},\n" for name in sorted(_activations.PRODUCTS)), "}\n"])
            + "\n"
            "def policy(_, operator, *args, **kwargs):\n"
            "    schema = operator._schema\n"
            "    given = dict(zip((argument.name for argument in schema.arguments), args)) | kwargs\n"
            "    # What is kept is not run again, and would leave the random numbers that it drew to the next one.\n"
            "    kept = schema.name.removeprefix('aten::') in PRODUCTS and not given.get('dropout_p')\n"
            "    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE\n"
            "\n"
            "contexts = functools.partial(create_selective_checkpoint_contexts, policy)\n"
        )
    return (
        f"{sketch}import functools\n"
        f"from torch.utils.checkpoint import {names}\n"
        "\n"
        f"{before}"
        f"for block in {blocks}:      # model.blocks: those that repeat\n"
        f"    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False{contexts})"
    )
