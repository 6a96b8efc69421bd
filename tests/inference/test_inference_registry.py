"""Discovery of inference techniques: built-ins and entry points, ids that training does not have, and loud failures."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from saturate.errors import TechniqueError
from saturate.inference.techniques import _registry
from saturate.techniques import _registry as training
from saturate.techniques._api import HEADINGS

BUILT_IN = {"aot-inductor", "bf16", "compile-inference", "cuda-graphs", "fp16", "nhwc-layout", "sdpa-kernel", "tf32-products", "threads"}

GOOD = '"""T\n\n' + "\n\n".join(f"{heading}\n{'-' * len(heading)}\nText of {heading}." for heading in HEADINGS) + '''
"""
from dataclasses import dataclass
from saturate.inference.techniques._api import Eligible, Proof, Technique, Touch
TECHNIQUE = Technique(id="third-inference", title="t", numerics="exact", stage="number", touches=(Touch("x"),))
@dataclass(frozen=True)
class Options:
    amount: int = 1
def eligible(facts): return Eligible("yes")
def variants(facts): return [Options()]
def bound(facts): return None
def apply(context, options): return "done"
def active(context, options): return Proof(False, "no")
def as_code(options): return "pass"
'''

BROKEN = {
    "heading": ("Numerics\n--------\n", "Numbers\n-------\n", "no heading 'Numerics'"),
    "id": ('id="third-inference"', 'id="other"', "the file says 'third-inference'"),
    "stage": ('stage="number"', 'stage="model"', "TECHNIQUE.stage is 'model'"),
    "numerics": ('numerics="exact"', 'numerics="fine"', "TECHNIQUE.numerics is 'fine'"),
    "runtime": ('stage="number"', 'stage="runtime"', 'must claim the resource "runtime"'),
    "arity": ("def active(context, options)", "def active(context)", "active must take 2"),
    "missing": ("def as_code(options): return \"pass\"\n", "", "the function as_code is missing"),
    "no_default": ("amount: int = 1", "amount: int", "has no default"),
    "syntax": ("@dataclass(frozen=True)", "@@", "SyntaxError"),
}


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Write `third_inference.py`, importable and registered as an entry point."""
    monkeypatch.syspath_prepend(str(tmp_path))
    real = importlib.metadata.entry_points

    def entry_points(**selection: str) -> list[importlib.metadata.EntryPoint]:
        found = list(real(**selection))
        if selection.get("group") == _registry.GROUP:
            found.append(importlib.metadata.EntryPoint("anything", "third_inference", _registry.GROUP))
        return found

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)

    def write(text: str) -> Path:
        path = tmp_path / "third_inference.py"
        path.write_text(text, encoding="utf-8")
        return path

    yield write
    sys.modules.pop("third_inference", None)


def test_built_ins_are_found_and_ordered() -> None:
    found = _registry.load()
    assert set(found) >= BUILT_IN
    assert list(found) == sorted(found)


def test_no_id_is_also_a_training_technique() -> None:
    """`saturate explain ID` and the docs list both."""
    assert not set(_registry.load()) & set(training.load())


def test_a_registered_module_is_found(third_party: Callable[[str], Path]) -> None:
    third_party(GOOD)
    assert "third-inference" in _registry.load()


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_module_is_named(what: str, third_party: Callable[[str], Path]) -> None:
    old, new, message = BROKEN[what]
    assert old in GOOD
    third_party(GOOD.replace(old, new))
    with pytest.raises(TechniqueError, match="third_inference") as caught:
        _registry.load()
    assert message in caught.value.cause


def test_a_module_is_loaded_from_its_file_where_its_name_is_unknown(third_party: Callable[[str], Path], tmp_path: Path) -> None:
    path = third_party(GOOD)
    path = path.rename(tmp_path / "elsewhere.py")
    try:
        assert _registry.load_one("package_that_is_not_here.third_inference", str(path)).TECHNIQUE.id == "third-inference"
    finally:
        sys.modules.pop("package_that_is_not_here.third_inference", None)


def test_no_technique_imports_another() -> None:
    folder = Path(_registry.__file__).parent
    names = {path.stem for path in folder.glob("*.py") if not path.name.startswith("_")}
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "saturate.inference.techniques":
                assert not names & {alias.name for alias in node.names}, path.name


def test_what_leaves_no_layer_in_its_own_precision_says_so() -> None:
    whole = {id for id, module in _registry.load().items() if getattr(module, "WHOLE", False)}
    assert whole == {"openvino-bf16", "tensorrt", "tf32-products", "torch-tensorrt"}
