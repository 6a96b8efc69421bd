"""Running the trained modules under autocast, for `bf16-autocast` and `fp16-autocast`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from saturate.records.facts import Facts
from saturate.techniques._api import Ineligible, NotApplied
from saturate.techniques._autograd import computed_in
from saturate.techniques._common import (
    OBSERVER_ORDER,
    convolves,
    device_of,
    map_tensors,
    multiplies,
    observe_first_call,
    wrap_all,
)

#: The place of autocast in the stack around a forward.
AUTOCAST_ORDER = 30

#: Of a parameter or buffer: the path of its module, "_parameters" or "_buffers", its name.
_Place = tuple[str, str, str]

#: As in implementations of MAML, whose module trains an inner one when it is called.
_STEPS_IN_FORWARD = "the model's forward trains it: its backward pass and the optimizer's step would run under autocast, too"


def why_no_autocast(facts: Facts) -> Ineligible | None:
    """Why no autocast can help, whatever its dtype; None when one might."""
    if facts.autocast:
        return Ineligible(_own_autocast(facts.autocast))
    if facts.steps_in_forward:
        return Ineligible(_STEPS_IN_FORWARD)
    if facts.grad_scaler:
        return Ineligible("the script scales its loss itself, so it manages its own precision")
    modules = facts.modules
    if not modules:
        return Ineligible("no trained module was seen")
    if not any("float32" in module.dtypes for module in modules):
        return Ineligible("the trained modules hold no float32 parameters")
    if not (multiplies(facts) or convolves(facts)):
        return Ineligible("the trained modules have no matrix products or convolutions to speed up")
    return None


def _own_autocast(dtype: str) -> str:
    return f"the script already runs under {dtype} autocast"


def wrap_autocast(context: Any, dtype: Any, key: str, wanted: Callable[[], bool] = lambda: True,
                  inside: Callable[[Any, Any], list[Any]] | None = None) -> int:
    """Run each trained module's forward under autocast, hand its outputs back as float32, and note (under `key`) the
    first autograd node that really computed in `dtype`. Returns how many modules were wrapped: the trained ones, or those parts of
    them that `inside(torch, module)` names. Not where the script autocasts itself: its nodes would be taken for what this did."""
    if context.autocast:
        raise NotApplied(_own_autocast(context.autocast))
    if context.steps_in_forward:
        raise NotApplied(_STEPS_IN_FORWARD)
    torch, device = context.torch, context.device
    caches = not cache_loses_gradients(context, dtype)

    def widen(tensor: Any) -> Any:
        return tensor.float() if tensor.dtype == dtype else tensor

    def wrap(inner: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not wanted():
                return inner(self, *args, **kwargs)
            with torch.autocast(device, dtype=dtype, cache_enabled=caches):
                output = inner(self, *args, **kwargs)
            return map_tensors(output, widen, torch)

        return forward

    def outside_autocast(inner: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_autocast_enabled(device):
                return inner(self, *args, **kwargs)
            with torch.autocast(device, enabled=False):
                return inner(self, *map_tensors(args, widen, torch), **map_tensors(kwargs, widen, torch))

        return forward

    def look(held: weakref.ref[Any], before: set[_Place], output: Any) -> None:
        node = computed_in(output, dtype, torch)
        if node:
            context.note(key, f"{node} computed in {str(dtype).removeprefix('torch.')}")
        module = held()
        if module is not None and (narrowed := _held_in(module, dtype) - before):
            _widen(module, narrowed)
            context.wrap_forward(module, OBSERVER_ORDER, functools.partial(_widening, narrowed), around=True)

    def wrap_one(module: Any) -> None:
        if dtype != torch.float16 and any(isinstance(part, torch.nn.DataParallel) and len(part.device_ids) > 1 for part in module.modules()):
            raise NotApplied("the threads of torch.nn.DataParallel autocast to float16, whatever the dtype around them")
        parts = [part for part in ([module] if inside is None else inside(torch, module)) if id(part) not in wrapped]
        if not parts:
            raise NotApplied(f"{type(module).__name__} has no layer that could compute in {str(dtype).removeprefix('torch.')} alone")
        for part in parts:
            context.wrap_forward(part, AUTOCAST_ORDER, wrap, around=True)
        lstms = [part for part in module.modules() if isinstance(part, torch.nn.LSTM)] if inside is None else []
        if lstms and not runs_lstm(context, dtype):
            for part in lstms:
                context.wrap_forward(part, AUTOCAST_ORDER - 1, outside_autocast, around=True, in_evaluation=outside_autocast)
        wrapped.update(map(id, parts))
        observe_first_call(context, module, functools.partial(look, weakref.ref(module), _held_in(module, dtype)))

    wrapped: set[int] = set()       # by id: one of the modules may be a part of another
    wrap_all(context, wrap_one)
    return len(wrapped)


def _held_in(module: Any, dtype: Any) -> set[_Place]:
    """The parameters and buffers of a format. TorchScript keeps its own elsewhere."""
    return {(path, kind, name) for path, part in module.named_modules() for kind in ("_parameters", "_buffers")
            for name, tensor in vars(part).get(kind, {}).items() if tensor is not None and tensor.dtype == dtype}


def _widening(narrowed: set[_Place], inner: Any) -> Any:
    """Around a forward that sets parameters or buffers to what it computes (`u.data = ...` of a spectral normalization written by hand):
    in the format of autocast, evaluation could not use them, and a checkpoint would hold them so."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = inner(self, *args, **kwargs)
        _widen(self, narrowed)
        return output

    return forward


def _widen(module: Any, narrowed: set[_Place]) -> None:
    for path, kind, name in narrowed:
        tensor = vars(module.get_submodule(path))[kind].get(name)
        if tensor is not None:
            tensor.data = tensor.data.float()


def cache_loses_gradients(context: Any, dtype: Any) -> bool:
    """Whether this torch takes a weight that autocast has cast under `no_grad` once more where gradients are wanted: they would end
    there. A diffusion model that is conditioned on itself runs its net so."""
    torch, device = context.torch, device_of(context)
    with torch.inference_mode(False), torch.enable_grad():
        weight = torch.ones(1, 1, device=device, requires_grad=True)
        with torch.autocast(device.type, dtype=dtype):
            with torch.no_grad():
                torch.mm(weight, weight)
            return torch.mm(weight, weight).grad_fn is None


def runs_lstm(context: Any, dtype: Any) -> bool:
    """Whether LSTMs run under this autocast. On a CPU without AVX-512, torch 2.13 has no kernel of them for either format, and asks for it
    all the same."""
    torch = context.torch
    if context.device != "cpu":
        return True
    with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", dtype=dtype):
        try:
            torch.nn.LSTM(1, 1)(torch.zeros(1, 1, 1))
        except RuntimeError:
            return False
    return True
