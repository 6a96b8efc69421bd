"""Run the model's forward in bfloat16 where that is numerically sane, and hand its outputs back as float32.

What it does
------------
Wraps the forward of the outermost trained modules in `torch.autocast` with bfloat16: matrix products, convolutions and
attention compute in bfloat16, while normalizations, softmax and losses inside the model stay in float32. Parameters,
gradients and optimizer state remain float32.

When it helps
-------------
Models bound by matrix products or convolutions on a device with bfloat16 units: NVIDIA since Ampere, CPUs with
AVX512-BF16 or AMX. Activations take half the memory, so models bound by memory bandwidth gain too.

When it hurts
-------------
Small layers: every call pays for casting its inputs and weights. Recurrent cells called step by step cast their weights
at each call outside of the autocast cache. Tensors that a forward stores on its modules (but for its parameters and buffers, which are widened
behind it), or passes to hooks inside of it, stay bfloat16: `.numpy()` raises an error on them, perhaps long after the start if the script
calls it only now and then. Positions that a forward
multiplies by frequencies as a matrix product (`positions[:, None] @ frequencies[None]`, for rotary embeddings) are rounded to 8 bits:
of the first 1000, 507 stay different. Evaluation, in float32, sees 1000, which the model was not trained on.

Numerics
--------
`precision`: bfloat16 keeps 8 bits of significand and the range of float32, so no loss scaling is needed. A loss that is
computed outside the model sees float32 and is as safe as before.

Some forwards fail under autocast, because they mix computed values with float32 tensors of their own in operators that take only
one type (`scatter_`, in-place writes, custom functions). For these, `scope="layers"` lets only linear and convolution layers compute in
bfloat16, and each returns float32. It is tried only then, because the casts cost time.

How it is applied
-----------------
The forward of each outermost module (or layer, see above) is wrapped while it is in training mode; evaluation keeps float32. Tensors in
returned tuples, dictionaries, dataclasses and distributions of `torch.distributions` are widened to float32. A forward that the script
compiled, or that a library put on the module, is wrapped from outside; what is compiled is compiled once more for it. Refused where the
script autocasts itself, and where the forward calls the backward pass and the optimizer: both would run under autocast, too. Refused,
too, where `torch.nn.DataParallel` runs parts of it on several devices: its threads would autocast to float16. An LSTM stays in float32
on a CPU for which torch has no kernel of it in bfloat16 (those without AVX-512), where the script would end.

References
----------
PyTorch documentation, "Automatic Mixed Precision package - torch.amp".
Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from saturate.records.facts import Evidence, Facts
from saturate.techniques import _autocast, _common
from saturate.techniques._api import Eligible, Ineligible, Proof, Technique, Touch

TECHNIQUE = Technique(
    id="bf16-autocast",
    title="bfloat16 autocast",
    numerics="precision",
    stage="model",
    acts_on="modules",
    touches=(Touch("forward", _autocast.AUTOCAST_ORDER), Touch("autocast")),
    fallbacks=True,
)


@dataclass(frozen=True)
class Options:
    """`scope`: "module", the whole forward of what is trained; "layers", each of its linear and convolution layers alone."""

    scope: Literal["module", "layers"] = "module"


def eligible(facts: Facts) -> Eligible | Ineligible:
    refusal = _autocast.why_no_autocast(facts)
    if refusal is not None:     # a refusal is false
        return refusal
    native = {"cuda": facts.cuda_bf16_native, "cpu": facts.machine.cpu_bf16_native}.get(facts.device, False)
    if not native:
        return Ineligible(f"this {facts.device} device has no bfloat16 arithmetic")
    return Eligible("float32 matrix products or convolutions on a device with bfloat16 arithmetic")


def variants(facts: Facts) -> list[Options]:
    layers = sum(module.linears + module.convolutions + module.other_convolutions for module in facts.modules)
    return [Options(), Options(scope="layers")] if layers else [Options()]


def bound(facts: Facts) -> float | None:
    return _common.computing(facts)


def apply(context: Any, options: Options) -> str:
    inside = layers_of if options.scope == "layers" else None
    count = _autocast.wrap_autocast(context, context.torch.bfloat16, TECHNIQUE.id, inside=inside)
    what = "module(s)" if inside is None else "linear and convolution layer(s)"
    return f"forward of {count} {what} under bfloat16 autocast, outputs in float32"


def layers_of(torch: Any, module: Any) -> list[Any]:
    """What `scope="layers"` wraps: layers that are products and return one tensor. Attention of torch's own reads the weights of its
    projections without calling them, and recurrent nets return their state as well: both stay in float32."""
    products = (torch.nn.Linear, torch.nn.modules.conv._ConvNd)
    return [layer for layer in module.modules() if isinstance(layer, products)]


def active(evidence: Evidence, options: Options) -> Proof:
    seen = evidence.notes.get(TECHNIQUE.id, "")
    return Proof(bool(seen), seen or "nothing in the autograd graph was computed in bfloat16")


def as_code(options: Options) -> str:
    if options.scope == "layers":
        return (
            "import types\n\n"
            "def in_bfloat16(layer, *args, **kwargs):\n"
            "    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=layer.training):\n"
            "        output = type(layer).forward(layer, *args, **kwargs)\n"
            "    return output.float() if layer.training else output\n\n"
            "for layer in model.modules():\n"
            "    if isinstance(layer, (torch.nn.Linear, torch.nn.modules.conv._ConvNd)):\n"
            "        layer.forward = types.MethodType(in_bfloat16, layer)"
        )
    return (
        "with torch.autocast(device.type, dtype=torch.bfloat16):\n"
        "    output = model(inputs)\n"
        "loss = loss_fn(output.float(), targets)"
    )
