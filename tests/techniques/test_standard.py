"""Modules of the standard library are never taken from the script's own folder."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import saturate
from saturate.techniques._standard import standard

PACKAGE = Path(saturate.__file__).parent

#: A user's own `secrets.py` keeps numpy.random, and with it most of the world, from loading.
FOUND_BY_ALL = {"secrets"}


def imported(path: Path) -> set[str]:
    """Roots of what a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found & sys.stdlib_module_names


def test_what_the_agent_imports_is_what_torch_has_loaded() -> None:
    """Anything else would be looked for beside the script first: `standard` finds it where it belongs."""
    pytest.importorskip("torch")
    code = "import sys, torch; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    files = [path for room in ("agent", "techniques") for path in sorted((PACKAGE / room).rglob("*.py"))]
    others = {path.name: left for path in files if (left := imported(path) - loaded - set(sys.builtin_module_names) - FOUND_BY_ALL)}
    assert files and not others


def test_a_namesake_beside_the_script_is_neither_run_nor_in_the_way(tmp_path: Path) -> None:
    """Seen: a folder with a `resource.py` of the user's, which no script there imports, kept the profile from working."""
    for name in ("resource", "sysconfig"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the user has a file of that name')")
    code = """
import sys
import saturate.agent.sampling, saturate.agent.places, saturate.agent.sources, saturate.techniques._memory_forecast
from saturate.techniques._standard import standard
assert standard("resource").getrusage(standard("resource").RUSAGE_SELF).ru_maxrss > 0
assert standard("sysconfig").get_path("stdlib")
assert "resource" not in sys.modules
try:
    import resource
except SystemExit:
    print("the script still finds its own")
"""
    done = subprocess.run([sys.executable, "-S", "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(PACKAGE.parent)!r}]\n{code}"],
                          capture_output=True, text=True)
    assert done.returncode == 0 and "its own" in done.stdout, done.stderr


def test_a_module_that_is_loaded_already_is_the_same() -> None:
    import resource

    assert standard.__wrapped__("resource") is resource, "who asked before it was loaded has one of its own"
    with pytest.raises(ModuleNotFoundError):
        standard("no_such_module_of_the_standard_library")
