"""What the techniques that quantize linear layers with torchao share: which layers, how, and what shows it.

torchao replaces the weight of a layer by a tensor subclass that carries its own kernels. Such a module runs eagerly, but
it is slow there: the casts around each product only disappear in a compiler. So these techniques are number formats that
wait for a runtime which compiles; alone they say what torchao's eager kernels give.

torchao sets options of torch's compiler for the whole process (coordinate descent tuning, fusion of integer products
with the scaling after them) and never resets them. A candidate has a process of its own, so nothing else sees that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from saturate.inference.techniques import _onnx, _precision
from saturate.inference.techniques._api import Context, Ineligible, NotApplied, Proof
from saturate.records.inference import ModelFacts

#: A last layer that holds less than this share of the weights is left alone: it decides the answer and costs little time.
LAST_LAYER_SHARE = 0.05

#: What has a smaller range on a CPU without VNNI, see `saturates`.
NARROWED = "inputs and weights"


def refusal(facts: ModelFacts) -> Ineligible | None:
    """Why torchao cannot help, or None."""
    if "torchao" not in facts.installed:
        return Ineligible("torchao is not installed: pip install 'saturate[inference]'")
    if not facts.linears:
        return Ineligible("torchao replaces linear layers; the model has none")
    return None


def refusal_below(facts: ModelFacts, capability: tuple[int, int], what: str) -> Ineligible | None:
    """Why a GPU kernel cannot run here, or None."""
    if facts.device != "cuda":
        return Ineligible(f"needs a CUDA device with {what}; the model is on the {facts.device}")
    if facts.capability is None or tuple(facts.capability) < capability:
        return Ineligible(f"needs {what}: compute capability {capability[0]}.{capability[1]}, this device has "
                          + (".".join(map(str, facts.capability)) if facts.capability else "an unknown one"))
    return None


def refusal_for_int8(facts: ModelFacts) -> Ineligible | None:
    """Why products in int8 cannot run here, or None."""
    return refusal_below(facts, (7, 5), "integer tensor cores") if facts.device == "cuda" else None


def saturates(facts: ModelFacts) -> bool:
    """Whether int8 products are to have half of their range: without VNNI a CPU adds them in 16 bits, which saturate."""
    return facts.device == "cpu" and not _onnx.vnni(facts)


def dynamic_int8(asymmetric: bool, reduce_range: bool) -> Any:
    """torchao's configuration for int8 products with inputs rounded at each call. `reduce_range`: where it `saturates`."""
    quantization = imported()
    mapping = quantization.MappingType.ASYMMETRIC if asymmetric else quantization.MappingType.SYMMETRIC
    return quantization.Int8DynamicActivationInt8WeightConfig(act_mapping_type=mapping, reduce_range=reduce_range)


def kept(name: str, keep: Collection[str]) -> bool:
    """Whether the module, or one that it lies in, stays in the original precision."""
    parts = name.split(".")
    return any(".".join(parts[:count]) in keep for count in range(1, len(parts) + 1)) or "" in keep


def layers(context: Context, fits: Callable[[Any], bool] = lambda layer: True) -> dict[str, Any]:
    """Linear layers to quantize, by name: plain ones with a plain weight, that fit, and that nothing says to keep.

    A subclass with a forward of its own, and the output layer of torch's attention, use their weight in ways of their
    own and are left alone.
    """
    torch = context.torch
    plain = torch.nn.Linear
    special = torch.nn.modules.linear.NonDynamicallyQuantizableLinear
    found = {name: layer for name, layer in context.model.named_modules()
             if isinstance(layer, plain) and type(layer).forward is plain.forward and not isinstance(layer, special)
             and type(layer.weight) is torch.nn.Parameter and layer.weight.is_floating_point()}
    if len(found) > 1:
        last = next(reversed(found))
        if found[last].weight.numel() < LAST_LAYER_SHARE * sum(layer.weight.numel() for layer in found.values()):
            del found[last]
    return {name: layer for name, layer in found.items() if fits(layer) and not kept(name, context.keep)}


#: The same without saturate: a mapping `linear` whose keys name what `layers` chooses. The names outlive the layers, which training
#: with rounding replaces.
LAYERS_CODE = f"""\
linear = {{name: layer.weight.numel() for name, layer in model.named_modules()
          if isinstance(layer, torch.nn.Linear) and type(layer).forward is torch.nn.Linear.forward and type(layer.weight) is torch.nn.Parameter
          and not isinstance(layer, torch.nn.modules.linear.NonDynamicallyQuantizableLinear)}}      # attention's output layer is one
last = next(reversed(linear))
if len(linear) > 1 and linear[last] < {LAST_LAYER_SHARE} * sum(linear.values()):
    del linear[last]      # it decides the answer and costs little time
torch.backends.mha.set_fastpath_enabled(False)      # torch's fused encoder layers read the weights of their parts themselves
"""


def quantize_code(config: str, fits: str = "") -> str:
    """Lines that quantize those of `linear` that fit. `config` and `fits`, a condition on `layer`, are Python."""
    condition = f" and {fits}" if fits else ""
    return f"{LAYERS_CODE}quantize_(model, {config}, lambda layer, name: name in linear{condition})"


def quantize(context: Context, technique: str, config: Any, fits: Callable[[Any], bool] = lambda layer: True) -> str:
    """Quantize the layers of `layers` with a torchao configuration. Raises NotApplied where none fits or none changed."""
    from torchao.quantization import quantize_

    chosen = layers(context, fits)
    if not chosen:
        raise NotApplied("no linear layer that torchao's kernel takes" + (" is left to quantize" if context.keep else ""))
    # Torch's fused encoder layers read the weights of their parts themselves, and dynamo breaks on the choice.
    context.torch.backends.mha.set_fastpath_enabled(False)
    wanted = {id(layer) for layer in chosen.values()}
    quantize_(context.model, config, filter_fn=lambda module, name: id(module) in wanted)
    done = [name for name in chosen if _format(context.torch, context.model.get_submodule(name))]
    if not done:
        raise NotApplied(f"torchao left the weights of all {len(chosen)} linear layers as they are")
    context.notes[technique] = str(len(done))
    among = sum(isinstance(module, context.torch.nn.Linear) for module in context.model.modules())
    return f"{len(done)} of {among} linear layers quantized"


def proof(context: Context, technique: str) -> Proof:
    """A census of the weights' types, after the first call."""
    found = Counter(filter(None, (_format(context.torch, module) for module in context.model.modules())))
    if not found:
        return Proof(False, "no linear layer holds a quantized weight")
    return Proof(sum(found.values()) >= int(context.notes.get(technique, "1")),
                 ", ".join(f"{count} linear layers with weights of type {name}" for name, count in found.most_common()))


def _format(torch: Any, module: Any) -> str:
    """The type of a layer's weight where it is a tensor subclass, else nothing."""
    weight = getattr(module, "weight", None) if isinstance(module, torch.nn.Linear) else None
    special = isinstance(weight, torch.Tensor) and type(weight) not in (torch.Tensor, torch.nn.Parameter)
    return type(weight).__name__ if special else ""


def imported() -> Any:
    """torchao.quantization. Raises NotApplied where it does not load."""
    try:
        import torchao.quantization
    except ImportError as error:
        raise NotApplied(f"torchao does not load here ({error}): pip install 'saturate[inference]'") from error
    return torchao.quantization


def in_bfloat16(context: Context, technique: str) -> str:
    """Cast a float32 model to bfloat16, with inputs and outputs as they are: what some kernels ask for. A sentence."""
    torch = context.torch
    if not any(parameter.dtype in (torch.float32, torch.float64) for parameter in context.model.parameters()):
        return ""
    return _precision.apply(context, torch.bfloat16, False, f"{technique} rest") + "; "


def bfloat16_helps(facts: ModelFacts) -> bool:
    """Whether a float32 model may gain from bfloat16 beside the quantized layers. On CPUs the compiler does not take
    torchao's int8 products in bfloat16 (torch 2.13)."""
    return facts.device == "cuda" and "float32" in facts.dtypes and tuple(facts.capability or (0, 0)) >= (8, 0)
