"""The benchmark of speculative decoding runs, prints its ratios and writes its numbers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="it trains a pair of models")

BENCH = Path(__file__).resolve().parents[2] / "bench" / "speculative.py"


@pytest.mark.slow
def test_smoke(tmp_path, clean_environment):
    numbers = tmp_path / "numbers.json"
    found = subprocess.run(
        [sys.executable, str(BENCH), "--smoke", "--json", str(numbers)], cwd=tmp_path,
        env={**clean_environment, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr[-3000:]
    ratio = r"\d+\.\d{3} \[\d+\.\d{3}, \d+\.\d{3}\]"
    assert re.search(rf"^greedy +{ratio}  acceptance (none|[\d.]+), \d+ -> \d+ tokens/s  token-identical$",
                     found.stdout, re.MULTILINE), found.stdout
    assert re.search(r"^a bad draft +\w+: acceptance", found.stdout, re.MULTILINE), found.stdout
    assert found.stdout.splitlines()[-1].startswith("smoke run, targets are not judged (")
    written = json.loads(numbers.read_text())
    assert written["benchmark"] == "speculative" and written["targets_met"] is None
    assert [row["identical"] for row in written["rows"] if "identical" in row] == [True] * 3
    assert not list(tmp_path.glob("saturate*")), "a scratch folder was left behind"
