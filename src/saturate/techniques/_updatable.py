"""Which optimizers and parameters can be updated one by one while the backward pass goes on.

Why an optimizer cannot be served (`why_not`, `shared`), and how many hold a parameter, which may be updated only where nothing else
does (`holders`, `alone`). `_updates` asks, and updates.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from saturate.techniques import _common

#: Optimizers of torch whose update of a parameter looks at nothing but that parameter, its gradient and its state.
KINDS = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD", "Rprop", "Adafactor")

#: Modules (by the beginning of their names) that may read gradients which were used and freed: they look whether there is one, and do right
#: where there is none.
READ_GRADIENTS = ("torch.optim.", "torch.nn.modules.module", "saturate.")


def why_not(optimizer: Any, torch: Any) -> str:
    """Why this optimizer cannot run parameter by parameter; "" when it can."""
    kind = type(optimizer)
    if kind not in {getattr(torch.optim, name, None) for name in KINDS}:
        return f"{_common.spelled(kind.__name__, kind.__module__)} is not known to update each parameter by itself"
    held = list(parameters(optimizer))
    if not any(p.requires_grad for p in held):
        return f"everything that {kind.__name__} holds is frozen"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{kind.__name__} is differentiable"
    if not all(isinstance(p, torch.nn.Parameter) for p in held):
        return "it updates tensors that are no Parameters, whose gradients cannot be watched"
    if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in held):
        return "the script has hooks of its own that run when a gradient is complete"
    if not hasattr(torch._C, "_storage_Use_Count") or not hasattr(torch.Tensor, "_use_count"):
        return "this version of torch does not tell who else holds a parameter"
    return ""


def parameters(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def shared(optimizers: Iterable[Any], built: Callable[[], Iterable[Any]]) -> str:
    """Why these optimizers are not alone with their parameters, of all that were built and are still there; "" when they are. One that
    had a learning rate scheduler is in a cycle with it, and is there until garbage is collected."""
    if _shared(optimizers, built()):
        gc.collect()
    return _shared(optimizers, built())


def _shared(optimizers: Iterable[Any], built: Iterable[Any]) -> str:
    mine = {id(optimizer) for optimizer in optimizers}
    owned = {id(p) for optimizer in optimizers for p in parameters(optimizer)}
    others = (o for o in built if id(o) not in mine and "param_groups" in vars(o) and any(id(p) in owned for p in parameters(o)))
    return next(map(another, others), "")


def another(optimizer: Any) -> str:
    return f"{type(optimizer).__name__}, another optimizer of the script, holds the same parameters"


def holders(parameter: Any, torch: Any) -> tuple[int, int]:
    """How many hold the parameter, and how many tensors share its memory, each with what asking adds."""
    return parameter._use_count(), _common.memory_holders(parameter, torch)


@functools.cache
def alone(torch: Any) -> tuple[int, int]:
    """What `holders` says of a parameter that nothing in the graph has saved: but for Python, the node that collects its gradient
    holds it. No backward pass is run for it, which others would take for one of the script's."""
    with torch.enable_grad():
        parameter = torch.nn.Parameter(torch.ones(1, device="cpu"))
        collects = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        found = holders(parameter, torch)
    del collects
    return found
