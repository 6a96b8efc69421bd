"""The limit of a workload as a whole."""

from __future__ import annotations

import pytest
from rule_cases import base, but, on_cpu

from saturate.findings._registry import verdict
from saturate.records.observations import OperatorSeen, SyncSeen

WAITS = {
    "input-bound": {"input_wait": 0.3},
    "communication-bound": {"communication__exposed": 0.3},
    "sync-bound": {"sync_idle": 0.3},
    "host-bound": {"kernels__host_late": 0.3},
    "device-wait-bound": {"device_wait": 0.3},
}


def operators(**shares: float) -> tuple[OperatorSeen, ...]:
    return tuple(
        OperatorSeen("aten::x", share=share, limit=None if kind == "unmodelled" else kind)
        for kind, share in shares.items()
    )


@pytest.mark.parametrize("limit", WAITS)
def test_the_largest_wait_names_the_limit(limit):
    others = base(
        busy=0.5, input_wait=0.1, sync_idle=0.1, device_wait=0.1, communication__exposed=0.1, kernels__host_late=0.1
    )
    assert verdict(but(others, **WAITS[limit])) == limit


def test_small_waits_and_no_waits_name_nothing():
    assert verdict(base(busy=0.5, input_wait=0.0499)) == "unknown"
    assert verdict(base(busy=0.5, input_wait=0.05)) == "input-bound"
    assert verdict(base()) == "unknown"
    assert verdict(base(input_wait=1.2)) == "unknown"


def test_copies_are_no_computation_and_have_no_limit_of_their_own():
    assert verdict(base(busy=0.95, copies__exposed=0.5, operators=operators(compute=0.45))) == "unknown"
    assert verdict(base(busy=0.9, copies__exposed=0.5, kernels__host_late=0.1)) == "unknown"
    assert verdict(base(busy=0.6, copies__exposed=0.1, kernels__host_late=0.4)) == "host-bound"


def test_idle_time_of_unknown_cause_is_not_laid_to_the_largest_cause_that_is_known():
    assert verdict(base(busy=0.5, unattributed=0.4, kernels__host_late=0.1)) == "unknown"
    assert verdict(base(busy=0.5, unattributed=0.1, kernels__host_late=0.4)) == "host-bound"


@pytest.mark.parametrize(
    ("shares", "limit"),
    [
        ({"memory": 0.5, "compute": 0.3}, "memory-bound"),
        ({"memory": 0.3, "compute": 0.5}, "compute-bound"),
        ({"memory": 0.3, "compute": 0.3, "latency": 0.3}, "unknown"),
        ({"compute": 0.5, "unmodelled": 0.4}, "unknown"),
        ({"compute": 0.55, "unmodelled": 0.35}, "compute-bound"),
    ],
)
def test_a_busy_device_is_limited_by_its_work(shares, limit):
    assert verdict(base(busy=0.9, operators=operators(**shares))) == limit


def test_operators_of_a_cpu_that_have_nothing_to_do_are_the_hosts_calls():
    calls = operators(latency=0.5, memory=0.3)
    assert verdict(base(device="cpu", busy=0.9, operators=calls)) == "host-bound"
    assert verdict(base(busy=0.9, operators=calls)) == "unknown"


def test_the_thresholds_are_where_they_are():
    work = operators(compute=0.85)
    for busy, limit in ((0.85, "compute-bound"), (0.8499, "input-bound")):
        assert verdict(base(busy=busy, operators=work, input_wait=0.1)) == limit
    for share, limit in ((0.5625, "compute-bound"), (0.55, "unknown")):  # of 0.9375 busy, 0.60 or less is modelled
        assert verdict(base(busy=0.9375, operators=operators(compute=share))) == limit
    assert verdict(base(busy=0.9, operators=operators(compute=0.4, memory=0.4))) == "compute-bound"
    assert verdict(base(busy=0.9, operators=operators(latency=0.4, memory=0.4))) == "memory-bound"
    assert verdict(base(steps=1, input_wait=0.3)) == "input-bound"


def test_communication_is_not_work():
    work = operators(compute=0.6)
    assert verdict(base(busy=0.9, operators=work, communication__exposed=0.04)) == "compute-bound"
    assert verdict(base(busy=0.9, operators=work, communication__exposed=0.3)) == "communication-bound"


def test_the_verdict_of_the_trace_stands_on_an_accelerator():
    assert verdict(base(limit="memory-bound", input_wait=0.9)) == "memory-bound"
    assert verdict(base(limit="nonsense", input_wait=0.9)) == "input-bound"
    assert verdict(base(limit="memory-bound", steps=0)) == "memory-bound"
    assert verdict(base(steps=0, input_wait=0.9)) == "unknown"


@pytest.mark.parametrize("conclusion", ["busy", "gaps"])
def test_what_the_trace_cannot_carry_is_not_concluded_from_the_rest(conclusion):
    blocked = {"integrity_blocks": frozenset({conclusion})}
    assert verdict(base(input_wait=0.9, **blocked)) == "unknown"
    assert verdict(on_cpu(busy=0.5, overhead=0.4, **blocked)) == "unknown"
    assert verdict(on_cpu(busy=0.5, overhead=0.4, integrity_blocks=frozenset({"occupancy"}))) == "host-bound"


def test_on_a_cpu_reads_and_overhead_are_waits():
    reads = (SyncSeen("train.py:9", "Tensor.item", 100.0, 30.0),)
    assert verdict(on_cpu(busy=0.9, syncs=reads, overhead=0.1)) == "sync-bound"
    assert verdict(on_cpu(busy=0.5, overhead=0.4, syncs=reads)) == "host-bound"
    lists = (SyncSeen("train.py:7", "Tensor.tolist", 1.0, 60.0),)      # which no operator is around
    assert verdict(on_cpu(busy=0.1, overhead=0.9, syncs=lists)) == "sync-bound"
    assert verdict(on_cpu(busy=0.1, overhead=0.9, syncs=lists, step_ms=200.0, step_ms_recorded=100.0)) == "sync-bound"
    assert verdict(on_cpu(busy=0.1, overhead=0.9, syncs=lists, step_ms=200.0)) == "host-bound"
    assert verdict(on_cpu(busy=0.5, overhead=0.2, input_wait=0.3)) == "input-bound"
    assert verdict(on_cpu(busy=0.9, overhead=0.95, communication__exposed=0.85)) == "communication-bound"
    assert verdict(on_cpu(busy=0.95, overhead=0.02, compiler__compile_share=0.9)) == "host-bound"
    assert verdict(on_cpu(busy=0.5, overhead=0.02, gc_pause=0.4)) == "host-bound"
    # A trace alone takes reads for work; what was observed comes first, and the trace where that says nothing.
    assert verdict(on_cpu(busy=0.9, syncs=reads, limit="compute-bound")) == "sync-bound"
    assert verdict(on_cpu(limit="compute-bound")) == "compute-bound"
