"""What a trace of a CUDA device tells of waits and formats. Run by `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from saturate.study import unheard
from saturate.trace.analyze import analyze_one
from saturate.trace.columns import Trace
from saturate.trace.observe import observations
from saturate.trace.read import read

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SIZE = 4096


def recorded(work: Callable[[], Any], folder: Path) -> Trace:
    """Three recorded steps of it."""
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1)
    with torch.profiler.profile(record_shapes=True, schedule=schedule) as recorder:
        for _ in range(4):
            work()
            recorder.step()
    recorder.export_chrome_trace(str(folder / "trace.json"))
    return read(folder / "trace.json")


def test_waits_in_operators_are_seen_beside_those_with_a_label(tmp_path: Path) -> None:
    a, host = torch.randn(SIZE, SIZE, device="cuda"), torch.randn(SIZE, 256)

    def work() -> None:
        made = a @ a
        made[made > 0].sum()
        with torch.profiler.record_function("saturate.sync train.py:1 Tensor.item"):
            made.sum().item()
        host.cuda()

    trace = recorded(work, tmp_path)
    assert unheard.told(trace, "cuda") is trace
    device = analyze_one(trace).devices[0]
    seen = {labelled: observations(trace, device, labelled).syncs for labelled in (True, False)}
    places = {labelled: {one.where for one in found} for labelled, found in seen.items()}
    assert places[True] - places[False] == {"aten::_local_scalar_dense"} and "aten::nonzero" in places[False]
    assert any("HtoD" in one.what for one in seen[False])


@pytest.mark.parametrize("tf32", [False, True])
def test_products_in_fp32_are_told_from_those_in_tf32(tf32: bool, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no TF32")
    a = torch.randn(SIZE, SIZE, device="cuda")

    def work() -> None:
        (a @ a).relu_()
        torch.cuda.synchronize()        # else most of it runs after the last step

    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, tf32         # monkeypatch deletes what it takes back, and this cannot be deleted
    try:
        trace = recorded(work, tmp_path)
    finally:
        matmul.allow_tf32 = before
    share = observations(trace, analyze_one(trace).devices[0]).fp32_matmul
    assert share == 0.0 if tf32 else share > 0.5
