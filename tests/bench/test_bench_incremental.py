"""bench/incremental.py runs, prints its ratio and can miss its targets."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.slow
def test_smoke(smoke):
    written = smoke("incremental", r"^\s+time of a save / torch.save with fsync \d+\.\d{3} \[\d+\.\d{3}, \d+\.\d{3}\]", timeout_s=300.0)
    for row in written["rows"]:
        assert row["bit_exact"] and 0 < row["share"] < 1 and row["restored"] == 4


@pytest.mark.parametrize("share, exact, code", [(0.012, True, 0), (0.014, True, 1), (0.012, False, 1)])
def test_targets_can_be_missed(monkeypatch, capsys, share, exact, code):
    monkeypatch.syspath_prepend(str(BENCH))
    incremental = importlib.import_module("incremental")
    row = dict.fromkeys(("first_share", "largest_share", "forecast_share", "whole_tensor_share", "block_share", "compressed_share", "save_s",
                         "plain_s", "restore_ratio"), 0.5)
    monkeypatch.setattr(incremental, "adapter", lambda small: None)
    monkeypatch.setattr(incremental, "run", lambda *arguments: {
        **row, "share": share, "file_bytes": 10**8, "forecast_helps": True, "time_ratio": [1, 1, 1], "restored": 21, "bit_exact": exact})
    monkeypatch.setattr(sys, "argv", ["incremental.py", "--only", "adapter"])
    assert incremental.main() == code
    assert capsys.readouterr().out.splitlines()[-1].startswith("targets met" if code == 0 else "TARGETS MISSED")
