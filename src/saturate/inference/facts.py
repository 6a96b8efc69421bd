"""What a search must know about a model before anything is changed: which layers it has, what it can be exported to,
whether two calls agree. Runs in a candidate's process, on the baseline, with the user's inputs.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import re
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from types import FrameType
from typing import Any

from saturate.inference import batches as trees
from saturate.inference import samples
from saturate.machine import facts as machine
from saturate.records.inference import ModelFacts
from saturate.techniques._trees import put_together, taken_apart

#: Distributions by the name that techniques ask for; the first that is installed counts.
_DISTRIBUTIONS = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"), "onnxruntime-gpu": ("onnxruntime-gpu",), "onnx": ("onnx",), "onnxscript": ("onnxscript",),
    "torchao": ("torchao",),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"), "torch_tensorrt": ("torch-tensorrt",),
    "triton": ("triton",),
    "transformers": ("transformers",), "cloudpickle": ("cloudpickle",), "openvino": ("openvino",),
    "modelopt": ("nvidia-modelopt",),
}

#: Instruction sets that decide about number formats, by Linux's names on x86 and Arm.
_FLAGS = frozenset(("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_int8",
                    "amx_bf16", "amx_fp16",
                    "asimddp", "i8mm", "bf16", "sve"))

#: Two calls on one input that differ by less, as a share of the largest entry, differ in the order of additions only.
_ROUNDING = 1e-5

#: Models that draw random numbers begin each call here: what is compared draws the same.
SEED = 0

#: Functions of torch that ask the values of a tensor how long sequences are.
_PACKING = ("pack_padded_sequence", "pad_packed_sequence", "pack_sequence")

_DATA_DEPENDENT = re.compile(r"data[- ]?dependent|dynamic control flow", re.IGNORECASE)


def observe(torch: Any, model: Any, inputs: list[tuple[Any, ...]], device: str, *,
            others: Sequence[tuple[Any, ...]] = (), kind: str = "", exportable: bool | None = None,
            export_problem: str = "", threads: int = 1, calibration_samples: int = 0, training_mode: bool = False,
            trainable: bool = False, student: bool = False, generates: bool = False) -> ModelFacts:
    """The facts about `model`, which is in evaluation mode on `device` ("cpu" or "cuda"), as `inputs` are. It is
    called some times on the first batch. What it raises there is raised: then there is no baseline. `others`: batches that the
    user gives too, whose sizes no measured one has.

    `exportable`, `export_problem`: what `try_export` said; the rest is known to the user's process only, `generates` (a method of
    that name is called) among it.
    """
    modules = list(model.modules())
    parameters = list(model.parameters())
    recording = _recording(torch, model, inputs[0])
    with recording():
        calls, attention_calls, writes_inputs, answers = _watch_calls(torch, model, inputs[0])
        differs, keeps_state = _repeats(torch, model, inputs[0])
    given = [*inputs, *others]
    sizes = {trees.samples(torch, batch) for batch in given}
    return ModelFacts(
        kind=kind or type(model).__name__, device=device, torch=str(torch.__version__),
        parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        dtypes=tuple(sorted(formats(model) or _formats_of_answers(torch, model, inputs[0], recording))),
        **_kinds(torch, modules),
        attentions=max(attention_calls, _attention_modules(torch, modules)),
        reused_modules=tuple(name for name, count in calls.items() if count > 1),
        batch_size=sizes.pop() if len(sizes) == 1 else None,
        varying_shapes=len({trees.signature(torch, batch) for batch in given}) > 1,
        exportable=exportable, export_problem=export_problem, random=differs, keeps_state=keeps_state,
        writes_inputs=writes_inputs, mode=_mode(torch, model, inputs[0], recording), training_mode=training_mode,
        installed=installed(),
        cpu_flags=cpu_flags(), capability=torch.cuda.get_device_capability() if device == "cuda" else None,
        cores=max(1, int(machine.cpu_count())), threads=threads, calibration_samples=calibration_samples,
        trainable=trainable,
        student=student, generates=_text(torch, model, calls, answers, asked=generates),
    )


def formats(model: Any) -> set[str]:
    """The floating-point formats of a model's numbers: of its parameters; of its buffers where it has none, and where they are wider
    than the usual ones. A table in a narrow format beside the parameters asks for less than they do."""
    def of(tensors: Any) -> set[str]:
        return {str(one.dtype).removeprefix("torch.") for one in tensors if one.is_floating_point()}

    # A number without dimensions changes no other's format.
    parameters, buffers = of(model.parameters()), of(one for one in model.buffers() if one.dim())
    return parameters | (buffers & {"float64"}) if parameters else buffers


def _formats_of_answers(torch: Any, model: Any, batch: tuple[Any, ...], recording: Any) -> set[str]:
    """Of a model that holds no numbers: those that go in and come out."""
    with recording():
        answer = model(*copy.deepcopy(batch))
    return {str(one.dtype).removeprefix("torch.") for one in (*trees.tensors(torch, batch), *trees.tensors(torch, answer))
            if one.is_floating_point()}


def _kinds(torch: Any, modules: list[Any]) -> dict[str, int]:
    """How many modules there are of each kind."""
    nn = torch.nn
    batch_norms = nn.modules.batchnorm._BatchNorm
    kinds = {
        "linears": (nn.Linear, nn.Bilinear), "convolutions": nn.modules.conv._ConvNd, "embeddings": (nn.Embedding,
                                                                                                     nn.EmbeddingBag),
        "recurrents": (nn.RNNBase, nn.RNNCellBase), "batch_norms": batch_norms,
    }
    found = {name: sum(isinstance(module, classes) for module in modules) for name, classes in kinds.items()}
    # By name too: language models bring normalizations of their own.
    found["norms"] = sum("norm" in type(module).__name__.lower() and not _parent(module) for module in modules
                         if not isinstance(module, batch_norms))
    return found


def _parent(module: Any) -> bool:
    return next(module.children(), None) is not None


def _attention_modules(torch: Any, modules: list[Any]) -> int:
    """Modules that look like attention and hold none that does: libraries nest them."""
    def alike(module: Any) -> bool:
        return isinstance(module, torch.nn.MultiheadAttention) or "attention" in type(module).__name__.lower()

    return sum(alike(module) and not any(alike(other) for other in itertools.islice(module.modules(), 1,
                                                                                    None)) for module in modules)


def _text(torch: Any, model: Any, calls: Counter[str], answers: list[Any], *, asked: bool) -> bool:
    """Whether the answer is generated text, numbers of tokens (samples, length): of a method `generate` (`asked`), or of a model that
    calls one of transformers that can generate again and again. Called once, it has said which tokens are likely."""
    generating = asked or any(count > 1 and getattr(model.get_submodule(name), "generation_config", None) is not None
                              for name, count in calls.items())
    return generating and any(one.dtype in (torch.int64, torch.int32) and one.dim() == 2 for one in answers)


def _watch_calls(torch: Any, model: Any, batch: tuple[Any, ...]) -> tuple[Counter[str], int, bool, list[Any]]:
    """(calls of each submodule in one forward, calls of scaled_dot_product_attention, whether it changed its
    inputs, the tensors of its answer)."""
    calls: Counter[str] = Counter()
    attention = torch.nn.functional.scaled_dot_product_attention

    class Watch(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
            self.seen += function is attention
            return function(*arguments, **(named or {}))

    watch = Watch()
    given = copy.deepcopy(batch)
    with _counted(torch, model, calls), watch:
        answers = trees.tensors(torch, model(*given))
    before, after = (trees.tensors(torch, one) for one in (batch, given))
    # A forward may take something out of its inputs, or put something in, as well as write to it.
    written = len(before) != len(after) or any(one.shape != other.shape or samples.raw(one) != samples.raw(other)
                                               for one, other in zip(before, after))
    return calls, watch.seen, written, answers


def _recording(torch: Any, model: Any, batch: tuple[Any, ...]) -> Any:
    """torch.no_grad, or torch.enable_grad for a model that differentiates in its forward and cannot do without. Not
    inference mode yet: what a model keeps from a call could not be used in one that records or exports."""
    try:
        with torch.no_grad():
            model(*copy.deepcopy(batch))
    except RuntimeError as error:
        try:
            with torch.enable_grad():
                model(*copy.deepcopy(batch))
        except RuntimeError:    # it is not for want of gradients, and what it said first is what counts
            raise error from None
        return torch.enable_grad
    return torch.no_grad


def _mode(torch: Any, model: Any, batch: tuple[Any, ...], recording: Any) -> str:
    """Inference mode, unless the model differentiates: forces from an energy, for one. It is asked last."""
    if recording is torch.enable_grad:
        return "enable_grad"
    try:
        with torch.inference_mode():
            model(*copy.deepcopy(batch))
    except RuntimeError:    # it ran before, so it is the mode
        return "no_grad"
    return "inference_mode"


def _repeats(torch: Any, model: Any, batch: tuple[Any, ...]) -> tuple[bool, bool]:
    """(whether two calls differ, whether they do so although every random number is the same in both)."""
    def answers(prepare: Callable[[], None]) -> list[list[Any]]:
        found = []
        for _ in range(2):
            given = copy.deepcopy(batch)
            prepare()
            found.append([tensor.detach().clone() for tensor in trees.tensors(torch, model(*given))])
        return found

    differs = _differ(torch, *answers(lambda: None))
    return differs, differs and _differ(torch, *answers(lambda: seed(torch)))


def seed(torch: Any) -> None:
    """Put the generators that models draw from where they always are."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)


@contextmanager
def _counted(torch: Any, model: Any, calls: Counter[str]) -> Iterator[None]:
    def hook(name: str) -> Any:
        def count(module: Any, inputs: Any) -> None:
            if not torch.compiler.is_compiling():       # torch.cond refuses branches that write to anything
                calls[name] += 1

        return count

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _differ(torch: Any, first: list[Any], second: list[Any]) -> bool:
    """Whether two answers differ by more than rounding."""
    if [tensor.shape for tensor in first] != [tensor.shape for tensor in second]:
        return True
    for a, b in zip(map(samples.dense, first), map(samples.dense, second)):
        if torch.equal(a, b):
            continue
        if not a.is_floating_point() and not a.is_complex():
            return True
        a, b = (torch.view_as_real(one) if one.is_complex() else one for one in (a, b))
        a, b = a.double(), b.double()
        if not torch.equal(a.isfinite(), b.isfinite()):
            return True
        a, b = a.nan_to_num(), b.nan_to_num()
        if (a - b).abs().max() > _ROUNDING * a.abs().max():
            return True
    return False


def installed() -> dict[str, str]:
    """Versions of the packages that techniques build on, not imported: some of them take seconds."""
    found = {}
    for name, distributions in _DISTRIBUTIONS.items():
        for distribution in distributions:
            try:
                found[name] = metadata.version(distribution)
                break
            except metadata.PackageNotFoundError:
                continue
    return found


def cpu_flags() -> frozenset[str]:
    information = machine.cpu_information()
    return _FLAGS.intersection((information.get("flags", "") or information.get("Features", "")).split())


def try_export(torch: Any, model: Any, batch: tuple[Any, ...], limit_s: float) -> tuple[bool, str]:
    """(whether torch.export takes the model, why not), both on the CPU. Tried in a fork, which can be ended at any
    time and takes with it what tracing leaves behind in the model; so before this process has used CUDA or several
    threads."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            torch.set_num_threads(1)        # a team of threads that the parent had would be waited for forever
            os.write(writer, json.dumps(_export(torch, model, batch)).encode()[:60000])
            status = 0
        finally:
            os._exit(status)                # nothing of the parent may be run again: not its handlers, not its loop
    os.close(writer)
    try:
        said, late = _read(reader, time.monotonic() + limit_s)
    finally:
        os.close(reader)
        _end(child)
    if late:
        return False, f"torch.export took longer than {limit_s:.0f} s"
    if not said:
        return False, "torch.export ended its process"
    able, problem = json.loads(said)
    return able, problem


def _export(torch: Any, model: Any, batch: tuple[Any, ...]) -> tuple[bool, str]:
    from saturate.inference.formats import _program

    skeleton, given = taken_apart(batch, torch)

    class Flat(torch.nn.Module):
        """Tensors in, tensors out: export knows the containers of libraries that told it, and programs need none."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.training = False

        def forward(self, *inputs: Any) -> Any:
            return tuple(trees.tensors(torch, self.model(*put_together(skeleton, list(inputs)))))

    try:
        with torch.no_grad():
            exported = torch.export.export(Flat(), tuple(given), strict=False)
    except Exception as error:  # noqa: BLE001 - it runs the model's own code, which may raise anything
        return False, _why_not(torch, error)
    unknown = _program.unknown_operator(torch, exported)        # said once, and not by each candidate that needs a program
    return not unknown, unknown


def _why_not(torch: Any, error: Exception) -> str:
    """Why there is no program, where in the user's code, and what would change that; else in the exporter's own words,
    which seldom name what the model does."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    places = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if _users(torch, frame)]
    at = f" (line {places[-1][1]} of {os.path.basename(places[-1][0].f_code.co_filename)})" if places else ""
    packed = torch.nn.utils.rnn.PackedSequence
    if any(frame.f_code.co_name in _PACKING or any(isinstance(value, packed) for value in frame.f_locals.values())
           for frame in frames):
        return (f"packed sequences{at}: how long they are is in the values of a tensor, and a program knows sizes only; it "
                "can be exported where sequences of one length make a batch, and nothing is packed")
    if _DATA_DEPENDENT.search(f"{type(error).__name__} {error}"):
        if any(frame.f_globals.get("__name__", "").startswith("torch.distributions.") for frame in frames):
            return (f"a distribution checks its arguments{at}: which code runs then depends on their values; with validate_args=False, "
                    "given to it, it does not")
        return (f"data-dependent control flow{at}: which code runs, or a size, depends on the values of a tensor; torch.where "
                "instead of if, and no .item(), keep that inside of a program")
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")[:300]
    if "does not require grad" in line:
        return f"it differentiates{at}, and a program records no gradients"
    return f"{type(error).__name__}: {line}{at}"


def _users(torch: Any, frame: FrameType) -> bool:
    """Whether it is neither torch, Python's own, nor this file: a model, or a library that it is made of."""
    path = frame.f_code.co_filename
    own = path.startswith(os.path.dirname(os.__file__) + os.sep) and not re.search(r"(site|dist)-packages", path)
    return os.path.isfile(path) and path != __file__ and not own and not path.startswith(os.path.dirname(torch.__file__) + os.sep)


def _read(reader: int, deadline_s: float) -> tuple[bytes, bool]:
    """(all that is written until the other end is closed, whether the deadline came first)."""
    said = b""
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline_s - time.monotonic()))
        if not ready:
            return said, True
        data = os.read(reader, 1 << 16)
        if not data:
            return said, False
        said += data


def _end(child: int) -> None:
    try:
        os.kill(child, signal.SIGKILL)
    except ProcessLookupError:
        pass                                # it has ended, and somebody collected it
    try:
        os.waitpid(child, 0)
    except ChildProcessError:
        pass
