"""Run the model's forward in float16 with dynamic loss scaling, on GPUs that have no bfloat16 arithmetic.

What it does
------------
Wraps the forward of the outermost trained modules in `torch.autocast` with float16, and multiplies every loss by a power
of two around the user's own `backward`, so that small gradients do not vanish in float16.

When it helps
-------------
Models bound by matrix products or convolutions on NVIDIA Volta and Turing: tensor cores for float16, none for bfloat16.

When it hurts
-------------
Small layers, and trainings whose activations exceed 65504: then steps are skipped again and again. Where bfloat16 is
native, that is both safer and as fast, so this technique is not offered.

Numerics
--------
`precision`: float16 keeps 11 bits of significand. A step whose gradients overflowed is skipped and the scale is halved;
after `growth_steps` good steps it is doubled.

How it is applied
-----------------
`torch.autograd.backward` is replaced. It scales what goes in and divides the accumulated gradients before it returns, so
gradient clipping, logging and custom optimizers see true gradients. Scaling by a power of two rounds nothing. Where an
overflow was found, the optimizer's gradients are set to None before its step, which therefore changes nothing. An
optimizer that steps inside of backward cannot be served and raises.

References
----------
PyTorch documentation, "Automatic Mixed Precision examples", section "Gradient scaling".
Micikevicius et al., "Mixed Precision Training", ICLR 2018.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from saturate.records.facts import Evidence, Facts
from saturate.techniques import _common
from saturate.techniques._api import Eligible, Ineligible, NotApplied, Proof, Technique, Touch

TECHNIQUE = Technique(
    id="fp16-autocast",
    title="float16 autocast with loss scaling",
    numerics="precision",
    stage="model",
    touches=(Touch("forward", _common.AUTOCAST_ORDER), Touch("autocast"), Touch("backward", 10)),
)


@dataclass(frozen=True)
class Options:
    """The first scale is low enough that a usual training does not skip its first steps."""

    initial_scale: float = field(default=4096.0, metadata={"minimum": 1.0, "maximum": 2.0**64})
    growth_steps: int = field(default=500, metadata={"minimum": 1})


def eligible(facts: Facts) -> Eligible | Ineligible:
    if facts.device != "cuda":
        return Ineligible("float16 arithmetic only pays on CUDA devices")
    if facts.cuda_bf16_native:
        return Ineligible("the device has bfloat16 arithmetic, which needs no loss scaling")
    if not facts.capability or tuple(facts.capability) < (7, 0):
        return Ineligible("the device has no float16 tensor cores")
    refusal = _common.why_no_autocast(facts)
    if refusal is not None:     # a refusal is false
        return refusal
    if not facts.optimizers:
        return Ineligible("no torch optimizer stepped, so an overflowed step could not be skipped")
    if any(optimizer.sparse or optimizer.kind == "LBFGS" for optimizer in facts.optimizers):
        return Ineligible("loss scaling does not work with sparse gradients or closures that run backward")
    return Eligible("float32 matrix products or convolutions on a device with float16 tensor cores only")


def variants(facts: Facts) -> list[Options]:
    return [Options()]


def bound(facts: Facts) -> float | None:
    return _common.computing(facts)


def apply(context: Any, options: Options) -> str:
    if not context.optimizers:
        raise NotApplied("no optimizer is known, so an overflowed step could not be skipped")
    count = _common.wrap_autocast(context, context.torch.float16, TECHNIQUE.id)
    scaler = _Scaler(context, options)
    for optimizer in context.optimizers:
        context.on_undo(optimizer.register_step_pre_hook(scaler.before_step).remove)
    autograd = context.torch.autograd
    wrapper = functools.wraps(autograd.backward)(functools.partial(scaler.backward, autograd.backward))
    # A compiler that traced the wrapper would lose what it does to the gradients.
    context.set_attribute(autograd, "backward", context.torch._disable_dynamo(wrapper))
    return f"forward of {count} module(s) under float16 autocast, losses scaled by {options.initial_scale:g} at first"


class _Scaler:
    """Dynamic loss scaling. Outside of `backward`, gradients are never scaled."""

    def __init__(self, context: Any, options: Options):
        self.torch = context.torch
        self.scale = options.initial_scale
        self.growth_steps = options.growth_steps
        self.good_steps = 0
        self.inside = False     # one flag for all threads: CUDA runs nested backward passes in threads of its own
        self.optimizers = context.optimizers
        self.overflow: dict[tuple[int, Any], Any] = {}      # (optimizer, device) -> 1.0 after an overflow, else 0.0

    def backward(
        self, original: Any, tensors: Any, grad_tensors: Any = None, retain_graph: Any = None,
        create_graph: bool = False, *rest: Any, **named: Any,
    ) -> None:
        if self.inside or create_graph:     # reentrant checkpointing; a graph of gradients must not hold the scale
            return original(tensors, grad_tensors, retain_graph, create_graph, *rest, **named)
        outputs = (tensors,) if isinstance(tensors, self.torch.Tensor) else tuple(tensors)
        given = (grad_tensors,) if isinstance(grad_tensors, self.torch.Tensor) else grad_tensors
        given = tuple(given) if given is not None else (None,) * len(outputs)
        for _, _, grads in self._gradients():
            self.torch._foreach_mul_(grads, self.scale)     # what earlier micro-steps accumulated
        self.inside = True
        try:
            original(outputs, tuple(map(self._scaled, outputs, given)), retain_graph, create_graph, *rest, **named)
        finally:
            self.inside = False
            for optimizer, device, grads in self._gradients():
                flag = self.overflow.setdefault((id(optimizer), device), self.torch.zeros((), device=device))
                inverse = self.torch.full((), 1.0 / self.scale, device=device)
                self.torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inverse)
        return None

    def _scaled(self, output: Any, grad: Any) -> Any:
        if grad is not None:
            return grad * self.scale
        return self.torch.full_like(output, self.scale) if output.numel() == 1 else None    # None: torch explains

    def _gradients(self) -> list[tuple[Any, Any, list[Any]]]:
        """Existing gradients as (optimizer, device, list of one dtype), each tensor once."""
        lists: dict[tuple[int, Any, Any], tuple[Any, Any, list[Any]]] = {}
        seen: set[int] = set()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    grad = parameter.grad
                    if grad is None or id(grad) in seen:
                        continue
                    seen.add(id(grad))
                    key = (id(optimizer), grad.device, grad.dtype)
                    lists.setdefault(key, (optimizer, grad.device, []))[2].append(grad)
        return list(lists.values())

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.inside:
            raise RuntimeError("fp16-autocast cannot serve an optimizer that steps inside of backward")
        flags = [flag for (owner, _), flag in self.overflow.items() if owner == id(optimizer)]
        if any(flag.item() for flag in flags):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None       # a step without gradients changes nothing, whatever the optimizer
            self.scale, self.good_steps = max(1.0, self.scale / 2), 0
        else:
            self.good_steps += 1
            if self.good_steps >= self.growth_steps:
                self.scale, self.good_steps = self.scale * 2, 0
        for flag in flags:
            flag.zero_()


def active(evidence: Evidence, options: Options) -> Proof:
    seen = evidence.notes.get(TECHNIQUE.id, "")
    return Proof(bool(seen), seen or "nothing in the autograd graph was computed in float16")


def as_code(options: Options) -> str:
    return (
        f"scaler = torch.amp.GradScaler(init_scale={options.initial_scale!r}, growth_interval={options.growth_steps})\n"
        "with torch.autocast('cuda', dtype=torch.float16):\n"
        "    output = model(inputs)\n"
        "scaler.scale(criterion(output.float(), targets)).backward()\n"
        "scaler.unscale_(optimizer)      # before gradient clipping\n"
        "scaler.step(optimizer)\n"
        "scaler.update()"
    )
