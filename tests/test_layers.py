"""The import rules of docs/structure.md, read from the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "saturate"
ROOMS = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}

#: room -> what of saturate it may import: rooms, or single modules. Its own room and what lies beside the rooms are always allowed.
MAY_IMPORT = {
    "cli": ROOMS - {"agent"},
    "study": {"trial", "measure", "verify", "techniques", "findings", "trace", "machine", "records", "report", "checkpoints", "data"},
    "trial": {"records", "machine.commands", "machine.redaction"},
    "agent": {"techniques", "checkpoints", "data", "measure.placement", "records.addresses", "records.facts", "trace._arguments", "trace._matrix_costs"},
    "techniques": {"checkpoints", "data", "records.facts"},
    "checkpoints": {"records.sizes"},
    "data": {"checkpoints.durable", "checkpoints.host_memory", "machine.facts"},
    "inference": {"trial", "techniques._api", "techniques._registry", "techniques._trees", "measure", "machine", "records", "report", "checkpoints.durable"},
    "measure": set(),
    "verify": {"records"},
    "findings": {"records"},
    "trace": {"checkpoints.durable", "machine", "records"},
    "machine": {"records"},
    "report": {"records"},
    "records": set(),
    "testing": {"techniques", "findings", "inference", "machine", "records", "agent.context"},
}

#: Packages from elsewhere, besides the standard library. `torch` is the user's, and never imported at the top.
MAY_USE = {
    "cli": {"msgspec", "pynvml", "rich"},
    "study": {"msgspec"},
    "trial": set(),
    "agent": {"torch", "safetensors"},
    "techniques": {"torch", "torchao"},
    "checkpoints": {"torch"},
    "data": {"torch", "numpy", "pyarrow", "PIL", "nvidia"},
    "inference": {"torch", "torchao", "numpy", "cloudpickle", "msgspec", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "tensorrt",
                  "torch_tensorrt", "transformers"},
    "measure": set(),
    "verify": set(),
    "findings": set(),
    "trace": {"msgspec", "numpy"},
    "machine": {"pynvml", "torch"},
    "report": {"msgspec"},
    "records": {"msgspec", "tomlkit"},
    "testing": {"torch"},
}


def imports(path: Path) -> list[tuple[str, int, bool]]:
    """(dotted name, line, whether it happens when the module is imported) of everything a file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {id(node) for function in ast.walk(tree) if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
              for node in ast.walk(function)}
    typing_only = {id(node) for test in ast.walk(tree) if isinstance(test, ast.If) and "TYPE_CHECKING" in ast.dump(test.test)
                   for node in ast.walk(test)}
    found = []
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno, id(node) not in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import hides the room"
            found += [(f"{node.module}.{alias.name}", node.lineno, id(node) not in inside) for alias in node.names]
    return found


def sources(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py"))


def breaches(room: str, path: Path) -> list[str]:
    """What a file of `room` imports against the rules."""
    problems = []
    for name, line, at_top in imports(path):
        first, _, rest = name.partition(".")
        where = f"{path.name}:{line} imports {name}"
        if first == "saturate":
            target = rest.partition(".")[0]
            if target not in ROOMS or target == room:
                continue            # saturate itself, and what lies beside the rooms
            if not any(rest == allowed or rest.startswith(f"{allowed}.") for allowed in MAY_IMPORT[room]):
                problems.append(where)
        elif first not in sys.stdlib_module_names and first != "__future__":
            if first not in MAY_USE[room]:
                problems.append(where)
            elif first == "torch" and at_top and room != "testing":
                problems.append(f"{where} at its top")
    return problems


def test_every_room_has_a_rule() -> None:
    assert set(MAY_IMPORT) == set(MAY_USE) == ROOMS


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_a_room_imports_only_what_it_may(room: str) -> None:
    assert sources(room)
    assert not [problem for path in sources(room) for problem in breaches(room, path)]


def test_breaches_are_seen(tmp_path: Path) -> None:
    """The check itself can fail."""
    path = tmp_path / "bad.py"
    path.write_text("import torch\nfrom saturate.cli import main\nimport msgspec\nfrom saturate.records import recipe\n"
                    "import json\nfrom saturate.records.facts import Facts\n", encoding="utf-8")
    assert [problem.split(" ")[0] for problem in breaches("agent", path)] == ["bad.py:1", "bad.py:2", "bad.py:3", "bad.py:4"]


def needed_at_the_top(path: Path, modules: dict[str, Path]) -> set[str]:
    """Modules of saturate that a file imports outside of functions, also for annotations alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {id(node) for function in ast.walk(tree) if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
              for node in ast.walk(function)}
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) and id(node) not in inside for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in inside:
            names |= {full if (full := f"{node.module}.{alias.name}") in modules else str(node.module) for alias in node.names}
    return names & set(modules)


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
               for path in PACKAGE.rglob("*.py")}
    left = {name: needed_at_the_top(path, modules) - {name} for name, path in modules.items()}
    while free := {name for name, needed in left.items() if not needed & set(left)}:
        left = {name: needed for name, needed in left.items() if name not in free}
    assert not left, f"in a circle, or behind one: {sorted(left)}"


def test_no_technique_names_another() -> None:
    names = {path.stem for path in sources("techniques") if not path.name.startswith("_")}
    for path in sources("techniques"):
        for name, line, _ in imports(path):
            assert name.rpartition(".")[2] not in names or not name.startswith("saturate.techniques"), f"{path.name}:{line}"


@pytest.mark.parametrize("modules", ["saturate", "saturate.cli.main", "saturate.study.tune, saturate.cli.run, saturate.cli.tune"])
def test_saturate_imports_no_torch(modules: str) -> None:
    code = f"import {modules}; import sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_agent_needs_nothing_but_the_standard_library() -> None:
    """It runs in the user's environment, which may hold none of saturate's own dependencies."""
    code = f"""
import sys
for name in ("msgspec", "rich", "tomlkit", "pynvml", "torch"): sys.modules[name] = None     # importing one raises
sys.path[:] = [{str(PACKAGE.parent)!r}, *(p for p in sys.path if "site-packages" not in p)]
import importlib, pkgutil, saturate.agent, saturate.techniques
for package in (saturate.agent, saturate.techniques):
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not info.name.endswith("sitecustomize"): importlib.import_module(info.name)
"""
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
