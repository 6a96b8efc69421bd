"""TensorRT engines: a plan file for one GPU architecture and one version of TensorRT.

Deserializing a plan runs no code of the plan's author unless `engine_host_code_allowed` is set; it stays off. A plan of
another architecture or version is refused by TensorRT. Written against TensorRT 11 and never run: no GPU was at hand.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from saturate.errors import ArtifactDamaged, EnvironmentProblem
from saturate.inference import structure
from saturate.inference.formats import _program
from saturate.inference.formats.onnx import INPUT, place_of
from saturate.inference.techniques._api import Entry

FORMAT = "tensorrt"

#: TensorRT's name of a number type -> torch's.
_DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT64": "int64", "INT32": "int32", "INT8": "int8",
           "UINT8": "uint8", "BOOL": "bool"}


def program(torch: Any, tensorrt: Any, plan: bytes, signature: dict[str, Any],
            classes: dict[str, type] | None = None) -> Callable[..., Any]:
    """A plan as a function with the model's signature and output structure; not for several threads at once.

    Raises ValueError for a plan that TensorRT does not take.
    """
    logger = tensorrt.Logger(tensorrt.Logger.WARNING)
    runtime = tensorrt.Runtime(logger)
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise ValueError("TensorRT does not take this plan: it was made for another GPU or version, or is damaged")
    context = engine.create_execution_context()
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    inputs = [name for name in names if engine.get_tensor_mode(name) == tensorrt.TensorIOMode.INPUT]
    kinds = {getattr(tensorrt.DataType, theirs): getattr(torch, ours) for theirs, ours in _DTYPES.items()
             if hasattr(tensorrt.DataType, theirs)}
    outputs = {name: kinds[engine.get_tensor_dtype(name)] for name in names if name not in inputs}

    def run(tensors: list[Any]) -> list[Any]:
        for name in inputs:
            tensor = tensors[place_of(name)]
            if not context.set_input_shape(name, tuple(tensor.shape)):
                raise ValueError(f"the engine was not built for an input of shape {tuple(tensor.shape)}")
            context.set_tensor_address(name, tensor.data_ptr())
        made = [torch.empty(tuple(context.get_tensor_shape(name)), dtype=dtype, device="cuda")
                for name, dtype in outputs.items()]
        for name, tensor in zip(outputs, made):
            context.set_tensor_address(name, tensor.data_ptr())
        if not context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise RuntimeError("TensorRT did not execute the engine")
        return made

    run.keep = (logger, runtime, engine)    # type: ignore[attr-defined] - the execution context does not keep them alive
    return _program.callable_of(torch, signature, "cuda", run, classes, answered=len(outputs))


def save(folder: Path, plan: Path, signature: dict[str, Any]) -> Entry:
    """Copy a plan into `folder`. Raises OSError (a full disk)."""
    shutil.copyfile(plan, folder / plan.name)
    return Entry(FORMAT, [plan.name], dict(signature))


def lines(entry: Entry, threads: int, place: Callable[[str], str]) -> str:
    """See `inference.lines.serving`. TensorRT's runtime takes addresses, so these are more than three."""
    tensors = structure.flat_inputs(entry.settings["inputs"])
    return "\n".join([*opening(place(entry.files[0])), *calling(tensors), "answers = list(made.values())"])


def opening(path: str) -> list[str]:
    """Lines that open the plan at `path`, which is Python."""
    return [
        "import tensorrt",
        "logger = tensorrt.Logger(tensorrt.Logger.WARNING)",
        "runtime = tensorrt.Runtime(logger)",
        f'engine = runtime.deserialize_cuda_engine(open({path}, "rb").read())',
        "context = engine.create_execution_context()",
        "names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]"]


def calling(tensors: str) -> list[str]:
    """Lines behind `opening` that make a mapping `made` of what the plan answers; `tensors`, which is Python, are the inputs in a row,
    on the GPU."""
    return [
        f"given = {{name: {tensors}[int(name[{len(INPUT)}:])].contiguous() for name in names if engine.get_tensor_mode(name) == "
        "tensorrt.TensorIOMode.INPUT}",
        "for name, tensor in given.items(): assert context.set_input_shape(name, tuple(tensor.shape))",
        f"kinds = {_DTYPES!r}",
        "made = {name: torch.empty(tuple(context.get_tensor_shape(name)), dtype=getattr(torch, kinds[engine.get_tensor_dtype(name).name]), "
        'device="cuda") for name in names if name not in given}',
        "for name, tensor in {**given, **made}.items(): context.set_tensor_address(name, tensor.data_ptr())",
        "assert context.execute_async_v3(torch.cuda.current_stream().cuda_stream)"]


def load(torch: Any, folder: Path, entry: Entry) -> Callable[..., Any]:
    """The program that `save` stored. Raises ArtifactDamaged, and EnvironmentProblem without TensorRT."""
    try:
        import tensorrt
    except ImportError as error:
        raise EnvironmentProblem("TensorRT is not installed", cause=str(error), remedy="pip install tensorrt") from error
    path = Path(folder) / entry.files[0]
    try:
        return program(torch, tensorrt, path.read_bytes(), entry.settings)
    except (KeyError, ValueError, OSError) as error:
        raise ArtifactDamaged(f"{path} cannot be loaded", cause=str(error),
                              remedy="run saturate optimize again on this machine") from error
