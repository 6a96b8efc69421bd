"""ONNX files, executed by ONNX Runtime.

An ONNX file is a protobuf: loading one runs no code. What it may do is name other files that hold its weights; those
must be regular files of the artifact itself. Settings: the signature (see `_program`), the device, and how many
threads, with or without spinning.

The CUDA path (input and output binding) is written against ONNX Runtime 1.30 and was never run.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from saturate.errors import ArtifactDamaged, EnvironmentProblem
from saturate.inference import compiling, structure
from saturate.inference.formats import _program
from saturate.inference.techniques._api import Entry

FORMAT = "onnx"

#: Above this many bytes of weights they go into a file of their own: a protobuf ends at 2 GiB.
LARGE_BYTES = 1_500_000_000

#: Names of the graph's inputs begin so; their place in the flat list of tensors follows. Outputs go by their order.
INPUT = "input_"

#: Of a session: where the weights of the graph that it writes go, which may exceed a protobuf.
EXTERNAL = "session.optimized_model_external_initializers_file_name"

#: What ONNX Runtime reads as it starts, and the package by which OpenVINO reports; see `unreported`.
UNREPORTED, REPORTER = "ORT_DISABLE_TELEMETRY", "openvino_telemetry"

#: ONNX Runtime's name of what executes on NVIDIA's GPUs.
CUDA = "CUDAExecutionProvider"

REMEDY = "copy the artifact again, or run saturate optimize again"


def providers(device: str, index: int = 0) -> list[Any]:
    """What ONNX Runtime is to execute a graph with, on the CPU or the GPU with this number. A GPU computes float32 as it is: by
    itself ONNX Runtime rounds to TensorFloat-32 there."""
    return [(CUDA, {"device_id": str(index), "use_tf32": "0"})] if device == "cuda" else ["CPUExecutionProvider"]


def open_session(path: Path, *, threads: int, spin: bool = True, device: str = "cpu", index: int = 0, executed: Path | None = None) -> Any:
    """A session on a file that is trusted to be whole; `index` is the number of the GPU, `executed` where the graph that it
    executes is written.

    Raises EnvironmentProblem where ONNX Runtime is not installed or has nothing for a GPU, and what ONNX Runtime raises (see `failures`).
    """
    onnxruntime = require("onnxruntime")
    if threads < 1:
        raise ValueError(f"{threads} threads")
    onnxruntime.disable_telemetry_events()      # of one that was imported before; see `unreported`
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3      # errors
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin else "0")
    if executed is not None:
        options.optimized_model_filepath = str(executed)
        options.add_session_config_entry(EXTERNAL, f"{executed.name}.data")
    with compiling.clock():
        session = onnxruntime.InferenceSession(str(path), options, providers=providers(device, index))
    if device == "cuda" and CUDA not in session.get_providers():        # it warns only, and computes on the CPU
        raise EnvironmentProblem("ONNX Runtime cannot use the GPU", cause="its CUDA libraries are missing, or do not fit those of torch",
                                 remedy="pip install onnxruntime-gpu, for the version of CUDA that torch was built with")
    session.disable_fallback()          # a provider that fails must say so, not change
    return session


def program(torch: Any, session: Any, signature: dict[str, Any], device: str,
            classes: dict[str, type] | None = None) -> Callable[..., Any]:
    """The session as a function with the model's signature and output structure; see `_program.callable_of`."""
    # A graph need not have the inputs that nothing depends on, so names are read, not counted.
    places = {name: place_of(name) for name in (item.name for item in session.get_inputs())}
    outputs = [item.name for item in session.get_outputs()]

    def on_cpu(tensors: list[Any]) -> list[Any]:
        feeds = {name: tensors[place].numpy() for name, place in places.items()}
        return [torch.from_numpy(array) for array in session.run(outputs, feeds)]

    def on_cuda(tensors: list[Any]) -> list[Any]:
        import numpy

        binding = session.io_binding()
        index = torch.cuda.current_device()
        for name, place in places.items():
            tensor = tensors[place]
            kind = numpy.dtype(str(tensor.dtype).removeprefix("torch."))
            binding.bind_input(name, "cuda", index, kind, tuple(tensor.shape), tensor.data_ptr())
        for name in outputs:
            binding.bind_output(name, "cuda", index)
        torch.cuda.current_stream().synchronize()       # ONNX Runtime works on a stream of its own
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return [_on_gpu(torch, value) for value in binding.get_outputs()]

    return _program.callable_of(torch, signature, device, on_cuda if device == "cuda" else on_cpu, classes, quiet=True,
                                answered=len(outputs))


def _on_gpu(torch: Any, value: Any) -> Any:
    """The tensor of an OrtValue, without a copy. DLPack carries the truth values of ONNX Runtime as numbers of 8 bits."""
    tensor = torch.from_dlpack(value)
    return tensor.view(torch.bool) if value.data_type() == "tensor(bool)" else tensor


def place_of(name: str) -> int:
    """The place of an input in the flat list of tensors. Raises ValueError for a name that the export did not give."""
    return int(name.removeprefix(INPUT))


def failures() -> tuple[type[Exception], ...]:
    """What ONNX Runtime raises; its exceptions have no common base class."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    names = ("Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NoModel", "NoSuchFile", "NotImplemented",
             "RuntimeException")
    return tuple(getattr(state, name) for name in names)


def require(name: str) -> Any:
    """Import a package of the extra, or raise the EnvironmentProblem that names it."""
    try:
        with unreported():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise EnvironmentProblem(f"{name} is not installed", cause=str(error),
                                 remedy="pip install 'saturate[inference]'") from error


@contextlib.contextmanager
def unreported() -> Iterator[None]:
    """Keep what is imported inside from reporting home: the model is its owner's. From 1.29 on ONNX Runtime sends the names and
    hashes of models to Microsoft (its Privacy.md), unless it is told not to as it starts; OpenVINO tells Google Analytics that it
    was imported and keeps a number for the user in ~/intel, unless the package that does so is missing."""
    told, absent = os.environ.get(UNREPORTED), REPORTER not in sys.modules
    os.environ[UNREPORTED] = "1"
    if absent:
        sys.modules[REPORTER] = None      # type: ignore[assignment]  # an import of it fails, as if it were not installed
    try:
        yield
    finally:
        if told is None:
            del os.environ[UNREPORTED]
        else:
            os.environ[UNREPORTED] = told
        if absent:
            sys.modules.pop(REPORTER, None)


def save(folder: Path, path: Path, settings: dict[str, Any]) -> Entry:
    """Copy a model, and the files that hold its weights, into `folder`. Raises OSError (a full disk)."""
    onnx = require("onnx")
    names = [path.name, *sorted(locations(_read(onnx, path)))]
    for name in names:
        shutil.copyfile(path.parent / name, folder / name)
    return Entry(FORMAT, names, settings)


def lines(entry: Entry, threads: int, place: Callable[[str], str]) -> str:
    """See `inference.lines.serving`."""
    settings, tensors = entry.settings, structure.flat_inputs(entry.settings["inputs"])
    spin = "" if settings["spin"] else '; options.add_session_config_entry("session.intra_op.allow_spinning", "0")'
    # By name: a graph has no inputs that nothing depends on.
    return (f"import onnxruntime\n"
            f"options = onnxruntime.SessionOptions(); options.intra_op_num_threads = {int(settings['threads'])}{spin}\n"
            f"session = onnxruntime.InferenceSession({place(entry.files[0])}, options, providers={providers(settings['device'])!r})\n"
            f"answers = session.run(None, {{one.name: {tensors}[int(one.name[{len(INPUT)}:])].numpy(force=True) for one in session.get_inputs()}})")


def load(torch: Any, folder: Path, entry: Entry) -> Callable[..., Any]:
    """The program that `save` stored. Raises ArtifactDamaged, and EnvironmentProblem where the extra is missing."""
    require("onnxruntime")
    path = stored(Path(folder), entry)
    settings = entry.settings
    try:
        device = settings["device"]
        index = torch.cuda.current_device() if device == "cuda" else 0
        session = open_session(path, threads=int(settings["threads"]), spin=bool(settings["spin"]), device=device, index=index)
        return program(torch, session, settings, device)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactDamaged(f"what is said of {path} is incomplete", cause=repr(error), remedy=REMEDY) from error
    except failures() as error:
        raise ArtifactDamaged(f"ONNX Runtime does not load {path}", cause=str(error), remedy=REMEDY) from error


def stored(folder: Path, entry: Entry) -> Path:
    """The model's file, once it and every file that it names are files of the artifact. Raises ArtifactDamaged, and
    EnvironmentProblem where the extra is missing."""
    onnx = require("onnx")
    path = _checked(folder, entry.files[0], entry.files)
    if path.suffix != ".onnx":          # runtimes choose by the name how they read a file
        raise ArtifactDamaged(f"{entry.files[0]!r} is no name of an ONNX file", evidence=str(folder), remedy=REMEDY)
    for name in locations(_read(onnx, path)):
        _checked(folder, name, entry.files)
    return path


def _read(onnx: Any, path: Path) -> Any:
    try:
        return onnx.load(path, format="protobuf", load_external_data=False)     # as runtimes read it, whatever its name
    except Exception as error:  # protobuf's own classes; onnx promises none
        cause = f"{type(error).__name__}: {error}"
        raise ArtifactDamaged(f"{path} is no ONNX file", cause=cause, remedy=REMEDY) from error


def _checked(folder: Path, name: str, files: list[str]) -> Path:
    """The path of a regular file of the artifact. Raises ArtifactDamaged for a name that leads, or could lead, elsewhere."""
    plain = PurePosixPath(name)
    inside = name in files and not plain.is_absolute() and ".." not in plain.parts and "\\" not in name
    path = folder / name
    if not (inside and path.is_file() and path.resolve() == folder.resolve() / plain):
        raise ArtifactDamaged(f"{name!r} is not a file of the artifact", evidence=str(folder), remedy=REMEDY)
    return path


def locations(model: Any) -> set[str]:
    """The files beside the model in which its tensors lie, wherever in the model the tensors are."""
    return {entry.value for tensor in _tensors(model) for entry in tensor.external_data if entry.key == "location"}


def _tensors(message: Any) -> Iterator[Any]:
    """Every TensorProto inside a protobuf message: of graphs, attributes, functions and sparse tensors alike."""
    if message.DESCRIPTOR.name == "TensorProto":
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in ([value] if hasattr(value, "DESCRIPTOR") else value):
                yield from _tensors(part)
