"""bench/loader.py runs, prints its ratio lines and writes its numbers."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.slow
@pytest.mark.skipif(any(importlib.util.find_spec(name) is None for name in ("PIL", "skimage", "sklearn")),
                    reason="needs the photographs of scikit-image and scikit-learn")
def test_smoke_of_the_loader_bench(tmp_path, clean_environment):
    numbers = tmp_path / "numbers.json"
    found = subprocess.run([sys.executable, str(BENCH / "loader.py"), "--smoke", "--json", str(numbers)], cwd=tmp_path,
                           env={**clean_environment, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=1200)
    assert found.returncode == 0, found.stderr[-3000:]
    for line in (r"^warm, tuned / one batch replayed  \d+\.\d{3} \[", r"^warm, tuned / best by hand        \d", r"^cold, first epoch / decode rate   \d"):
        assert re.search(line, found.stdout, re.MULTILINE), found.stdout
    assert found.stdout.splitlines()[-1].startswith("smoke run, targets are not judged (")
    written = json.loads(numbers.read_text())
    assert written["benchmark"] == "loader" and written["targets_met"] is None and written["rows"]
    assert not list(tmp_path.glob("saturate*")), "a scratch folder was left behind"
