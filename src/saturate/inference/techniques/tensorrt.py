"""Build a TensorRT engine from the model, and serve with it.

What it does
------------
Exports the module to ONNX, in float16 between float32 inputs and outputs or in float32, and lets TensorRT choose and time
fused kernels for this GPU and for the range of shapes in the inputs.

When it helps
-------------
Convolutional models and encoders of fixed shape on NVIDIA GPUs.

When it hurts
-------------
Building takes minutes. The engine belongs to one GPU architecture and one version of TensorRT, and refuses shapes outside of
those that the inputs spanned. Float16 overflows above 65504.

Numerics
--------
`precision`: float16, or float32 with TensorFloat-32 products where TensorRT prefers them.

How it is applied
-----------------
TensorRT 11 takes types from the graph (strong typing) and has no precision flags, so the module is cast before the export.
Written from its documentation and never run: no GPU was at hand.

References
----------
NVIDIA TensorRT documentation, "Strongly Typed Networks".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from saturate.inference import compiling, structure
from saturate.inference.formats import tensorrt as engines
from saturate.inference.techniques import _onnx, _precision
from saturate.inference.techniques._api import Context, Eligible, Ineligible, NotApplied, Proof, Technique, Touch
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="tensorrt",
    title="TensorRT",
    numerics="precision",
    stage="runtime",
    touches=(Touch("runtime"), Touch("number-format"), Touch("module-classes"), Touch("memory-format")),
    status="experimental",
)

PREPARE_S = 60.0

#: One plan is built of all layers.
WHOLE = True


@dataclass(frozen=True)
class Options:
    """half: float16 weights and activations."""

    half: bool = True


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    if facts.device != "cuda":
        return Ineligible("TensorRT needs an NVIDIA GPU; the model is on the CPU")
    if "tensorrt" not in facts.installed:
        return Ineligible("tensorrt is not installed: pip install tensorrt onnx onnxscript")
    return _onnx.refusal(facts, ("onnx", "onnxscript")) or Eligible("torch.export takes the model, and TensorRT is installed")


def variants(facts: ModelFacts) -> list[Options]:
    return [Options(), Options(half=False)]


def apply(context: Context, options: Options) -> str:
    import tensorrt

    torch = context.torch
    model = _onnx.in_half(torch, context.model) if options.half else None
    exported = _onnx.export(context, model)
    path = context.folder / "model.plan"
    path.write_bytes(_build(tensorrt, exported, _shapes(torch, context)))
    context.call = engines.program(torch, tensorrt, path.read_bytes(), exported.signature, exported.classes)
    context.save = lambda folder: engines.save(folder, path, exported.signature)
    context.notes[TECHNIQUE.id] = f"plan of {path.stat().st_size} bytes"
    return f"TensorRT {tensorrt.__version__} in {'float16' if options.half else 'float32'}; {exported.sizes()}"


def _shapes(torch: Any, context: Context) -> list[list[tuple[int, ...]]]:
    """Of each input tensor, its shape in every batch."""
    batches = [structure.flatten(torch, batch)[1] for batch in (*context.inputs, *context.others)]
    return [[tuple(tensor.shape) for tensor in same] for same in zip(*batches)]


def _build(tensorrt: Any, exported: _onnx.Exported, shapes: list[list[tuple[int, ...]]]) -> bytes:
    """A plan for the shapes between the smallest and the largest batch. Raises NotApplied with TensorRT's reason."""
    logger = tensorrt.Logger(tensorrt.Logger.WARNING)
    builder = tensorrt.Builder(logger)
    strong = getattr(tensorrt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)    # of TensorRT 10; all networks of 11 are
    network = builder.create_network(0 if strong is None else 1 << int(strong))
    parser = tensorrt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(exported.path)):
        raise NotApplied(f"TensorRT does not parse the graph: {parser.get_error(0).desc()}")
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        name = network.get_input(index).name
        sizes = list(zip(*shapes[_onnx.files.place_of(name)]))
        high = tuple(map(max, sizes))
        profile.set_shape(name, tuple(map(min, sizes)), high, high)
    config.add_optimization_profile(profile)
    with compiling.clock():
        plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise NotApplied("TensorRT built no engine; the log of this candidate says why")
    return bytes(plan)


def active(context: Context, options: Options) -> Proof:
    note = context.notes.get(TECHNIQUE.id, "")
    return Proof(bool(note), note or "no engine was built")


def as_code(options: Options) -> str:
    return "\n".join([
        *([_precision.as_code("float16")] if options.half else []),
        _onnx.EXPORT_CODE.rstrip(),
        "# trtexec --onnx=model.onnx --saveEngine=model.plan",
        *engines.opening('"model.plan"'),
        "def model(*inputs):",
        *(f"    {line}" for line in engines.calling("tensors(inputs)")),
        "    return list(made.values())"])
