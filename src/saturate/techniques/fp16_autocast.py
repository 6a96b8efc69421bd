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
gradient clipping, logging and custom optimizers see true gradients, and so does a script that asks for those of its inputs.
Scaling by a power of two rounds nothing. Where an overflow was found, the optimizer's gradients are set to None before its update
(after the closure of `step(closure)`), which therefore changes nothing. One that is not torch's own may not look whether there are
gradients, or count the step: it is called for a stand-in without parameters then. An optimizer that steps inside of backward cannot be
served and raises.

What looks at gradients while backward goes on would see scaled ones. Where the script hooks a tensor or the backward of a module,
or retains the gradient of an intermediate tensor, the technique withdraws with a line on stderr: the training goes on in float32.
An autograd function of the script's own whose backward is not linear in its gradient (a clamp) is not seen. Threads may train
models of their own side by side, but not the same parameters. LSTMs stay in float32 where `bf16-autocast` leaves them so.

References
----------
PyTorch documentation, "Automatic Mixed Precision examples", section "Gradient scaling".
Micikevicius et al., "Mixed Precision Training", ICLR 2018.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from saturate import notices
from saturate.records.facts import Evidence, Facts
from saturate.techniques import _autocast, _autograd, _closures, _common
from saturate.techniques._api import Eligible, Ineligible, NotApplied, Proof, Technique, Touch
from saturate.techniques._weakly import held_weakly

TECHNIQUE = Technique(
    id="fp16-autocast",
    title="float16 autocast with loss scaling",
    numerics="precision",
    stage="model",
    touches=(Touch("forward", _autocast.AUTOCAST_ORDER), Touch("autocast"), Touch("backward", 10), Touch("backward-call", 10)),
)

#: Of the note that says why float16 was given up.
STOPPED = f"{TECHNIQUE.id}:stopped"
#: Packages whose hooks on gradients do not mind a scale.
_HARMLESS = ("torch", "saturate")


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
    refusal = _autocast.why_no_autocast(facts)
    if refusal is not None:     # a refusal is false
        return refusal
    if not facts.optimizers:
        return Ineligible("no torch optimizer stepped, so an overflowed step could not be skipped")
    if any(optimizer.sparse or optimizer.kind == "LBFGS" for optimizer in facts.optimizers):
        return Ineligible("loss scaling does not work with sparse gradients or closures that run backward")
    return Eligible("float32 matrix products or convolutions on a device with float16 tensor cores only")


def bound(facts: Facts) -> float | None:
    return _common.computing(facts)


def apply(context: Any, options: Options) -> str:
    if not context.optimizers:
        raise NotApplied("no optimizer is known, so an overflowed step could not be skipped")
    scaler = _Scaler(context, options)
    reason = scaler.hooked(p for o in context.optimizers for p in _parameters(o)) or _hooked_module(context.modules)
    if reason:
        raise NotApplied(reason)
    count = _autocast.wrap_autocast(context, context.torch.float16, TECHNIQUE.id, lambda: not scaler.stopped)
    for optimizer in context.optimizers:
        context.on_undo(optimizer.register_step_pre_hook(scaler.before_step).remove)
    autograd, tensor = context.torch.autograd, context.torch.Tensor
    wrapper = functools.wraps(autograd.backward)(functools.partial(scaler.backward, autograd.backward))
    # A compiler that traced the wrapper would lose what it does to the gradients.
    context.set_attribute(autograd, "backward", context.torch._disable_dynamo(wrapper))
    for name, does in (("register_hook", "hooks"), ("retain_grad", "retains")):
        context.set_attribute(tensor, name, scaler.watched(getattr(tensor, name), does))
    return f"forward of {count} module(s) under float16 autocast, losses scaled by {options.initial_scale:g} at first"


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _hooked_module(modules: Iterable[Any]) -> str:
    """Why a script's hooks on modules forbid scaling, or ""."""
    for part in (part for module in modules for part in module.modules()):
        if part._backward_hooks or part._backward_pre_hooks:
            return f"the script hooks the backward of {type(part).__name__}, and would see scaled gradients"
    return ""


def _times(torch: Any, scale: float, output: Any, grad: Any) -> Any:
    """What the backward pass of an output begins with."""
    if grad is not None:
        return grad * scale
    return torch.full_like(output, scale) if output.numel() == 1 else None      # None: torch explains


class _Scaler:
    """Dynamic loss scaling. Outside of `backward`, gradients are never scaled."""

    def __init__(self, context: Any, options: Options):
        self.torch = context.torch
        self.note = context.note
        self.modules = held_weakly(context.modules)              # torch's backward holds us, and the script may drop its model
        self.optimizers = held_weakly(context.optimizers)
        self.scale = options.initial_scale
        self.growth_steps = options.growth_steps
        self.good_steps = 0
        self.stopped = False
        self.passes: list[float] = []       # scales of the outermost backward passes under way, one for each thread that trains
        self.held: dict[int, Any] = {}      # by id, tensors whose gradients are scaled now
        self.overflow: dict[tuple[int, Any], Any] = {}      # (optimizer or 0, device) -> 1.0 after an overflow, else 0.0

    def backward(
        self, original: Any, tensors: Any, grad_tensors: Any = None, retain_graph: Any = None,
        create_graph: bool = False, *rest: Any, **named: Any,
    ) -> None:
        tensors = outputs = _autograd.roots(tensors, self.torch)
        if self._nested():      # reentrant checkpointing: what comes in is scaled already, and so must be what the inputs get
            owners, found = self._owners(), self._reached(outputs, ())[0] if self.passes else []
            trained = [tensor for tensor in found if id(tensor) in owners or isinstance(tensor, self.torch.nn.Parameter)]
            with self._holding(trained, self.passes[-1] if self.passes else 1.0):
                return original(tensors, grad_tensors, retain_graph, create_graph, *rest, **named)
        if create_graph or self.stopped:        # a graph of gradients must not hold the scale
            return original(tensors, grad_tensors, retain_graph, create_graph, *rest, **named)
        if not all(isinstance(output, self.torch.Tensor) for output in outputs):
            self._stop("a backward pass begins at an edge of the graph, not at a loss")
            return original(tensors, grad_tensors, retain_graph, create_graph, *rest, **named)
        reached, reason = self._reached(outputs, named.get("inputs", rest[1] if len(rest) > 1 else ()))
        if reason:
            self._stop(reason)
            return original(tensors, grad_tensors, retain_graph, create_graph, *rest, **named)
        given = (grad_tensors,) if isinstance(grad_tensors, self.torch.Tensor) else grad_tensors
        given = tuple(given) if given is not None else (None,) * len(outputs)
        scale = self.scale          # a thread that trains another model may change it meanwhile
        scaled = tuple(map(functools.partial(_times, self.torch, scale), outputs, given))
        self.passes.append(scale)
        try:
            with self._holding(reached, scale):
                original(outputs, scaled, retain_graph, create_graph, *rest, **named)
        finally:
            self.passes.remove(scale)
        return None

    def _nested(self) -> bool:
        """Whether this is called inside of a backward pass. CUDA runs nested ones in threads of its own, which know it too."""
        return bool(self.torch._C._current_graph_task_id() != -1)

    @contextlib.contextmanager
    def _holding(self, tensors: list[Any], scale: float) -> Iterator[None]:
        """Their gradients are scaled meanwhile, but for those that are already."""
        mine = [tensor for tensor in tensors if id(tensor) not in self.held]
        self.held.update((id(tensor), tensor) for tensor in mine)
        for _, _, grads in self._gradients(mine):
            self.torch._foreach_mul_(grads, scale)      # what earlier micro-steps accumulated
        try:
            yield
        finally:
            for tensor in mine:
                del self.held[id(tensor)]
            for owner, device, grads in self._gradients(mine):
                flag = self.overflow.setdefault((owner, device), self.torch.zeros((), dtype=self.torch.float32, device=device))
                inverse = self.torch.full((), 1.0 / scale, dtype=self.torch.float32, device=device)
                self.torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inverse)

    def _reached(self, outputs: tuple[Any, ...], inputs: Any) -> tuple[list[Any], str]:
        """The tensors whose `.grad` a backward pass adds to, and why those must not be scaled, or ""."""
        known = [*_common.tensors(inputs, self.torch), *(tensor for tensor in _common.tensors(outputs, self.torch) if tensor.is_leaf)]
        found = {id(tensor): tensor for tensor in known}
        reason = ""
        for node in _autograd.graph_nodes(outputs, self.torch, limit=sys.maxsize):
            if (leaf := _autograd.leaf_of(node)) is not None:
                found[id(leaf)] = leaf
            elif _autograd.node_name(node).startswith("BackwardHookFunction"):
                reason = "the script hooks the backward of a module, and would see scaled gradients"
        for optimizer in self.optimizers():       # whole: a function of the script's own may add to gradients by itself
            own = {id(parameter): parameter for parameter in _parameters(optimizer)}
            if not own.keys().isdisjoint(found):
                found.update(own)
        return list(found.values()), reason or self.hooked(found.values())

    def hooked(self, tensors: Iterable[Any]) -> str:
        """Why the gradient of one of these tensors must not be scaled, or ""."""
        for tensor in tensors:
            if tensor.is_complex():
                return f"{self._name(tensor)} is complex, which torch's loss scaling does not support"
            if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                return f"the script hooks the gradient of {self._name(tensor)}, and would see a scaled one"
        return ""

    def _name(self, tensor: Any) -> str:
        names = (name for module in self.modules() for name, parameter in module.named_parameters() if parameter is tensor)
        return next(names, f"a tensor of shape {tuple(tensor.shape)}")

    def watched(self, original: Any, does: str) -> Any:
        """`original`, a method of tensors, that stops the scaling where the script calls it on an intermediate one."""

        @functools.wraps(original)
        def method(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__") or ""
            if tensor.grad_fn is not None and caller.partition(".")[0] not in _HARMLESS:
                self._stop(f"the script {does} the gradient of an intermediate tensor, and would see a scaled one")
            return original(tensor, *args, **kwargs)

        return method

    def _stop(self, reason: str) -> None:
        """From the next forward on in float32, and not scaled from this very pass on."""
        if not self.stopped:
            self.stopped = True
            self.note(STOPPED, f"given up: {reason}")
            notices.tell(f"saturate: {TECHNIQUE.id}: {reason}; the training goes on in float32\n")

    def _owners(self) -> dict[int, int]:
        """The id of the optimizer by that of the parameter."""
        return {id(parameter): id(o) for o in reversed(self.optimizers()) for parameter in _parameters(o)}

    def _gradients(self, tensors: list[Any]) -> list[tuple[int, Any, list[Any]]]:
        """Existing gradients as (id of the optimizer or 0, device, list of one dtype), each tensor once."""
        owners = self._owners()
        lists: dict[tuple[int, Any, Any], tuple[int, Any, list[Any]]] = {}
        seen: set[int] = set()
        for tensor in tensors:
            grad = tensor.grad if tensor.is_leaf or tensor.retains_grad else None       # of others, torch warns
            if grad is None or id(grad) in seen:
                continue
            seen.add(id(grad))
            owner = owners.get(id(tensor), 0)
            lists.setdefault((owner, grad.device, grad.dtype), (owner, grad.device, []))[2].append(
                grad._values() if grad.is_sparse else grad)
        return list(lists.values())

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if self.passes and self._nested():
            raise RuntimeError("fp16-autocast cannot serve an optimizer that steps inside of backward")
        if _closures.surprising(args, kwargs):
            self._stop("step() is given something to call that is no closure, and gradients may arrive in it")
        with_closure = _closures.around(args, kwargs, lambda: self._decide(optimizer))
        if with_closure is None and self._decide(optimizer) and not type(optimizer).__module__.startswith("torch.optim."):
            return (_without_parameters(optimizer), *args[1:]), kwargs
        return with_closure

    def _decide(self, optimizer: Any) -> bool:
        """Drop the gradients if a backward pass overflowed, and say so; the scale of the next one."""
        # A list: another thread may add to them. What no optimizer holds may stay infinite for ever, and stops no step.
        flags = [flag for (owner, _), flag in list(self.overflow.items()) if owner == id(optimizer)]
        overflowed = any(flag.item() for flag in flags)
        if overflowed:
            for parameter in _parameters(optimizer):
                parameter.grad = None       # a step without gradients changes nothing, whatever the optimizer
            self.scale, self.good_steps = max(1.0, self.scale / 2), 0
        else:
            self.good_steps += 1
            if self.good_steps >= self.growth_steps:
                self.scale, self.good_steps = self.scale * 2, 0
        for flag in flags:
            flag.zero_()
        return overflowed


def _without_parameters(optimizer: Any) -> Any:
    """One of its kind whose step has nothing to do, and counts for nothing."""
    alone = type(optimizer).__new__(type(optimizer))
    vars(alone).update(vars(optimizer), state=collections.defaultdict(dict))
    alone.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    return alone


def active(evidence: Evidence, options: Options) -> Proof:
    if STOPPED in evidence.notes:
        return Proof(False, evidence.notes[STOPPED])
    seen = evidence.notes.get(TECHNIQUE.id, "")
    return Proof(bool(seen), seen or "nothing in the autograd graph was computed in float16")


def as_code(options: Options) -> str:
    return (
        f"scaler = torch.amp.GradScaler(init_scale={options.initial_scale!r}, growth_interval={options.growth_steps})\n"
        "with torch.autocast('cuda', dtype=torch.float16):\n"
        "    output = model(inputs)\n"
        "scaler.scale(loss_fn(output.float(), targets)).backward()\n"
        "scaler.unscale_(optimizer)      # before gradient clipping\n"
        "scaler.step(optimizer)\n"
        "scaler.update()"
    )
