"""From a module to an ONNX file, and to a session that serves: what the techniques that stand on ONNX share."""

from __future__ import annotations

import ast
import collections
import copy
import functools
import json
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saturate.inference import structure
from saturate.inference.formats import _program
from saturate.inference.formats import onnx as files
from saturate.inference.techniques._api import Context, Eligible, Ineligible, NotApplied, Proof, unrepeatable
from saturate.records.inference import ModelFacts

#: Nodes that multiply integers, and those that multiply floating-point numbers, after ONNX Runtime's own fusions.
INTEGER = ("ConvInteger", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat", "QGemm", "QLinearConv",
           "QLinearMatMul")
FLOAT = ("Conv", "ConvTranspose", "FusedConv", "FusedGemm", "FusedMatMul", "Gemm", "MatMul")

#: Nodes whose first input is what they pass on; the others say in which shape, and may be computed.
RESHAPING = ("Expand", "Flatten", "Pad", "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze")

#: How static int8 chooses the range of an activation, as the quantizer calls it.
METHODS = {"minmax": "MinMax", "percentile": "Percentile", "entropy": "Entropy"}

#: Where the exporter writes the modules that a node comes from, outermost first.
SCOPES = "pkg.torch.onnx.name_scopes"

#: The flat module of `_program.capture` calls the user's one so.
_ROOT = "model."


@dataclass(frozen=True)
class Exported:
    """An ONNX file in the scratch folder, the signature with which it is called (see `formats._program`), the classes of
    its output, and of each value in the graph the modules that made it, as in `named_modules`."""

    path: Path
    signature: dict[str, Any]
    classes: dict[str, type]
    owners: dict[str, frozenset[str]]

    def sizes(self) -> str:
        """What it may be called with, for the user."""
        free = sorted({size for tensor in self.signature["tensors"] for size in tensor["shape"] if isinstance(size, str)})
        return f"{len(free)} free size(s)" if free else "only for the shapes of these inputs"


def refusal(facts: ModelFacts, packages: Sequence[str] = ("onnx", "onnxruntime", "onnxscript")) -> Ineligible | None:
    """Why a model cannot go through ONNX here, or None."""
    missing = [name for name in packages if name not in facts.installed]
    if missing:
        return Ineligible(f"{', '.join(missing)} not installed: pip install 'saturate[inference]'")
    if _version(facts.torch) < (2, 6):
        return Ineligible(f"exporting with free dimensions needs torch 2.6, this is {facts.torch}")
    if facts.exportable is False:
        return Ineligible(f"torch.export does not take this model: {facts.export_problem}")
    if facts.generates:
        return Ineligible("the cache of a model that generates grows with each token; an exported graph has none")
    if (why := unrepeatable(facts)) is not None:
        return Ineligible(why)
    return None


def refusal_on_cpu(facts: ModelFacts) -> Ineligible | None:
    """`refusal`, and what ONNX Runtime's CPU provider cannot do."""
    if facts.device != "cpu":
        return Ineligible("these integer kernels of ONNX Runtime run on the CPU; the model is on a GPU")
    narrow = [name for name in facts.dtypes if name in ("float16", "bfloat16")]
    if narrow:
        return Ineligible(f"parameters are {', '.join(narrow)}; ONNX Runtime's CPU kernels compute float32")
    return refusal(facts)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def vnni(facts: ModelFacts) -> bool:
    """Whether integer products accumulate in 32 bits: without, pairs of them saturate in 16 (x86)."""
    on_x86 = platform.machine() in ("x86_64", "AMD64")
    return not on_x86 or bool(facts.cpu_flags & {"avx512_vnni", "avx_vnni", "amx_int8"})


def about_int8(facts: ModelFacts) -> str:
    """What this CPU makes of int8, for the user."""
    if vnni(facts):
        return "this CPU multiplies int8 in one instruction"
    return "this CPU has no VNNI: weights get 7 bits so that sums do not saturate, and little may be gained"


def about_static_int8(facts: ModelFacts) -> Eligible | Ineligible:
    """Whether there is anything to compute in int8, and batches to learn its ranges from."""
    if not facts.linears and not facts.convolutions:
        return Ineligible("neither convolutions nor Linear layers")
    if not facts.calibration_samples:
        return Ineligible("there is no calibration batch: give more than one batch of inputs")
    return Eligible(f"{facts.convolutions} convolutions, {facts.linears} Linear layers; {about_int8(facts)}")


# -- export ----------------------------------------------------------------------------------------------------------


def export(context: Context, model: Any = None) -> Exported:
    """Write context.model (or `model`, with the same inputs and outputs) to model.onnx in the scratch folder.

    Raises NotApplied with the exporter's own reason.
    """
    torch = context.torch
    program = _program.capture(context, model)
    if any(tensor["dtype"].startswith("complex") for tensor in program.signature["tensors"]):
        raise NotApplied("the model takes complex numbers, and ONNX Runtime has none")
    path = context.folder / "model.onnx"
    names = [f"{files.INPUT}{place}" for place in range(len(program.signature["tensors"]))]
    try:
        made = torch.onnx.export(program.exported, (), dynamo=True, verbose=False, optimize=False, input_names=names)
        owners = _owners(made.model.graph)
        made.optimize()
        # An input that is an output as well gave its name to the output.
        for place, value in enumerate(made.model.graph.outputs):
            owners[f"output_{place}"] = owners.get(value.name, frozenset())
            value.name = f"output_{place}"
        for value, name in zip(made.model.graph.inputs, names, strict=True):
            value.name = name
    except torch.onnx.OnnxExporterError as error:
        raise NotApplied(f"the ONNX exporter: {_cause(error)}") from error
    made.save(path, external_data=context.facts.parameter_bytes > files.LARGE_BYTES)
    return Exported(path, program.signature, program.classes, owners)


def _owners(graph: Iterable[Any]) -> dict[str, frozenset[str]]:
    """The modules behind each value of a graph that nothing was fused in yet. What is fused later keeps the name of its
    result; a normalization that goes into the product before it brings that product's modules along."""
    found: dict[str, frozenset[str]] = {}
    for node in graph:
        scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))[:-1]       # the last one is the operator
        modules = {re.sub(r"@\d+$", "", scope).removeprefix(_ROOT) for scope in scopes if scope.startswith(_ROOT)}
        if node.op_type == "BatchNormalization":
            modules |= found.get(node.inputs[0].name, frozenset())
        found |= {value.name: frozenset(modules) for value in node.outputs}
    return found


def in_half(torch: Any, model: Any) -> Any:
    """A copy of the model in float16, with float32 at its borders."""

    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = copy.deepcopy(model).half()
            self.training = False       # not eval(): parts of the model may be in another mode on purpose

        @functools.wraps(type(model).forward)      # its parameters are those of the program
        def forward(self, *inputs: Any) -> Any:
            output = self.model(*_cast(torch, inputs, torch.float32, torch.float16))
            return _cast(torch, output, torch.float16, torch.float32)

    return Half()


def _cast(torch: Any, value: Any, source: Any, target: Any) -> Any:
    description, tensors = structure.flatten(torch, value)
    cast = [tensor.to(target) if tensor.dtype is source else tensor for tensor in tensors]
    return structure.rebuild(description, cast, structure.classes_in(value))


def _cause(error: BaseException) -> str:
    """What an exporter reports, in one line: its own message is a banner around the cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {line}"[:300]


# -- what the quantizers need ----------------------------------------------------------------------------------------


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


def before(model: Any, names: Iterable[str]) -> list[str]:
    """Names of the nodes that only pass on what a product or a sum computed (activations, pooling, reshaping), on the way
    to the nodes `names`."""
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
            if sum(bool(given) and given not in constants for given in data) == 1:
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


class Batches:
    """Calibration batches as onnxruntime.quantization reads them, one at a time.

    Raises NotApplied where no batch fits a program whose sizes are fixed.
    """

    def __init__(self, context: Context, exported: Exported, names: Iterable[str], limit: int):
        places = {name: files.place_of(name) for name in names}
        described = [structure.flatten(context.torch, batch) for batch in context.calibration]
        fitting = [tensors for description, tensors in described
                   if description == exported.signature["inputs"] and _fit(tensors, exported.signature["tensors"])]
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


def static_int8(context: Context, method: str, products: bool, reduce_range: bool, batches: int,
                unrounded: Sequence[str] = ()) -> tuple[Exported, Path, str]:
    """Export the context's model, and quantize the graph as the calibration batches tell: uint8 activations, int8 weights per
    channel (QDQ). Operators in `unrounded`, and what only leads to them, read their inputs as they were before rounding.
    Returns the file that the graph is in, and how its ranges were found, for the user.

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
    reader = Batches(context, exported, (item.name for item in model.graph.input), batches)
    quantization.quantize_static(
        prepared, path, reader, quant_format=quantization.QuantFormat.QDQ, per_channel=True,
        activation_type=quantization.QuantType.QUInt8, weight_type=quantization.QuantType.QInt8, reduce_range=reduce_range,
        op_types_to_quantize=["Conv", "MatMul", "Gemm"] if products else None,
        nodes_to_exclude=left, use_external_data_format=large,
        calibrate_method=quantization.CalibrationMethod[METHODS[method]],
        # One batch at a time: the quantizer would hold every activation of all batches. Products of two activations lose
        # most and gain least.
        extra_options={"CalibStridedMinMax": 1, "MatMulConstBOnly": products},
    )
    apart = [node.name for node in model.graph.node if node.op_type in unrounded]
    if left or apart:
        read_unrounded(path, [*left, *apart, *before(model, apart)], large)
    return exported, path, f"ranges of {len(reader)} calibration batches ({method})"


def _fit(tensors: list[Any], wanted: list[dict[str, Any]]) -> bool:
    return all(isinstance(size, str) or size == given for tensor, want in zip(tensors, wanted)
               for size, given in zip(want["shape"], tensor.shape))


# -- the same without saturate -----------------------------------------------------------------------------------------

EXPORT_CODE = """\
torch.onnx.export(model, inputs, dynamo=True).save("model.onnx")      # dynamic_shapes= for sizes that vary
"""

PREPARE_CODE = """\
import onnx
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
quant_pre_process("model.onnx", "prepared.onnx", skip_symbolic_shape=True)
prepared = onnx.load("prepared.onnx")
del prepared.graph.value_info[:]      # shapes that the exporter wrote, which the quantizer would find in conflict with its own
onnx.save(prepared, "prepared.onnx")
"""

READER_CODE = """\
names = [given.name for given in prepared.graph.input]
class Batches(CalibrationDataReader):
    def __init__(self):
        self.left = iter(calibration)
    def get_next(self):
        batch = next(self.left, None)
        return None if batch is None else {name: x.numpy() for name, x in zip(names, batch)}
"""


def static_int8_code(method: str, products: bool, reduce_range: bool) -> str:
    """The lines that write int8.onnx."""
    kinds = '\n                op_types_to_quantize=["Conv", "MatMul", "Gemm"],' if products else ""
    return (
        f"{EXPORT_CODE}{PREPARE_CODE}{READER_CODE}"
        f'quantize_static("prepared.onnx", "int8.onnx", Batches(), quant_format=QuantFormat.QDQ, per_channel=True,{kinds}\n'
        f"                activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, reduce_range={reduce_range},\n"
        f"                calibrate_method=CalibrationMethod.{METHODS.get(method, method)},\n"
        f'                extra_options={{"MatMulConstBOnly": {products}}})\n'
    )


def call_code(name: str, more: str = "") -> str:
    """The lines that answer by the file `name`. `more`: lines about the `options`. ONNX Runtime has threads of its own."""
    return (
        "import onnxruntime\n"
        "options = onnxruntime.SessionOptions()\n"
        f"options.intra_op_num_threads = torch.get_num_threads()\n{more}"
        f'session = onnxruntime.InferenceSession("{name}", options)\n'
        "answers = session.run(None, {given.name: x.numpy() for given, x in zip(session.get_inputs(), inputs)})"
    )


# -- what serves -----------------------------------------------------------------------------------------------------


def serve(context: Context, exported: Exported, path: Path, key: str, spin: bool = True) -> None:
    """Set the context's callable and how it is stored, and note which nodes ONNX Runtime executes."""
    executed = context.folder / "executed.onnx"
    try:
        session = files.open_session(path, threads=context.threads, spin=spin, device=context.device, executed=executed)
    except files.failures() as error:
        raise NotApplied(f"ONNX Runtime: {_cause(error)}") from error
    settings = {**exported.signature, "threads": context.threads, "spin": spin, "device": context.device}
    context.call = files.program(context.torch, session, exported.signature, context.device, exported.classes)
    context.save = lambda folder: files.save(folder, path, settings)
    nodes = files.require("onnx").load(executed, load_external_data=False).graph.node
    context.notes[key] = json.dumps(collections.Counter(node.op_type for node in nodes))
    for written in context.folder.glob("executed.onnx*"):
        written.unlink()


def census(context: Context, key: str) -> dict[str, int]:
    """Nodes by operator, of the graph that ONNX Runtime executes; empty where the technique was not applied."""
    return json.loads(context.notes.get(key, "{}"))


def integer_proof(context: Context, key: str) -> Proof:
    """Whether any product is computed in integers."""
    nodes = census(context, key)
    integer = {name: nodes[name] for name in INTEGER if nodes.get(name)}
    floating = sum(nodes.get(name, 0) for name in FLOAT)
    shown = ", ".join(f"{count} {name}" for name, count in integer.items()) or "no integer product"
    return Proof(bool(integer), f"ONNX Runtime executes {shown}; {floating} products in floating point")
