"""A search by throughput with processes that really serve beside each other."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch")
for name in ("cloudpickle", "onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(name, reason="the extra saturate[inference]")

import saturate  # noqa: E402 - after the checks for what is optional
from saturate.inference import serving  # noqa: E402


def test_a_winner_by_throughput_has_served_in_fresh_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers so small that eager PyTorch is all overhead: an ONNX program of them is several times as fast in any weather. It ends long before
    its time on a machine with nothing else to do."""
    monkeypatch.setattr(serving, "MOST_BATCH", 4)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(part for _ in range(60) for part in (torch.nn.Linear(16, 16), torch.nn.ReLU()))).eval()
    inputs = [(torch.rand(2, 16),) for _ in range(3)]
    result = saturate.optimize(model, inputs, objective="throughput", time="4m", only=("onnx-runtime",), workdir=tmp_path / "study", threads=2)
    record = result.record
    assert record.verdict == "faster" and record.objective == "throughput", (record.verdict, record.notes, record.candidates)
    rows = {(row.of == "baseline", row.batch, row.processes): row for row in record.throughput}
    assert {(True, 2, 1), (True, 4, 1), (False, 2, 1)} <= set(rows), "each began at the batch that the model came with, and grew"
    assert any(row.processes == 2 for row in record.throughput), "two processes share two threads"
    assert rows[False, 2, 1].samples_per_s > rows[True, 2, 1].samples_per_s > 0
    best = max((row for row in record.throughput if row.of == "best"), key=lambda row: row.samples_per_s)
    assert best.samples_per_s > 2 * rows[True, 2, 1].samples_per_s
    assert record.throughput_ratio is not None and record.throughput_ratio_ci[0] > 1.0, record.throughput_ratio_ci
    x = torch.rand(2, 16)
    torch.testing.assert_close(result(x), model(x))
