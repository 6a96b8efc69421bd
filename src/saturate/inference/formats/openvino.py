"""ONNX files, executed by OpenVINO on the CPU.

Stored and checked as `formats.onnx` does. Settings: the signature (see `_program`), how many threads, the format that
floating-point numbers are computed in ("f32" or "bf16"), and the sizes that were measured, where others may come too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from saturate.errors import ArtifactDamaged
from saturate.inference import compiling, structure
from saturate.inference.formats import _program
from saturate.inference.formats import onnx as files
from saturate.inference.techniques._api import Entry

FORMAT = "openvino"

#: OpenVINO computes integers of 64 bits with 32: more than these come back as others, even where they are only passed on.
LEAST, MOST = -2**31, 2**31 - 1

#: What floating-point numbers may be computed in. OpenVINO's own choice is bfloat16 wherever the processor has it.
PRECISIONS = ("f32", "bf16")


def settings_of(threads: int, precision: str) -> dict[str, Any]:
    """OpenVINO's properties. Threads are not bound to cores: another process may be bound to the same ones."""
    if threads < 1:
        raise ValueError(f"{threads} threads")
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}, not one of {', '.join(PRECISIONS)}")
    return {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": precision, "ENABLE_CPU_PINNING": False}


@functools.cache
def core() -> Any:
    """OpenVINO's Core: one for the process, and never let go. Each gives the thread that makes it an alternate stack for signals, and
    when it goes gives it the one from before, which may belong to a Core that has gone: the next signal then ends the process.

    Raises EnvironmentProblem where OpenVINO is not installed.
    """
    return files.require("openvino").Core()


class Executable:
    """The model of a file that is trusted to be whole, on this CPU: a list of tensors in, a list of tensors out. Threads may call
    it at once.

    sizes: the shapes of the inputs by name, for which a program of their own is compiled: a transformer in 8 bits gains
    by knowing them (`LOG.md`). One for all others is compiled when the first of them comes. None: one program for all.

    Raises EnvironmentProblem where OpenVINO is not installed, and RuntimeError for what it does not take.
    """

    def __init__(self, torch: Any, path: Path, threads: int, precision: str, sizes: dict[str, list[int]] | None):
        self._properties = settings_of(threads, precision)
        self._torch, self._model = torch, core().read_model(str(path))
        # A graph need not have the inputs that nothing depends on, so names are read, not counted.
        self._places = {name: files.place_of(name) for name in (item.get_any_name() for item in self._model.inputs)}
        self._wide = [self._places[item.get_any_name()] for item in self._model.inputs if item.get_element_type().get_type_name() == "i64"]
        self.sizes = None if sizes is None else {name: list(sizes[name]) for name in self._places}
        self._programs: dict[bool, Any] = {}        # True: for all sizes
        self._compiling = threading.Lock()
        self._mine = threading.local()              # a request serves one call at a time
        self.usual = self.program(general=sizes is None)

    def program(self, general: bool) -> Any:
        """OpenVINO's compiled model, for all sizes or for the known ones."""
        with self._compiling:
            if general not in self._programs:
                model = self._model if general else self._model.clone()
                if not general:
                    model.reshape(self.sizes)
                with compiling.clock():
                    self._programs[general] = core().compile_model(model, "CPU", self._properties)
            return self._programs[general]

    def __call__(self, tensors: list[Any]) -> list[Any]:
        """Raises ValueError for integers that it would answer wrongly."""
        for place in self._wide:
            if tensors[place].numel():
                least, most = tensors[place].aminmax()
                if least < LEAST or most > MOST:
                    raise ValueError(f"input tensor {place} holds {int(least)} to {int(most)}; OpenVINO computes integers with 32 bits")
        feeds = {name: tensors[place].numpy() for name, place in self._places.items()}
        general = self.sizes is None or any(list(feeds[name].shape) != size for name, size in self.sizes.items())
        mine = self._mine
        if not hasattr(mine, "requests"):
            mine.requests = {}
        if general not in mine.requests:
            mine.requests[general] = self.program(general).create_infer_request()
        # Outputs are copied out of buffers that the next call writes to.
        return [self._torch.from_numpy(array) for array in mine.requests[general].infer(feeds, share_inputs=True).to_tuple()]


def program(torch: Any, executable: Executable, signature: dict[str, Any], classes: dict[str, type] | None = None) -> Callable[..., Any]:
    """It as a function with the model's signature and output structure; see `_program.callable_of`."""
    return _program.callable_of(torch, signature, "cpu", executable, classes, quiet=True, answered=len(executable.usual.outputs))


def save(folder: Path, path: Path, settings: dict[str, Any]) -> Entry:
    """Copy a model, and the files that hold its weights, into `folder`. Raises OSError (a full disk)."""
    return Entry(FORMAT, files.save(folder, path, settings).files, settings)


def lines(entry: Entry, threads: int, place: Callable[[str], str]) -> str:
    """See `inference.lines.serving`."""
    settings, tensors = entry.settings, structure.flat_inputs(entry.settings["inputs"])
    known = f"; graph.reshape({settings['sizes']!r})" if settings["sizes"] else ""
    # By name: a graph has no inputs that nothing depends on. `model` is the user's, of which the lines behind these make the program again.
    return ("import openvino\n"
            f"core = openvino.Core(); graph = core.read_model({place(entry.files[0])}){known}\n"
            f'compiled = core.compile_model(graph, "CPU", {settings_of(int(settings["threads"]), settings["precision"])!r})\n'
            f"answers = list(compiled({{(name := one.get_any_name()): {tensors}[int(name[{len(files.INPUT)}:])].numpy(force=True) "
            f"for one in compiled.inputs}}).values())")


def load(torch: Any, folder: Path, entry: Entry) -> Callable[..., Any]:
    """The program that `save` stored. Raises ArtifactDamaged, and EnvironmentProblem where OpenVINO is missing."""
    files.require("openvino")
    path = files.stored(Path(folder), entry)
    settings = entry.settings
    try:
        executable = Executable(torch, path, int(settings["threads"]), settings["precision"], settings["sizes"])
        return program(torch, executable, settings)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactDamaged(f"what is said of {path} is incomplete", cause=repr(error), remedy=files.REMEDY) from error
    except RuntimeError as error:
        raise ArtifactDamaged(f"OpenVINO does not load {path}", cause=str(error), remedy=files.REMEDY) from error
