"""Programs of torch.export (.pt2): a graph of ATen operators and its tensors, executed by torch.

The default of a candidate without a runtime of its own, and of those that compile in the process that serves: settings
say how to execute the program after loading (`saturate.inference.runtimes`) and which switches of the process it was
measured with (`saturate.inference.session`). Compiling is done again at the first call after each load.

Trust: the archive holds a graph in JSON and raw tensors. `torch.export.load` would also unpickle, evaluate and import
what it finds there, so `_vetting` refuses an archive that holds any such thing, and what is stored here holds none
(weights that are tensor subclasses are taken apart). What remains is that the program computes what its author wanted:
the digests in the manifest say that nobody changed it since.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from saturate.errors import ArtifactDamaged, EnvironmentProblem
from saturate.inference import runtimes, session, structure
from saturate.inference.formats import NotDeployable, _program, _vetting
from saturate.inference.techniques._api import Context, Entry, NotApplied

FORMAT = "exported"
NAME = "model.pt2"


def save(context: Context, folder: Path, runtime: dict[str, Any] | None = None, model: Any = None) -> Entry:
    """Store `context.model` (or `model`) in `folder`; `runtime` is how to execute it (default: as it is).

    Raises NotDeployable with the reason, and OSError when the disk is full.
    """
    torch = context.torch
    try:
        program = _program.capture(context, model)
    except NotApplied as error:
        raise NotDeployable(str(error)) from error
    write(torch, program.exported, Path(folder) / NAME)
    settings = {"device": context.device, "runtime": dict(runtime or runtimes.EAGER), "session": session.switches(context),
                **program.signature}
    return Entry(FORMAT, [NAME], settings)


def write(torch: Any, exported: Any, path: Path) -> None:
    """Write an ExportedProgram such that reading it unpickles nothing. Raises NotDeployable, OSError."""
    try:
        if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in exported.state_dict.values()):
            # Quantized weights are tensor subclasses, and would be pickled.
            exported = exported.run_decompositions(_foreign(torch, exported))
    except Exception as error:
        raise NotDeployable(f"torch.export cannot take the weights apart: {_program.short(error)}") from error
    exported._example_inputs = None     # torch would pickle them; nothing needs them after this
    exported._guards_code = []          # Python that torch would execute; `_program.callable_of` checks inputs
    for graph in exported.graph_module.modules():
        for node in getattr(getattr(graph, "graph", None), "nodes", ()):
            # Not the lines and paths of the user's source that torch keeps there.
            node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
            if node.target in (torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_async.msg):     # what it says quotes
                node.update_arg(1, _vetting.plain(node.args[1]))
    try:
        written = io.BytesIO()      # torch ends the process where it cannot write to a file (a full disk)
        torch.export.save(exported, written)
        path.write_bytes(written.getbuffer())
        _vetting.exported(torch, path)
    except _vetting.Unsafe as error:
        path.unlink(missing_ok=True)
        raise NotDeployable(f"torch {torch.__version__} cannot store the program as plain data: {error}") from error
    except OSError:
        path.unlink(missing_ok=True)
        raise
    except Exception as error:
        path.unlink(missing_ok=True)
        raise NotDeployable(f"torch.export cannot store the program: {_program.short(error)}") from error


def _foreign(torch: Any, exported: Any) -> dict[Any, Any]:
    """How to write the operators that a library added (torchao) with torch's own: who loads the program may not have it."""
    used = {node.target for node in exported.graph.nodes if getattr(node.target, "namespace", "aten") not in ("aten", "prims")}
    return {operator: rule for operator, rule in torch.export.default_decompositions().items() if operator in used}


def read(torch: Any, path: Path) -> Any:
    """The module of a stored program, which takes and returns flat tensors. Raises ArtifactDamaged, and EnvironmentProblem where it calls
    what nothing here registers."""
    remedy = "copy the artifact again, or run saturate optimize again"
    try:
        _vetting.exported(torch, path)
    except _vetting.UnknownOperator as error:
        raise EnvironmentProblem(f"{path} is not loaded", cause=str(error), remedy="import the library that registers it, and load again") from error
    except _vetting.Unsafe as error:
        raise ArtifactDamaged(f"{path} is not loaded", cause=str(error), remedy=remedy) from error
    try:
        return torch.export.load(path).module().requires_grad_(False)
    except Exception as error:
        raise ArtifactDamaged(f"torch {torch.__version__} does not load {path}", cause=_program.short(error),
                              remedy=remedy) from error


def _answered(module: Any) -> int:
    """How many tensors a flat program returns."""
    return len(next(iter(reversed(module.graph.nodes))).args[0])


def lines(entry: Entry, threads: int, place: Callable[[str], str]) -> str:
    """See `inference.lines.serving`."""
    settings, program = entry.settings, f"torch.export.load({place(entry.files[0])}).module()"
    runtime, first = settings["runtime"], session.lines(settings["session"], threads)
    if runtime["kind"] == "cuda-graphs":
        program = f'torch.compile({program}, backend="cudagraphs")'
    elif runtime["kind"] == "compile":
        first = f"import torch._inductor.config\n{first}; torch._inductor.config.freezing = {runtime['freezing']}"
        program = f"torch.compile({program}, mode={runtime['mode']!r}, dynamic={True if runtime['dynamic'] else None})"
    return f"{_program.library_lines(settings)}{first}\nprogram = {program}\nwith torch.no_grad(): answers = program(*{structure.flat_inputs(settings['inputs'])})"


def load(torch: Any, folder: Path, entry: Entry) -> Any:
    """The stored program as a function with the model's signature. Raises ArtifactDamaged, EnvironmentProblem."""
    path, settings = Path(folder) / entry.files[0], entry.settings
    _program.load_libraries(settings)
    module = read(torch, path)
    try:
        session.restore(torch, settings["session"])
        run = runtimes.executed(torch, module, settings["runtime"])
        return _program.callable_of(torch, settings, settings["device"], lambda tensors: run(*tensors), answered=_answered(module))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactDamaged(f"the settings beside {path} are incomplete", cause=repr(error),
                              remedy="copy the artifact again, or run saturate optimize again") from error
