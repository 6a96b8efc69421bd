"""The benchmark of FLOPs runs, and judges: a wrong formula misses the target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "flops.py"


def run(tmp_path, *options, change=""):
    """The benchmark, in a process where `change` was done first."""
    code = "\n".join(("import runpy, sys", change, f"sys.argv = {[str(BENCH), *options]!r}",
                      f"sys.path.insert(0, {str(BENCH.parent)!r})",
                      f"runpy.run_path({str(BENCH)!r}, run_name='__main__')"))
    return subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""})


def test_every_case_is_that_of_closed_form(tmp_path):
    done = run(tmp_path, "--smoke", "--json", str(tmp_path / "numbers.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("smoke run, targets are not judged (")
    written = json.loads((tmp_path / "numbers.json").read_text())
    assert written["benchmark"] == "flops" and written["targets_met"] is None and len(written["rows"]) >= 18
    for row in written["rows"]:
        assert abs(row["ratio"] - 1) < 0.01, row
        assert abs(row["inside"] - 1) < 0.01, row
        knows_groups = "forward and backward" not in row["case"] or not {"grouped", "depthwise"} & set(row["case"].split(", "))
        if knows_groups and "both" not in row["case"]:
            assert row["flop_counter"] in (0, row["flops"]), row
    assert {row["kind"] for row in written["rows"]} == {"matrix", "convolution", "attention"}


@pytest.mark.slow
def test_a_wrong_formula_misses_the_target(tmp_path):
    wrong = "from saturate.trace import _matrix_costs as m; m.FORMULAS['aten::mm'] = m.FORMULAS['aten::mv']"
    done = run(tmp_path, change=wrong)
    assert done.returncode == 1 and "TARGETS MISSED" in done.stdout, done.stdout + done.stderr[-2000:]
