"""The reference values of the real traces: to a tenth of a point, at the digits with which they are stated."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from saturate.records.analysis import Analysis
from saturate.trace.analyze import analyze
from saturate.trace.columns import Trace
from saturate.trace.observe import observations
from saturate.trace.read import read

#: Shares in percent; gap shares are of the idle time inside the span. "about": stated without decimals.
REFERENCE: dict[str, dict[str, Any]] = {
    "resnet50_v100_workers0": {
        "kernels": 8772, "span_ms": 996.5, "busy_of_span": 60.57, "busy_of_step": 56.02, "wait_raw": 39.6,
        "wait_exposed": 33.9, "about": {"input": 73, "host_late": 25}, "median_us": 2.0, "short": 62,
        "verdict": "input-bound"},
    "resnet50_v100_workers4": {
        "kernels": 8868, "span_ms": 801.6, "busy_of_span": 76.65, "busy_of_step": 72.39, "wait_raw": 1.0,
        "wait_exposed": 0.85, "about": {"host_late": 94}, "median_us": 2.0, "short": 63, "verdict": "host-bound"},
    "owlv2_h100": {
        "kernels": 4330, "span_ms": 1078.3, "busy_of_span": 52.56, "busy_of_step": 46.79, "wait_raw": 51.1,
        "wait_exposed": 51.1, "about": {"input": 96}, "median_us": 12.9, "short": 48, "verdict": "input-bound"},
    "ddp2_v100": {
        "kernels": 19370, "span_ms": 1733.0, "busy_of_span": 57.74, "busy_of_step": 57.58, "communication": 20.6,
        "overlap": 0.0, "about": {"host_late": 97}, "median_us": 8.0, "short": 51, "verdict": "host-bound"},
    "a100_ws16": {
        "kernels": 6080, "span_ms": 1231.5, "busy_of_span": 35.60, "busy_of_step": 35.51,
        "about": {"already_launched": 87}, "median_us": 4.0, "short": 88, "verdict": "device-wait-bound"},
    "ws128_rank0": {
        "kernels": 1154, "span_ms": 1222.8, "busy_of_span": 44.79, "busy_of_step": 44.5, "overlap": 15.0,
        "about": {"host_late": 54, "already_launched": 46}, "median_us": 21.0},
    "ws128_rank1": {
        "kernels": 1104, "span_ms": 1231.2, "busy_of_span": 47.11, "busy_of_step": 46.8, "overlap": 19.9,
        "median_us": 19.0},
    "sglang_decode_hipgraph": {
        "kernels": 555, "span_ms": 473.7, "busy_of_span": 2.06, "busy_of_step": None, "gap_late": 99.9,
        "verdict": "host-bound"},
}


@cache
def analyzed(folder: Path, name: str) -> tuple[Trace, Analysis]:
    trace = read(folder / f"{name}.json.gz")
    return trace, analyze([trace])


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_values(shared_traces: Path, name: str) -> None:
    trace, analysis = analyzed(shared_traces, name)
    expected, (device,) = REFERENCE[name], analysis.devices
    window_ns = device.step_ns or device.span_ns
    measured = {
        "busy_of_span": device.busy_of_span, "busy_of_step": device.busy_of_step, "wait_raw": device.data_wait.raw,
        "wait_exposed": device.data_wait.exposed, "overlap": device.communication_overlap,
        "communication": device.communication_ns / window_ns, "gap_late": device.gaps.host_late}
    for key, share in measured.items():
        if key in expected:
            stated = expected[key]
            assert share is None if stated is None else 100 * share == pytest.approx(stated, abs=0.1), key
    assert device.kernels == expected["kernels"]
    assert device.span_ns / 1e6 == pytest.approx(expected["span_ms"], abs=0.06)
    for cause, share in expected.get("about", {}).items():
        assert 100 * getattr(device.gaps, cause) == pytest.approx(share, abs=0.5), cause
    if "median_us" in expected:
        assert device.median_kernel_ns / 1e3 == pytest.approx(expected["median_us"], abs=0.05)
    if "short" in expected:
        assert 100 * device.short_kernels == pytest.approx(expected["short"], abs=0.5)
    if "verdict" in expected:
        assert device.verdict == analysis.verdict == expected["verdict"]
    parts = device.compute_ns, device.exposed_communication_ns, device.exposed_copy_ns, device.idle_ns
    assert sum(parts) == window_ns
    assert sum(device.gap_ns.values()) == device.span_ns - round(device.busy_of_span * device.span_ns)
    assert observations(trace, device).steps == device.steps


@pytest.mark.parametrize("name, sm_fill_of_step, occupancy", [
    ("owlv2_h100", 0.449, 0.5787), ("resnet50_v100_workers0", 0.5468, 0.4913)])
def test_occupancy_agrees_with_the_tensorboard_plugin(shared_traces: Path, name: str, sm_fill_of_step: float,
                                                      occupancy: float) -> None:
    """To a point: it left the last step out, and took Kineto's estimate, 0 for kernels of much shared memory."""
    full = analyzed(shared_traces, name)[1].devices[0].occupancy
    assert full.sm_fill_of_step == pytest.approx(sm_fill_of_step, abs=0.01)
    assert full.occupancy == pytest.approx(occupancy, abs=0.01)


def test_a_graph_replay_abstains_on_occupancy_and_operators(shared_traces: Path) -> None:
    _, analysis = analyzed(shared_traces, "sglang_decode_hipgraph")
    device = analysis.devices[0]
    assert device.occupancy.sm_fill is None and "grid" in device.unknown["occupancy.sm_fill"]
    assert device.roofline.coverage is None and "graph" in device.unknown["roofline"]
    assert {problem.id for problem in analysis.integrity.problems} == {"graph-replay", "no-steps"}
    assert device.step_ns is None and "ProfilerStep" in device.unknown["step_ns"]


def test_a_trace_without_accelerator_events_says_so(shared_traces: Path) -> None:
    _, analysis = analyzed(shared_traces, "cpu_only")
    assert "no-accelerator" in {problem.id for problem in analysis.integrity.problems}
    device = analysis.devices[0]
    assert (device.id, device.kernels, device.gaps.input, device.communication_overlap) == (-1, 0, None, 0.0)


def test_damage_that_is_not_there_is_not_reported(shared_traces: Path) -> None:
    """Whole microseconds make 7 % of the events read 0: the busy time is as exact as the clock, and is printed."""
    for name in ("resnet50_v100_workers0", "resnet50_v100_workers4", "owlv2_h100", "ddp2_v100", "a100_ws16"):
        assert analyzed(shared_traces, name)[1].integrity.ok


def test_more_workers_shorten_the_step_by_the_wait(shared_traces: Path) -> None:
    one, four = (analyzed(shared_traces, f"resnet50_v100_workers{number}")[1].devices[0] for number in (0, 4))
    gained = 1 - four.step_ns / one.step_ns * (one.steps / four.steps)
    assert 0 < gained < one.data_wait.exposed, "what was exposed bounds what it gave"


def test_ranks_together(shared_traces: Path) -> None:
    traces = [read(shared_traces / f"ws128_rank{rank}.json.gz") for rank in (0, 1)]
    analysis = analyze(iter(traces))
    assert [device.rank for device in analysis.devices] == [0, 1]
    assert [Path(source).name for source in analysis.sources] == ["ws128_rank0.json.gz", "ws128_rank1.json.gz"]


def test_two_processes_of_nsight_systems(shared_traces: Path) -> None:
    """44.8 ms of kernels (and 0.03 of memsets) on two devices together; the rest of the busy time is copies."""
    analysis = analyze([read(shared_traces / "nsys_h100_2gpu.sqlite")])
    assert sum(device.kernels for device in analysis.devices) == 3442
    assert sum(device.compute_ns for device in analysis.devices) / 1e6 == pytest.approx(44.83 + 0.03, abs=0.005)
    assert [device.span_ns // 10**6 for device in analysis.devices] == [969, 969]
    assert [problem.id for problem in analysis.integrity.problems] == ["launched-before-recording", "no-steps"]
    assert {device.verdict for device in analysis.devices} == {"unknown"}


def test_a_tiny_triton_trace(shared_traces: Path) -> None:
    _, analysis = analyzed(shared_traces, "torch_compile_triton")
    assert analysis.devices[0].kernels == 12 and analysis.devices[0].busy_of_span > 0.99
