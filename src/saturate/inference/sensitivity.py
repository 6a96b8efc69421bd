"""Which layers suffer most from few bits: each one alone is rounded to 8 bits, and the change of the model's outputs is
measured. It knows no technique, so that one ranking serves all of them.

What is rounded are products with a weight (linear, convolution, matrix product with a parameter), wherever they are
called: in a layer, inside attention, or by a function. A product belongs to the innermost module that was being called,
by its name in `model.named_modules()`. Weights are rounded symmetrically per output channel and inputs by their minimum
and maximum over the tensor, as the static int8 formats do. Nothing is changed in the model: the rounded copies
live for one call, so tied weights stay tied.

Runs in a candidate's process, on the baseline.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from typing import Any

from saturate.inference import batches

#: Batches are taken until they hold so many samples; more would sharpen the scores, not the order.
SAMPLES = 16


def rank(torch: Any, model: Any, batches: Sequence[tuple[Any, ...]], *, deadline_s: float | None = None) -> list[tuple[str, float]]:
    """(name of a module, score), the most sensitive first. The score is the signal-to-noise ratio of the model's
    floating-point outputs in dB while this module alone computes with 8 bits: lower is more sensitive, `inf` is no change.

    `batches` are positional inputs on the model's device. `deadline_s` is a `time.monotonic()` value: modules that it
    left no time for follow the others, in the order and with the scores of their own outputs; so do all of them where
    the model returns no floating-point numbers. Raises ValueError without batches.
    """
    chosen = _few(torch, batches)
    if not chosen:
        raise ValueError("no inputs to rank the layers with")
    attention = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)      # one fused operator would hide the products inside it
    watch = _watch(model)
    handles = _follow(model, watch)
    try:
        with torch.inference_mode(False), torch.no_grad():      # inference mode dispatches whole functions, not their products
            return _rank(torch, model, chosen, watch, deadline_s)
    finally:
        for handle in handles:
            handle.remove()
        torch.backends.mha.set_fastpath_enabled(attention)


def _rank(torch: Any, model: Any, batches: list[tuple[Any, ...]], watch: Any, deadline_s: float | None) -> list[tuple[str, float]]:
    expected = [_outputs(torch, model, batch) for batch in batches]
    watch.own = {}
    _outputs(torch, model, batches[0], watch)
    own = {name: _decibels(*powers) for name, powers in watch.own.items()}
    watch.own = None
    order = sorted(own, key=own.get)
    measured: dict[str, float] = {}
    if any(outputs for outputs in expected):
        for name in order:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                break
            watch.rounded = name
            powers = [_powers(outputs, _outputs(torch, model, batch, watch)) for outputs, batch in zip(expected, batches)]
            measured[name] = _decibels(*map(sum, zip(*powers)))
    rest = [name for name in order if name not in measured]
    return [(name, measured[name]) for name in sorted(measured, key=measured.get)] + [(name, own[name]) for name in rest]


def _few(torch: Any, batches: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    chosen, samples = [], 0
    for batch in batches:
        if samples >= SAMPLES:
            break
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        samples += tensors[0].shape[0] if tensors and tensors[0].ndim else 1
        chosen.append(batch)
    return chosen


#: Products as torch dispatches them: places of the input and of the weight, and the weight's axis of output channels.
PRODUCTS = {"aten::convolution": (0, 1, 0), "aten::mm": (0, 1, 1), "aten::addmm": (1, 2, 1), "aten::bmm": (0, 1, 2), "aten::baddbmm": (1, 2, 2)}

#: Among them those that multiply activations with each other as well: only with a parameter they are products with a weight.
BATCHED = ("aten::bmm", "aten::baddbmm")


def _watch(model: Any) -> Any:
    """A mode that sees every product, and rounds those of one module."""
    from torch.utils._python_dispatch import TorchDispatchMode

    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    class Watch(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []                              # of the modules being called, outermost first
            self.rounded: str | None = None                         # the module whose products are rounded
            self.own: dict[str, tuple[float, float]] | None = None  # powers of signal and noise of each module's products

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            kind = function._schema.name
            name = self.names[-1] if self.names else ""
            if kind not in PRODUCTS or (self.own is None and name != self.rounded):
                return function(*args, **kwargs)
            given, weight, axis = PRODUCTS[kind]
            if (not args[given].is_floating_point() or not args[given].numel()
                    or (kind in BATCHED and args[weight].untyped_storage().data_ptr() not in weights)):
                return function(*args, **kwargs)
            narrow = list(args)
            narrow[given], narrow[weight] = _round_input(args[given]), _round_weight(args[weight], axis)
            rounded = function(*narrow, **kwargs)
            if self.own is None:
                return rounded
            exact = function(*args, **kwargs)
            powers = zip(_powers([exact], [rounded]), self.own.get(name, (0.0, 0.0)))
            self.own[name] = tuple(map(sum, powers))
            return exact

    return Watch()


def _round_weight(weight: Any, axis: int) -> Any:
    """Symmetric, one scale per output channel, -127 to 127."""
    others = [dimension for dimension in range(weight.ndim) if dimension != axis % weight.ndim]
    scale = weight.abs().amax(others, keepdim=True) / 127
    scale = scale.where(scale > 0, 1)
    return (weight / scale).round() * scale


def _round_input(given: Any) -> Any:
    """Affine, one scale for the tensor, 0 to 255; zero stays zero."""
    low, high = given.min().clamp(max=0), given.max().clamp(min=0)
    scale = (high - low) / 255
    if not scale > 0 or not scale.isfinite():
        return given
    zero = (-low / scale).round()
    return ((given / scale + zero).round().clamp(0, 255) - zero) * scale


def _follow(model: Any, watch: Any) -> list[Any]:
    """Hooks that keep the name of the module being called at the end of `watch.names`."""

    def leave(module: Any, inputs: Any, output: Any) -> None:
        watch.names.pop()

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda module, inputs, name=name: watch.names.append(name)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    return handles


def _outputs(torch: Any, model: Any, batch: tuple[Any, ...], watch: Any = None) -> list[Any]:
    """Floating-point outputs. The same random numbers each time, for a model that draws some."""
    given = copy.deepcopy(batch)        # it may write to its inputs
    torch.manual_seed(0)
    if watch is None:
        result = model(*given)
    else:
        watch.names.clear()
        with watch:
            result = model(*given)
    return [leaf for leaf in batches.tensors(torch, result) if leaf.is_floating_point()]


def _powers(exact: Sequence[Any], other: Sequence[Any]) -> tuple[float, float]:
    """Sums of squares of the exact values and of the differences, where the exact ones are finite (masks hold -inf)."""
    signal = noise = 0.0
    for left, right in zip(exact, other):
        if left.shape != right.shape:       # lengths that depend on the values: nothing to compare
            return 1.0, 1.0
        left, right = left.double(), right.double()
        finite = left.isfinite()
        difference = (right - left)[finite]
        signal += float(left[finite].square().sum())
        noise += float(difference.square().sum()) if bool(difference.isfinite().all()) else math.inf
    return signal, noise


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    if signal == 0 or math.isinf(noise):
        return -math.inf
    return 10 * math.log10(signal / noise)
