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
from pathlib import Path
from typing import Any

from saturate.errors import EnvironmentProblem
from saturate.inference import structure
from saturate.inference.formats import _program
from saturate.inference.formats import onnx as files
from saturate.inference.techniques import _onnx_exports, _onnx_interpolation, _onnx_translations
from saturate.inference.techniques._api import Context, Eligible, Ineligible, NotApplied, Proof, no_program
from saturate.inference.techniques._onnx_exports import Exported
from saturate.records.inference import ModelFacts

#: Nodes that multiply integers, and those that multiply floating-point numbers, after ONNX Runtime's own fusions.
INTEGER = ("ConvInteger", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat", "QGemm", "QLinearConv",
           "QLinearMatMul")
FLOAT = ("Conv", "ConvTranspose", "FusedConv", "FusedGemm", "FusedMatMul", "Gemm", "MatMul")

#: Number formats that numpy does not have (by how they begin), and so neither do these runtimes where they are called.
FOREIGN = ("bfloat16", "complex", "float4", "float8")

#: Where the exporter writes the modules that a node comes from, outermost first.
SCOPES = "pkg.torch.onnx.name_scopes"

#: The flat module of `_program.capture` calls the user's one so.
_ROOT = "model."


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
    if (why := no_program(facts)) is not None:
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


def worth_int8(facts: ModelFacts, layers: str, narrowed: str = "weights") -> Eligible:
    """`layers` may be multiplied in int8, and what this CPU makes of that. `narrowed`: what has 7 bits where sums would saturate else."""
    if vnni(facts):
        return Eligible(f"{layers}; this CPU multiplies int8 in one instruction")
    note = f"this CPU has no VNNI: {narrowed} get 7 bits so that sums do not saturate, and less is gained than with it"
    return Eligible(f"{layers}; {note}", note=note)


# -- export ----------------------------------------------------------------------------------------------------------


def export(context: Context, model: Any = None) -> Exported:
    """context.model as an ONNX file, or `model`, with the same inputs and outputs. Do not write to it: other candidates may have it, too.
    So a technique that has changed the model before gives what it has made of it as `model`.

    Raises NotApplied with the exporter's own reason.
    """
    if model is not None:
        return _exported(context, model, context.folder)
    return _onnx_exports.once(context, lambda folder: _exported(context, context.model, folder))


def _exported(context: Context, model: Any, folder: Path) -> Exported:
    torch = context.torch
    program = _program.capture(context, model)
    given = [tensor["dtype"] for tensor in program.signature["tensors"]]
    for verb, kinds in (("takes", given), ("returns", _program.answers(program.exported))):
        foreign = next((kind for kind in kinds if kind.startswith(FOREIGN)), None)
        if foreign is not None:
            raise NotApplied(f"the model {verb} {foreign}, which an ONNX runtime cannot be given, or give back, by numpy")
    nodes = _nodes(program.exported)
    _refuse_wrong(torch, nodes)
    gathered = any(_onnx_interpolation.by_open_sizes(torch, node) for node in nodes)
    from onnx_ir.passes import PassError

    path = folder / _onnx_exports.NAME
    names = [f"{files.INPUT}{place}" for place in range(len(program.signature["tensors"]))]
    try:
        with _program.kept_open(torch, program):
            made = torch.onnx.export(program.exported, (), dynamo=True, verbose=False, optimize=False, input_names=names,
                                     custom_translation_table=_onnx_translations.translations(torch, nodes) | (_onnx_interpolation.translations(torch) if gathered else {}))
        owners = _owners(made.model.graph)
        with _onnx_translations.exactly():
            made.optimize()
        # An input that is an output as well gave its name to the output.
        for place, value in enumerate(made.model.graph.outputs):
            owners[f"output_{place}"] = owners.get(value.name, frozenset())
            value.name = f"output_{place}"
        for value, name in zip(made.model.graph.inputs, names, strict=True):
            value.name = name
    except (torch.onnx.OnnxExporterError, PassError) as error:
        raise NotApplied(f"the ONNX exporter: {_cause(error)}") from error
    made.save(path, external_data=context.facts.parameter_bytes > files.LARGE_BYTES)
    return Exported(path, program.signature, program.classes, owners, gathered)


def _nodes(exported: Any) -> list[Any]:
    """Of a program; the branches of a `torch.cond` are graphs of their own."""
    return [node for module in exported.graph_module.modules() if hasattr(module, "graph") for node in module.graph.nodes]


def _refuse_wrong(torch: Any, nodes: Sequence[Any]) -> None:
    """Raise NotApplied for operators whose translation is right for some inputs only, and which have no other here."""
    if any(str(node.target) == "aten.logcumsumexp.default" for node in nodes):
        raise NotApplied("the ONNX exporter writes aten.logcumsumexp.default as the logarithm of sums that become 0 or infinite where the model's do not")
    _onnx_interpolation.refuse_wrong(torch, nodes)


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


# -- the same without saturate -----------------------------------------------------------------------------------------

# A graph has inputs and outputs that are tensors, and torch exports nothing but modules: a model may be a method, and answer with more,
# or with a dataclass, into which torch's pytree does not look unless somebody registered it.
MODULE_CODE = """\
from torch.utils._pytree import tree_leaves
def tensors(tree):                  # in order, those inside of dataclasses too
    opened = ([getattr(x, name) for name in x.__dataclass_fields__] if hasattr(x, "__dataclass_fields__") else x for x in tree_leaves(tree))
    return [x for one in opened for x in (tensors(one) if isinstance(one, list) else [one]) if torch.is_tensor(x)]
class Tensors(torch.nn.Module):     # of what the model answers with: a graph has nothing else
    def __init__(self, called):
        super().__init__()
        self.called, self.training = called, False
    def forward(self, *inputs):
        return tensors(self.called(*inputs))
"""

# Inputs go by name: they may be nested or None, and a graph has no inputs that nothing depends on.
EXPORT_CODE = f"""\
{MODULE_CODE}\
def named(batch):
    return {{f"input_{{place}}": x.numpy(force=True) for place, x in enumerate(tensors(batch))}}
with torch.no_grad():               # with gradients some attention is taken apart otherwise, and does not fit any more
    # its optimizer takes x + 1e-8 for x; dynamic_shapes= for sizes that vary
    torch.onnx.export(Tensors(model), inputs, dynamo=True, optimize=False, input_names=list(named(inputs))).save("model.onnx")
"""


def call_code(name: str, more: str = "") -> str:
    """The lines that make the file `name` the model. `more`: lines about the `options`. ONNX Runtime has threads of its own."""
    return (
        "import onnxruntime\n"
        "options = onnxruntime.SessionOptions()\n"
        f"options.intra_op_num_threads = torch.get_num_threads()\n{more}"
        "on_gpu = any(x.is_cuda for x in tensors(inputs))\n"
        f"providers = {files.providers('cuda')} if on_gpu else {files.providers('cpu')}\n"
        f'session = onnxruntime.InferenceSession("{name}", options, providers=providers)\n'
        "def model(*inputs):\n"
        "    given = named(inputs)\n"
        "    return session.run(None, {one.name: given[one.name] for one in session.get_inputs()})"
    )


# -- what serves -----------------------------------------------------------------------------------------------------


def serve(context: Context, exported: Exported, path: Path, key: str, spin: bool = True) -> None:
    """Set the context's callable and how it is stored, and note which nodes ONNX Runtime executes."""
    executed = context.folder / "executed.onnx"
    try:
        index = context.torch.cuda.current_device() if context.device == "cuda" else 0
        session = files.open_session(path, threads=context.threads, spin=spin, device=context.device, index=index, executed=executed)
    except EnvironmentProblem as error:
        raise NotApplied(f"{error.message}: {error.cause}") from error
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
