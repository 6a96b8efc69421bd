"""What the project recorded itself on an H200 (torch 2.11, bench/record_gpu_traces.py): one bottleneck each, and one with none."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from nulls import unreasoned

from saturate.findings import _registry
from saturate.records.analysis import Device, Finding
from saturate.trace.analyze import analyze_one
from saturate.trace.observe import observations
from saturate.trace.read import read

FOLDER = Path(__file__).parent / "h200"


def analysed(name: str) -> tuple[Device, list[Finding]]:
    trace = read(FOLDER / f"{name}.json.gz")
    device = analyze_one(trace).devices[0]
    return device, _registry.detect(observations(trace, device), frozenset())


@pytest.mark.parametrize(("name", "verdict", "first", "bound"), [
    ("fp32", "compute-bound", "fp32-matmul", 9.4),          # 95 % of the step, at 1/10 of the rate of 16 bits
    ("odd", "compute-bound", "unaligned-shapes", 3.9),
    ("pageable", "unknown", "pageable-copies", 12.2),
    ("launchbound", "host-bound", "launch-bound", 9.1),
    ("eager", "host-bound", "eager-attention", 2.3),
    ("tf32", "compute-bound", "host-syncs", 1.05),          # the loss is read in each step, of 5.7 ms; no product is in fp32
])
def test_what_was_planted_comes_first(name: str, verdict: str, first: str, bound: float) -> None:
    device, findings = analysed(name)
    assert (device.steps, device.verdict) == (3, verdict)
    assert findings[0].id == first and findings[0].bound == pytest.approx(bound, rel=0.02)
    assert name == "fp32" or "fp32-matmul" not in [finding.id for finding in findings]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json.gz")), ids=lambda path: path.name.partition(".")[0])
def test_what_is_not_known_has_a_reason_beside_it(path: Path) -> None:
    record = msgspec.to_builtins(analyze_one(read(path)))
    assert unreasoned(record) == set()
    busy = record["devices"][0]
    busy["busy_of_step"], busy["gaps"]["sync"] = None, None         # and one that has none is seen
    busy["unknown"].pop("busy_of_step", None)
    assert "devices.busy_of_step" in unreasoned(record) and unreasoned(record) <= {"devices.busy_of_step", "devices.gaps.sync"}


def test_where_nothing_is_wrong_nothing_is_found() -> None:
    """The host queues four steps in the time of half of one."""
    device, findings = analysed("clean")
    assert findings == [] and (device.verdict, device.steps) == ("compute-bound", 0) and "step_ns" in device.unknown
    assert device.busy_of_span is not None and device.busy_of_span > 0.99
    products = [one for one in device.roofline.operators if one.name in ("aten::mm", "aten::addmm")]
    assert products and all(one.limit == "compute" and 0.85 < one.efficiency < 1.0 for one in products)
