"""Compile the parts of the exported module that TensorRT supports into engines, and leave the rest to torch.

What it does
------------
Captures the module with torch.export and lets Torch-TensorRT replace subgraphs by TensorRT engines. Operators without a
converter stay in torch, so models that TensorRT alone cannot parse still gain.

When it helps
-------------
NVIDIA GPUs; models that are mostly, but not wholly, made of operators that TensorRT supports.

When it hurts
-------------
Compiling takes minutes, and every border between an engine and torch costs a synchronisation. Engines belong to one GPU
architecture and one version of TensorRT.

Numerics
--------
`precision`: float32 with TensorFloat-32 products where TensorRT prefers them, or float16.

How it is applied
-----------------
torch_tensorrt.dynamo.compile on the captured program, explicitly typed. Stored as an AOTInductor package that holds the
engines. Written from the documentation of Torch-TensorRT 2.13 and never run: no GPU was at hand.

References
----------
Torch-TensorRT documentation, "Compiling Exported Programs" and "Saving models compiled with Torch-TensorRT".
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saturate.inference import compiling, session, structure
from saturate.inference.formats import _program, aoti
from saturate.inference.techniques import _onnx, _precision
from saturate.inference.techniques._api import (
    Context,
    Eligible,
    Entry,
    Ineligible,
    NotApplied,
    Proof,
    Technique,
    Touch,
)
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="torch-tensorrt",
    title="Torch-TensorRT",
    numerics="precision",
    stage="runtime",
    touches=(Touch("runtime"), Touch("number-format"), Touch("module-classes")),
    status="experimental",
)

PREPARE_S = 60.0

#: All layers are compiled as they come.
WHOLE = True


@dataclass(frozen=True)
class Options:
    """half: float16 inside, float32 at the borders."""

    half: bool = True


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    if facts.device != "cuda":
        return Ineligible("Torch-TensorRT needs an NVIDIA GPU; the model is on the CPU")
    if not {"torch-tensorrt", "torch_tensorrt"} & set(facts.installed):
        return Ineligible("torch-tensorrt is not installed: pip install torch-tensorrt")
    return _onnx.refusal(facts, ()) or Eligible("torch.export takes the model, and Torch-TensorRT is installed")


def variants(facts: ModelFacts) -> list[Options]:
    return [Options(), Options(half=False)]


def apply(context: Context, options: Options) -> str:
    import torch_tensorrt

    program = _program.capture(context, _onnx.in_half(context.torch, context.model) if options.half else None)
    _, example = structure.flatten(context.torch, context.inputs[0])
    with compiling.clock():
        compiled = torch_tensorrt.dynamo.compile(program.exported, arg_inputs=tuple(example), use_explicit_typing=True)
    engines = sum("TensorRT" in type(module).__name__ for module in compiled.modules())
    if not engines:
        raise NotApplied("no part of the model became a TensorRT engine")
    context.notes[TECHNIQUE.id] = f"{engines} TensorRT engines"
    context.call = _program.callable_of(context.torch, program.signature, "cuda", lambda tensors: compiled(*tensors),
                                        program.classes)
    context.save = lambda folder: _save(torch_tensorrt, context, compiled, example, program, folder)
    return f"{engines} TensorRT engines in {'float16' if options.half else 'float32'}"


def _save(torch_tensorrt: Any, context: Context, compiled: Any, example: list[Any], program: _program.Program,
          folder: Path) -> Entry:
    torch_tensorrt.save(compiled, str(folder / aoti.NAME), output_format="aot_inductor", arg_inputs=tuple(example))
    settings = {"device": context.device, "session": session.switches(context), **program.signature}
    return Entry(aoti.FORMAT, [aoti.NAME], settings)


def active(context: Context, options: Options) -> Proof:
    note = context.notes.get(TECHNIQUE.id, "")
    return Proof(bool(note), note or "nothing was compiled")


def as_code(options: Options) -> str:
    return "\n".join([
        "import torch_tensorrt",
        *([_precision.as_code("float16")] if options.half else []),
        "with torch.no_grad():",
        "    program = torch.export.export(model, inputs)",
        "model = torch_tensorrt.dynamo.compile(program, arg_inputs=inputs, use_explicit_typing=True)"])
