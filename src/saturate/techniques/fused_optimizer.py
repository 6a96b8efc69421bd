"""Update all parameters of an optimizer in one kernel instead of one per operation.

What it does
------------
Switches `torch.optim` Adam, AdamW, SGD and Adagrad to their fused kernels while the training runs.

When it helps
-------------
Many parameters and small steps, where launching kernels or walking lists of tensors is a visible part of the step; on
CPUs also large models, because each value is read and written once.

When it hurts
-------------
Rarely. A few huge parameters gain nothing.

Numerics
--------
`reordering`: the same formula, with operations combined in another order inside the kernel.

How it is applied
-----------------
The flags of the optimizer's groups are set; existing step counters move to the parameter's device, where the fused
kernel wants them. What `state_dict` returns, and an optimizer that is pickled or copied, carries the user's own flags and counters on the
CPU, so a checkpoint loads without saturate; after `load_state_dict` the flags are set again. What `state_dict` of an optimizer around it
returns that has the same groups, as one of SAM, carries them too. An optimizer with a group that cannot be fused is left alone as a whole.

Fused kernels look at no strides: they update wrongly where a gradient or a state lies in another order in memory than its
parameter. Before each update (with `step(closure)`, after the closure has made the gradients) such a one is laid out as its
parameter; from the first parameter on that does not fill its memory (a slice of another tensor), or is not floating point, the
script's own kernels go on. They also take a step of SGD in which a parameter without momentum comes beside others that have it,
as after a layer was unfrozen.

References
----------
PyTorch documentation, "torch.optim", section "Algorithms" (for-loop, foreach and fused implementations).
pytorch/pytorch issue 95415 (why fused is not the default).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from saturate.records.facts import Evidence, Facts, OptimizerFacts
from saturate.techniques import _closures, _common
from saturate.techniques._api import Eligible, Ineligible, NotApplied, Proof, Technique, Touch
from saturate.techniques._layouts import Layouts, dense
from saturate.techniques._weakly import OfOptimizer, weakly

TECHNIQUE = Technique(
    id="fused-optimizer",
    title="fused optimizer kernels",
    numerics="reordering",
    stage="model",
    touches=(Touch("optimizer-kernels"),),
)

KINDS = ("Adam", "AdamW", "SGD", "Adagrad")
DEVICES = ("cpu", "cuda")
STOPPED = "not fused any more"
_FLAGS = {"fused": True, "foreach": False}      # SGD looks at foreach first


@dataclass(frozen=True)
class Options:
    """Nothing to choose."""


def _refusal(optimizer: OptimizerFacts) -> str:
    return _reason(
        optimizer.kind or "the optimizer", optimizer.module,
        known=optimizer.kind in KINDS and optimizer.module.startswith("torch.optim"),
        fused=bool(optimizer.fused),
        unsupported=optimizer.sparse or optimizer.differentiable,
        floating=all(dtype.startswith(("float", "bfloat")) for dtype in optimizer.dtypes))


def _reason(kind: str, module: str, *, known: bool, fused: bool, unsupported: bool, floating: bool) -> str:
    """Why an optimizer cannot be switched, of which this was seen; "" where nothing is against it."""
    if not known:
        return f"{_common.spelled(kind, module)} has no fused kernel"
    if fused:
        return f"{kind} is fused already"
    if unsupported:
        return f"{kind} has sparse gradients or is differentiable, which its fused kernel does not support"
    return "" if floating else f"{kind} updates parameters that are not floating point"


def eligible(facts: Facts) -> Eligible | Ineligible:
    if facts.device not in DEVICES:
        return Ineligible(f"not offered on {facts.device or 'unknown'} devices")
    if not facts.optimizers:
        return Ineligible("no torch optimizer stepped")
    refusals = [_refusal(optimizer) for optimizer in facts.optimizers]
    if all(refusals):
        return Ineligible(refusals[0])
    kinds = {optimizer.kind for optimizer, refusal in zip(facts.optimizers, refusals) if not refusal}
    return Eligible(f"{', '.join(sorted(kinds))} can run fused")


def bound(facts: Facts) -> float | None:
    return _common.share(facts.optimizer_ms, facts.step_ms)


def apply(context: Any, options: Options) -> str:
    problems = [_problem(optimizer, context.torch) for optimizer in context.optimizers]
    fusable = [optimizer for optimizer, problem in zip(context.optimizers, problems) if not problem]
    if not fusable:
        raise NotApplied("; ".join(dict.fromkeys(problems)) or "no torch optimizer stepped")
    for optimizer in fusable:
        switch = _Switch(optimizer, context.torch, lambda reason: context.note(TECHNIQUE.id, reason))
        context.on_undo(optimizer.register_load_state_dict_post_hook(switch.loaded).remove)
        context.on_undo(optimizer.register_step_pre_hook(switch.before_step).remove)
        for flag, value in _FLAGS.items():      # groups that are added later
            context.set_item(optimizer.defaults, flag, value)
        for saved in (optimizer, *_around(optimizer, context.built_optimizers())):
            context.on_undo(saved.register_state_dict_post_hook(switch.saving).remove)
        context.set_attribute(optimizer, "__getstate__", switch.pickled)
        context.on_undo(weakly(switch.off))     # the first that is undone: the hooks are what holds it
        switch.on()
    context.note(TECHNIQUE.id, f"{len(fusable)} optimizer(s) switched")
    return f"{len(fusable)} optimizer(s) switched to fused kernels"


def _around(optimizer: Any, built: list[Any]) -> list[Any]:
    """Others that were built and have its very groups."""
    return [other for other in built if other is not optimizer and vars(other).get("param_groups") is optimizer.param_groups]


def _problem(optimizer: Any, torch: Any) -> str:
    """Why this optimizer cannot be switched; "" where it can."""
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    sparse = any(p.grad is not None and p.grad.is_sparse for p in parameters)
    reason = _reason(
        kind, type(optimizer).__module__,
        known=type(optimizer) in {getattr(torch.optim, name) for name in KINDS},
        fused=all(group.get("fused") for group in groups),
        unsupported=sparse or any(group.get("differentiable") for group in groups),
        floating=all(p.is_floating_point() for p in parameters))
    if reason:
        return reason
    elsewhere = next((p.device.type for p in parameters if p.device.type not in DEVICES), "")
    if elsewhere:
        return f"{kind} updates parameters on {elsewhere}, where its fused kernel is not offered"
    if kind == "Adagrad" and any(p.device.type == "cuda" for p in parameters) and not has_kernel(torch, "aten::_fused_adagrad_", "CUDA"):
        return "this torch has no fused kernel of Adagrad for CUDA"
    return "" if all(map(dense, parameters)) else f"{kind} updates a parameter that does not fill its memory (a slice of another tensor)"


def has_kernel(torch: Any, operator: str, key: str) -> bool:
    """Whether this torch has an operator, and a kernel of it for the devices of a dispatch key. Adagrad's came to CUDA years after Adam's."""
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, key))
    except RuntimeError:        # no operator of this name
        return False


class _Switch(OfOptimizer):
    """Sets and restores the flags of one optimizer. `load_state_dict` replaces the group objects, so groups are always
    looked up anew."""

    def __init__(self, optimizer: Any, torch: Any, note: Callable[[str], None]):
        super().__init__(optimizer)
        self.torch = torch
        self.note = note
        self.user_flags: list[dict[str, Any]] = []
        self.user_defaults = {flag: optimizer.defaults.get(flag) for flag in _FLAGS}
        self.layouts = Layouts(torch, optimizer)
        self.stopped = self.paused = False

    def on(self) -> None:
        groups = self.optimizer.param_groups
        self.user_flags = [{flag: group[flag] for flag in _FLAGS if flag in group} for group in groups]
        for group in groups:
            group.update(_FLAGS)
            self._move_steps(group, on_device=True)

    def off(self) -> None:
        for group, flags in zip(self.optimizer.param_groups, self._flags()):
            group.update(flags)     # in place, so that the order of the keys stays
            for flag in _FLAGS.keys() - flags.keys():
                group.pop(flag, None)
            self._move_steps(group, on_device=bool(group.get("capturable") or group.get("fused")))

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Look when the gradients of this step are there: now, or after the closure that makes them."""
        if self.torch.compiler.is_compiling():
            return None
        if _closures.surprising(args, kwargs) and not self.stopped:
            self._stop("step() is given something to call that is no closure, and gradients may change in it")
        with_closure = _closures.around(args, kwargs, self.look)
        if with_closure is None:
            self.look()
        return with_closure

    def look(self) -> None:
        """Choose the kernels of the step that goes on, which reads the flags of its groups after its closure."""
        if self.stopped:
            return
        if self.paused:
            self.paused = False
            self.on()
        reason = self.layouts.align()
        if reason:
            self._stop(reason)
        elif self._some_momentum():
            self.paused = True
            self.off()

    def _some_momentum(self) -> bool:
        """Whether a group of SGD has parameters with momentum and without: its fused kernel knows no first step of a few."""
        def missing(parameter: Any) -> bool:
            return (self.optimizer.state.get(parameter) or {}).get("momentum_buffer") is None

        return any(len({missing(p) for p in group["params"] if p.grad is not None}) > 1
                   for group in self.optimizer.param_groups if group.get("momentum"))

    def _stop(self, reason: str) -> None:
        """The script's own kernels, from this very step on."""
        self.stopped = True
        self.off()
        self.optimizer.defaults.update(self.user_defaults)
        self.note(f"{STOPPED}: {reason}")

    def _flags(self) -> list[dict[str, Any]]:
        """The user's flags of each group; a group that was added later has those of the first."""
        missing = len(self.optimizer.param_groups) - len(self.user_flags)
        return self.user_flags + self.user_flags[:1] * missing

    def _move_steps(self, group: Any, on_device: bool) -> None:
        for parameter in group["params"]:
            state = self.optimizer.state.get(parameter)
            step = state.get("step") if state else None
            if isinstance(step, self.torch.Tensor):
                target = parameter.device if on_device else "cpu"
                state["step"] = step.to(device=target, dtype=self.torch.float32) if on_device else step.to(target)

    def saving(self, optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
        groups, states = [], dict(saved["state"])
        for group, flags in zip(saved["param_groups"], self._flags()):
            groups.append(_with_flags(group, flags))
            for index in group["params"]:
                self._saved_step(states, index, group, flags)
        return {**saved, "state": states, "param_groups": groups}

    def pickled(self) -> dict[str, Any]:
        """What `__getstate__` returns."""
        found = type(self.optimizer).__getstate__(self.optimizer)
        groups, states = [], copy.copy(found["state"])
        for group, flags in zip(found["param_groups"], self._flags()):
            groups.append(_with_flags(group, flags))
            for parameter in group["params"]:
                self._saved_step(states, parameter, group, flags)
        return {**found, "defaults": {**found["defaults"], **self.user_defaults}, "state": states, "param_groups": groups}

    def _saved_step(self, states: Any, key: Any, group: Any, flags: Any) -> None:
        step = states.get(key, {}).get("step")
        if isinstance(step, self.torch.Tensor) and not (group.get("capturable") or flags.get("fused")):
            states[key] = {**states[key], "step": step.cpu()}       # a copy: what is saved holds live state

    def loaded(self, optimizer: Any) -> None:
        self.layouts.forget()
        self.paused = False
        if not self.stopped:
            self.on()


def _with_flags(group: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    return {**{key: value for key, value in group.items() if key in flags or key not in _FLAGS}, **flags}


def active(evidence: Evidence, options: Options) -> Proof:
    fused = [optimizer.kind for optimizer in evidence.optimizers if optimizer.fused]
    if not fused or TECHNIQUE.id not in evidence.notes:
        seen = evidence.notes.get(TECHNIQUE.id, "")
        return Proof(False, seen if seen.startswith(STOPPED) else "no optimizer that steps is fused")
    return Proof(True, f"{', '.join(fused)} stepped with its fused flag set")


def as_code(options: Options) -> str:
    return (
        "# Your own optimizer with fused=True (Adam, AdamW, SGD and Adagrad take it): where you make it, or of the one that is made\n"
        "optimizer = type(optimizer)([{**group, \"fused\": True, \"foreach\": False} for group in optimizer.param_groups], fused=True)"
    )
