"""Compile the model ahead of time into a library that runs without Python.

What it does
------------
Exports the model with torch.export and compiles it with AOTInductor: inductor's kernels, called from C++. On CPUs the
weights are frozen into the library.

When it helps
-------------
The same kernels as `torch.compile` without its guards and Python between them, which small models notice; and it loads in
moments on the machine that serves, with nothing to compile there.

When it hurts
-------------
The model must be exportable: control flow that depends on data is not. Inputs of varying sizes get kernels for open
sizes, which are slower. The library belongs to one instruction set and one version of torch.

Numerics
--------
`reordering`: fused kernels add in another order, folded normalizations round at another place.

How it is applied
-----------------
The batch dimension stays open where the model takes other batch sizes and does not branch on them (a program holds one side
of a branch), and so does every size that varies in the inputs; the measured sizes get a library of their own beside that,
because open sizes cost convolutions most of their gain.
On a CPU the library's weights lie on cache lines, which torch leaves to chance (`formats/_cache_lines.py`).
Inputs are checked before each call, because the library does not. The proof is the compiled library in the package.

References
----------
PyTorch documentation, "AOTInductor: Ahead-Of-Time Compilation for torch.export-ed Models".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from os import environ

from saturate.inference.formats import _cache_lines, _program, aoti
from saturate.inference.techniques import _onnx
from saturate.inference.techniques._api import Context, Eligible, Ineligible, Proof, Technique, Touch, no_program
from saturate.machine import facts as machine
from saturate.records.inference import ModelFacts

TECHNIQUE = Technique(
    id="aot-inductor",
    title="AOTInductor",
    numerics="reordering",
    stage="runtime",
    touches=(Touch("runtime"),),
)

PREPARE_S = 30.0

#: What other techniques put between the operators, casts for one, is compiled with them.
COMPILES = True

#: The first version with packages and open sizes (torch.export.Dim.AUTO).
_OLDEST = (2, 6)


@dataclass(frozen=True)
class Options:
    """`freezing` folds the weights in; `max_autotune` measures kernels while it compiles."""

    freezing: bool = True
    max_autotune: bool = False


def eligible(facts: ModelFacts) -> Eligible | Ineligible:
    if facts.device not in ("cpu", "cuda"):
        return Ineligible(f"not offered on {facts.device or 'unknown'} devices")
    if tuple(int(part) for part in re.findall(r"\d+", facts.torch)[:2]) < _OLDEST:
        return Ineligible(f"needs torch 2.6, this is {facts.torch or 'unknown'}")
    if not machine.compiler(environ):
        return Ineligible("compiling needs a C++ compiler (g++ or clang++) on PATH")
    if facts.exportable is False:
        return Ineligible(f"torch.export does not take this model: {facts.export_problem}")
    if (why := no_program(facts)) is not None:
        return Ineligible(why)
    return Eligible("the model can be exported")


def variants(facts: ModelFacts) -> Sequence[Options]:
    freezing = facts.device == "cpu"
    return [Options(freezing=freezing), Options(freezing=freezing, max_autotune=True)]


def bound(facts: ModelFacts) -> float | None:
    return 2.0


def apply(context: Context, options: Options) -> str:
    program = _program.capture(context)
    configuration = {"freezing": options.freezing, "max_autotune": options.max_autotune}
    package = aoti.build(context, program, context.folder / "aot_inductor.pt2", configuration)
    context.call = aoti.opened(context.torch, package, program.signature, context.device, program.classes)
    context.save = lambda folder: aoti.save(context, folder, package, program)
    open_sizes = f"{len(program.signature['ranges'])} open size(s)"
    context.notes[TECHNIQUE.id] = f"a compiled library of {package.stat().st_size / 1e6:.1f} MB, {open_sizes}"
    return f"compiled ahead of time, {open_sizes}{', weights frozen' if options.freezing else ''}"


def active(context: Context, options: Options) -> Proof:
    seen = context.notes.get(TECHNIQUE.id, "")
    return Proof(bool(seen) and context.call is not None, seen or "nothing was compiled")


def as_code(options: Options) -> str:
    changed = {**{name: True for name in ("freezing", "max_autotune") if getattr(options, name)}, _cache_lines.OPTION: _cache_lines.VALUE}
    return (
        f"{_onnx.MODULE_CODE}{_cache_lines.CODE}"
        "with torch.no_grad():\n"
        "    program = torch.export.export(Tensors(model), inputs)      # dynamic_shapes= for sizes that vary\n"
        f'    torch._inductor.aoti_compile_and_package(program, package_path="model.pt2", inductor_configs={changed})\n'
        'model = torch._inductor.aoti_load_package("model.pt2")'
    )
