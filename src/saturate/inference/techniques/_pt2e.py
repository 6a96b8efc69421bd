"""What the techniques share that quantize the exported graph (PT2E) for the kernels of an x86 CPU.

    capture     the model as a graph, by torch.export
    prepared    observers, or fake quantizers, around products, where torchao's X86InductorQuantizer puts them
    converted   calibrated, or trained, and rounded: still a graph that multiplies in float32, at a third of the speed
    serve       compiled by AOTInductor with frozen weights: only there the integer kernels appear

The quantizer recognizes an operator by the layer that it came from, and stumbles over layers that are called twice (one
nn.ReLU for a whole block), over functions instead of layers and over sums with a number. So each operator is told to be
a layer of its own first (`_label`). torchao folds BatchNorm into the product before it, also where others read that
product or share its weight; those get copies first (`_separate`).
"""

from __future__ import annotations

import dataclasses
import operator
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saturate.inference import structure
from saturate.inference.formats import _cache_lines, _program, aoti
from saturate.inference.techniques import _onnx, _precision
from saturate.inference.techniques._api import Context, Ineligible, NotApplied, Proof, no_program
from saturate.inference.techniques._torchao import kept
from saturate.machine import facts as machine
from saturate.records.inference import ModelFacts

#: Inductor counts the products that it replaced by integer kernels under these names.
LOWERED = ("qconv_weight_prepack_matcher_count", "qlinear_weight_prepack_matcher_count")

#: What has 7 bits on a CPU without VNNI, see `Recipe`.
NARROWED = "inputs"

#: The smallest step: below it nothing is but zero.
LEAST_STEP = 2.0**-60

#: Of two activations: costs accuracy, and is no faster.
_GATES = ("mul",)

#: What hands on integers where ranges are known beforehand.
_SHAPING = ("cat", "flatten", "nn.functional.max_pool2d", "nn.functional.avg_pool2d", "nn.functional.adaptive_avg_pool2d")


@dataclass(frozen=True)
class Recipe:
    """Which operators, and how. `qat`: fake quantizers that gradients pass, instead of observers. `dynamic`: inputs are
    rounded anew at each call; linear layers only, as there is no such kernel for convolutions. `reduce_range`: inputs take 7 bits,
    because a CPU without VNNI adds products in 16 bits, which saturate."""

    qat: bool = False
    dynamic: bool = False
    reduce_range: bool = False

    def configuration(self) -> dict[str, bool]:
        """For `get_default_x86_inductor_quantization_config`."""
        return {"is_qat": self.qat, "is_dynamic": self.dynamic, "reduce_range": self.reduce_range}

    def floating(self) -> tuple[str, ...]:
        """Functions that the quantizer is to leave alone, as attributes of torch."""
        return (*_GATES, *_SHAPING) if self.dynamic else _GATES


def refusal(facts: ModelFacts) -> Ineligible | None:
    """Why these kernels cannot help, or None."""
    if facts.device != "cpu":
        return Ineligible(f"these kernels are for x86 CPUs; the model is on the {facts.device}")
    if platform.machine() not in ("x86_64", "AMD64"):
        return Ineligible(f"these kernels are for x86 CPUs, this is {platform.machine()}")
    if "torchao" not in facts.installed:
        return Ineligible("torchao is not installed: pip install 'saturate[inference]'")
    if not machine.compiler(os.environ):
        return Ineligible("compiling needs a C++ compiler (g++ or clang++) on PATH")
    if facts.exportable is False:
        return Ineligible(f"torch.export does not take the model: {facts.export_problem}")
    if (why := no_program(facts)) is not None:
        return Ineligible(why)
    if facts.dtypes and "float32" not in facts.dtypes:
        return Ineligible(f"parameters are {', '.join(facts.dtypes)}; these kernels round float32")
    return None


def rest_in_bfloat16(facts: ModelFacts) -> tuple[bool, ...]:
    """Whether what is not in integers is computed in bfloat16: each way that is worth a trial, the faster one first."""
    return (True, False) if _precision.AMX in facts.cpu_flags else (False,)


def captured(context: Context) -> _program.Program:
    """The model as a graph over flat tensors. Attention is not fused into one operator, which would hide its products."""
    torch = context.torch
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return _program.capture(context)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def prepared(context: Context, program: _program.Program, recipe: Recipe) -> Any:
    """The graph with observers. Raises NotApplied where torchao does not load, or finds nothing to quantize."""
    try:
        from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
    except ImportError as error:
        raise NotApplied(f"torchao does not load here ({error}): pip install 'saturate[inference]'") from error
    torch = context.torch
    exported = program.exported
    if any(map(_overwrites, exported.graph.nodes)):
        exported = exported.run_decompositions({})      # without operators that write into their inputs; all others stay
    graph = exported.module()
    found = _label(torch, graph, context, recipe)
    if not found:
        raise NotApplied("no " + ("linear layer" if recipe.dynamic else "convolution or linear layer") + " is left to quantize")
    _separate(torch, graph)
    _straighten(torch, graph)
    return _fine(torch, _free(prepare_pt2e(graph, _quantizer(torch, recipe))))


def _fine(torch: Any, graph: Any) -> Any:
    """With steps as small as numbers are. torchao lets none be smaller than 2**-12, so that inputs or weights that reach no further than some
    hundredths are rounded to a few values: a quiet recording, probabilities of many classes."""
    for module in graph.modules():
        if isinstance(least := getattr(module, "eps", None), torch.Tensor):
            least.fill_(LEAST_STEP)
        elif isinstance(least, float):
            module.eps = LEAST_STEP
    return graph


def calibrate(context: Context, graph: Any, batches: Sequence[tuple[Any, ...]]) -> int:
    """Run batches through a prepared graph. Returns how many fitted the captured shapes; raises NotApplied for none."""
    torch, done = context.torch, 0
    problem: Exception | None = None
    with torch.no_grad():
        for batch in batches:
            try:
                graph(*[tensor.contiguous() for tensor in structure.flatten(torch, batch)[1]])
                done += 1
            except (RuntimeError, AssertionError, ValueError) as error:     # a smaller batch, where the graph has one size
                problem = error
    if not done:
        raise NotApplied(f"no calibration batch goes through the captured graph: {problem}" if problem
                         else "there are no calibration inputs")
    return done


def converted(torch: Any, graph: Any) -> Any:
    """The graph with rounded weights, between operators that round and widen."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    graph = _free(convert_pt2e(graph))
    _ranges_with_zero(torch, graph)
    return graph


def _ranges_with_zero(torch: Any, graph: Any) -> None:
    """Ranges that are found at each call include 0 in torch. Its compiler leaves that out, so that inputs of one sign (probabilities, images
    between 0.8 and 1) had a scale that their zero point does not reach: nothing of them was left."""

    def ends(x: Any) -> Any:
        return torch.stack([x.amin().clamp(max=0.0), x.amax().clamp(min=0.0)])

    for node in [node for node in graph.graph.nodes if _operator(node) == "quantized_decomposed.choose_qparams.tensor"]:
        with graph.graph.inserting_before(node):
            node.update_arg(0, graph.graph.call_function(ends, (node.args[0],)))
    graph.recompile()


def served(torch: Any, graph: Any, program: _program.Program) -> Any:
    """A module with the inputs and outputs of the model that runs `graph`, which knows flat tensors only."""

    class Served(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.graph = graph

        def forward(self, *inputs: Any) -> Any:
            tensors = self.graph(*structure.flatten(torch, inputs)[1])
            return structure.rebuild(program.signature["outputs"], list(tensors), program.classes)

    return Served()


def serve(context: Context, technique: str, graph: Any, program: _program.Program, bfloat16: bool = False) -> str:
    """Compile a converted graph and make it what the candidate serves. `bfloat16`: what is not in integers is computed under autocast.
    Raises NotApplied where it does not compile."""
    torch = context.torch
    context.model = served(torch, graph, program).requires_grad_(False)
    if bfloat16:
        _precision.under_autocast(context, torch.bfloat16)
    path = context.folder / f"{technique}.pt2"
    try:
        compiled, package, lowered = _built(context, path)
    except NotApplied:          # some of torchao's patterns stumble over sizes that are open: then the batch size is fixed
        fixed = dataclasses.replace(context, facts=dataclasses.replace(context.facts, batch_size=None))
        compiled, package, lowered = _built(fixed, path)
    compiled.signature["parameters"] = program.signature["parameters"]
    _no_wider(compiled.signature, program.signature)
    context.notes[f"{technique} products"] = str(quantized(graph))
    context.notes[f"{technique} lowered"] = str(lowered)
    context.call = aoti.opened(torch, package, compiled.signature, context.device, program.classes)
    context.save = lambda folder: aoti.save(context, folder, package, compiled)
    sizes = {size for tensor in compiled.signature["tensors"] for size in tensor["shape"] if isinstance(size, str)}
    words = "other batch sizes too" if sizes else f"batches of shape {compiled.signature['tensors'][0]['shape']} only"
    others = ", all else under autocast to bfloat16" if bfloat16 else ""
    return f"{quantized(graph)} products rounded to int8{others}, compiled by AOTInductor for {words}"


def _no_wider(signature: dict[str, Any], before: dict[str, Any]) -> None:
    """Sizes within the limits of the program that the graph was made from: that one alone was compared with the model, which may go
    another way with one row."""
    for one, other in zip(signature["tensors"], before["tensors"]):
        for name, known in zip(one["shape"], other["shape"]):
            limits, narrower = signature["ranges"].get(name), before["ranges"].get(known)
            if limits is not None and narrower is not None:
                limits[0] = max(limits[0], narrower[0])
                limits[1] = min((most for most in (limits[1], narrower[1]) if most is not None), default=None)


def _built(context: Context, path: Path) -> tuple[_program.Program, Path, int]:
    """The program, its package, and how many products became integer kernels."""
    before = _lowered()
    program = _program.capture(context)
    package = aoti.build(context, program, path, {"freezing": True})
    programs = 2 if "fixed" in program.signature else 1         # for open sizes, and for the measured ones
    return program, package, (_lowered() - before) // programs


def proof(context: Context, technique: str) -> Proof:
    """Rounded is not enough: the compiler must have put integer kernels in place of the rounded products."""
    lowered, products = (int(context.notes.get(f"{technique} {key}", 0)) for key in ("lowered", "products"))
    if not lowered:
        return Proof(False, f"the compiler put no integer kernel in place of {products} rounded products")
    return Proof(True, f"integer kernels for {lowered} of {products} rounded products")


def quantized(graph: Any) -> int:
    """How many products of a converted graph take rounded inputs and rounded weights."""
    def rounded(value: Any) -> bool:
        return "dequantize" in str(getattr(value, "target", ""))

    return sum(_operator(node) in PRODUCTS and all(map(rounded, node.args[:2])) for node in graph.graph.nodes)


# -- the same without saturate -------------------------------------------------------------------------------------------


def prepare_code(recipe: Recipe) -> str:
    """Lines that make `graph`, with observers or fake quantizers, of `model`. What is trained answers as the user's loss takes it."""
    module = "model" if recipe.qat else "Tensors(model)"
    verb = "prepare_qat_pt2e" if recipe.qat else "prepare_pt2e"
    changed = ", ".join(f"{name}=True" for name, value in recipe.configuration().items() if value)
    return (
        "# pip install torchao\n"
        f"{'' if recipe.qat else _onnx.MODULE_CODE}"
        f"from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, {verb}\n"
        "from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86\n"
        "torch.backends.mha.set_fastpath_enabled(False)      # one fused operator would hide the products of attention\n"
        "quantizer = x86.X86InductorQuantizer()\n"
        f"quantizer.set_global(x86.get_default_x86_inductor_quantization_config({changed}))\n"
        f"for function in ({''.join(f'torch.{name}, ' for name in recipe.floating()).rstrip()}):      # these stay in floating point\n"
        "    quantizer.set_function_type_qconfig(function, None)\n"
        "with torch.no_grad():               # with gradients some attention is taken apart otherwise\n"
        f"    program = torch.export.export({module}, inputs)\n"
        f"graph = {verb}(program.module(), quantizer)\n"
        "for part in graph.modules():        # torchao has no steps below 2**-12, which small inputs and weights need\n"
        "    if isinstance(getattr(part, 'eps', None), (float, torch.Tensor)):\n"
        f"        part.eps = part.eps * 0 + {LEAST_STEP}\n")


#: What `_ranges_with_zero` does, to a graph that was converted.
_WITH_ZERO_CODE = """\
def ends(x):                        # a range that includes 0, which torch's compiler does not see to
    return torch.stack([x.amin().clamp(max=0.0), x.amax().clamp(min=0.0)])
for node in list(graph.graph.nodes):
    if str(node.target) == 'quantized_decomposed.choose_qparams.tensor':
        with graph.graph.inserting_before(node):
            node.update_arg(0, graph.graph.call_function(ends, (node.args[0],)))
graph.recompile()
"""


def serve_code(recipe: Recipe, bfloat16: bool = False) -> str:
    """Lines that make `model` of such a graph, once it was calibrated or trained."""
    mixed = "model = graph\n" + _precision.as_code("bfloat16", autocast=True) + "\n"
    return (
        "graph = convert_pt2e(graph)\n"
        f"{_WITH_ZERO_CODE * recipe.dynamic}"
        f"{mixed * bfloat16}{_cache_lines.CODE}"
        "with torch.no_grad():\n"
        f"    program = torch.export.export({'model' if bfloat16 else 'graph'}, inputs)\n"
        f"    options = {{'freezing': True, '{_cache_lines.OPTION}': {_cache_lines.VALUE}}}\n"
        "    package = torch._inductor.aoti_compile_and_package(program, inductor_configs=options)\n"
        "model = torch._inductor.aoti_load_package(package)")


# -- the graph -----------------------------------------------------------------------------------------------------------

#: Operators, as torch writes them, and the layer that the quantizer knows them by.
PRODUCTS = {"aten.conv1d.default": "Conv1d", "aten.conv2d.default": "Conv2d", "aten.linear.default": "Linear"}
LAYERS = {"relu": "ReLU", "relu6": "ReLU6", "hardtanh": "Hardtanh", "hardswish": "Hardswish", "silu": "SiLU",
          "leaky_relu": "LeakyReLU", "tanh": "Tanh", "gelu": "GELU"}
SUMS = ("aten.add.Tensor", "aten.add_.Tensor")


def _operator(node: Any) -> str:
    return str(node.target) if node.op == "call_function" else ""


def _overwrites(node: Any) -> bool:
    """Whether an operator changes a tensor that others read: rounding makes copies, which would not see it."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and (not node.users or len(node.args[0].users) > 1)


def _label(torch: Any, graph: Any, context: Context, recipe: Recipe) -> int:
    """Tell the quantizer what each operator is: a layer of its own, or nothing that it knows. Returns the number of
    products that it may quantize."""
    found = 0
    for node in graph.graph.nodes:
        name = _operator(node)
        if not name:
            continue
        source: Any = name
        if name in PRODUCTS:
            floating = not _float32(torch, node) or (recipe.dynamic and name != "aten.linear.default")
            if not (floating or _kept(node, context)):
                source = getattr(torch.nn, PRODUCTS[name])
                found += 1
        elif _activation(name) in LAYERS:
            source = getattr(torch.nn, LAYERS[_activation(name)])
        elif name in SUMS and _of_two_tensors(torch, node):
            source = operator.add
        node.meta["source_fn_stack"] = [(node.name, source)]
    return found


def _activation(name: str) -> str:
    """"aten.relu_.default" is "relu", in place or not."""
    return name.removeprefix("aten.").removesuffix(".default").removesuffix("_")


def _kept(node: Any, context: Context) -> bool:
    """Whether the operator was called inside a module that stays as it is. Paths look like "L['self'].model.block.conv@1"."""
    stack = node.meta.get("nn_module_stack", {}).values()
    paths = [re.sub(r"@\d+", "", path.removeprefix("L['self'].")) for path, _ in stack]
    names = [path.removeprefix("model.") for path in paths if path.startswith("model.")]
    return any(kept(name, context.keep) for name in names) or "" in context.keep


def _of_two_tensors(torch: Any, node: Any) -> bool:
    """Whether a sum is one of two different tensors of the same shape, which an integer kernel can take along."""
    values = [getattr(value, "meta", {}).get("val") for value in node.args]
    return (len(node.args) == 2 and not node.kwargs and node.args[0] is not node.args[1] and _float32(torch, node)
            and all(isinstance(value, torch.Tensor) for value in values) and values[0].shape == values[1].shape)


def _float32(torch: Any, node: Any) -> bool:
    """Whether all tensors that an operator takes and gives are of the format that integer kernels round. A model may hold others,
    such as a table of float64."""
    values = [getattr(value, "meta", {}).get("val") for value in (node, *node.args)]
    return all(value.dtype == torch.float32 for value in values if isinstance(value, torch.Tensor))


def _separate(torch: Any, graph: Any) -> None:
    """Before BatchNorm is folded into the product before it: where others read that product, BatchNorm gets one of its
    own; where others share its weight, it gets a copy."""
    for norm in [node for node in graph.graph.nodes if "batch_norm" in _operator(node)]:
        product = norm.args[0]
        if not _operator(product).startswith(("aten.conv", "aten.linear")):
            continue
        if len(product.users) > 1:
            with graph.graph.inserting_before(product):
                own = graph.graph.node_copy(product)
            own.meta["source_fn_stack"] = [(own.name, source) for _, source in product.meta.get("source_fn_stack", ())]
            norm.replace_input_with(product, own)
            product = own
        if norm.args[3] is None:        # it takes the statistics of each batch, and torchao would look for those to fold
            with graph.graph.inserting_before(norm):
                copy = graph.graph.call_function(torch.ops.aten.clone.default, (product,))
            copy.meta.update(product.meta, source_fn_stack=[(copy.name, "copy")])
            norm.replace_input_with(product, copy)
            continue
        for place, value in enumerate(product.args[1:3], start=1):
            if getattr(value, "op", "") != "get_attr" or len(value.users) == 1:
                continue
            name = f"{product.name}_own_{place}"
            shared = _attribute(graph, value.target).detach()
            graph.register_parameter(name, torch.nn.Parameter(shared.clone(), requires_grad=False))
            with graph.graph.inserting_before(product):
                own_value = graph.graph.get_attr(name)
            own_value.meta.update(value.meta)
            product.update_arg(place, own_value)
    graph.recompile()


def _straighten(torch: Any, graph: Any) -> None:
    """Copy the input of a linear layer where it is not contiguous (attention with the batch first): torch would turn it into
    a batched product, which becomes no integer kernel when its sizes are open. The copy and the rounding are one loop."""
    for node in [node for node in graph.graph.nodes if _operator(node) == "aten.linear.default"]:
        value = node.args[0].meta.get("val")
        if not isinstance(value, torch.Tensor) or value.is_contiguous():
            continue
        with graph.graph.inserting_before(node):
            copy = graph.graph.call_function(
                torch.ops.aten.clone.default, (node.args[0],), {"memory_format": torch.contiguous_format})
        copy.meta.update(node.args[0].meta, val=value.contiguous(), source_fn_stack=[(copy.name, "copy")])
        node.update_arg(0, copy)
    graph.recompile()


def _attribute(graph: Any, path: str) -> Any:
    found = graph
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _quantizer(torch: Any, recipe: Recipe) -> Any:
    """torchao's quantizer for x86."""
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(**recipe.configuration()))
    for name in recipe.floating():
        quantizer.set_function_type_qconfig(operator.attrgetter(name)(torch), None)
    return quantizer


def _free(graph: Any) -> Any:
    """torchao makes `train` and `eval` raise; the graph was captured for inference and has no other mode."""
    for name in ("train", "eval"):
        vars(graph).pop(name, None)
    return graph


def _lowered() -> int:
    from torch._dynamo.utils import counters

    return sum(counters["inductor"][name] for name in LOWERED)
