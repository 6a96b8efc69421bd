"""bench/checkpoint.py runs, prints its ratio lines and writes its numbers; its digests see a tear."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.slow
def test_smoke_of_the_checkpoint_bench(smoke):
    smoke("checkpoint", r"^blocked, saturate / dcp [\w, ]+: -?\d+\.\d{3} \[", r"^total, saturate / torch.save: -?\d+\.\d{3} \[",
          r"^torn tensors: 0 in 40 saves; without the copy [1-9]\d* in 20$")


def test_ratios_by_hand(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import checkpoint

    middle, low, high = checkpoint.against([1.0, 1.1, 0.9, 1.0], [2.0, 2.0, 2.0, 2.0])
    assert middle == pytest.approx(0.5) and low < 0.5 < high
    assert checkpoint.against([2.0] * 4, [2.0] * 4) == (1.0, 1.0, 1.0)
