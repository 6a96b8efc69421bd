"""Two processes in one file: each counts its correlation ids from 1, so the ids alone do not tell whose a kernel is."""

from __future__ import annotations

from typing import Any

import pytest
from kineto_text import call, document, event, kernel, step, write

from saturate.trace.analyze import analyze_one
from saturate.trace.columns import Trace
from saturate.trace.kineto import read

STEPS = 20
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def recorded(process: int, wait: int, *, external: int = 0, first: int = 1, by: str = "cudaLaunchKernel") -> list[dict[str, Any]]:
    """One training of 1 ms a step on a device of its own, that waits `wait` us for its loader."""
    found = []
    for number in range(STEPS):
        at, own = 1000 * number, external and external + number
        found += [{**one, "pid": process, "tid": process} for one in (
            step(number, at, 1000), event("user_annotation", LOADER, at, wait),
            call(by, at + wait + 10, 5, first + number, own))]
        found.append(kernel("gemm", at + wait + 20, 980 - wait, first + number, own, device=process - 7))
    return found


@pytest.fixture
def reading(tmp_path):
    return lambda events: read(write(tmp_path / "trace.json", document(events)))


def told(trace: Trace) -> dict[int, set[int]]:
    return {device: set(trace.gpu.pid[trace.gpu.device == device].tolist()) for device in (0, 1)}


@pytest.mark.parametrize("by", ["cudaLaunchKernel", "hipLaunchByPtr"])
def test_neither_is_taken_for_the_other(reading, by):
    trace = reading([*recorded(7, 1), *recorded(8, 600, by=by)])
    assert told(trace) == {0: {-1}, 1: {-1}}
    found = analyze_one(trace)
    problems = {problem.id for problem in found.integrity.problems}
    assert not found.integrity.ok and {"duplicate-ids", "unmatched-kernels"} <= problems and "lost-records" not in problems
    for device in found.devices:
        assert device.verdict == "unknown" and device.data_wait.raw is None and device.step_ns is None
        assert "several processes" in device.unknown["data_wait"]
        assert device.compute_ns, "what ran is known"


def test_the_external_id_decides(reading):
    trace = reading([*recorded(7, 1, external=100), *recorded(8, 600, external=900)])
    assert told(trace) == {0: {7}, 1: {8}}
    found = analyze_one(trace)
    assert found.integrity.ok and [device.verdict for device in found.devices][1] == "input-bound"


def test_the_device_decides(reading):
    """Where some of its events have ids of one process alone."""
    trace = reading([*recorded(7, 1), *recorded(8, 600, first=5)])
    assert told(trace) == {0: {7}, 1: {8}}
    assert [device.data_wait.raw for device in analyze_one(trace).devices] == [0.001, 0.6]


def test_a_device_that_may_be_of_all_decides_nothing(reading):
    """Both processes call their GPU 0, and only the one with more calls has ids that the other has not."""
    trace = reading([{**one, "args": {**one["args"], "device": 0}} if one.get("cat") == "kernel" else one
                     for one in (*recorded(7, 1), *recorded(8, 600), *recorded(8, 600, first=STEPS + 1))])
    assert trace.gpu.device.tolist() == [0] * 3 * STEPS
    assert sorted(trace.gpu.pid.tolist()) == [-1] * 2 * STEPS + [8] * STEPS


def test_a_process_that_may_be_on_the_device_too_leaves_it_open(reading):
    """Process 8 has ids of its own on device 1; nothing tells where process 7 is, which has the same ids elsewhere."""
    trace = reading([*recorded(7, 1), *recorded(8, 600), *recorded(8, 600, first=STEPS + 1)])
    assert told(trace) == {0: {-1}, 1: {-1, 8}}


def test_ids_apart_need_no_decision(reading):
    assert told(reading([*recorded(7, 1), *recorded(8, 600, first=500)])) == {0: {7}, 1: {8}}
