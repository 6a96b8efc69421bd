"""Compute linear layers in 8-bit floating point.

What it does
------------
`torchao` replaces the trained module's `nn.Linear` layers, where all three matrix products of a step have sizes that
divide by 16, by layers that cast inputs, weights and gradients to float8 with a scale per tensor, newly computed each
time.

When it helps
-------------
Large matrices on GPUs with float8 tensor cores (compute capability 8.9 and later: Ada, Hopper, Blackwell), together
with `compile`, which fuses the casts: then up to twice the rate of bfloat16.

When it hurts
-------------
Small matrices, and without `compile`: casting costs more than the product saves.

Numerics
--------
`precision`: products take float8 (3 bits of mantissa forward, 2 backward) and add up in float32. Parameters,
gradients and the optimizer stay as they are.

How it is applied
-----------------
`convert_to_float8_training` on the trained modules. The new layers share the parameters of the old ones, so
optimizers and keys of state dicts stay. A copied or pickled model has the plain layers again. Layers that are called
under float16 or whose number of rows does not divide by 16 fail in torchao; such a trial fails by name. Needs the
extra `saturate[torchao]` in the environment of the workload. Tested with emulated float8 only, without such a device.

References
----------
pytorch/ao, torchao/float8 (README, "float8 training").
Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from saturate.records.facts import Evidence, Facts
from saturate.techniques import _common
from saturate.techniques._api import Eligible, Ineligible, NotApplied, Proof, Technique, Touch

TECHNIQUE = Technique(
    id="fp8-linear",
    title="linear layers in float8",
    numerics="precision",
    stage="model",
    acts_on="modules",
    touches=(Touch("linear-layers"),),
    status="experimental",
)

#: The first compute capability with float8 tensor cores.
CAPABILITY = (8, 9)

#: Sizes must divide by this (torch._scaled_mm); layers with a side below `least` are not worth the casts.
DIVISOR = 16


@dataclass(frozen=True)
class Options:
    """`recipe`: what has a scale of its own, as torchao calls it: "tensorwise" or "rowwise" (more exact, slower). `least`: layers with
    a side below it stay as they are."""

    recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    least: int = field(default=256, metadata={"minimum": 0})


def eligible(facts: Facts) -> Eligible | Ineligible:
    if facts.device != "cuda":
        return Ineligible(f"needs a CUDA device with float8 tensor cores, the training is on {facts.device or 'an unknown device'}")
    if facts.rocm:
        return Ineligible("AMD's GPUs number their generations in another way, and which of them multiply float8 is not known here")
    if facts.capability is None or tuple(facts.capability) < CAPABILITY:
        return Ineligible(f"{facts.device_name or 'the device'} has no float8 tensor cores (compute capability 8.9 and later)")
    if not any(module.linears for module in facts.modules):
        return Ineligible("no trained module with linear layers was seen")
    if facts.autocast == "float16" or facts.grad_scaler:
        return Ineligible("the script computes in float16, which float8 layers do not support")
    if "torchao" not in facts.packages:
        return Ineligible("torchao is not installed in the workload's environment: pip install 'saturate[torchao]'")
    return Eligible(f"{sum(module.linears for module in facts.modules)} linear layers, and a device with float8 tensor cores")


def variants(facts: Facts) -> list[Options]:
    return [Options(), Options(recipe="rowwise")]


def bound(facts: Facts) -> float | None:
    return _common.computing(facts, 0.5)


def apply(context: Any, options: Options) -> str:
    if context.device != "cuda":
        raise NotApplied(f"the training is on {context.device or 'no known device'}, not on a CUDA device")
    try:
        from torchao.float8 import Float8LinearConfig
    except ImportError as error:
        raise NotApplied(f"torchao does not load here ({error}): pip install 'saturate[torchao]'") from error
    # The gradient of a weight sums over the rows of a batch: the last one of an epoch need not have a multiple of 16.
    config = replace(Float8LinearConfig.from_recipe_name(options.recipe), pad_inner_dim=True)
    return convert(context, config, options.least)


def convert(context: Any, config: Any, least: int) -> str:
    """Replace the layers. Raises NotApplied when none is suitable."""
    from torchao.float8 import convert_to_float8_training

    plain = context.torch.nn.Linear
    replaced: list[Any] = []

    def suitable(layer: Any, name: str) -> bool:
        sides = layer.in_features, layer.out_features
        return (type(layer) is plain and min(sides) >= least and not any(side % DIVISOR for side in sides)
                and "forward" not in vars(layer) and not layer._forward_hooks and not layer._forward_pre_hooks)

    for module in context.modules:
        if type(module) is plain:
            continue        # it has no parent that could hold another in its place
        before = [(parent, name, child) for parent in module.modules() for name, child in parent.named_children() if type(child) is plain]
        convert_to_float8_training(module, module_filter_fn=suitable, config=config)
        for parent, name, child in before:
            layer = getattr(parent, name)
            if layer is not child:
                replaced.append(layer)
                layer.train(child.training)
                layer.__reduce_ex__ = _as_plain(layer, child)
                context.changes.append(f"{context.owner}: {type(parent).__name__}.{name} computes in float8")
                context.on_undo(functools.partial(_put_back, weakref.ref(parent), name, weakref.ref(child)))
    if not replaced:
        raise NotApplied(f"no linear layer with sides of {least} or more that divide by {DIVISOR}")
    replaced[0].register_forward_hook(lambda *_: context.note(TECHNIQUE.id, f"{len(replaced)} layers ran in float8"))
    return f"{len(replaced)} linear layers compute in float8"


def _put_back(parent: weakref.ref[Any], name: str, plain: weakref.ref[Any]) -> None:
    """Unless the script has dropped its model: the layer that computes in its place holds the plain one (`_as_plain`)."""
    there, layer = parent(), plain()
    if there is not None and layer is not None:
        setattr(there, name, layer)


def _as_plain(layer: Any, plain: Any) -> Any:
    """How a copy and a pickle see the layer: as the one that it replaced, with the parameters that it has now."""

    def reduce(protocol: Any) -> Any:
        plain.weight, plain.bias = layer.weight, layer.bias
        plain.train(layer.training)
        return plain.__reduce_ex__(1)       # newer protocols insist on the layer's own class

    return reduce


def active(evidence: Evidence, options: Options) -> Proof:
    seen = evidence.notes.get(TECHNIQUE.id, "")
    return Proof(bool(seen), seen or "no layer ran in float8")


def as_code(options: Options) -> str:
    return (
        "# pip install torchao\n"
        "from dataclasses import replace\n"
        "from torchao.float8 import Float8LinearConfig, convert_to_float8_training\n"
        "\n"
        "def suitable(layer, name):\n"
        "    sides = layer.in_features, layer.out_features\n"
        f"    return type(layer) is torch.nn.Linear and min(sides) >= {options.least} and not any(side % {DIVISOR} for side in sides)\n"
        "\n"
        f"config = replace(Float8LinearConfig.from_recipe_name({options.recipe!r}), pad_inner_dim=True)\n"
        "convert_to_float8_training(model, module_filter_fn=suitable, config=config)"
    )
