"""Store images and convolution weights with the channels innermost, as the fast convolution kernels want them.

What it does
------------
Converts 4-d parameters, their gradients and optimizer state to the channels-last memory format, and 4-d inputs at the
door of the outermost trained modules. 4-d outputs are handed back in the usual format, in evaluation too.

When it helps
-------------
2-d convolutional networks: on GPUs together with half precision or TensorFloat-32 (tensor cores work channels-last, so
cuDNN need not transpose), on CPUs because oneDNN's kernels do as well.

When it hurts
-------------
Models that mix convolutions with layers that lack channels-last kernels, and grouped convolutions on some GPUs. A model
that calls `.view` on activations raises an error, which is reported as a failed trial. A script that calls `.view(-1)` on weights or
gradients fails, too, as `torch.nn.utils.parameters_to_vector` does (`.reshape(-1)` works on both formats). So does LBFGS: it is left alone,
but a script that goes on with it after another optimizer fails at its first step. Activations that a script takes from inside the
model, by a hook or by calling one of its parts, are channels-last in evaluation too.

Left alone are:

- trainings in which something else holds the memory of weights when the technique is applied (a `state_dict()` that is kept,
  `share_memory()`, views of one flat tensor): converting them would separate the two. CUDA memory that several processes share is not seen;
- weights for which an optimizer that is not torch's own keeps state: its kernels may read that in the order of memory;
- trainings with several processes, unless DistributedDataParallel averages their gradients.

Numerics
--------
`reordering`: the same products, added in another order.

How it is applied
-----------------
Parameters keep their identity, shape and values; only strides change, and a model's state dict is loaded as before. The state dict of an
optimizer is a copy in the usual format, because loading keeps strides, and fused kernels ignore them. When the change is undone, tensors
that by then share memory with parameters keep their strides. The forward is wrapped, innermost of all wrappers; in evaluation only for
its outputs. safetensors accepts only the usual format, and gets tensors in it. DistributedDataParallel lays out the buckets of its
gradients when it is constructed: if all ranks can, the weights are converted just before that, and stay so.

References
----------
PyTorch tutorials, "Channels Last Memory Format in PyTorch".
PyTorch recipes, "Performance Tuning Guide".
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from saturate.importwatch import once_imported
from saturate.records.facts import Evidence, Facts
from saturate.techniques import _common
from saturate.techniques._api import Eligible, Ineligible, NotApplied, Proof, Technique, Touch
from saturate.techniques._layouts import Aligning, Layouts, Saving, in_usual_format

ORDER = 10

TECHNIQUE = Technique(
    id="channels-last",
    title="channels-last memory format",
    numerics="reordering",
    stage="model",
    touches=(Touch("forward", ORDER), Touch("memory-format")),
)


_DISTRIBUTED = "gradients are averaged between processes in buckets that were laid out for the parameters as they were"
_VIEWED = "LBFGS views gradients as one vector, which those in channels-last cannot be"

#: Parameters that were converted and not converted back, by id.
_converted: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

#: Those that were to be converted back, and shared their memory by then: whoever goes on training them needs the door as before.
_left: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Options:
    """Nothing to choose."""


def eligible(facts: Facts) -> Eligible | Ineligible:
    if facts.world_size > 1 and not any(module.distributed for module in facts.modules):
        return Ineligible("several processes train, and how they exchange gradients is not known")
    if any("LBFGS" in optimizer.kind for optimizer in facts.optimizers):
        return Ineligible(_VIEWED)
    modules = [module for module in _common.wrappable(facts) if module.convolutions]
    if not modules:
        return Ineligible("no trained module with 2-d convolutions was seen whose forward is its class's own")
    if all(module.grouped_convolutions >= module.convolutions for module in modules):
        return Ineligible("all convolutions are grouped; their kernels gain nothing from channels-last")
    return Eligible(f"{sum(module.convolutions for module in modules)} 2-d convolutions")


def bound(facts: Facts) -> float | None:
    return _common.computing(facts)


def prepare(context: Any, options: Options) -> None:
    """Until `apply` knows the optimizers, one may load state that is laid out as in another run."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    wanted = [True]                             # it may be imported when this is taken back
    context.on_undo(wanted.clear)
    once_imported("safetensors.torch", lambda module: _hand_over_in_usual_format(context, module) if wanted else None)
    context.on_undo(register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _look_after(context, optimizer)).remove)
    if not context.torch.distributed.is_available():
        return
    cls = context.torch.nn.parallel.DistributedDataParallel
    original = cls.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        if given.get("device_mesh") is None:
            _convert_on_all_ranks(context, given["module"], given.get("process_group"))
        original(self, *args, **kwargs)

    context.set_attribute(cls, "__init__", init)


def _hand_over_in_usual_format(context: Any, safetensors: Any) -> None:
    """What is saved may be a copy of a model that was made while its weights lay channels-last: all tensors that do are meant."""
    def usual(original: Any) -> Any:
        @functools.wraps(original)
        def flatten(tensors: Any, *args: Any) -> Any:
            return original(in_usual_format(tensors, context.torch) if isinstance(tensors, dict) else tensors, *args)

        return flatten

    for name in ("_flatten", "_flatten_as_ptr"):        # in older versions, and in newer ones: what both ways to save call first
        if hasattr(safetensors, name):
            context.set_attribute(safetensors, name, usual(getattr(safetensors, name)))


def _convert_on_all_ranks(context: Any, module: Any, group: Any) -> None:
    """Change the strides of a module's weights, if each rank can: they must be the same everywhere."""
    torch = context.torch
    weights = _weights(context, [module])
    if not weights or not any(isinstance(part, torch.nn.Conv2d) for part in module.modules()):
        return
    try:
        able = torch.tensor(int(not _shared(context, weights)), device=weights[0][1].device)
    except NotApplied:      # this version of torch cannot tell, on any rank
        return
    torch.distributed.all_reduce(able, torch.distributed.ReduceOp.MIN, group)
    if able.item():
        for _, parameter in weights:
            _convert(context, parameter)


def apply(context: Any, options: Options) -> str:
    distributed = context.torch.distributed
    if any("LBFGS" in type(optimizer).__name__ for optimizer in context.optimizers):
        raise NotApplied(_VIEWED)
    modules = _common.outermost(context.modules)
    weights, left = _weights(context, modules), []
    if distributed.is_available() and distributed.is_initialized():
        if weights:
            raise NotApplied(_DISTRIBUTED)
        converted = sum(_is_converted(context, parameter) for module in modules for parameter in module.parameters())
    else:
        left = [p for module in modules for p in module.parameters() if _left.get(id(p)) is p and _is_converted(context, p)]
        refusal = _refusal(context, weights)
        if refusal and not left:
            raise NotApplied(refusal)
        weights = [] if refusal else weights
        converted = len(weights) + len(left)
    if not converted:
        raise NotApplied("no 4-d parameter whose layout would change")
    _common.wrap_all(context, lambda module: _wrap(context, module))
    for parameter in (*(parameter for _, parameter in weights), *left):
        _convert(context, parameter)
        context.on_undo(functools.partial(_convert_back, context, weakref.ref(parameter)))
    for optimizer in context.optimizers:
        _look_after(context, optimizer)
    return f"{converted} parameters and the 4-d inputs of {len(context.modules)} module(s) stored channels-last"


def _refusal(context: Any, weights: list[tuple[str, Any]]) -> str:
    """Why these must not be converted, or ""."""
    for optimizer in context.optimizers:
        if not _is_torchs(optimizer) and any(optimizer.state.get(parameter) for _, parameter in weights):
            return f"{type(optimizer).__name__} is not torch's own, and how it lays out its state is not known"
    shared = _shared(context, weights)
    return (f"{shared}, its gradient or its optimizer state shares memory with other tensors (a state_dict() that "
            "is kept, for one) or processes, and would be cut off from them") if shared else ""


def _weights(context: Any, modules: Iterable[Any]) -> list[tuple[str, Any]]:
    """Parameters whose strides conversion would change, by name; a 1x1 kernel counts as both formats already."""
    return [(name, parameter) for module in modules for name, parameter in module.named_parameters()
            if parameter.dim() == 4 and not parameter.is_contiguous(memory_format=context.torch.channels_last)]


def _is_converted(context: Any, parameter: Any) -> bool:
    return parameter.dim() == 4 and not parameter.is_contiguous() and parameter.is_contiguous(memory_format=context.torch.channels_last)


def _shared(context: Any, weights: list[tuple[str, Any]]) -> str:
    """The first of them whose memory something else has as well, or ""."""
    return next((name for name, parameter in weights
                 if any(_common.shares_memory(tensor, context.torch) for tensor in _with_it(context, parameter))), "")


def _is_torchs(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _with_it(context: Any, parameter: Any) -> list[Any]:
    """The parameter, its gradient, and what is as large of its optimizer state."""
    states = [value for optimizer in context.optimizers if _is_torchs(optimizer) for value in optimizer.state.get(parameter, {}).values()
              if type(value) is context.torch.Tensor and value.is_floating_point() and value.shape == parameter.shape]
    return [parameter, *states] if parameter.grad is None else [parameter, parameter.grad, *states]


def _convert(context: Any, parameter: Any) -> None:
    """Change the strides of a parameter, its gradient and its optimizer state: with mixed strides, the fast optimizer
    kernels fall back to slow ones."""
    for tensor in _with_it(context, parameter):
        tensor.data = tensor.data.contiguous(memory_format=context.torch.channels_last)
    _converted[id(parameter)] = parameter


def _convert_back(context: Any, held: weakref.ref[Any]) -> None:
    """But for what is shared by now: strides change no number, and it would be cut off from whoever shares it."""
    parameter = held()
    if parameter is None:
        return              # the script has dropped its model
    for tensor in _with_it(context, parameter):
        if not _common.shares_memory(tensor, context.torch):
            tensor.data = tensor.data.contiguous()
    if _is_converted(context, parameter):
        _left[id(parameter)] = parameter
    else:
        _left.pop(id(parameter), None)
        _converted.pop(id(parameter), None)


def _look_after(context: Any, optimizer: Any) -> None:
    """What an optimizer saves is laid out as without us, and what fused kernels of the script's choice read is laid out alike. Once:
    `prepare` comes here before each step, whose hooks of the optimizer's own are run after that."""
    torch = context.torch
    if torch.compiler.is_compiling() or not _is_torchs(optimizer):
        return
    ours = _converted and any(_is_ours(parameter) for group in optimizer.param_groups for parameter in group["params"])
    if ours and not any(isinstance(hook, Saving) for hook in optimizer._optimizer_state_dict_post_hooks.values()):
        context.on_undo(optimizer.register_state_dict_post_hook(Saving(torch, _is_ours)).remove)
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if fused and not any(isinstance(hook, Aligning) for hook in optimizer._optimizer_step_pre_hooks.values()):
        layouts = Layouts(torch, optimizer)
        context.on_undo(optimizer.register_step_pre_hook(Aligning(torch, layouts)).remove)
        context.on_undo(optimizer.register_load_state_dict_post_hook(lambda _: layouts.forget()).remove)


def _is_ours(parameter: Any) -> bool:
    return _converted.get(id(parameter)) is parameter


def _wrap(context: Any, module: Any) -> None:
    torch = context.torch

    def inward(value: Any, changed: list[tuple[Any, Any, int]]) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() != 4 or not value.is_floating_point():
            return value
        other = value.contiguous(memory_format=torch.channels_last)
        if other is not value:
            changed.append((value, other, other._version))
        return other

    def outward(tensor: Any) -> Any:
        return tensor.contiguous() if tensor.dim() == 4 else tensor

    def wrap(inner: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            # Tensors that are made there do not tell who writes to them.
            if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
                return _common.map_tensors(inner(self, *args, **kwargs), outward, torch)
            changed: list[tuple[Any, Any, int]] = []
            args = tuple(inward(value, changed) for value in args)
            kwargs = {name: inward(value, changed) for name, value in kwargs.items()}
            output = inner(self, *args, **kwargs)
            for given, other, version in changed:
                if other._version != version:       # the forward wrote to its argument, and the script reads it there
                    given.copy_(other)
            return _common.map_tensors(output, outward, torch)

        return forward

    def look(output: Any) -> None:
        context.note(TECHNIQUE.id, "the wrapped forward ran")

    def outside(inner: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = inner(self, *args, **kwargs)
            return output if torch.jit.is_tracing() else _common.map_tensors(output, outward, torch)

        return forward

    context.wrap_forward(module, ORDER, wrap, in_evaluation=outside)
    _common.observe_first_call(context, module, look)


def active(evidence: Evidence, options: Options) -> Proof:
    if TECHNIQUE.id not in evidence.notes:
        return Proof(False, "the wrapped forward never ran")
    if not evidence.channels_last:
        return Proof(False, "no parameter is stored channels-last")
    return Proof(True, f"{evidence.channels_last} parameters are stored channels-last, and the wrapped forward ran")


def as_code(options: Options) -> str:
    return (
        "model = model.to(memory_format=torch.channels_last)\n"
        "inputs = inputs.to(memory_format=torch.channels_last)"
    )
