"""8-bit graphs: how ONNX Runtime's quantizer makes them of an exported model, for whichever runtime executes them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from saturate.inference import structure
from saturate.inference.formats import onnx as files
from saturate.inference.techniques._api import Context, Eligible, Ineligible, NotApplied
from saturate.inference.techniques._onnx import EXPORT_CODE, FLOAT, export, worth_int8
from saturate.inference.techniques._onnx_exports import Exported
from saturate.records.inference import ModelFacts

#: Nodes whose first input is what they pass on; the others say in which shape, and may be computed.
RESHAPING = ("Expand", "Flatten", "Pad", "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze")

#: Nodes that give the shares by which attention mixes (a mask may follow the softmax). What goes into them may hold a mask, and a range of 8
#: bits that holds minus infinity, or a billion, holds nothing else.
SHARES = ("Softmax", "Where")

#: What no runtime computes in integers. The quantizer would round their scales with one step for all channels (4 to 6 dB of a small
#: convolutional network), and copies a bias that several share under a name that another tensor may have: the exporter's own end in
#: numbers, too.
NORMALIZATIONS = ("BatchNormalization", "InstanceNormalization", "LayerNormalization")

#: How static int8 chooses the range of an activation, as the quantizer calls it.
METHODS = {"minmax": "MinMax", "percentile": "Percentile", "entropy": "Entropy"}


def about_static(facts: ModelFacts) -> Eligible | Ineligible:
    """Whether there is anything to compute in int8, and batches to learn its ranges from."""
    if not facts.linears and not facts.convolutions:
        return Ineligible("neither convolutions nor Linear layers")
    if not facts.calibration_samples:
        return Ineligible("there is no calibration batch: give more than one batch of inputs")
    return worth_int8(facts, f"{facts.convolutions} convolutions, {facts.linears} Linear layers")


def prepare(source: Path, target: Path) -> tuple[Any, bool]:
    """Fold constants and batch normalization, and give each product a weight of its own: one that several products
    share would be transposed or quantized once for each of them, in place.

    Returns the model, and whether its weights lie in a file of their own.
    """
    onnx, onnxruntime = files.require("onnx"), files.require("onnxruntime")
    large = source.with_name(f"{source.name}.data").exists()
    folded = target.with_suffix(".folded.onnx")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(folded)
    options.log_severity_level = 3
    if large:
        options.add_session_config_entry(files.EXTERNAL, f"{folded.name}.data")
    onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    model = onnx.load(folded)
    del model.graph.value_info[:]       # onnx 1.23 finds what the exporter wrote there in conflict with its own
    separate_weights(model.graph)
    _store(onnx, model, target, large)
    for written in folded.parent.glob(f"{folded.name}*"):
        written.unlink()
    return model, large


def _store(onnx: Any, model: Any, path: Path, large: bool) -> None:
    if large:
        path.with_name(f"{path.name}.data").unlink(missing_ok=True)     # onnx appends to what is there
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data", convert_attribute=False)
    else:
        onnx.save(model, path)


def separate_weights(graph: Any) -> int:
    """Copy each constant that a product multiplies by and other nodes use, once per further use; how many copies."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    uses = collections.Counter(name for node in graph.node for name in node.input if name in constants)
    copies = 0
    for node in graph.node:
        if node.op_type not in FLOAT:
            continue
        for place, name in enumerate(node.input):
            if uses[name] > 1:
                uses[name] -= 1
                copies += 1
                mine = graph.initializer.add()
                mine.CopyFrom(constants[name])
                mine.name = node.input[place] = f"{name}.{copies}"
    return copies


def excluded(exported: Exported, model: Any, keep: Iterable[str]) -> list[str]:
    """Names of the nodes of `model`, prepared from the export, that belong to modules in `keep` or lie inside of them."""
    keep = set(keep)
    found = [node for node in model.graph.node
             if any(keep & exported.owners.get(name, frozenset()) for name in node.output)]
    if keep and not any(node.op_type in FLOAT for node in found):
        raise NotApplied(f"no product of the graph belongs to {', '.join(sorted(keep))}: it cannot stay in float32")
    # The quantizer splits a Gemm, under a new name.
    return [name for node in found for name in (node.name, f"{node.name}_MatMul")]


def before(model: Any, names: Iterable[str], joined: bool = False) -> list[str]:
    """Names of the nodes that only pass on what a product or a sum computed (activations, pooling, reshaping), on the way
    to the nodes `names`. `joined`: also those that put several of them side by side."""
    made_by = {output: node for node in model.graph.node for output in node.output}
    constants = {tensor.name for tensor in model.graph.initializer}
    found, names = [], set(names)
    waiting = [node for node in model.graph.node if node.name in names]
    while waiting:
        for name in waiting.pop().input:
            node = made_by.get(name)
            if node is None or node.op_type in FLOAT or node.name in names:
                continue
            data = node.input[:1] if node.op_type in RESHAPING else node.input
            if (joined and node.op_type == "Concat") or sum(bool(given) and given not in constants for given in data) == 1:
                names.add(node.name)
                found.append(node.name)
                waiting.append(node)
    return found


def read_unrounded(path: Path, names: Iterable[str], large: bool) -> None:
    """In a quantized graph (QDQ), let the nodes `names` read their inputs as they were before rounding: one range for a
    tensor with outliers is what breaks a layer, more often than the layer's own 8 bits."""
    onnx = files.require("onnx")
    model, names = onnx.load(path), set(names)
    made_by = {output: node for node in model.graph.node for output in node.output}
    for node in model.graph.node:
        if node.name not in names:
            continue
        for place, name in enumerate(node.input):
            back = made_by.get(name)
            rounding = made_by.get(back.input[0]) if back is not None and back.op_type == "DequantizeLinear" else None
            if rounding is not None and rounding.op_type == "QuantizeLinear":
                node.input[place] = rounding.input[0]
    _store(onnx, model, path, large)


def per_channel(model: Any) -> list[str]:
    """Names of the nodes whose constants, one for each channel, would be rounded with one step for all: normalizations, and the scales and shifts
    behind them, which for groups are nodes of their own. In float32 these cost little. Not the bias of a linear layer: OpenVINO 2026.4 crashes
    where that is left out."""
    constants = {tensor.name for tensor in model.graph.initializer if max(tensor.dims, default=1) > 1}
    found, normalized = [], set()
    for node in model.graph.node:
        scales = node.op_type in ("Add", "Mul") and constants & set(node.input) and normalized & set(node.input)
        if scales or node.op_type in NORMALIZATIONS:
            found.append(node.name)
        elif node.op_type not in RESHAPING or node.input[0] not in normalized:
            continue
        normalized.update(node.output)
    return found


class Batches:
    """Calibration batches as onnxruntime.quantization reads them, one at a time.

    Raises NotApplied where no batch fits a program whose sizes are fixed.
    """

    def __init__(self, context: Context, exported: Exported, names: Iterable[str], limit: int):
        places = {name: files.place_of(name) for name in names}
        described = [structure.flatten(context.torch, batch) for batch in context.calibration]
        fitting = [tensors for description, tensors in described
                   if structure.same(description, exported.signature["inputs"]) and _fit(tensors, exported.signature["tensors"])]
        self._feeds = [{name: tensors[place].detach().cpu().contiguous().numpy() for name, place in places.items()}
                       for tensors in fitting[:limit]]
        if not self._feeds:
            raise NotApplied("no calibration batch has the sizes that the exported program takes" if context.calibration
                             else "there are no calibration batches")
        self.set_range(0, len(self._feeds))

    def set_range(self, start_index: int, end_index: int) -> None:
        self._left = iter(self._feeds[start_index:end_index])

    def get_next(self) -> dict[str, Any] | None:
        return next(self._left, None)

    def __len__(self) -> int:
        return len(self._feeds)


def signed(quantization: Any, model: Any) -> dict[str, list[dict[str, Any]]]:
    """For the quantizer: int8 around zero for what products of two activations multiply, but for the shares that a softmax gives, which
    are never negative. Kernels for 8 bits take a second operand that is signed only."""
    constants = {tensor.name for tensor in model.graph.initializer}
    made_by = {output: node.op_type for node in model.graph.node for output in node.output}
    return {name: [{"quant_type": quantization.QuantType.QInt8, "symmetric": True}]
            for node in model.graph.node if node.op_type == "MatMul" and not constants & set(node.input)
            for name in node.input if made_by.get(name) not in SHARES}


def static(context: Context, method: str, products: bool, reduce_range: bool, batches: int,
           unrounded: Callable[[Any], bool] = lambda node: False, attention: bool = False) -> tuple[Exported, Path, str]:
    """Export the context's model, and quantize the graph as the calibration batches tell: uint8 activations, int8 weights per
    channel (QDQ). `products`: what multiplies by constant matrices only; `attention`: products of two activations as well, `signed`.
    Nodes of which `unrounded` is true, and what only leads to them, read their inputs as they were before
    rounding. Returns the file that the graph is in, and how its ranges were found, for the user.

    Raises NotApplied where there is nothing to calibrate with, and for a method that is none.
    """
    quantization = files.require("onnxruntime.quantization")
    if method not in METHODS:
        raise NotApplied(f"method must be one of {', '.join(METHODS)}, not {method}")
    exported = export(context)
    prepared, path = context.folder / "prepared.onnx", context.folder / "int8.onnx"
    model, large = prepare(exported.path, prepared)
    left = excluded(exported, model, context.keep)
    left += before(model, left)
    apart = [node.name for node in model.graph.node if unrounded(node)]
    # Excluded, not only read past: the quantizer removes a ReLU that its rounding stands for.
    left += apart + before(model, apart, joined=True)
    reader = Batches(context, exported, (item.name for item in model.graph.input), batches)
    quantization.quantize_static(
        prepared, path, reader, quant_format=quantization.QuantFormat.QDQ, per_channel=True,
        activation_type=quantization.QuantType.QUInt8, weight_type=quantization.QuantType.QInt8, reduce_range=reduce_range,
        op_types_to_quantize=["Conv", "MatMul", "Gemm"] if products else None,
        nodes_to_exclude=left if products else left + per_channel(model), use_external_data_format=large,
        calibrate_method=quantization.CalibrationMethod[METHODS[method]],
        # One batch at a time: the quantizer would hold every activation of all batches.
        extra_options={"CalibStridedMinMax": 1, "MatMulConstBOnly": products and not attention,
                       "TensorQuantOverrides": signed(quantization, model) if attention else {}},
    )
    if left:
        read_unrounded(path, left, large)
    return exported, path, f"ranges of {len(reader)} calibration batches ({method})"


def _fit(tensors: list[Any], wanted: list[dict[str, Any]]) -> bool:
    return all(isinstance(size, str) or size == given for tensor, want in zip(tensors, wanted)
               for size, given in zip(want["shape"], tensor.shape))


# -- the same without saturate -----------------------------------------------------------------------------------------

# `prepare`. ONNX Runtime's own quant_pre_process (1.30) folds nothing where symbolic shapes are skipped: a weight that is only transposed
# would get one unsigned range for all of its channels, as an activation does.
PREPARE_CODE = f"""\
import onnx, onnxruntime
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_dynamic, quantize_static
folding = onnxruntime.SessionOptions()      # of constants and batch normalization: only weights that are constants get a range per channel
folding.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
folding.optimized_model_filepath = "prepared.onnx"
for name in ("model.onnx", "prepared.onnx"):      # once more what comes of functions, which are opened behind the folding
    onnxruntime.InferenceSession(name, folding, providers=["CPUExecutionProvider"])
prepared = onnx.load("prepared.onnx")
del prepared.graph.value_info[:]      # shapes that the exporter wrote, which the quantizer would find in conflict with its own
weights, taken = {{tensor.name: tensor for tensor in prepared.graph.initializer}}, set()
for node in sorted(prepared.graph.node, key=lambda node: node.op_type in {FLOAT}):      # products share no weights: they are quantized in place
    for place, name in enumerate(node.input):
        if node.op_type in {FLOAT} and name in weights and name in taken:
            own = prepared.graph.initializer.add()
            own.CopyFrom(weights[name])
            own.name = node.input[place] = f"{{name}}.{{len(prepared.graph.initializer)}}"
        taken.add(name)
onnx.save(prepared, "prepared.onnx")
"""

READER_CODE = """\
class Batches(CalibrationDataReader):
    def __init__(self):
        self.left = iter(calibration)
    def get_next(self):
        batch = next(self.left, None)
        return None if batch is None else {one.name: named(batch)[one.name] for one in prepared.graph.input}
"""


# `per_channel`.
PER_CHANNEL_CODE = f"""\
several = {{tensor.name for tensor in prepared.graph.initializer if max(tensor.dims, default=1) > 1}}
per_channel, normalized = [], set()         # one step would do for all channels: normalizations, and what scales and shifts behind them
for node in prepared.graph.node:
    if node.op_type in {NORMALIZATIONS} or (
            node.op_type in ("Add", "Mul") and several & set(node.input) and normalized & set(node.input)):
        per_channel.append(node.name)
        normalized.update(node.output)
    elif node.op_type in {RESHAPING} and node.input[0] in normalized:
        normalized.update(node.output)
"""


# `signed`.
SIGNED_CODE = f"""\
fixed = {{tensor.name for tensor in prepared.graph.initializer}}
kinds = {{name: node.op_type for node in prepared.graph.node for name in node.output}}
signed = {{name: [{{"quant_type": QuantType.QInt8, "symmetric": True}}] for node in prepared.graph.node
          if node.op_type == "MatMul" and not fixed & set(node.input) for name in node.input if kinds.get(name) not in {SHARES}}}
"""


def apart_code(alone: str) -> str:
    """Lines that make a list `apart` of the names of nodes that are left as they are. alone: lines that define a function of that name, which
    says of which nodes that is true (`unrounded` of `static`)."""
    return f"""\
{alone}made = {{name: node for node in prepared.graph.node for name in node.output}}
constants = {{tensor.name for tensor in prepared.graph.initializer}}
waiting = [node for node in prepared.graph.node if alone(node)]
apart = [node.name for node in waiting]
while waiting:
    for node in filter(None, map(made.get, waiting.pop().input)):
        data = node.input[:1] if node.op_type in {RESHAPING} else node.input
        passes_on = node.op_type == "Concat" or sum(bool(name) and name not in constants for name in data) == 1
        if passes_on and node.op_type not in {FLOAT} and node.name not in apart:
            apart.append(node.name)
            waiting.append(node)
"""


# `read_unrounded` for them.
UNROUNDED_CODE = """\
int8 = onnx.load("int8.onnx")
made = {name: node for node in int8.graph.node for name in node.output}
for node in int8.graph.node:
    for place, name in enumerate(node.input if node.name in apart else ()):
        if name in made and made[name].op_type == "DequantizeLinear" and made[name].input[0] in made:
            node.input[place] = made[made[name].input[0]].input[0]
onnx.save(int8, "int8.onnx")
"""


def static_code(method: str, products: bool, reduce_range: bool, apart: str = "", attention: bool = False) -> str:
    """The lines that write int8.onnx. `apart`: lines that make a list of that name, of nodes that are left as they are."""
    kinds = '\n                op_types_to_quantize=["Conv", "MatMul", "Gemm"],' if products else ""
    left = ["*apart"] * bool(apart) + ["*per_channel"] * (not products)
    kinds += f"\n                nodes_to_exclude=[{', '.join(left)}]," if left else ""
    return (
        f"{EXPORT_CODE}{PREPARE_CODE}{READER_CODE}{apart}{'' if products else PER_CHANNEL_CODE}{SIGNED_CODE if attention else ''}"
        f'quantize_static("prepared.onnx", "int8.onnx", Batches(), quant_format=QuantFormat.QDQ, per_channel=True,{kinds}\n'
        f"                activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, reduce_range={reduce_range},\n"
        f"                calibrate_method=CalibrationMethod.{METHODS.get(method, method)},\n"
        f'                extra_options={{"MatMulConstBOnly": {products and not attention}'
        f"""{', "TensorQuantOverrides": signed' if attention else ''}}})\n"""
    )
