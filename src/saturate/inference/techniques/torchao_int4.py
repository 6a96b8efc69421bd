"""Store the weights of linear layers in 4 bits, and compute in floating point.

What it does
------------
`torchao` keeps the weights of linear layers as 4-bit integers with a scale and a zero point for each group of
neighbouring inputs. Kernels widen them inside the product.

When it helps
-------------
Decoding a language model one or a few sequences at a time: the time goes into reading weights, and these are an eighth
of float32. Large models that do not fit otherwise.

When it hurts
-------------
More than a few rows per call: widening costs more than reading saves (0.75x at batch 8 against bfloat16 on an H200, in
NVIDIA's own table). Layers whose inputs do not divide into groups stay as they are.

Numerics
--------
`precision`: 16 steps per group of weights. The strongest of the weight formats here; small models lose visibly.

How it is applied
-----------------
On CUDA (compute capability 8.0 and later) the model computes in bfloat16, and `quantize_` uses `Int4WeightOnlyConfig` packed
for tensor cores, with groups rounded by HQQ. On the CPU it uses torchao's prototype for torch's own int4 kernel, where the
installed torchao still has it. Run on CPUs only; the CUDA path is untested.

References
----------
pytorch/ao, torchao/quantization (README, "A16W4 Weight Only Quantization").
Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from saturate.inference.techniques import _precision, _torchao
from saturate.inference.techniques._api import Context, Eligible, Ineligible, NotApplied, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="torchao-int4",
    title="int4 weights of linear layers",
    numerics="precision",
    stage="number",
    touches=(Touch("number-format"), Touch("module-classes")),
    status="experimental",
)

#: Outputs of a layer that torch's CPU kernel takes divide by this.
CPU_OUTPUTS = 16


@dataclass(frozen=True)
class Options:
    """`group`: so many neighbouring inputs share a scale: 32, 64 or 128; fewer is more exact and larger."""

    group: int = 128


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    refused = _torchao.refusal(facts)
    if refused is None and facts.device != "cpu":
        refused = _torchao.refusal_below(facts, (8, 0), "bfloat16 tensor cores")
    return refused if refused is not None else Eligible(f"{facts.linears} linear layers, whose weights shrink to an eighth")


def variants(facts: ModelFacts) -> list[Options]:
    return [Options(), Options(group=32)]


def bound(facts: ModelFacts) -> float | None:
    return 1.9 if facts.device == "cuda" else 1.2       # decoding an 8B language model on an H100, over bfloat16


def apply(context: Context, options: Options) -> str:
    quantization = _torchao.imported()
    if options.group not in (32, 64, 128):
        raise NotApplied(f"a group has 32, 64 or 128 inputs, not {options.group}")
    words = _torchao.in_bfloat16(context, TECHNIQUE.id) if context.device == "cuda" else ""
    config = _on_cuda(quantization, options.group) if context.device == "cuda" else _on_cpu(options.group)
    outputs = 1 if context.device == "cuda" else CPU_OUTPUTS

    def fits(layer: Any) -> bool:
        return layer.in_features % options.group == 0 and layer.out_features % outputs == 0

    return words + _torchao.quantize(context, TECHNIQUE.id, config, fits)


def _on_cuda(quantization: Any, group: int) -> Any:
    return quantization.Int4WeightOnlyConfig(
        group_size=group, int4_packing_format="tile_packed_to_4d", int4_choose_qparams_algorithm="hqq")


def _on_cpu(group: int) -> Any:
    try:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    except ImportError as error:
        raise NotApplied(f"the installed torchao has no int4 weights for the CPU ({error})") from error
    return PrototypeInt4WeightOnlyConfig(group_size=group)


def active(context: Context, options: Options) -> Proof:
    return _torchao.proof(context, TECHNIQUE.id)


def as_code(options: Options) -> str:
    on_gpu = "    " + _precision.as_code("bfloat16").replace("\n", "\n    ")
    return ("# pip install torchao\n"
            "from torchao.quantization import quantize_\n"
            "on_gpu = next(model.parameters()).is_cuda\n"
            "if on_gpu:\n"
            "    from torchao.quantization import Int4WeightOnlyConfig\n"
            f"    how = Int4WeightOnlyConfig(group_size={options.group}, int4_packing_format='tile_packed_to_4d',\n"
            "                               int4_choose_qparams_algorithm='hqq')\n"
            f"{on_gpu}\n"
            "else:\n"
            "    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig\n"
            f"    how = PrototypeInt4WeightOnlyConfig(group_size={options.group})\n"
            + _torchao.quantize_code("how", f"layer.in_features % {options.group} == 0 and layer.out_features % (1 if on_gpu else {CPU_OUTPUTS}) == 0"))
