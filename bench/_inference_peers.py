"""What a user sets by hand: the same models through ONNX Runtime, OpenVINO, Inductor, PT2E and torchao, without saturate.

Each is a dozen lines of the library's own calls, with the settings that its documentation recommends or that are known
to be fastest. A peer runs in a process of its own (`Peer`), which the races of `saturate.inference.racing` stop and go on with.

    python bench/_inference_peers.py NAME MODEL small|full THREADS      one peer, answering on standard output
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")     # a benchmark reports to nobody

#: Which peers compute what the model computes, up to the order of additions.
LOSSLESS = ("eager", "inductor", "onnx-runtime", "openvino")

#: Which compute in bfloat16. Without instructions for it BERT-base had not answered some hundred inputs after ten minutes.
BFLOAT16 = ("inductor-bf16", "openvino-bf16", "openvino-int8-bf16", "pt2e-int8-static-bf16")


class Failed(Exception):
    """A peer that does not work for a model; the message is its last line of error."""


class Peer:
    """One peer in a process of its own, or an artifact ("saturate:FOLDER"). `prepare_s`: until its first answer;
    `agreement`: the share of held-out samples with float32's top-1."""

    def __init__(self, name: str, model: str, small: bool, threads: int, log: Path):
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        command = [sys.executable, str(HERE / "_inference_peers.py"), name, model, "small" if small else "full", str(threads)]
        with log.open("w") as errors:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                                             env=environment, start_new_session=True)
        self._log = log
        self.cpu: int | None = None         # on which it ended its latest block
        self.shares = 1                     # its times are those of whole calls
        try:
            ready = self._answer()
        except BaseException:       # Ctrl-C while it compiles
            self.close()
            raise
        self.prepare_s, self.agreement = ready["prepare_s"], ready["agreement"]

    def _answer(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            self.close()
            lines = [line for line in self._log.read_text().splitlines() if line.strip()]
            raise Failed(lines[-1][:200] if lines else f"ended with {self._process.returncode}")
        return json.loads(line)

    def block(self, count: int, *, cpu: int | None = None) -> list[int]:
        """Nanoseconds of each of `count` calls, begun on `cpu`."""
        self._process.stdin.write(json.dumps([count, cpu]) + "\n")
        self._process.stdin.flush()
        times, self.cpu = self._answer()
        return times

    def freeze(self) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


# -- by hand -----------------------------------------------------------------------------------------------------------


def eager(model: Any, inputs: list[tuple[Any, ...]], threads: int) -> Callable[..., Any]:
    return model


def inductor(model: Any, inputs: list[tuple[Any, ...]], threads: int) -> Callable[..., Any]:
    import torch
    import torch._inductor.config

    torch._inductor.config.freezing = True
    return torch.compile(model)


def inductor_bfloat16(model: Any, inputs: list[tuple[Any, ...]], threads: int) -> Callable[..., Any]:
    import torch

    run = inductor(model.to(torch.bfloat16), inputs, threads)
    return lambda *args: run(*(arg.to(torch.bfloat16) if arg.is_floating_point() else arg for arg in args)).float()


def _onnx(model: Any, inputs: list[tuple[Any, ...]]) -> str:
    import onnx
    import torch

    path = tempfile.mkdtemp() + "/model.onnx"
    torch.onnx.export(model, inputs[0], dynamo=True, verbose=False).save(path)
    stored = onnx.load(path)
    del stored.graph.value_info[:]      # onnx 1.23 contradicts the exporter's
    onnx.save(stored, path)
    return path


def _session(path: str, threads: int) -> Callable[..., Any]:
    import onnxruntime
    import torch

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]
    return lambda *args: torch.from_numpy(session.run(None, {name: arg.numpy() for name, arg in zip(names, args)})[0])


def onnx_runtime(model: Any, inputs: list[tuple[Any, ...]], threads: int) -> Callable[..., Any]:
    return _session(_onnx(model, inputs), threads)


def onnx_int8_dynamic(model: Any, inputs: list[tuple[Any, ...]], threads: int) -> Callable[..., Any]:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    path = _onnx(model, inputs)
    quantize_dynamic(path, path + ".int8", op_types_to_quantize=["MatMul"], weight_type=QuantType.QInt8)
    return _session(path + ".int8", threads)


def _int8(model: Any, inputs: list[tuple[Any, ...]]) -> str:
    """A QDQ file, as ONNX Runtime's documentation makes it."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quant_pre_process,
        quantize_static,
    )

    path = _onnx(model, inputs)
    quant_pre_process(path, path + ".pre", skip_symbolic_shape=True)
    import onnx

    names = [item.name for item in onnx.load(path).graph.input]

    class Reader(CalibrationDataReader):
        left = iter([{name: tensor.numpy() for name, tensor in zip(names, batch)} for batch in inputs])

        def get_next(self) -> Any:
            return next(self.left, None)

    quantize_static(path + ".pre", path + ".int8", Reader(), quant_format=QuantFormat.QDQ, per_channel=True,
                    activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8)
    return path + ".int8"


def onnx_int8_static(model: Any, inputs: list[tuple[Any, ...]], threads: int) -> Callable[..., Any]:
    return _session(_int8(model, inputs), threads)


def _openvino(path: str, threads: int, precision: str) -> Callable[..., Any]:
    import openvino
    import torch

    compiled = openvino.Core().compile_model(path, "CPU", {
        "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision})
    names = [item.get_any_name() for item in compiled.inputs]
    return lambda *args: torch.from_numpy(compiled({name: arg.numpy() for name, arg in zip(names, args)})[0])


def openvino(model: Any, inputs: list[tuple[Any, ...]], threads: int) -> Callable[..., Any]:
    return _openvino(_onnx(model, inputs), threads, "f32")


def openvino_bfloat16(model: Any, inputs: list[tuple[Any, ...]], threads: int) -> Callable[..., Any]:
    return _openvino(_onnx(model, inputs), threads, "bf16")


def openvino_int8_static(model: Any, inputs: list[tuple[Any, ...]], threads: int) -> Callable[..., Any]:
    return _openvino(_int8(model, inputs), threads, "f32")


def openvino_int8_bfloat16(model: Any, inputs: list[tuple[Any, ...]], threads: int) -> Callable[..., Any]:
    return _openvino(_int8(model, inputs), threads, "bf16")


def torchao_int8_dynamic(model: Any, inputs: list[tuple[Any, ...]], threads: int) -> Callable[..., Any]:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return inductor(model, inputs, threads)


def _rounded(model: Any, inputs: list[tuple[Any, ...]], dynamic: bool) -> Any:
    import torch
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic))
    prepared = prepare_pt2e(torch.export.export(model, inputs[0]).module(), quantizer)
    for batch in inputs:
        prepared(*batch)
    converted = convert_pt2e(prepared)
    move_exported_model_to_eval(converted)
    return converted


def _pt2e(model: Any, inputs: list[tuple[Any, ...]], dynamic: bool) -> Callable[..., Any]:
    return inductor(_rounded(model, inputs, dynamic), inputs, 1)


def pt2e_int8_static(model: Any, inputs: list[tuple[Any, ...]], threads: int) -> Callable[..., Any]:
    return _pt2e(model, inputs, dynamic=False)


def pt2e_int8_static_bfloat16(model: Any, inputs: list[tuple[Any, ...]], threads: int) -> Callable[..., Any]:
    import torch

    run = pt2e_int8_static(model, inputs, threads)

    def mixed(*args: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return run(*args).float()

    return mixed


def pt2e_int8_dynamic(model: Any, inputs: list[tuple[Any, ...]], threads: int) -> Callable[..., Any]:
    return _pt2e(model, inputs, dynamic=True)


PEERS: dict[str, Callable[..., Any]] = {
    "eager": eager, "inductor": inductor, "inductor-bf16": inductor_bfloat16, "onnx-runtime": onnx_runtime,
    "onnx-int8-dynamic": onnx_int8_dynamic, "onnx-int8-static": onnx_int8_static, "torchao-int8-dynamic": torchao_int8_dynamic,
    "openvino": openvino, "openvino-bf16": openvino_bfloat16, "openvino-int8-static": openvino_int8_static,
    "openvino-int8-bf16": openvino_int8_bfloat16, "pt2e-int8-static": pt2e_int8_static, "pt2e-int8-static-bf16": pt2e_int8_static_bfloat16,
    "pt2e-int8-dynamic": pt2e_int8_dynamic,
}


#: The side of the square matrices of `int8_products`, and how many operations one call of it is.
SIDE = 2048
PRODUCT = 2 * SIDE**3


def int8_products(model: Any, inputs: list[tuple[Any, ...]], threads: int) -> Callable[..., Any]:
    """No peer but the ceiling of them all: one product of two matrices of bytes, summed in 32 bits, of a size at which it is fastest."""
    import torch

    a, b = (torch.randint(-128, 128, (SIDE, SIDE), dtype=torch.int8) for _ in range(2))
    return lambda *args: torch._int_mm(a, b)


def _ahead_of_time(int8: bool, on_lines: bool) -> Callable[..., Callable[..., Any]]:
    """No peers either, but the two sides of `cache_lines.py`: AOTInductor's library as torch links it, and as saturate does."""

    def made(model: Any, inputs: list[tuple[Any, ...]], threads: int) -> Callable[..., Any]:
        import torch

        from saturate.inference.formats import _cache_lines

        folder = Path(tempfile.mkdtemp())
        exported = torch.export.export(_rounded(model, inputs, dynamic=False) if int8 else model, inputs[0])
        with _cache_lines.weights("cpu" if on_lines else "none", folder) as linked:
            if on_lines and not linked:
                raise Failed("the compiler links nothing else here")
            package = torch._inductor.aoti_compile_and_package(
                exported, package_path=str(folder / "model.pt2"), inductor_configs={"freezing": True, **linked})
        return torch._inductor.aoti_load_package(package)

    return made


SERVED = {**PEERS, "int8-products": int8_products,
          **{f"aoti-{kind}-{place}": _ahead_of_time(kind == "int8", place == "on-lines") for kind in ("float32", "int8") for place in ("as-torch", "on-lines")}}


def _loaded(name: str) -> Callable[..., Any]:
    """The program in an artifact, hosted like the peers."""
    import saturate

    return saturate.load(name.partition(":")[2])


def serve(name: str, model: str, small: bool, threads: int) -> None:
    """Prepare one peer, then answer [number of calls, CPU] on standard input with [their times, CPU]."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)           # what libraries print belongs into the log
    import torch
    from _inference_models import build

    from saturate.measure import placement

    torch.set_num_threads(threads)
    subject = build(model, small)
    with torch.no_grad():
        expected = [subject.model(*batch).argmax(1).tolist() for batch in subject.held_out]
        began = time.perf_counter()
        run = _loaded(name) if name.startswith("saturate:") else SERVED[name](subject.model, subject.inputs, threads)
        run(*subject.inputs[0])
        prepare_s = time.perf_counter() - began
        found = [run(*batch).argmax(1).tolist() for batch in subject.held_out]
        agreement = sum(a == b for a, b in zip(found, expected)) / len(expected)
        print(json.dumps({"prepare_s": prepare_s, "agreement": agreement}), file=answers, flush=True)
        for line in sys.stdin:
            count, cpu = json.loads(line)
            times = []
            placement.move(cpu)
            for index in range(count):
                batch = subject.inputs[index % len(subject.inputs)]
                start = time.perf_counter_ns()
                run(*batch)
                times.append(time.perf_counter_ns() - start)
            print(json.dumps([times, placement.current()]), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], sys.argv[3] == "small", int(sys.argv[4]))
