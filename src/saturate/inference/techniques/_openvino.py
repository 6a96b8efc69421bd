"""From an ONNX file to a program of OpenVINO: what the techniques that stand on it share."""

from __future__ import annotations

import collections
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from saturate.inference import facts, structure
from saturate.inference.formats import openvino as programs
from saturate.inference.techniques import _onnx, _onnx_int8
from saturate.inference.techniques._api import Context, Ineligible, NotApplied, Proof
from saturate.records.inference import ModelFacts

#: Layers that multiply matrices, as OpenVINO names what it executes.
PRODUCTS = ("Convolution", "Deconvolution", "FullyConnected", "GroupConvolution", "MatMul")

#: ... and its name of the type that one computes in, at the end of the name of its kernel.
INTEGER = "I8"

#: Operators that must not read 8-bit integers: OpenVINO 2026.4 sums those along the middle one of three dimensions right for
#: the first sample of a batch only.
REDUCTIONS = ("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceMean", "ReduceSum", "ReduceSumSquare")

#: Lines of OpenVINO's messages that name places in its own code, or say no more than that it failed.
_PLACE = re.compile(r"Exception from \S+:\d+:$|Check '.*' failed at \S+:\d+:$|FrontEnd API failed with \w+:$|Model wasn't fully converted\.")


def refusal(known: ModelFacts, packages: tuple[str, ...] = ("onnx", "onnxscript", "openvino")) -> Ineligible | None:
    """Why OpenVINO cannot execute a model here, or None."""
    if known.device != "cpu":
        return Ineligible("OpenVINO runs on the CPU here; the model is on a GPU")
    others = [name for name in known.dtypes if name != "float32"]
    if others:
        return Ineligible(f"its numbers are {', '.join(others)}; these programs of OpenVINO compute float32, or narrower on their own")
    return _onnx.refusal(known, packages)


def needs_float32(context: Context) -> None:
    """Raise NotApplied where another technique has made the model's numbers narrower, or they were others to begin with."""
    others = facts.formats(context.model) - {"float32"}
    if others:
        raise NotApplied(f"its numbers are {', '.join(sorted(others))} by now; these programs of OpenVINO compute float32")


def serve(context: Context, exported: _onnx.Exported, path: Path, key: str, precision: str = "f32") -> None:
    """Set the context's callable and how it is stored, and note what OpenVINO executes.

    Raises NotApplied with OpenVINO's own reason.
    """
    if exported.gathered:
        raise NotApplied("sizes vary, and OpenVINO, which divides by way of the inverse, takes other pixels at some of them where the model interpolates "
                         "to sizes that are no multiple (nearest)")
    if pools_otherwise(exported.path):
        raise NotApplied("sizes vary, and where the last window of an average reaches beyond the padding (ceil_mode, count_include_pad), OpenVINO divides "
                         "by another count than torch")
    varies = context.facts.varying_shapes or not exported.signature["ranges"]
    tensors = structure.flatten(context.torch, context.inputs[0], distinct=True)[1]
    sizes = None if varies else {f"{programs.files.INPUT}{place}": list(tensor.shape) for place, tensor in enumerate(tensors)}
    try:
        executable = programs.Executable(context.torch, path, context.threads, precision, sizes)
    except RuntimeError as error:
        raise NotApplied(f"OpenVINO: {said(error)[:300]}") from error
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


def pools_otherwise(path: Path) -> bool:
    """Whether a graph has averages that OpenVINO 2026.4 takes otherwise at some of the sizes that are open. Where they are not, its answers
    show it."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*graph.value_info, *graph.input)}
    for node in graph.node:
        given = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        if node.op_type == "AveragePool" and given.get("ceil_mode") and given.get("count_include_pad") and any(given.get("pads", ())):
            known = shapes.get(node.input[0], ())
            if not known or any(not size.HasField("dim_value") for size in known[2:]):
                return True
    return False


def said(error: Exception) -> str:
    """Why OpenVINO refuses a graph, in one line: its messages begin with places in its own code, and lines that only announce the next
    one end with a colon."""
    lines = [line.strip().removeprefix("-- ") for line in str(error).splitlines()]
    told = [line for line in lines if line and not _PLACE.match(line)]
    announced = list(itertools.takewhile(lambda line: line.endswith(":"), told))
    return " ".join(told[:len(announced) + 1]) or next(filter(None, lines), "no message")


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


#: ... nor must these, where everything is quantized: its compiler ends the process at a normalization behind a concatenation of them, and see
#: `_onnx_int8.SHARES`.
_ALONE = ("BatchNormalization", *_onnx_int8.SHARES)


def unrounded(products: bool) -> Callable[[Any], bool]:
    """Which nodes read no 8-bit integers. `products`: nothing but products would."""
    return lambda node: sums(node) or (not products and node.op_type in _ALONE)


def unrounded_code(products: bool) -> str:
    """The same, as lines for the user."""
    kinds = REDUCTIONS if products else (*REDUCTIONS, *_ALONE)
    return _onnx_int8.apart_code(f"""\
def alone(node):     # OpenVINO 2026.4 sums 8-bit integers of a batch wrongly: sums, and what leads to them, stay as they are
    if node.op_type != "Einsum":
        return node.op_type in {kinds}
    taken, _, answer = node.attribute[0].s.decode().partition("->")
    terms = [set(term.strip()) for term in taken.split(",")]
    return any(sum(label in term for term in terms) == 1 and label not in answer for label in set.union(*terms) - set(". "))
""")


def sums(node: Any) -> bool:
    """Whether a node of a graph adds up the entries of one tensor."""
    if node.op_type != "Einsum":
        return node.op_type in REDUCTIONS
    taken, _, answer = node.attribute[0].s.decode().partition("->")
    terms = [set(term.strip()) for term in taken.split(",")]
    return any(sum(label in term for term in terms) == 1 and label not in answer for label in set.union(*terms) - set(". "))


def call_code(name: str, precision: str = "f32") -> str:
    """The lines that make the file `name` the model. OpenVINO has threads of its own."""
    return (
        "import openvino\n"
        'settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False,\n'
        f'            "INFERENCE_PRECISION_HINT": "{precision}"}}\n'
        f'compiled = openvino.Core().compile_model("{name}", "CPU", settings)\n'
        "def model(*inputs):\n"
        "    given = named(inputs)\n"
        "    return list(compiled({one.get_any_name(): given[one.get_any_name()] for one in compiled.inputs}).values())"
    )
