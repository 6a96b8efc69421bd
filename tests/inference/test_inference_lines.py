"""The lines that call a stored program without saturate: three of them, run where saturate cannot be imported, with the
answers and the threads of the artifact."""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from saturate.inference import artifact, lines, session, structure
from saturate.inference.candidates import Candidate, Part
from saturate.inference.formats import _program, aoti, exported, onnx, openvino
from saturate.inference.search import Tried
from saturate.inference.techniques import _registry
from saturate.inference.techniques._api import Context, Entry
from saturate.records.inference import CandidateRecord, ModelFacts

torch = pytest.importorskip("torch")

FACTS = ModelFacts(kind="Net", torch=torch.__version__, batch_size=4)

#: What is run instead of the user's program: no saturate, and what came of it in a file.
BEFORE = "import sys; sys.modules['saturate'] = None\nimport torch\ninputs = torch.load('inputs.pt')\n"
AFTER = "\nthreads = options.intra_op_num_threads if 'onnxruntime' in globals() else torch.get_num_threads()\n" \
        "threads = compiled.get_property('INFERENCE_NUM_THREADS') if 'openvino' in globals() else threads\n" \
        "torch.save([threads, [torch.as_tensor(one) for one in answers]], 'answers.pt')\n"


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 3)

    def forward(self, x: Any, more: Any = None) -> Any:
        y = self.linear(x)
        return y.relu() if more is None else {"scaled": y * more["scale"], "plain": (y, None)}


SIMPLE = (torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),)
NESTED = (*SIMPLE, {"unused": torch.zeros(4), "scale": torch.full((4, 1), 2.0)})


def stored(folder: Path, kind: str, inputs: tuple[Any, ...], threads: int = 1, **how: Any) -> Path:
    """An artifact of format `kind` in a folder of its own."""
    torch.manual_seed(0)
    model, program, scratch = Net().eval().requires_grad_(False), folder / "program", folder / "scratch"
    program.mkdir()
    scratch.mkdir()
    context = Context(torch=torch, model=model, device="cpu", inputs=[inputs], calibration=[], facts=FACTS, folder=scratch, threads=threads)
    if kind == "exported":
        entry = exported.save(context, program, **how)
    elif kind == "aoti":
        captured = _program.capture(context)
        entry = aoti.save(context, program, aoti.build(context, captured, folder / "made.pt2"), captured)
    else:
        entry = _onnx_file(context, program, kind, **how)
    return artifact.store(folder / "an artifact's", entry, program=program, record=CandidateRecord(
        id=kind, techniques=[], fate="kept", reason="", code="answers = [model(*inputs)]"), facts=FACTS, threads=threads, inputs=[inputs],
        outputs=[model(*inputs)])


def _onnx_file(context: Context, program: Path, kind: str, spin: bool = True, known: bool = False) -> Entry:
    for package in ("onnx", {"onnx": "onnxruntime"}.get(kind, kind), "onnxscript"):
        pytest.importorskip(package, reason="the extra saturate[inference]")
    from saturate.inference.techniques import _onnx

    made = _onnx.export(context)
    if kind == "openvino":
        sizes = {f"input_{place}": list(one.shape) for place, one in enumerate(structure.flatten(torch, context.inputs[0])[1])} if known else None
        return openvino.save(program, made.path, {**made.signature, "threads": context.threads, "precision": "f32", "sizes": sizes})
    settings = {**made.signature, "threads": context.threads, "spin": spin, "device": "cpu"}
    return onnx.save(program, made.path, settings)


def answered(folder: Path, source: str, inputs: tuple[Any, ...]) -> tuple[int, list[Any]]:
    """The threads and the answers of a script that has no saturate."""
    (folder / "script.py").write_text(BEFORE + source + AFTER)
    torch.save(inputs, folder / "inputs.pt")
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    threads, answers = torch.load(folder / "answers.pt")
    return threads, answers


def agrees(folder: Path, inputs: tuple[Any, ...], threads: int) -> None:
    """The three lines against the artifact that they call."""
    source = lines.of_artifact(folder, artifact.read(folder))
    assert len([line for line in source.splitlines() if not line.startswith("import ")]) == 3
    assert source.splitlines()[-1].removeprefix("with torch.no_grad(): ").startswith("answers = ")
    taken = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assert not taken & set(lines.YOURS), "in reproduce.py the lines that make the program again of the user's model stand behind these"
    found, answers = answered(folder.parent, source, inputs)
    expected = structure.flatten(torch, artifact.load(folder)(*inputs))[1]
    assert found == threads and len(answers) == len(expected)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(answers, expected))


@pytest.mark.parametrize("inputs", [SIMPLE, NESTED], ids=["a tensor", "nested, one unused"])
@pytest.mark.parametrize(("kind", "how"), [("onnx", {}), ("onnx", {"spin": False}), ("openvino", {}),
                                           ("openvino", {"known": True}), ("exported", {})])
def test_three_lines_call_the_stored_program_as_it_was_measured(tmp_path: Path, kind: str, how: dict[str, Any], inputs: Any) -> None:
    agrees(stored(tmp_path, kind, inputs, threads=2, **how), inputs, 2)


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [SIMPLE, NESTED], ids=["a tensor", "nested, one unused"])
def test_three_lines_call_machine_code(tmp_path: Path, inputs: Any) -> None:
    agrees(stored(tmp_path, "aoti", inputs), inputs, 1)


@pytest.mark.slow
def test_three_lines_compile_what_was_measured_compiled(tmp_path: Path) -> None:
    runtime = {"kind": "compile", "mode": "default", "dynamic": False, "freezing": True}
    agrees(stored(tmp_path, "exported", SIMPLE, runtime=runtime), SIMPLE, 1)


def test_the_stored_module_runs_beside_its_program_wherever_it_is(tmp_path: Path) -> None:
    """The folder may be renamed: no path of the machine that made it stands in it."""
    folder = stored(tmp_path, "exported", SIMPLE).rename(tmp_path / "elsewhere")
    source = (folder / "reproduce.py").read_text()
    assert str(tmp_path) not in source and "# model: " in source and "# inputs: " in source
    (folder / "with.py").write_text(BEFORE + "model = lambda x: 'made again'\n" + source.split("# The same")[0] + AFTER)
    torch.save(SIMPLE, folder / "inputs.pt")
    done = subprocess.run([sys.executable, "with.py"], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert torch.allclose(torch.load(folder / "answers.pt")[1][0], artifact.load(folder)(*SIMPLE), atol=1e-6)


@pytest.mark.slow
def test_lines_for_tensorrt_are_given_float32_and_answer_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the plan, which trtexec makes: the graph that is exported takes float32, whatever it computes in."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from saturate.inference.techniques import tensorrt

    monkeypatch.chdir(tmp_path)
    exec(tensorrt.as_code(tensorrt.Options()).partition("# trtexec")[0], {"torch": torch, "model": Net().eval(), "inputs": SIMPLE})
    graph = onnx.load("model.onnx").graph
    borders = {one.type.tensor_type.elem_type for one in (*graph.input, *graph.output)}
    assert borders == {onnx.TensorProto.FLOAT}
    assert {one.data_type for one in graph.initializer} >= {onnx.TensorProto.FLOAT16}


def test_lines_for_torch_tensorrt_are_given_float32_and_answer_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from saturate.inference.techniques import torch_tensorrt

    dynamo = types.SimpleNamespace(compile=lambda program, arg_inputs, use_explicit_typing: program.module())
    monkeypatch.setitem(sys.modules, "torch_tensorrt", types.SimpleNamespace(dynamo=dynamo))
    for options in (torch_tensorrt.Options(), torch_tensorrt.Options(half=False)):
        names = {"torch": torch, "model": Net().eval(), "inputs": SIMPLE}
        exec(lines.whole([torch_tensorrt.as_code(options)], None), names)
        assert names["answers"].dtype == torch.float32


@pytest.mark.parametrize("id", sorted(_registry.load()))
def test_what_makes_a_candidate_begins_with_its_threads_and_ends_in_an_answer(id: str) -> None:
    module = _registry.load()[id]
    record = Tried(Candidate.of([Part(module, module.Options())]), "dominated", "").record(3)
    assert record.code.startswith("torch.set_num_threads(3)\n")
    assert record.code.endswith(f"\n{lines.ANSWER}")
    assert "answers" not in Tried(Candidate(), "dominated", "").record(3).code


class Enqueued:
    """A stand-in for TensorRT, as far as its runtime is called: an engine that doubles its input "input_1"."""

    Logger = type("Logger", (), {"WARNING": 1, "__init__": lambda self, level: None})
    TensorIOMode = types.SimpleNamespace(INPUT="in", OUTPUT="out")
    num_io_tensors = 3

    def __init__(self) -> None:
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def Runtime(self, logger: Any) -> Any:
        return self

    def deserialize_cuda_engine(self, plan: bytes) -> Any:
        assert plan == b"a plan"
        return self

    def create_execution_context(self) -> Any:
        return self

    def get_tensor_name(self, index: int) -> str:
        return ("input_1", "output_0", "output_1")[index]

    def get_tensor_mode(self, name: str) -> str:
        return "in" if name.startswith("input") else "out"

    def get_tensor_dtype(self, name: str) -> Any:
        return types.SimpleNamespace(name="HALF" if name == "output_1" else "FLOAT")

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shapes["input_1"]

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def execute_async_v3(self, stream: int) -> bool:
        count = math.prod(self.shapes["input_1"])
        given, made = ((ctypes.c_float * count).from_address(self.addresses[name]) for name in ("input_1", "output_0"))
        made[:] = [2 * one for one in given]
        return True


def test_a_plan_is_called_by_name_and_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.plan").write_bytes(b"a plan")
    monkeypatch.setitem(sys.modules, "tensorrt", Enqueued())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, device, **how: empty(*sizes, **how))
    entry = Entry("tensorrt", ["model.plan"], {"inputs": {"tuple": [[0], {"list": [[1], {"value": None}]}]}})
    names = {"torch": torch, "inputs": (torch.zeros(2), [torch.arange(6.0).reshape(3, 2).T, None])}
    exec(lines.serving(entry, 1, lambda name: repr(str(tmp_path / name))), names)
    doubled, half = names["answers"]
    assert torch.equal(doubled, 2 * names["inputs"][1][0]) and (half.dtype, half.shape) == (torch.float16, (2, 3))


#: numpy refuses what has a gradient, as it does what lies on a GPU.
WITH_GRADIENT = (SIMPLE[0].clone().requires_grad_(),)


@pytest.mark.parametrize("kind", ["onnx", "openvino"])
def test_three_lines_take_inputs_that_numpy_does_not(tmp_path: Path, kind: str) -> None:
    folder = stored(tmp_path, kind, SIMPLE)
    _, answers = answered(tmp_path, lines.of_artifact(folder, artifact.read(folder)), WITH_GRADIENT)
    assert torch.allclose(answers[0], artifact.load(folder)(*SIMPLE), atol=1e-6)


@pytest.mark.parametrize(("id", "package"), [("onnx-runtime", "onnxruntime"), ("openvino-runtime", "openvino")])
def test_a_runtime_of_its_own_takes_any_inputs_and_the_threads_that_were_set(tmp_path: Path, id: str, package: str) -> None:
    for needed in ("onnx", "onnxscript", package):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    module = _registry.load()[id]
    made = "model = torch.nn.Linear(8, 3).eval()\n"
    threads, answers = answered(tmp_path, made + Tried(Candidate.of([Part(module, module.Options())]), "kept", "").record(2).code, WITH_GRADIENT)
    assert threads == 2 and answers[0].shape == (4, 3)


@pytest.mark.parametrize("made", ["model = functools.partial(Net().eval(), more={'scale': 2.0})", "model = Net().eval().called", "model = Biased().eval()",
                                  "model = Net().eval().answered"], ids=["partial", "method", "attention with a bias that is computed", "dataclass"])
def test_a_graph_is_made_of_what_is_no_module_and_answers_with_more_than_tensors(tmp_path: Path, made: str) -> None:
    for needed in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    module = _registry.load()["onnx-runtime"]
    net = ("import dataclasses\nimport functools\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
           "        self.linear = torch.nn.Linear(8, 3)\n    def forward(self, x, more):\n"
           "        return {'scores': self.linear(x) * more['scale'], 'task': 'classify', 'classes': 3}\n"
           "    def called(self, x):\n        return self.forward(x, {'scale': 2.0})\n"
           "    def answered(self, x):\n        return Answer('classify', Answer(3, [self.linear(x)]))\n\n"
           "@dataclasses.dataclass\nclass Answer:\n    task: object\n    scores: object\n\n"
           "class Biased(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.linear = torch.nn.Linear(8, 8)\n"
           "        self.bias = torch.nn.Parameter(torch.zeros(1, 2, 4, 4))\n    def forward(self, x):\n"
           "        given = self.linear(x).view(1, 4, 2, 4).transpose(1, 2)\n"
           "        found = torch.nn.functional.scaled_dot_product_attention(given, given, given, attn_mask=self.bias + 0.0)\n"
           "        return found.transpose(1, 2).reshape(4, -1)[:, :3]\n")
    code = Tried(Candidate.of([Part(module, module.Options())]), "kept", "").record(2).code
    _, answers = answered(tmp_path, f"{net}{made}\n{code}", WITH_GRADIENT)
    assert [tuple(one.shape) for one in answers] == [(4, 3)]


def test_switches_are_one_line_that_does_what_loading_does() -> None:
    before = torch.get_float32_matmul_precision(), torch.get_num_threads()
    try:
        line = session.lines({"threads": "2", "float32_products": "high", "attention": "flash"}, 1)
        exec(line, {"torch": torch})
        assert "\n" not in line and torch.get_num_threads() == 2 and torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.flash_sdp_enabled() and not torch.backends.cuda.mem_efficient_sdp_enabled()
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.set_num_threads(before[1])
        for setter in session.ATTENTION.values():
            getattr(torch.backends.cuda, setter)(True)
