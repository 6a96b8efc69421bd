"""Ceilings and rooflines where there is a CUDA device. Run by `pytest -m gpu`."""

from __future__ import annotations

import sys

import pytest

from saturate.machine import accelerators, ceilings
from saturate.trace.read import read
from saturate.trace.roofline import roofline

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SIZE = 8192


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return ceilings.measure(sys.executable, "cuda", where=tmp_path_factory.mktemp("kept"))


def test_measured_rates_lie_below_the_specification(measured):
    assert measured.device_name == torch.cuda.get_device_name() and measured.driver
    spec = accelerators.find(measured.device_name)
    if spec is None:
        pytest.skip(f"{measured.device_name} is not in the table")
    for name, rate in measured.rates.items():
        if name in spec.rates:
            assert 0.4 < rate / spec.rates[name] < 1.05, name
    assert 0.6 < measured.memory_rate() / spec.bandwidth < 1.05
    assert measured.host_to_device["pinned"] > measured.host_to_device["pageable"] * 0.9
    assert 500 < measured.launch_ns < 50_000


def test_a_large_product_and_a_copy_reach_their_ceilings(measured, tmp_path):
    a = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)

    def work():
        for _ in range(5):
            torch.mm(a, a)
            torch.relu(a)
            b.copy_(a.t())
        torch.cuda.synchronize()

    work()
    with torch.profiler.profile(record_shapes=True) as recorder:
        work()
    recorder.export_chrome_trace(str(tmp_path / "trace.json"))
    found = roofline(read(tmp_path / "trace.json"), 0, None, measured)
    assert found.source.startswith("measured on this device") and found.coverage > 0.9
    operators = {operator.name: operator for operator in found.operators}
    # Newer versions of torch have it clamp.
    product, relu = operators["aten::mm"], operators.get("aten::relu") or operators["aten::clamp_min"]
    assert product.flops == 5 * 2 * SIZE**3 and product.limit == "compute" and 0.7 < product.efficiency < 1.1
    assert relu.limit == "memory" and 0.7 < relu.efficiency < 1.1
