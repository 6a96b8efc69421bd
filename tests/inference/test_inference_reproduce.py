"""The lines that make a candidate without saturate run as they are printed, in a fresh process that has no saturate."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from saturate.inference import lines, tried
from saturate.inference.candidates import Candidate, Part
from saturate.inference.techniques import _registry
from saturate.inference.techniques._api import Entry, variants_of
from saturate.records.inference import CandidateRecord, ModelFacts

TECHNIQUES = _registry.load()

#: Facts that every technique makes variants for.
FACTS = ModelFacts(linears=2, convolutions=2, attentions=1, cores=2, threads=2, installed={"onnxruntime": "1.30"}, cpu_flags=frozenset({"avx512_vnni", "amx_bf16"}))

#: Needs of those that are not torch alone.
EXTRAS = {"onnx": ("onnx", "onnxruntime", "onnxscript"), "openvino": ("onnx", "onnxruntime", "onnxscript", "openvino"), "pt2e": ("torchao",), "qat": ("torchao",), "torchao": ("torchao",)}

#: Need a GPU, or a library for one.
GPU = ("cuda-graphs", "fp16", "tensorrt", "torch-tensorrt", "torchao-fp8", "torchao-int4", "tf32-products")

#: What a user has: the names of `lines.YOURS`.
GIVEN = """
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.conv, self.head = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3), nn.Linear(16, 32)
        self.last = nn.Linear(32, 5)
    def forward(self, x):
        return self.last(self.head(self.conv(self.norm(self.stem(x)).relu()).relu().mean((2, 3))).relu())
model, make_student = Net().eval(), Net
conv, norm, following = model.stem, model.norm, model.conv
inputs = (torch.randn(4, 3, 12, 12),)
calibration = [(torch.randn(4, 3, 12, 12),) for _ in range(3)]
loader = [(torch.randn(4, 3, 12, 12), torch.arange(4)) for _ in range(3)]
loss = nn.functional.cross_entropy
"""

NAMES = {"torch", "nn", *lines.YOURS, "conv", "norm"}


def record_of(id: str, options: Any) -> CandidateRecord:
    candidate = Candidate.of([Part(TECHNIQUES[id], options)])
    return tried.Tried(candidate, "dominated", "why").record(1)


def making(id: str, options: Any) -> str:
    """reproduce.py, without the lines that call the stored program."""
    entry = Entry("generation", ["model.safetensors"], {"architectures": {"model": {}}})
    served = lines.serving(entry, 1, lambda name: f"Path(__file__).with_name({name!r})")
    return lines.reproduce(record_of(id, options), "Net", entry, 1).replace(served, "")


@pytest.mark.parametrize("id", TECHNIQUES)
def test_every_name_is_imported_made_or_asked_for(id: str) -> None:
    for options in variants_of(TECHNIQUES[id], FACTS):
        source = making(id, options)
        tree = ast.parse(source)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        made = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        made |= {alias.asname or alias.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}
        made |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        made |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        assert used - made - set(dir(builtins)) <= NAMES, used - made - set(dir(builtins))
        for name in used & set(lines.YOURS) - (made - {"model", "inputs"}):
            assert f"# {name}: " in source, "it is said what the name is"


def _called(tree: ast.AST, name: str) -> set[ast.Call]:
    return {node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name}


@pytest.mark.parametrize("id", TECHNIQUES)
def test_what_is_exported_is_exported_without_gradients(id: str) -> None:
    """With gradients attention is taken apart otherwise, and is another graph than the candidate's."""
    for options in variants_of(TECHNIQUES[id], FACTS):
        tree = ast.parse(making(id, options))
        within = {node for node in ast.walk(tree) if isinstance(node, ast.With) and any(_called(item, "no_grad") for item in node.items)}
        assert _called(tree, "export") <= set().union(*(_called(node, "export") for node in within))


#: A model whose inputs are nested, one of them None and one that nothing depends on, and whose answer is a dictionary.
NESTED = """
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 16)
    def forward(self, given, mask=None, extra=()):
        hidden = self.first(given["x"]) if mask is None else given["x"]
        return {"out": self.last(torch.relu(hidden + extra[0])), "twice": (hidden * 2,)}
def batch():
    return {"unused": torch.randn(4, 3), "x": torch.randn(4, 64)}, None, (torch.randn(4, 64),)
model, inputs, calibration = Net().eval(), batch(), [batch() for _ in range(3)]
with torch.no_grad():
    wanted = model(*inputs)
wanted = [wanted["out"], wanted["twice"][0]]
"""

#: Behind the printed lines: how far the answers are from the model's own.
COMPARE = """
from torch.utils._pytree import tree_leaves
found = [torch.as_tensor(one) for one in tree_leaves(answers)]
assert [one.dtype for one in found] == [torch.float32] * 2, [one.dtype for one in found]
for one, other in zip(found, wanted):
    error = ((one - other).norm() / other.norm()).item()
    assert error < 0.2, error
"""


@pytest.mark.slow
@pytest.mark.parametrize("id", ["onnx-runtime", "openvino-runtime", "onnx-int8-static", "onnx-int8-dynamic", "openvino-int8-static", "bf16",
                                "torchao-int4"])
def test_inputs_may_be_nested_missing_or_without_use(id: str, tmp_path: Path) -> None:
    runs(id, tmp_path, NESTED, COMPARE)


def runs(id: str, folder: Path, given: str = GIVEN, compare: str = "assert answers is not None\n") -> None:
    needs = next((packages for start, packages in EXTRAS.items() if id.startswith(start)), ())
    for package in ("torch", *needs):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    for number, options in enumerate(variants_of(TECHNIQUES[id], FACTS)):
        script = folder / f"reproduce{number}.py"
        script.write_text("import sys; sys.modules['saturate'] = None\n" + given + making(id, options) + f"\n{compare}")
        done = subprocess.run([sys.executable, script.name], cwd=folder, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("id", [id for id in TECHNIQUES if id not in GPU])
def test_it_runs_as_printed(id: str, tmp_path: Path) -> None:
    runs(id, tmp_path)


@pytest.mark.parametrize("id", ["bf16", "nhwc-layout"])
def test_answers_inside_of_dataclasses_are_as_before(id: str) -> None:
    """torch takes those for leaves: they stayed in the format, or the layout, of the inside."""
    torch = pytest.importorskip("torch")

    @dataclasses.dataclass(frozen=True)
    class Answer:
        maps: Any
        parts: list[Any]
        name: str = "it"

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 8, 3)

        def forward(self, given: Answer) -> Answer:
            found = self.conv(given.maps)
            return Answer(found, [{"same": Answer(found, [])}, None])

    for options in variants_of(TECHNIQUES[id], FACTS):
        names = {"torch": torch, "model": Net().eval(), "inputs": (Answer(torch.randn(2, 3, 8, 8), []),)}
        exec(TECHNIQUES[id].as_code(options) + f"\n{lines.ANSWER}", names)
        answers = names["answers"]
        assert isinstance(answers, Answer) and answers.name == "it" and answers.parts[1] is None
        for found in (answers.maps, answers.parts[0]["same"].maps):
            assert found.dtype == torch.float32 and found.is_contiguous()


def test_layers_that_were_kept_are_named() -> None:
    module = TECHNIQUES["onnx-int8-static"]
    candidate = Candidate((Part(module, module.Options()),), frozenset({"body.2", "head"}))
    assert "leave them out of what is quantized: body.2, head" in tried.code(candidate).splitlines()[0]
