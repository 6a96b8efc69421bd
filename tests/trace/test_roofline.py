"""Efficiency, limit and what is recoverable, against ceilings that make the numbers round."""

from __future__ import annotations

import pytest
from traces import V100, Recording

from saturate.machine import accelerators
from saturate.records.ceilings import Ceilings
from saturate.trace.columns import DeviceInfo
from saturate.trace.read import read
from saturate.trace.roofline import roofline
from saturate.trace.windows import CPU, devices

F32, BF16 = "float", "c10::BFloat16"
#: 1 GB/s = 1 byte per ns; 100 GFLOP/s = 100 FLOPs per ns. Beyond 1 MB memory is as slow; smaller operations run at 4
#: GB/s.
ROUND = Ceilings(device="cuda", device_name=V100.name, rates={"float32": 100e9, "tfloat32": 400e9, "bfloat16": 800e9},
                 bandwidth={"copy": [(1000, 4e9), (1_000_000, 1e9)], "read": [(1000, 2e9), (1_000_000, 0.5e9)]})
MATRICES = {"dims": ((1000, 1000), (1000, 1000)), "types": (F32, F32)}
MM, MM_BYTES = 2 * 10**9, 12 * 10**6            # 20 ms at 100 GFLOP/s, 12 ms at 1 GB/s


def made(name, dims, types, took, kernel="kernel", times=1, device=V100, **columns):
    recording = Recording(device)
    for turn in range(times):
        at = turn * 10 * took
        recording.operator(name, at, at + took, dims=dims, types=types)
        recording.kernel(kernel, at + 2 * took, at + 3 * took, launched=at + took // 2, **columns)
    return recording.trace()


def only(trace, ceilings=ROUND, device=0):
    found = roofline(trace, device, None, ceilings)
    assert len(found.operators) == 1
    return found.operators[0], found


def test_a_compute_bound_product():
    operator, found = only(made("aten::mm", took=25_000_000, **MATRICES))
    assert operator.efficiency == pytest.approx(20 / 25)
    assert operator.limit == "compute" and operator.inefficient is False
    assert operator.recoverable_ns == 5_000_000 and (operator.flops, operator.bytes) == (MM, MM_BYTES)
    assert found.coverage == 1.0 and found.source == f"measured on this device ({V100.name})"
    assert found.ceilings == {**ROUND.rates, "copy": 1e9}


def test_a_memory_bound_operator_and_one_that_is_far_from_every_roof():
    big = {"dims": ((1_000_000,),), "types": (F32,)}        # 8 MB moved: 8 ms
    operator, _ = only(made("aten::relu", took=10_000_000, **big))
    assert (operator.limit, operator.efficiency, operator.recoverable_ns) == ("memory", pytest.approx(0.8), 2_000_000)
    slow, _ = only(made("aten::relu", took=40_000_000, **big))
    assert slow.inefficient is True and slow.efficiency == pytest.approx(0.2)
    near, _ = only(made("aten::relu", took=20_000_000, **big))
    assert near.inefficient is False, "0.4 itself is not below 0.4"


def test_small_operations_are_compared_with_the_cache():
    operator, _ = only(made("aten::relu", ((100,),), (F32,), took=20_000, blocks=800))      # 800 B at 4 GB/s: 200 ns
    assert operator.efficiency == pytest.approx(200 / 20_000)
    middle, _ = only(made("aten::relu", ((1000,),), (F32,), took=20_000, blocks=800))       # 8 kB: as slow as 1 MB
    assert middle.efficiency == pytest.approx(8000 / 20_000)


def test_the_roof_is_that_of_the_format_and_of_the_path():
    fp32, _ = only(made("aten::mm", took=25_000_000, kernel="volta_sgemm_128x64_nn", **MATRICES))
    tf32, _ = only(made("aten::mm", took=25_000_000, kernel="cutlass_80_tensorop_s1688gemm_256x64", **MATRICES))
    half, _ = only(made("aten::mm", took=25_000_000, dims=MATRICES["dims"], types=(BF16, BF16)))
    assert fp32.efficiency == pytest.approx(20 / 25)
    assert tf32.limit == "memory" and tf32.efficiency == pytest.approx(12 / 25), "5 ms of arithmetic, 12 ms of memory"
    assert half.limit == "memory" and half.efficiency == pytest.approx(6 / 25)
    volta, found = only(made("aten::mm", took=25_000_000, dims=MATRICES["dims"], types=(BF16, BF16)), None)
    assert "bfloat16" not in found.ceilings and volta.efficiency == pytest.approx(MM / (15.7e12 * 0.8) / 25e-3)


def test_a_format_that_nothing_is_known_of_is_not_modelled():
    operator, found = only(made("aten::mm", took=25_000_000, dims=MATRICES["dims"], types=("double", "double")))
    assert operator.efficiency is None and operator.unknown == dict.fromkeys(
        ("limit", "inefficient", "efficiency", "recoverable_ns"), "no ceiling for float64")
    assert operator.flops == MM and found.coverage == 0.0


def test_better_than_possible_is_an_anomaly_and_not_good_news():
    operator, found = only(made("aten::mm", took=18_000_000, **MATRICES))
    assert operator.efficiency is operator.recoverable_ns is operator.limit is operator.inefficient is None
    assert operator.unknown["efficiency"].startswith("1.11 times as fast as the compute ceiling")
    assert found.coverage == 0.0
    allowed, found = only(made("aten::mm", took=19_000_000, **MATRICES))
    assert allowed.efficiency == pytest.approx(20 / 19) and allowed.recoverable_ns == 0 and found.coverage == 1.0


@pytest.mark.parametrize(("took", "blocks", "limit"), [
    (9_000, 79, "latency"), (9_000, -1, "latency"), (9_000, 640 * 8, "memory"), (11_000, 1, "memory")])
def test_a_short_kernel_that_does_not_fill_the_device_waits_for_itself(took, blocks, limit):
    operator, _ = only(made("aten::relu", ((500,),), (F32,), took=took, times=3, blocks=blocks, threads=256,
                            registers=32, shared_bytes=0))
    assert operator.limit == limit and operator.calls == 3


def test_the_order_is_by_recoverable_time_not_by_share():
    recording = Recording(V100)
    recording.operator("aten::mm", 0, 100, **MATRICES)
    recording.kernel("good", 1000, 22_001_000, launched=50)                 # 22 ms, 2 to gain
    recording.operator("aten::relu", 200, 300, dims=((100_000,),), types=(F32,))
    recording.kernel("bad", 30_000_000, 40_000_000, launched=250)           # 10 ms, 9.2 to gain
    recording.operator("aten::sort", 400, 500, dims=((100_000,),), types=(F32,))
    recording.kernel("sort", 50_000_000, 58_000_000, launched=450)          # 8 ms, not modelled
    found = roofline(recording.trace(), 0, None, ROUND)
    assert [operator.name for operator in found.operators] == ["aten::relu", "aten::mm", "aten::sort"]
    assert found.coverage == pytest.approx(32 / 40)


def test_other_devices_ceilings_are_not_used():
    other = Ceilings(device="cuda", device_name="NVIDIA H200", rates={"float32": 1e15},
                     bandwidth={"copy": [(1, 1e15)]})
    trace = made("aten::mm", took=25_000_000, **MATRICES)
    assert only(trace, [other, ROUND])[1].source.startswith("measured")
    operator, found = only(trace, [other])
    assert found.source == "specification of NVIDIA V100 SXM 32GB x 0.80, 0.90"
    spec = accelerators.find(V100.name)
    assert found.ceilings == {**{name: rate * 0.8 for name, rate in spec.rates.items()}, "copy": spec.bandwidth * 0.9}
    assert operator.efficiency == pytest.approx(MM / (15.7e12 * 0.8) / 25e-3)


def test_an_unknown_device_is_compared_with_nothing_and_says_so():
    unheard = DeviceInfo(id=0, name="Megachip 9000")
    operator, found = only(made("aten::mm", took=25_000_000, device=unheard, **MATRICES), None)
    assert found.coverage is None and found.ceilings == {} and "Megachip 9000" in found.source
    assert operator.flops == MM and operator.efficiency is None and "Megachip" in operator.unknown["efficiency"]


def test_on_a_cpu_only_a_record_of_a_cpu_counts():
    recording = Recording()
    recording.operator("aten::mm", 0, 25_000_000, **MATRICES)
    trace = recording.trace()
    cpu = Ceilings(device="cpu", device_name="Toy 9000", rates=ROUND.rates, bandwidth=ROUND.bandwidth)
    operator, found = only(trace, [ROUND, cpu], CPU)
    assert operator.efficiency == pytest.approx(0.8) and "Toy 9000" in found.source
    assert only(trace, ROUND, CPU)[1].coverage is None


@pytest.mark.parametrize(("elements", "took", "limit"), [
    (500, 60_000, "latency"),           # 4 us of bytes: the rest is what a call costs
    (500, 30_000, "memory"),
    (50_000, 2_000_000, "memory"),      # far from its roof, but that is not the call's doing
])
def test_an_operator_of_a_cpu_with_next_to_nothing_to_do_moves_no_bytes(elements, took, limit):
    recording = Recording()
    recording.operator("aten::relu", 0, took, dims=((elements,),), types=(F32,))
    cpu = Ceilings(device="cpu", device_name="Toy 9000", rates=ROUND.rates, bandwidth=ROUND.bandwidth)
    assert only(recording.trace(), cpu, CPU)[0].limit == limit


def test_no_kernels_no_shares():
    found = roofline(Recording(V100).trace(), 0, None, ROUND)
    assert found.coverage is None and found.operators == []


@pytest.fixture(scope="module")
def owlv2(shared_traces):
    trace = read(shared_traces / "owlv2_h100.json.gz")
    return roofline(trace, devices(trace)[0])


def test_owlv2_softmax_and_bmm_are_far_below_the_roof(owlv2):
    """Against the plain specification, as the reference values are: 23 % of HBM bandwidth, 5 to 7 % of the bf16
    peak."""
    spec = accelerators.find("NVIDIA H100 80GB HBM3")
    top = owlv2.operators[:3]
    assert [operator.name for operator in top] == ["aten::_softmax", "aten::bmm", "aten::bmm"]
    softmax, *products = top
    assert softmax.shapes == "[16, 5185, 5185]" and softmax.dtypes == "bfloat16"
    assert softmax.bytes / (softmax.time_ns / 1e9) / spec.bandwidth == pytest.approx(0.235, abs=0.01)
    shares = [operator.flops / (operator.time_ns / 1e9) / spec.rates["bfloat16"] for operator in products]
    assert shares == pytest.approx([0.05, 0.07], abs=0.01)
    moved = [operator.bytes / (operator.time_ns / 1e9) / spec.bandwidth for operator in products]
    assert moved == pytest.approx([0.24, 0.32], abs=0.01)
    assert all("_align1" in operator.kernels[0] for operator in products)
    assert all(operator.inefficient and operator.limit == "memory" for operator in top)
    assert softmax.time_ns / 1e6 == pytest.approx(262, abs=1)
    assert sum(operator.time_ns for operator in products) / 1e6 == pytest.approx(229, abs=1)


def test_owlv2_what_is_efficient_is_called_so(owlv2):
    assert owlv2.source == "specification of NVIDIA H100 SXM x 0.80, 0.90" and owlv2.coverage > 0.99
    peak = accelerators.find("NVIDIA H100 80GB HBM3").rates["bfloat16"]
    large = [operator for operator in owlv2.operators if operator.name == "aten::addmm" and "5185" in operator.shapes]
    assert {round(operator.flops / (operator.time_ns / 1e9) / peak, 2) for operator in large} <= {
        share / 100 for share in range(52, 79)}
    assert not any(operator.inefficient for operator in large)
