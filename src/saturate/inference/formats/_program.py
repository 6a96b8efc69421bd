"""A module captured by torch.export as a program over a flat list of tensors, and how such a program is called again.

Everything that is not a tensor (the nesting of inputs and outputs, numbers, None) is kept outside of the program, in its
*signature*: plain data that goes into `Entry.settings`.

    inputs, outputs     what `saturate.inference.structure` says of both
    parameters          names of the model's parameters, for calls with keyword arguments
    tensors             of each input tensor {"dtype": "float32", "shape": [batch, 3, 224, 224]}; a size that may vary is
                        a name, and equal names mean equal sizes
    ranges              {name: [least, most]}; most is None without a limit
    values              [[place of an input tensor, rows of the table that its numbers are looked up in], ...]; a third number is the
                        least one, where it is not 0
    libraries           whose operators the program calls, of those that torch does not come with (`LIBRARIES`); absent where there are none
    why_fixed           why the batch size is no name although the inputs have one; "" where nothing is known to say

Which sizes stay open, and within which limits, is decided in `_dynamic_shapes`; what it plans is exported and tried out here.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from saturate.errors import ArtifactDamaged, EnvironmentProblem
from saturate.inference import agreement, pickles, structure
from saturate.inference import batches as trees
from saturate.inference.formats import OtherSizes, _dynamic_shapes, _tables
from saturate.inference.techniques._api import Context, NotApplied

#: Libraries whose operators, which bear their names, are machine code that they load when they are imported. What loads a program imports
#: these and no others, whatever the artifact says.
LIBRARIES = ("torchvision",)

#: A program remembers so many kinds of inputs that it takes.
MOST_FITTED = 256


@dataclass
class Program:
    """What torch.export made of a model. `flat` is the module that it was made from: tensors in, a tuple of tensors out."""

    exported: Any
    flat: Any
    signature: dict[str, Any]
    classes: dict[str, type]            # of the output, for the process that made the program
    example: list[Any] | None           # flat tensors of the sizes that matter; None where sizes vary


def capture(context: Context, model: Any = None) -> Program:
    """Export `context.model` (or `model`, with the same inputs and outputs), with the sizes left open that vary in the
    inputs, and the batch dimension too where the model takes other batch sizes.

    Raises NotApplied with the problem that torch.export reports: control flow that depends on data, for one.
    """
    torch, model = context.torch, context.model if model is None else model
    try:
        described = [structure.flatten(torch, batch, distinct=True) for batch in (*context.inputs, *context.others)]
    except structure.NotDescribable as error:
        raise NotApplied(f"the inputs cannot be stored: {error}") from error
    description = described[0][0]
    other = next((other for other, _ in described if not structure.same(other, description)), None)
    if other is not None:
        raise NotApplied(f"the batches differ in structure or in values that are no tensors{_where_they_differ(description, other)}")
    if any(tensor.layout != torch.strided for _, tensors in described for tensor in tensors):
        raise NotApplied("an input is sparse, and stored programs take dense tensors")
    batches = [[_plain(torch, tensor) for tensor in tensors] for _, tensors in described]
    flat = _flat_module(torch, model, description)
    problem: Exception | None = None
    for sizes in _dynamic_shapes.plans(batches, context.facts.batch_size, hasattr(torch.export.Dim, "AUTO")):
        flat.outputs = None
        try:
            exported = _export(torch, flat, _dynamic_shapes.example(torch, batches, sizes), sizes)
            shapes = _try_out(torch, exported, flat, batches, sizes, values=not context.facts.random)
        except Exception as error:  # noqa: BLE001 - export runs the model's own code, which may raise anything
            # The plan with most freedom says best what the model asks for; but where no size was open, none is why.
            problem = error if problem is None or not any(sizes) else problem
            continue
        unknown = unknown_operator(torch, exported)
        if unknown:
            raise NotApplied(unknown)
        _tables.keep_within(exported, shapes["ranges"])
        signature = {"inputs": description, "outputs": flat.outputs, "parameters": _parameters(model), **shapes, "values": _tables.looked_up(exported),
                     **_libraries(exported), "why_fixed": _dynamic_shapes.why_fixed(problem)}
        return Program(exported, flat, signature, flat.classes, None if context.facts.varying_shapes else batches[0])
    if isinstance(problem, structure.NotDescribable):       # with fixed sizes too, where a size in it would be a number
        raise NotApplied(f"the output cannot be stored: {problem}{_without_cache(problem)}") from problem
    raise NotApplied(f"torch.export cannot capture the model: {_dynamic_shapes.one_size_only(problem) or short(problem)}") from problem


def unknown_operator(torch: Any, exported: Any) -> str:
    """Why nobody could load the program, where it calls an operator that a module in Python registers: who loads it imports nothing because a
    file says so. Else ""."""
    modules = {name: one._init_fn.__module__ for name, one in pickles.defined_operators().items() if name}
    for graph in exported.graph_module.modules():
        for node in getattr(getattr(graph, "graph", None), "nodes", ()):
            name = getattr(getattr(node.target, "_schema", None), "name", "")
            module = modules.get(name, "torch")
            if module.partition(".")[0] != "torch" and node.target not in torch.export.default_decompositions():
                return (f"a program would call the operator {name}, which {module} registers, and only a process that imports that knows it"
                        f"{_without_kernel(name)}")
    return ""


def _libraries(exported: Any) -> dict[str, list[str]]:
    """The entry of a signature for libraries whose operators a program calls."""
    spaces = {getattr(node.target, "namespace", "") for graph in exported.graph_module.modules() for node in getattr(getattr(graph, "graph", None), "nodes", ())}
    found = [library for library in LIBRARIES if library in spaces]
    return {"libraries": found} if found else {}


def load_libraries(settings: dict[str, Any]) -> None:
    """Import what registers the operators of a program. Raises EnvironmentProblem where that is not installed."""
    for library in _named(settings):
        try:
            importlib.import_module(library)
        except (ImportError, OSError, RuntimeError) as error:       # what does not go with this torch raises the others
            raise EnvironmentProblem(f"the program calls operators of {library}, which cannot be imported here", cause=short(error),
                                     remedy=f"install the {library} that goes with this torch") from error


def library_lines(settings: dict[str, Any]) -> str:
    """The same, as lines for the user."""
    return "".join(f"import {library}       # registers operators that the program calls\n" for library in _named(settings))


def _named(settings: dict[str, Any]) -> list[str]:
    """Those of `LIBRARIES` that are among what a file says."""
    said = settings.get("libraries")
    return [library for library in LIBRARIES if isinstance(said, list) and library in said]


def _without_kernel(operator: str) -> str:
    """What to do about an operator of transformers."""
    return '; with model.set_experts_implementation("batched_mm") the model does without it' if operator.startswith("transformers::grouped_mm") else ""


@contextlib.contextmanager
def kept_open(torch: Any, program: Program) -> Iterator[None]:
    """Around what makes a program of another runtime of it. Raises NotApplied where sizes are not open in that any more."""
    try:
        with _dynamic_shapes.kept_open(torch, program.exported, program.signature["ranges"]):
            yield
    except _dynamic_shapes.Decided as error:
        raise NotApplied(_dynamic_shapes.one_size_only(error)) from error


def _where_they_differ(one: Any, other: Any) -> str:
    """The first value that is another one in another batch, and what to do about it; "" where they are arranged otherwise."""
    path, one, other = structure.difference(one, other)
    if not all(isinstance(node, dict) and {"value", "number"} & set(node) for node in (one, other)):
        return ""
    first, second = (float(node["number"]) if "number" in node else node["value"] for node in (one, other))
    shown = f": inputs{path} is {first!r:.40} in one, {second!r:.40} in another"
    kinds = {type(first), type(second)}
    return f"{shown}; a program keeps it as it is: give the model a tensor there" if kinds <= {int, float, bool} else shown


def _without_cache(problem: Exception) -> str:
    """What to do about keys and values that a model of transformers returns unless it is told not to."""
    return "; with model.config.use_cache = False the model does not return it" if ".cache_utils." in str(problem) else ""


def _plain(torch: Any, tensor: Any) -> Any:
    with torch.inference_mode(False):       # a tensor made in inference mode cannot be captured
        return tensor.detach().clone() if tensor.is_inference() else tensor.detach().contiguous()


def fixed(torch: Any, program: Program) -> Any:
    """The same for the sizes of the inputs only, or None where that is no other program: compilers lay out memory and
    choose kernels for sizes that they know, which open ones cost a convolutional network a third of its speed."""
    if program.example is None or not program.signature["ranges"]:
        return None
    return _export(torch, program.flat, program.example, [{} for _ in program.example])


def _export(torch: Any, flat: Any, example: list[Any], sizes: _dynamic_shapes.Sizes) -> Any:
    shapes = None
    if any(sizes):
        auto = torch.export.Dim.AUTO
        shapes = (tuple({dimension: auto for dimension in open_sizes} for open_sizes in sizes),)
    with torch.inference_mode(False), torch.no_grad():
        # Copies: an export that fails leaves its marks on the tensors, and the next one would take their sizes for open still.
        exported = torch.export.export(flat, tuple(tensor.clone() for tensor in example), dynamic_shapes=shapes, strict=False)
    _dynamic_shapes.check_open(exported, sizes)
    return exported


def _try_out(torch: Any, exported: Any, flat: Any, batches: list[list[Any]], sizes: _dynamic_shapes.Sizes, *,
             values: bool) -> dict[str, Any]:
    """`tensors` and `ranges` of the signature, by trial: what was captured may hold for the example's sizes only.

    torch.export takes it for granted that an open size is not one, so a branch on that is lost; what it answers then
    shows it. Raises ValueError where other batches do not go through, Decided where that is known of some sizes. `values`:
    equal shapes are not enough.
    """
    module = exported.module()      # with the guards that torch.export recorded

    def problem(case: list[Any]) -> str:
        with torch.inference_mode(False), torch.no_grad():
            try:
                expected, got = (run(*[tensor.clone() for tensor in case]) for run in (flat, module))    # one may write to them
            except Exception as error:  # noqa: BLE001 - a guard, a size that was a constant, or the model's own code
                return short(error)
        alike = len(got) == len(expected) and all(_alike(torch, *pair, values) for pair in zip(expected, got))
        return "" if alike else f"what was captured answers otherwise than the model{_hidden(torch, flat)}"

    cases = [*batches[:2], *batches[2:][-2:]]       # inputs of other sizes come last
    if any(open_sizes.get(0) == "batch" for open_sizes in sizes):
        cases.append(_dynamic_shapes.with_rows(torch, batches[0], sizes, 3))
    found = next(filter(None, map(problem, cases)), "")
    if found:
        raise ValueError(found)
    shapes = _dynamic_shapes.shapes_and_ranges(torch, exported, batches, sizes)
    for name, limits in shapes["ranges"].items():
        if limits[0] <= 2:
            limits[0] = 2 if problem(_dynamic_shapes.with_one(batches[0], shapes["tensors"], name)) else 1
    return shapes


def _hidden(torch: Any, model: Any) -> str:
    """Why that may be, where torch's own encoder hands padded batches to its layers without the padding."""
    if any(isinstance(one, torch.nn.TransformerEncoder) and getattr(one, "use_nested_tensor", False) for one in model.modules()):
        return (": torch's TransformerEncoder answers 0 for the tokens that src_key_padding_mask hides, and only as long as it is not captured; "
                "with its use_nested_tensor = False, set before the search, both answer alike")
    return ""


def _alike(torch: Any, expected: Any, got: Any, values: bool) -> bool:
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    if not values or not expected.numel():
        return True
    one, other = agreement.wide(torch, expected), agreement.wide(torch, got)
    scale = one.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return torch.allclose(one, other, rtol=1e-2, atol=1e-2 * scale, equal_nan=True)


def answers(exported: Any) -> list[str]:
    """The number formats of what the program returns."""
    values = next(node for node in exported.graph.nodes if node.op == "output").args[0]
    return [str(node.meta["val"].dtype).removeprefix("torch.") for node in values]


def _flat_module(torch: Any, model: Any, description: Any) -> Any:
    class Flat(torch.nn.Module):
        """Tensors in, a tuple of tensors out; `outputs` is the description of what the model returned."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.training = False       # not eval(): parts of the model may be in another mode on purpose
            self.outputs: Any = None
            self.classes: dict[str, type] = {}

        def forward(self, *tensors: Any) -> tuple[Any, ...]:
            output = self.model(*structure.rebuild(description, list(tensors)))
            described, flat = structure.flatten(torch, output)
            if self.outputs is None:
                self.outputs, self.classes = described, structure.classes_in(output)
            elif not structure.same(described, self.outputs):
                raise ValueError("the answer is arranged otherwise, or holds other values beside its tensors, from call to call")
            return tuple(flat)

    return Flat()


def _parameters(model: Any) -> list[str]:
    """Names of the model's parameters that can be given by place."""
    found = trees.signature_of(trees.call_of(model))
    return [one.name for one in found.parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD] if found else []


def short(error: BaseException | None) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}"[:300]


# -- calling ------------------------------------------------------------------------------------------------------------


def callable_of(torch: Any, signature: dict[str, Any], device: str, run: Callable[[list[Any]], Sequence[Any]],
                classes: dict[str, type] | None = None, *, quiet: bool = False, answered: int | None = None) -> Callable[..., Any]:
    """A function with the signature and the output structure of the model that the program was made from.

    It checks what a compiled program does not check itself: with other sizes, types or strides that would read beyond
    its buffers. `quiet`: `run` records no gradients whatever the mode is, so the mode need not be switched. `answered`: how
    many tensors `run` returns; None: not known before the first call.

    The function raises TypeError for another structure or number type and for sparse tensors, OtherSizes (a ValueError) for sizes that it was
    not made for, and on a CPU IndexError for numbers that a table has no row for, as the model does. Raises KeyError when the signature is
    incomplete, ValueError where it is no signature of this program.
    """
    inputs, outputs, parameters = signature["inputs"], signature["outputs"], signature["parameters"]
    expected = [(getattr(torch, one["dtype"]), list(one["shape"])) for one in signature["tensors"]]
    ranges = signature["ranges"]
    why_fixed = f": {signature['why_fixed']!s:.300}" if signature.get("why_fixed") else ""     # unknown to older artifacts
    if not isinstance(ranges, dict) or not all(isinstance(limits, list) and len(limits) == 2 for limits in ranges.values()):
        raise ValueError(f"{ranges!r:.200} does not say how large its inputs may be")
    if structure.places(inputs) != list(range(len(expected))):
        raise ValueError(f"its inputs {inputs!r:.200} are not the {len(expected)} tensors that are described")
    if max(structure.places(outputs), default=-1) >= (math.inf if answered is None else answered):
        raise ValueError(f"the program returns {answered} tensors, which its outputs {outputs!r:.200} exceed")
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        raise ValueError("the names of its parameters are no list of names")
    plain = inputs == {"tuple": [[place] for place in range(len(expected))]}      # tensors only: nothing to take apart
    alone = outputs == [0]
    kinds = [torch.Tensor] * len(expected)
    tables = signature.get("values", []) if device == "cpu" else []      # unknown to older artifacts; a GPU would be waited for
    if not all(isinstance(one, list) and len(one) in (2, 3) and {*map(type, one)} == {int} and one[0] in range(len(expected)) for one in tables):
        raise ValueError(f"{tables!r:.200} does not say which inputs are looked up in a table")
    tables = [(*one, 0)[:3] for one in tables]
    if not all(isinstance(dtype, torch.dtype) for dtype, _ in expected):
        raise ValueError("an input is of no type that torch knows")
    # A small model takes some ten microseconds, and so would this function: what fitted once need not be looked at again.
    fitted: set[Any] = set()

    def check(tensors: list[Any]) -> None:
        known: dict[str, int] = {}
        for index, (tensor, (dtype, shape)) in enumerate(zip(tensors, expected)):
            given, wanted = tensor.device.type, device
            if given == wanted == "cuda":       # programs run on the current GPU, and may read another one's memory as their own
                given, wanted = str(tensor.device), f"cuda:{torch.cuda.current_device()}"
            if tensor.dtype != dtype or given != wanted:
                raise TypeError(f"input tensor {index} is {tensor.dtype} on {given}, this program takes {dtype} on {wanted}")
            if tensor.layout != torch.strided:
                raise TypeError(f"input tensor {index} is {tensor.layout}, this program takes dense tensors: tensor.to_dense()")
            sizes = tuple(tensor.shape)
            if len(sizes) != len(shape) or not all(_fits(*pair, known, ranges) for pair in zip(sizes, shape)):
                raise OtherSizes(f"input tensor {index} has shape {list(sizes)}, this program was made for {shape}"
                                 f"{_limits(shape, ranges)}{why_fixed}")

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = list(positional(parameters, args, kwargs) if kwargs else args)
        if not plain or [type(one) for one in tensors] != kinds:
            description, tensors = structure.flatten(torch, tuple(tensors), distinct=True)
            if not structure.same(description, inputs):
                raise TypeError(f"this program takes inputs arranged as {inputs}, not {description}")
        kind = tuple([(one.shape, one.dtype, one.device, one.layout) for one in tensors])
        if kind not in fitted:
            check(tensors)
            if len(fitted) < MOST_FITTED:
                fitted.add(kind)
        for place, rows, first in tables:
            if tensors[place].numel():
                least, most = tensors[place].aminmax()
                if least < first or most >= rows:
                    raise IndexError(f"input tensor {place} holds {int(least)} to {int(most)}, and is looked up in a table of {rows} rows, from {first}")
        tensors = [(one.detach() if one.requires_grad else one).contiguous() for one in tensors]
        if not quiet and torch.is_grad_enabled():
            with torch.no_grad():
                answers = run(tensors)
        else:
            answers = run(tensors)
        try:
            return answers[0] if alone else structure.rebuild(outputs, answers, classes)
        except ValueError as error:
            raise ArtifactDamaged("the program's answer is not arranged as its settings say",
                                  cause=str(error), remedy="copy the artifact again, or make it again") from error

    return call


def _fits(size: int, wanted: int | str, known: dict[str, int], ranges: dict[str, Any]) -> bool:
    if not isinstance(wanted, str):
        return size == wanted
    least, most = ranges.get(wanted, (0, None))
    return known.setdefault(wanted, size) == size and size >= least and (most is None or size <= most)


def _limits(shape: list[Any], ranges: dict[str, Any]) -> str:
    limits = {name: ranges[name] for name in shape if name in ranges}
    words = [f"{name} from {least}" + (f" to {most}" if most is not None else "") for name, (least, most) in limits.items()]
    return f" ({', '.join(words)})" if words else ""


def positional(parameters: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Keyword arguments at their places. Raises TypeError for one that has none."""
    given, left = list(args), dict(kwargs)
    for name in parameters[len(args):]:
        if name not in left:
            break
        given.append(left.pop(name))
    if left:
        raise TypeError(f"this program takes its inputs by place; it cannot take {', '.join(left)} here")
    return tuple(given)
