"""ONNX files, executed by OpenVINO on the CPU.

Stored and checked as `formats.onnx` does. Settings: the signature (see `_program`), how many threads, and the format that
floating-point numbers are computed in ("f32" or "bf16").
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from saturate.errors import ArtifactDamaged
from saturate.inference import structure
from saturate.inference.formats import _program
from saturate.inference.formats import onnx as files
from saturate.inference.techniques._api import Entry

FORMAT = "openvino"

#: What floating-point numbers may be computed in. OpenVINO's own choice is bfloat16 wherever the processor has it.
PRECISIONS = ("f32", "bf16")


def settings_of(threads: int, precision: str) -> dict[str, Any]:
    """OpenVINO's properties. Threads are not bound to cores: another process may be bound to the same ones."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}, not one of {', '.join(PRECISIONS)}")
    return {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": precision, "ENABLE_CPU_PINNING": False}


def compiled(path: Path, threads: int, precision: str) -> Any:
    """A model compiled for this CPU, of a file that is trusted to be whole.

    Raises EnvironmentProblem where OpenVINO is not installed, and RuntimeError for what it does not take.
    """
    openvino = files.require("openvino")
    core = openvino.Core()
    return core.compile_model(core.read_model(str(path)), "CPU", settings_of(threads, precision))


def program(torch: Any, model: Any, signature: dict[str, Any], classes: dict[str, type] | None = None) -> Callable[..., Any]:
    """The compiled model as a function with the model's signature and output structure; see `_program.callable_of`."""
    # A graph need not have the inputs that nothing depends on, so names are read, not counted.
    places = {name: files.place_of(name) for name in (item.get_any_name() for item in model.inputs)}
    mine = threading.local()        # a request serves one call at a time

    def run(tensors: list[Any]) -> list[Any]:
        if not hasattr(mine, "request"):
            mine.request = model.create_infer_request()
        feeds = {name: tensors[place].numpy() for name, place in places.items()}
        # Outputs are copied out of buffers that the next call writes to.
        return [torch.from_numpy(array) for array in mine.request.infer(feeds, share_inputs=True).to_tuple()]

    return _program.callable_of(torch, signature, "cpu", run, classes, quiet=True, answered=len(model.outputs))


def save(folder: Path, path: Path, settings: dict[str, Any]) -> Entry:
    """Copy a model, and the files that hold its weights, into `folder`. Raises OSError (a full disk)."""
    return Entry(FORMAT, files.save(folder, path, settings).files, settings)


def lines(entry: Entry, threads: int, place: Callable[[str], str]) -> str:
    """See `inference.lines.serving`."""
    settings, tensors = entry.settings, structure.flat_inputs(entry.settings["inputs"])
    # By name: a graph has no inputs that nothing depends on.
    return (f"import openvino\n"
            f"settings = {settings_of(int(settings['threads']), settings['precision'])!r}\n"
            f'compiled = openvino.Core().compile_model({place(entry.files[0])}, "CPU", settings)\n'
            f"answers = list(compiled({{(name := one.get_any_name()): {tensors}[int(name[{len(files.INPUT)}:])].numpy() "
            f"for one in compiled.inputs}}).values())")


def load(torch: Any, folder: Path, entry: Entry) -> Callable[..., Any]:
    """The program that `save` stored. Raises ArtifactDamaged, and EnvironmentProblem where OpenVINO is missing."""
    files.require("openvino")
    path = files.stored(Path(folder), entry)
    settings = entry.settings
    try:
        return program(torch, compiled(path, int(settings["threads"]), settings["precision"]), settings)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactDamaged(f"what is said of {path} is incomplete", cause=repr(error), remedy=files.REMEDY) from error
    except RuntimeError as error:
        raise ArtifactDamaged(f"OpenVINO does not load {path}", cause=str(error), remedy=files.REMEDY) from error
