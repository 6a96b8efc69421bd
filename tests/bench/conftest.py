"""Shared by the tests of benchmarks: one as a module, and a short run of one."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch):
    """Import a benchmark as a module."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


@pytest.fixture
def smoke(tmp_path, clean_environment):
    """Run a benchmark with --smoke, look for lines of its answer by pattern, and return what it wrote with --json."""

    def run(name, *lines, timeout_s=600.0):
        numbers = tmp_path / "numbers.json"
        found = subprocess.run(
            [sys.executable, str(BENCH / f"{name}.py"), "--smoke", "--json", str(numbers)], cwd=tmp_path,
            env={**clean_environment, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=timeout_s)
        assert found.returncode == 0, found.stderr[-3000:]
        for line in lines:
            assert re.search(line, found.stdout, re.MULTILINE), found.stdout
        assert found.stdout.splitlines()[-1].startswith("smoke run, targets are not judged (")
        assert not list(tmp_path.glob("saturate*")), "a scratch folder was left behind"
        written = json.loads(numbers.read_text())
        assert written["benchmark"] == name and written["targets_met"] is None and written["rows"]
        return written

    return run
