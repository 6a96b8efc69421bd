"""Choose the attention kernel instead of leaving the choice to PyTorch.

What it does
------------
Allows one implementation of `scaled_dot_product_attention` (flash, cuDNN, memory-efficient or the plain one), with the
plain one for calls that it does not support. PyTorch's own order may have the plain one before cuDNN's, so the order is set as
well (PyTorch 2.6 and later).

When it helps
-------------
GPUs: the default order of preference is not the fastest for every head size and length. On CPUs there is flash and the
plain one; short sequences may prefer the plain one.

When it hurts
-------------
A kernel that does not support the call's mask, dtype or head size is not used, and the plain one is slow and takes memory
that grows with the square of the length.

Numerics
--------
`reordering`: the same sums in another order.

How it is applied
-----------------
By torch's process-wide switches, also after loading. The proof is the attention operator that one forward of the model
dispatches; what a compiler makes of it later follows the same switches.

References
----------
PyTorch documentation, "torch.nn.attention.sdpa_kernel" and "torch.nn.functional.scaled_dot_product_attention".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from saturate.inference import session
from saturate.inference.techniques import _wrap
from saturate.inference.techniques._api import Context, Eligible, Ineligible, NotApplied, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="sdpa-kernel",
    title="attention kernel",
    numerics="reordering",
    stage="session",
    touches=(Touch("sdpa-backend"),),
)

#: What an operator's name holds when an implementation ran.
_OPERATORS = {
    "flash": "_scaled_dot_product_flash_attention", "efficient": "_scaled_dot_product_efficient_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention", "math": "_scaled_dot_product_attention_math",
}


@dataclass(frozen=True)
class Options:
    """`backend` is flash, efficient, cudnn or math."""

    backend: str = "flash"

    def __post_init__(self) -> None:
        if self.backend not in _OPERATORS:
            raise ValueError(f"backend is {self.backend!r}, not one of {', '.join(_OPERATORS)}")


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    if facts.device not in ("cpu", "cuda"):
        return Ineligible(f"not offered on {facts.device or 'unknown'} devices")
    if not facts.attentions:
        return Ineligible("the model has no attention")
    return Eligible(f"{facts.attentions} attentions")


def variants(facts: ModelFacts) -> Sequence[Options]:
    if facts.device == "cpu":
        return [Options("math")]        # flash is the default there
    return [Options("cudnn"), Options("flash"), Options("efficient")]


def apply(context: Context, options: Options) -> str:
    session.switch(context, "attention", options.backend)
    used = _used(context)
    if not used:
        raise NotApplied("the model does not call scaled_dot_product_attention")
    if options.backend not in used:
        cause = f"{options.backend} does not support these calls"
        if options.backend == "cudnn" and not session.takes_attention_order(context.torch):
            cause = "this torch may prefer every other kernel to cudnn, and takes no other order (2.6 does)"
        raise NotApplied(f"attention ran by {', '.join(sorted(used))}: {cause}")
    context.notes[TECHNIQUE.id] = f"{used[options.backend]} attention call(s) ran by {options.backend}"
    return f"attention by {options.backend}"


def _used(context: Context) -> dict[str, int]:
    """How often each implementation ran in one forward."""
    torch = context.torch
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _wrap.answer(context, context.inputs[0])
    found: dict[str, int] = {}
    for event in profile.key_averages():
        for name, operator in _OPERATORS.items():
            if operator in event.key:
                found[name] = found.get(name, 0) + event.count
    return found


def active(context: Context, options: Options) -> Proof:
    seen = context.notes.get(TECHNIQUE.id, "")
    return Proof(bool(seen), seen or f"no {options.backend} attention was seen")


def as_code(options: Options) -> str:
    return "\n".join(session.attention_lines(options.backend))
