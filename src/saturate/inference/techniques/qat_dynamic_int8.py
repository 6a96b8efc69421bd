"""Train a little with 8-bit rounding of linear layers in the forward, then multiply in 8-bit integers.

What it does
------------
Puts torchao's fake quantizers into linear layers, which round weights per output channel and inputs per row, as int8
products with dynamic inputs do, and trains for a few epochs with the user's loss. Then the layers get int8 weights.

When it helps
-------------
Where int8 products are fast enough but miss the accuracy budget, on any device that has them; with a runtime that
compiles.

When it hurts
-------------
It costs training time, and a learning rate that is too high ruins a trained model. Few rows per call, as for int8
products without training.

Numerics
--------
`convergence`: it is another function, trained on the user's data.

How it is applied
-----------------
torchao's `QATConfig`; the outputs of the original teach, beside the user's loss, up to the deadline of the candidate.
Then `Int8DynamicActivationInt8WeightConfig` with a zero point for the inputs, as in the training. Layers that a repair
keeps are not rounded. In the training neither are layers with hooks: torchao puts new ones in their place, without them.

References
----------
pytorch/ao, torchao/quantization/qat (README).
"""

from __future__ import annotations

from dataclasses import dataclass

from saturate.inference.techniques import _onnx, _qat, _torchao
from saturate.inference.techniques._api import Context, Eligible, Ineligible, NotApplied, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="qat-dynamic-int8",
    title="int8 products of linear layers, trained with rounding",
    numerics="convergence",
    stage="number",
    touches=(Touch("number-format"), Touch("module-classes"), Touch("weights-trained", _qat.ORDER)),
)

PREPARE_S = 90.0


@dataclass(frozen=True)
class Options:
    """`reduce_range`: half of the range, for CPUs without VNNI. `train` says how long."""

    reduce_range: bool = False


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    for refused in (_qat.refusal(facts), _torchao.refusal(facts), _torchao.refusal_for_int8(facts)):
        if refused is not None:
            return refused
    layers = f"{facts.linears} linear layers, and training data"
    return Eligible(layers) if facts.device == "cuda" else _onnx.worth_int8(facts, layers, _torchao.NARROWED)


def variants(facts: ModelFacts) -> list[Options]:
    return [Options(_torchao.saturates(facts))]


def bound(facts: ModelFacts) -> float | None:
    return 5.2 if facts.device == "cuda" or _onnx.vnni(facts) else 1.5       # the same products as without training


def apply(context: Context, options: Options) -> str:
    quantization = _torchao.imported()
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    torch, teacher = context.torch, _qat.original(context)
    chosen = _torchao.layers(context, lambda layer: not (layer._forward_hooks or layer._forward_pre_hooks))
    if not chosen or "" in chosen:
        raise NotApplied("no linear layer inside the model is left to quantize")
    wanted = {id(layer) for layer in chosen.values()}
    fake = QATConfig(activation_config=IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False),
                     weight_config=IntxFakeQuantizeConfig(torch.int8, "per_channel"), step="prepare")
    quantization.quantize_(context.model, fake, filter_fn=lambda module, name: id(module) in wanted)
    trained = _qat.recover(context, context.model, teacher)
    quantization.quantize_(context.model, QATConfig(step="convert"))
    return f"{trained}; {_torchao.quantize(context, TECHNIQUE.id, _torchao.dynamic_int8(True, options.reduce_range))}"


def active(context: Context, options: Options) -> Proof:
    return _torchao.proof(context, TECHNIQUE.id)


def as_code(options: Options) -> str:
    halved = ", reduce_range=True" if options.reduce_range else ""
    rounding = _torchao.quantize_code("QATConfig(activation_config=inputs_, weight_config=weights_, step='prepare')",
                                      "not (layer._forward_hooks or layer._forward_pre_hooks)")
    return ("# pip install torchao\n"
            "from torchao.quantization import Int8DynamicActivationInt8WeightConfig, MappingType, quantize_\n"
            "from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig\n"
            "inputs_, weights_ = IntxFakeQuantizeConfig(torch.int8, 'per_token', is_symmetric=False), IntxFakeQuantizeConfig(torch.int8, 'per_channel')\n"
            f"{rounding}\n"
            "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\n"
            "for *batch, target in loader:\n"
            "    loss(model(*batch), target).backward(); optimizer.step(); optimizer.zero_grad()\n"
            "quantize_(model, QATConfig(step='convert'))\n"
            f"quantize_(model, Int8DynamicActivationInt8WeightConfig(act_mapping_type=MappingType.ASYMMETRIC{halved}),\n"
            "          lambda layer, name: name in linear)")
