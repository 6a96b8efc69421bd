"""Drop gradients between steps instead of filling them with zeros.

What it does
------------
`zero_grad(set_to_none=False)` writes zeros into every gradient, and the next backward adds to them. Dropping the
gradients saves both passes over memory.

When it helps
-------------
Scripts that still ask for zeros, with large models.

When it hurts
-------------
Scripts that read `parameter.grad` between `zero_grad` and backward find None.

Numerics
--------
`exact`: a gradient that is written equals one that was added to zero. A parameter whose gradient stays unused in a step
gets its zeros before the optimizer looks, so momentum and weight decay act on it as before.

How it is applied
-----------------
`zero_grad` of torch's optimizers is replaced, for those that have no other, and for what wraps them and has their groups (as with
Lightning and Fabric, whose scripts never see the optimizer itself). When the next backward ends (or a step begins, or
its closure ends, without one), what it left out is filled with zeros; a gradient that the script itself drops after that stays
dropped. Still zeroed in place are gradients that something else holds or that lie in a larger memory (views of one flat buffer),
and sparse ones.

References
----------
PyTorch documentation, "torch.optim.Optimizer.zero_grad".
PyTorch recipes, "Zeroing out gradients in PyTorch".
"""

from __future__ import annotations

import functools
import sys
import weakref
from dataclasses import dataclass
from typing import Any

from saturate.records.facts import Evidence, Facts
from saturate.techniques import _closures
from saturate.techniques._api import Eligible, Ineligible, NotApplied, Proof, Technique, Touch

TECHNIQUE = Technique(
    id="zero-grad-none",
    title="gradients dropped, not zeroed",
    numerics="exact",
    stage="model",
    touches=(Touch("zero-grad"), Touch("backward-call", 0)),
)


@dataclass(frozen=True)
class Options:
    """Nothing to choose."""


def eligible(facts: Facts) -> Eligible | Ineligible:
    if facts.zero_grad_set_to_none is None:
        return Ineligible("the script never calls zero_grad")
    if facts.zero_grad_set_to_none:
        return Ineligible("gradients are dropped already, the default since PyTorch 2.0")
    if not facts.optimizers:
        return Ineligible("no torch optimizer stepped")
    return Eligible("the script asks zero_grad for zeros")


def apply(context: Any, options: Options) -> str:
    if not context.optimizers:
        raise NotApplied("no optimizer is known")
    if not hasattr(context.torch._C, "_storage_Use_Count") or not hasattr(context.torch.Tensor, "_use_count"):
        raise NotApplied("this version of torch does not tell who else holds a gradient")
    kind = context.torch.optim.Optimizer
    optimizers = [o for o in context.optimizers if type(o).zero_grad is kind.zero_grad and "zero_grad" not in vars(o)]
    if not optimizers:
        raise NotApplied(f"{type(context.optimizers[0]).__name__} has a zero_grad of its own")
    emptied: dict[int, weakref.ref[Any]] = {}       # by id, parameters whose gradients were dropped, and no backward has ended since

    def fill() -> None:
        _fill(context.torch, emptied)

    def before_step(_: Any, args: Any, kwargs: Any) -> Any:
        fill()
        return _closures.around(args, kwargs, fill)

    for optimizer in optimizers:
        context.on_undo(optimizer.register_step_pre_hook(before_step).remove)
    context.set_attribute(kind, "zero_grad", _dropping(context, kind.zero_grad, list(map(weakref.ref, optimizers)), emptied))
    autograd = context.torch.autograd
    original = autograd.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if emptied:
            fill()
        return found

    context.set_attribute(autograd, "backward", context.torch._disable_dynamo(backward))
    return f"zero_grad of {len(optimizers)} optimizer(s) drops gradients"


def _dropping(context: Any, original: Any, ours: list[weakref.ref[Any]], emptied: dict[int, weakref.ref[Any]]) -> Any:
    pending = [True]

    @functools.wraps(original)
    def zero_grad(this: Any, set_to_none: bool = True) -> None:
        if type(this).zero_grad is not wrapper or not any(this.param_groups is optimizer.param_groups
                                                          for held in ours if (optimizer := held()) is not None):
            return original(this, set_to_none)
        own = [parameter for group in this.param_groups for parameter in group["params"]]
        if set_to_none:
            for parameter in own:
                emptied.pop(id(parameter), None)
            return original(this, set_to_none=True)
        dropped = [parameter for parameter in own if _droppable(parameter, context.torch)]
        for parameter in dropped:
            parameter.grad = None
            emptied[id(parameter)] = weakref.ref(parameter)
        original(this, set_to_none=False)       # the others; the user's own None stays None, as it did
        if dropped and pending:
            pending.clear()
            context.note(TECHNIQUE.id, f"{len(dropped)} gradients dropped instead of zeroed")

    wrapper = context.torch._disable_dynamo(zero_grad)
    return wrapper


def _droppable(parameter: Any, torch: Any) -> bool:
    """Whether nobody would miss the gradient: it is dense, and nothing else holds it or any part of its memory."""
    grad = parameter.grad
    if type(grad) is not torch.Tensor or grad.layout is not torch.strided:
        return False
    del grad
    return _holders(parameter, torch) == _alone(torch)


def _holders(parameter: Any, torch: Any) -> tuple[int, int, int]:
    """How many hold the gradient, share its memory, and have it in Python, each with what asking adds."""
    grad = parameter.grad
    return grad._use_count(), torch._C._storage_Use_Count(grad.untyped_storage()._cdata), sys.getrefcount(grad)


@functools.cache
def _alone(torch: Any) -> tuple[int, int, int]:
    parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    parameter.grad = torch.zeros(1, device="cpu")
    return _holders(parameter, torch)


def _fill(torch: Any, emptied: dict[int, weakref.ref[Any]]) -> None:
    for held in emptied.values():
        parameter = held()
        # With a hook of its own, a gradient may have been used and dropped already.
        if parameter is not None and parameter.grad is None and not parameter._post_accumulate_grad_hooks:
            parameter.grad = torch.zeros_like(parameter)
    emptied.clear()


def active(evidence: Evidence, options: Options) -> Proof:
    seen = evidence.notes.get(TECHNIQUE.id, "")
    return Proof(bool(seen), seen or "no gradient was dropped")


def as_code(options: Options) -> str:
    return (
        "had = [p for group in optimizer.param_groups for p in group[\"params\"] if p.grad is not None]\n"
        "optimizer.zero_grad(set_to_none=True)\n"
        "loss.backward()\n"
        "for p in had:\n"
        "    if p.grad is None:      # not used in this step: momentum and weight decay act on it as before\n"
        "        p.grad = torch.zeros_like(p)"
    )
