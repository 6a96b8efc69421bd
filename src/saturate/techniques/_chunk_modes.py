"""What surrounds the forward of one chunk: random numbers that can be drawn again, autocast, what its module holds, and eyes on
its reductions."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import random
import sys
from collections.abc import Iterator
from typing import Any

from saturate.techniques import _common
from saturate.techniques._chunk_plan import NotSplittable
from saturate.techniques._surroundings import _CLOSED, _CONTAINERS, MOST_BYTES, _fill, _same, attributes


class Randomness:
    """The states of all generators that a forward may draw from: torch's on the CPU and on `devices`, Python's, NumPy's."""

    def __init__(self, torch: Any, devices: tuple[Any, ...]):
        self.torch = torch
        self.devices = devices
        self.cpu = torch.get_rng_state()
        self.on_devices = [torch.cuda.get_rng_state(device) for device in devices]
        self.python = random.getstate()
        numpy = sys.modules.get("numpy")
        self.numpy = numpy.random.get_state(legacy=False) if numpy is not None and hasattr(numpy, "random") else None

    def restore(self) -> None:
        self.torch.set_rng_state(self.cpu)
        for device, state in zip(self.devices, self.on_devices):
            self.torch.cuda.set_rng_state(state, device)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)

    def was_drawn_from(self) -> bool:
        """Whether anything was drawn since."""
        now = Randomness(self.torch, self.devices)
        if self.python != now.python or not self.torch.equal(self.cpu, now.cpu):
            return True
        if any(not self.torch.equal(before, after) for before, after in zip(self.on_devices, now.on_devices)):
            return True
        return _bits(self.numpy) != _bits(now.numpy)


def _bits(state: Any) -> Any:
    """NumPy's state as something that can be compared: its arrays as bytes."""
    if isinstance(state, dict):
        return {name: _bits(value) for name, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


@contextlib.contextmanager
def drawing_again(state: Randomness) -> Iterator[None]:
    """Random numbers as they were drawn from `state` on; afterwards the generators stand where they stood before."""
    now = Randomness(state.torch, state.devices)
    state.restore()
    try:
        yield
    finally:
        now.restore()


def devices_of(module: Any) -> tuple[Any, ...]:
    """The CUDA devices that hold parameters of a module."""
    return tuple(dict.fromkeys(p.device for p in module.parameters() if p.device.type == "cuda"))


class Autocast:
    """The autocast settings at construction, to be entered again. Without its cache: a weight that was cast while no
    gradients were recorded must not be used where they are."""

    def __init__(self, torch: Any, device: str):
        self.torch = torch
        self.settings = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                         for kind in dict.fromkeys((device, "cpu"))]

    @contextlib.contextmanager
    def entered(self, on: bool = True) -> Iterator[None]:
        """`on=False`: outside of any autocast, as a backward runs."""
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self.settings:
                stack.enter_context(self.torch.autocast(kind, dtype=dtype, enabled=enabled and on, cache_enabled=False))
            yield


class Held:
    """What a module and those inside it hold at construction, to be read once more: modes, values, parts, buffers, and the members
    of containers and of objects that lie on their attributes. One level deep, as it is taken in every step that is cut."""

    def __init__(self, module: Any, torch: Any):
        own = vars(torch.nn.Module())
        closed = (*_CLOSED, torch.nn.Module, torch.Tensor)
        self._parts: list[tuple[Any, dict[str, Any]]] = []
        self._things: list[tuple[Any, Any]] = []
        self._buffers: list[tuple[dict[str, Any], list[tuple[str, Any, int, Any]]]] = []
        for part, found in attributes(module):
            self._parts.append((part, dict(dict.items(vars(part)))))       # with what wraps its forward
            values = [value for name, value in found.items() if name not in own and not isinstance(value, closed)]
            things = [value if isinstance(value, _CONTAINERS) else getattr(value, "__dict__", None) for value in values]
            self._things += [(thing, copy.copy(thing)) for thing in (part._modules, *things) if isinstance(thing, _CONTAINERS)]
            self._buffers.append((part._buffers, [(name, buffer, *_kept(buffer, torch)) for name, buffer in part._buffers.items()]))

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Inside, they hold what they held; afterwards what they hold now."""
        buffers = [(now, {name: buffer if copied is None or buffer._version == version else copied
                          for name, buffer, version, copied in kept}) for now, kept in self._buffers]
        things = [*((vars(part), held) for part, held in self._parts), *self._things, *buffers]
        changed = [(thing, held, dict(dict.items(thing)) if isinstance(thing, dict) else copy.copy(thing))
                   for thing, held in things if not _same(thing, held)]
        for thing, held, _ in changed:
            _put(thing, held)
        try:
            yield
        finally:
            for thing, _, now in changed:
                _put(thing, now)


def _put(thing: Any, members: Any) -> None:
    """Give a container these members. A mapping keeps what is the same: the attributes of a module are never all gone."""
    if not isinstance(thing, dict):
        return _fill(thing, members)
    for name, value in list(dict.items(thing)):
        if name not in members:
            del thing[name]
        elif value is not members[name]:
            thing[name] = members[name]
    for name in members:
        if name not in thing:
            thing[name] = members[name]


def _kept(buffer: Any, torch: Any) -> tuple[int, Any]:
    """Its version, and a copy where it is small."""
    if buffer is None:
        return 0, None
    small = buffer.layout is torch.strided and buffer.device.type != "meta" and buffer.nbytes <= MOST_BYTES
    return buffer._version, buffer.detach().clone() if small else None


def glimpse(tensor: Any) -> Any:
    """Some entries of a tensor, spread over it, as a copy."""
    return tensor.detach()[tuple(slice(None, None, max(1, size // 4)) for size in tensor.shape)].clone()


def agrees(ours: Any, theirs: Any, allowed: float) -> bool:
    """Whether two glimpses differ by no more than `allowed` of the largest entry. Whole numbers are not compared: rounding may flip
    what was the largest."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if not (ours.is_floating_point() or ours.is_complex()) or not ours.numel():
        return True
    import torch

    ours, theirs = (_common.reals(glimpse, torch).double() for glimpse in (ours, theirs))
    scale = float(theirs.abs().nan_to_num(0.0, 0.0, 0.0).amax())
    return bool(ours.isclose(theirs, rtol=0.0, atol=allowed * scale, equal_nan=True).all())


@contextlib.contextmanager
def hooks_set_aside(parameters: list[Any]) -> Iterator[None]:
    """Without the script's hooks on parameters, which must see the whole gradient once, and not that of each chunk."""
    kept = [(hooks, dict(hooks)) for p in parameters if (hooks := p._backward_hooks)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, entries in kept:
            hooks.update(entries)


def deaf_to_none(parameters: list[Any], gradients: list[Any], torch: Any) -> None:
    """For the rest of this backward pass: autograd calls the hooks of all that our node was given, with None where a parameter has no
    gradient. In a graph of the script's own that parameter would not be met."""
    kept = [(hooks, key, hook, functools.partial(_unless_none, hook))
            for p, gradient in zip(parameters, gradients) if gradient is None and (hooks := p._backward_hooks)
            for key, hook in hooks.items() if getattr(hook, "func", None) is not _unless_none]      # of another forward, in the same pass
    if not kept:
        return
    for hooks, key, _, ours in kept:
        hooks[key] = ours

    def restore() -> None:
        for hooks, key, hook, ours in kept:
            if hooks.get(key) is ours:      # the script may have removed it
                hooks[key] = hook

    torch.autograd.Variable._execution_engine.queue_callback(restore)


def _unless_none(hook: Any, gradient: Any) -> Any:
    return None if gradient is None else hook(gradient)


# -- reductions ------------------------------------------------------------------------------------------------------

#: Losses of torch.nn.functional whose mean is over all entries of their input, unless they divide by given weights.
_ELEMENTWISE = frozenset({
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "poisson_nll_loss", "soft_margin_loss", "kl_div",
})
_BY_TARGET = frozenset({"cross_entropy", "nll_loss"})
_BY_WEIGHTS = frozenset({"mse_loss", "l1_loss"})

#: Their arguments whose part in the mean is known; a later torch may have others.
_ARGUMENTS = frozenset({
    "input", "target", "size_average", "reduce", "reduction", "weight", "ignore_index", "label_smoothing", "pos_weight", "beta", "delta",
    "log_input", "full", "eps", "log_target",
})


class Reduction:
    """A loss function of torch that a forward called: `weight` is how many entries it is the mean of (0-d float64 tensor;
    None: not known), or None with `summed`. `by`: the weights, of entries or of classes, whose sum a mean is divided by, if not by
    the number of entries."""

    def __init__(self, result: Any, weight: Any, summed: bool, by: Any = None):
        self.result = result
        self.weight = weight
        self.summed = summed
        self.by = by

    def gave(self, value: Any) -> bool:
        return value is self.result and self.weight is not None


@functools.cache
def _reductions_class(torch: Any) -> type:
    class Reductions(torch.overrides.TorchFunctionMode):
        """Lists the losses that torch's own functions reduce while it is entered."""

        def __init__(self, hooks: bool) -> None:
            super().__init__()
            self.hooks = hooks
            self.found: list[Reduction] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            name = getattr(func, "__name__", "")
            if name == "register_hook" and not self.hooks:
                raise NotSplittable("its forward registers a hook on a tensor, which would be called for each chunk")
            if name == "l1_loss":
                kwargs = {**_hidden_weight(func), **kwargs}
            result = func(*args, **kwargs)
            if name in _ELEMENTWISE or name in _BY_TARGET:
                self.found.append(_reduction(name, func, args, kwargs, result, torch))
            return result

    return Reductions


def _hidden_weight(function: Any) -> dict[str, Any]:
    """The `weight` of the call of `l1_loss` that is under way: torch tells a mode all arguments but this one (2.13)."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not getattr(function, "__code__", None):
        frame = frame.f_back
    weight = frame.f_locals.get("weight") if frame is not None else None
    return {} if weight is None else {"weight": weight}


def reductions(torch: Any, hooks: bool = False) -> Any:
    """A context manager whose `found` lists the `Reduction`s of what ran inside. `hooks`: whether it may set some on tensors."""
    return _reductions_class(torch)(hooks)


def _reduction(name: str, func: Any, args: Any, kwargs: Any, result: Any, torch: Any) -> Reduction:
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    given = given.arguments
    reduction = given.get("reduction", "mean")
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return Reduction(result, None, False)       # a spelling that torch gave up years ago
    if any(value is not None for argument, value in given.items() if argument not in _ARGUMENTS):
        return Reduction(result, None, False)
    if reduction != "mean":
        return Reduction(result, None, reduction == "sum")
    target = given["target"]
    if name in _BY_WEIGHTS and given.get("weight") is not None:
        return Reduction(result, given["weight"].detach().double().sum(), False, given["weight"].detach())
    if name in _ELEMENTWISE:
        shape = torch.broadcast_shapes(given["input"].shape, target.shape)
        return Reduction(result, torch.tensor(float(shape.numel()), dtype=torch.float64, device="cpu"), False)
    if target.is_floating_point():                  # probabilities of classes: the mean is over the rows
        classes = given["input"].shape[1 if given["input"].dim() > 1 else 0]
        return Reduction(result, torch.tensor(given["input"].numel() / classes, dtype=torch.float64, device="cpu"), False)
    counted = target != given["ignore_index"]
    if given["weight"] is None:
        return Reduction(result, counted.sum().double(), False)
    weights = given["weight"].double()[torch.where(counted, target, torch.zeros_like(target))]
    return Reduction(result, (weights * counted).sum(), False, given["weight"].detach())


# -- randomness without effect -----------------------------------------------------------------------------------------


@functools.cache
def _steady_class(torch: Any) -> type:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Steady(TorchDispatchMode):
        """Nothing is dropped, and everything drawn is the same constant: what a forward computes then depends on its
        inputs alone, however they are cut."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if torch.Tag.nondeterministic_seeded not in func.tags:
                return func(*args, **kwargs)
            return _steady(func, list(args), kwargs, torch)

    return Steady


def steady(torch: Any) -> Any:
    """A context manager in which random numbers have no effect."""
    return _steady_class(torch)()


def _steady(func: Any, args: list[Any], kwargs: dict[str, Any], torch: Any) -> Any:
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    names = [argument.name for argument in schema.arguments]
    if name == "native_dropout":
        return func(args[0], 0.0, *args[2:], **kwargs)
    for dropout in ("dropout_p", "dropout"):
        if dropout in names:
            position = names.index(dropout)
            if position < len(args):
                args[position] = 0.0
            else:
                kwargs[dropout] = 0.0
            return func(*args, **kwargs)
    if name.startswith("bernoulli"):
        # The keep mask of a dropout is divided by the same probability: nothing is dropped or scaled.
        # What has its default is left out of the arguments.
        defaults = [argument.default_value for argument in schema.arguments]
        probability = next((value for value in [*args[1:], *kwargs.values(), *defaults] if isinstance(value, (float, torch.Tensor))), None)
        kept = args[0] if name.endswith("_") else args[0].clone()
        if probability is None:
            return kept         # each entry is its own probability
        return kept.copy_(probability) if isinstance(probability, torch.Tensor) else kept.fill_(probability)
    result = func(*args, **kwargs)
    if name.startswith("randperm"):         # not in order: samples that are given to each other must not come back to themselves
        return result.copy_(torch.arange(result.numel() - 1, -1, -1, device=result.device))
    if isinstance(result, torch.Tensor) and result.is_floating_point():
        return result.fill_(0.5)
    raise NotSplittable(f"the forward draws random numbers with {schema.name}")
