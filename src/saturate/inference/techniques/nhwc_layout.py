"""Keep images and convolution weights with the channels innermost, as the fast convolution kernels want them.

What it does
------------
Stores the weights of 2-d and 3-d convolutions channels-last, and converts images at the model's door; outputs are handed
back in the usual layout.

When it helps
-------------
Convolutional networks: on GPUs together with half precision (tensor cores work channels-last), on CPUs because oneDNN's
kernels do as well and need not convert.

When it hurts
-------------
Models that mix convolutions with layers that have no such kernels; depthwise convolutions on some GPUs. A model that
calls `.view` on activations raises. Compilers choose layouts themselves, so with one there is little left to gain.

Numerics
--------
`reordering`: the same products, added in another order.

How it is applied
-----------------
Only strides change: parameters keep their identity, shape and values. The proof is how many convolutions were seen to
give channels-last outputs in a forward of real inputs.

References
----------
PyTorch tutorials, "Channels Last Memory Format in PyTorch".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from saturate.inference.techniques import _census, _wrap
from saturate.inference.techniques._api import Context, Eligible, Ineligible, NotApplied, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="nhwc-layout",
    title="channels-last layout",
    numerics="reordering",
    stage="number",
    touches=(Touch("memory-format"),),
)

#: What `apply` does, on any nesting of inputs.
_LINES = _wrap.MAPPED_CODE + """\
formats = {4: torch.channels_last, 5: torch.channels_last_3d}
for layer in model.modules():
    if type(layer).__name__ in ("Conv2d", "Conv3d", "ConvTranspose2d", "ConvTranspose3d"):
        layer.weight.data = layer.weight.data.contiguous(memory_format=formats[layer.weight.dim()])
def inward(x):
    image = x.dim() in formats and x.is_floating_point()
    return x.contiguous(memory_format=formats[x.dim()]) if image else x
class ChannelsLast(torch.nn.Module):      # images channels-last inside, answers in the usual layout
    def __init__(self, model):
        super().__init__()
        self.model, self.training = model, False
    def forward(self, *inputs):
        return mapped(lambda x: x.contiguous(), self.model(*mapped(inward, inputs)))
model = ChannelsLast(model)"""

_CONVOLUTIONS = ("Conv2d", "Conv3d", "ConvTranspose2d", "ConvTranspose3d")


@dataclass(frozen=True)
class Options:
    """Nothing to choose."""


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    if not facts.convolutions:
        return Ineligible("the model has no convolutions")
    return Eligible(f"{facts.convolutions} convolutions")


def bound(facts: ModelFacts) -> float | None:
    return 1.1      # float32 ResNet-50 on a Zen 5 core, eager; more with half precision on a GPU


def apply(context: Context, options: Options) -> str:
    torch = context.torch
    layers = [module for module in context.model.modules() if type(module).__name__ in _CONVOLUTIONS]
    weights = {id(layer.weight): layer.weight for layer in layers}.values()
    if not weights:
        raise NotApplied("the model has no 2-d or 3-d convolution")
    for weight in weights:
        weight.data = weight.data.contiguous(memory_format=_format(torch, weight.dim()))

    def inward(tensor: Any) -> Any:
        image = tensor.dim() in (4, 5) and tensor.is_floating_point()
        return tensor.contiguous(memory_format=_format(torch, tensor.dim())) if image else tensor

    def wrapper(inner: Any, args: Any, kwargs: Any) -> Any:
        output = inner(*_wrap.mapped(torch, args, inward), **_wrap.mapped(torch, kwargs, inward))
        return _wrap.mapped(torch, output, lambda tensor: tensor.contiguous())

    _wrap.around(context.model, wrapper)
    seen, among = _census.count(context, _census.CONVOLUTIONS, lambda tensor: _is_channels_last(torch, tensor))
    if not seen:
        raise NotApplied(f"none of {among} convolutions computed channels-last")
    context.notes[TECHNIQUE.id] = f"{seen} of {among} convolutions compute channels-last"
    return f"{len(weights)} weights and the images stored channels-last"


def _format(torch: Any, dimensions: int) -> Any:
    return torch.channels_last if dimensions == 4 else torch.channels_last_3d


def _is_channels_last(torch: Any, tensor: Any) -> bool:
    """And not the usual layout as well, as with one channel or one pixel."""
    image = tensor.dim() in (4, 5)
    return image and tensor.is_contiguous(memory_format=_format(torch, tensor.dim())) and not tensor.is_contiguous()


def active(context: Context, options: Options) -> Proof:
    seen = context.notes.get(TECHNIQUE.id, "")
    return Proof(bool(seen), seen or "no convolution was seen computing channels-last")


def as_code(options: Options) -> str:
    return _LINES
