"""From an ONNX file to a program of OpenVINO: what the techniques that stand on it share."""

from __future__ import annotations

import collections
import json
from pathlib import Path

from saturate.inference import structure
from saturate.inference.formats import openvino as programs
from saturate.inference.techniques import _onnx
from saturate.inference.techniques._api import Context, Ineligible, NotApplied, Proof
from saturate.records.inference import ModelFacts

#: Layers that multiply matrices, as OpenVINO names what it executes.
PRODUCTS = ("Convolution", "Deconvolution", "FullyConnected", "GroupConvolution", "MatMul")

#: ... and its name of the type that one computes in, at the end of the name of its kernel.
INTEGER = "I8"

#: Operators that must not read 8-bit integers: OpenVINO 2026.4 sums those along the middle one of three dimensions right for
#: the first sample of a batch only.
REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL1", "ReduceL2")


def refusal(facts: ModelFacts, packages: tuple[str, ...] = ("onnx", "onnxscript", "openvino")) -> Ineligible | None:
    """Why OpenVINO cannot execute a model here, or None."""
    if facts.device != "cpu":
        return Ineligible("OpenVINO runs on the CPU here; the model is on a GPU")
    others = [name for name in facts.dtypes if name != "float32"]
    if others:
        return Ineligible(f"parameters are {', '.join(others)}; these programs of OpenVINO compute float32, or narrower on their own")
    return _onnx.refusal(facts, packages)


def needs_float32(context: Context) -> None:
    """Raise NotApplied where another technique has made the parameters narrower."""
    narrow = {str(parameter.dtype).removeprefix("torch.") for parameter in context.model.parameters()} - {"float32"}
    if narrow:
        raise NotApplied(f"parameters are {', '.join(sorted(narrow))} by now; these programs of OpenVINO compute float32")


def serve(context: Context, exported: _onnx.Exported, path: Path, key: str, precision: str = "f32") -> None:
    """Set the context's callable and how it is stored, and note what OpenVINO executes.

    Raises NotApplied with OpenVINO's own reason.
    """
    varies = context.facts.varying_shapes or not exported.signature["ranges"]
    tensors = structure.flatten(context.torch, context.inputs[0], distinct=True)[1]
    sizes = None if varies else {f"{programs.files.INPUT}{place}": list(tensor.shape) for place, tensor in enumerate(tensors)}
    try:
        executable = programs.Executable(context.torch, path, context.threads, precision, sizes)
    except RuntimeError as error:
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
        raise NotApplied(f"OpenVINO: {line[:300]}") from error
    settings = {**exported.signature, "threads": context.threads, "precision": precision, "sizes": executable.sizes}
    context.call = programs.program(context.torch, executable, exported.signature, exported.classes)
    context.save = lambda folder: programs.save(folder, path, settings)
    nodes: collections.Counter[str] = collections.Counter()
    for node in executable.usual.get_runtime_model().get_ops():
        about = node.get_rt_info()
        kind = _text(about, "layerType")
        if kind not in ("Const", "Input", "Output"):
            nodes[f"{kind} {_text(about, 'primitiveType').rpartition('_')[2]}"] += 1
    context.notes[key] = json.dumps(nodes)


def _text(about: object, key: str) -> str:
    return about[key].astype(str) if key in about else ""      # type: ignore[operator, index] - OpenVINO's own mapping


def census(context: Context, key: str) -> dict[str, int]:
    """How many nodes OpenVINO executes, by "layer type"; empty where the technique was not applied."""
    return json.loads(context.notes.get(key, "{}"))


def proof(context: Context, key: str, kind: str) -> Proof:
    """Whether any product is computed in `kind` ("I8", "bf16")."""
    products = {name: count for name, count in census(context, key).items() if name.split()[0] in PRODUCTS}
    found = {name: count for name, count in products.items() if name.lower().endswith(f" {kind.lower()}")}
    shown = ", ".join(f"{count} {name}" for name, count in found.items()) or f"no product in {kind}"
    return Proof(bool(found), f"OpenVINO executes {shown}; {sum(products.values()) - sum(found.values())} products in other types")


UNROUNDED_CODE = """\
int8 = onnx.load("int8.onnx")
made = {name: node for node in int8.graph.node for name in node.output}
for node in int8.graph.node:      # OpenVINO 2026.4 sums 8-bit integers of a batch wrongly: sums read what was not rounded
    back = made.get(node.input[0]) if node.op_type.startswith("Reduce") else None
    if back is not None and back.op_type == "DequantizeLinear":
        node.input[0] = made[back.input[0]].input[0]
onnx.save(int8, "int8.onnx")
"""


def call_code(name: str, precision: str = "f32") -> str:
    """The lines that answer by the file `name`. OpenVINO has threads of its own."""
    return (
        "import openvino\n"
        f'settings = {{"INFERENCE_NUM_THREADS": torch.get_num_threads(), "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "{precision}"}}\n'
        f'compiled = openvino.Core().compile_model("{name}", "CPU", settings)\n'
        "answers = list(compiled({given.get_any_name(): x.numpy() for given, x in zip(compiled.inputs, inputs)}).values())"
    )
