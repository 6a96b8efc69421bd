"""bench/checkpoint.py runs, prints its ratio lines and writes its numbers; its digests see a tear."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.slow
def test_smoke_of_the_checkpoint_bench(tmp_path, clean_environment):
    numbers = tmp_path / "numbers.json"
    found = subprocess.run([sys.executable, str(BENCH / "checkpoint.py"), "--smoke", "--json", str(numbers)], cwd=tmp_path,
                           env={**clean_environment, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr[-3000:]
    for line in (r"^blocked, saturate / dcp [\w, ]+: -?\d+\.\d{3} \[", r"^total, saturate / torch.save: -?\d+\.\d{3} \[",
                 r"^torn tensors: 0 in 40 saves; without the copy [1-9]\d* in 20$"):
        assert re.search(line, found.stdout, re.MULTILINE), found.stdout
    assert found.stdout.splitlines()[-1].startswith("smoke run, targets are not judged (")
    written = json.loads(numbers.read_text())
    assert written["benchmark"] == "checkpoint" and written["targets_met"] is None and written["rows"]
    assert not list(tmp_path.glob("saturate*")), "a scratch folder was left behind"


def test_ratios_by_hand(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import checkpoint

    middle, low, high = checkpoint.against([1.0, 1.1, 0.9, 1.0], [2.0, 2.0, 2.0, 2.0])
    assert middle == pytest.approx(0.5) and low < 0.5 < high
    assert checkpoint.against([2.0] * 4, [2.0] * 4) == (1.0, 1.0, 1.0)
