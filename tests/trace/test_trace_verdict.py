"""The one word."""

from __future__ import annotations

import pytest

from saturate.records.analysis import Operator, Roofline
from saturate.trace.verdict import verdict

NOTHING = Roofline(coverage=None, operators=[])


def modelled(coverage: float, **times: int) -> Roofline:
    return Roofline(coverage=coverage, operators=[
        Operator(name=limit, shapes="", dtypes="", calls=1, kernels=[], time_ns=ns, flops=1, bytes=1, limit=limit)
        for limit, ns in times.items()])


@pytest.mark.parametrize("roofline, expected", [
    (modelled(0.6, compute=50, memory=40, latency=10), "compute-bound"),
    (modelled(0.6, compute=40, memory=50, latency=10), "memory-bound"),
    (modelled(0.6, compute=40, memory=40, latency=20), "unknown"),
    (modelled(0.59, compute=100), "unknown"),
    (NOTHING, "unknown"),
])
def test_a_busy_device_is_limited_by_what_its_operators_are(roofline: Roofline, expected: str) -> None:
    """And never called host-bound for the few per cent that remain."""
    limit, reason = verdict(100, 85, {"host-bound": 15}, {}, roofline)
    assert limit == expected and bool(reason) == (expected == "unknown")


def test_operators_that_are_little_more_than_their_call_argue_for_who_calls_them() -> None:
    calls = modelled(0.6, compute=30, memory=20, latency=50)
    assert verdict(100, 85, {}, {}, calls, "host-bound") == ("host-bound", "")
    assert verdict(100, 85, {}, {}, calls)[0] == "unknown"


@pytest.mark.parametrize("losses, other, expected", [
    ({"input-bound": 10, "host-bound": 6}, 0, "input-bound"),
    ({"input-bound": 6, "communication-bound": 10}, 0, "communication-bound"),
    ({"sync-bound": 10, "device-wait-bound": 6}, 0, "sync-bound"),
    ({"sync-bound": 6, "device-wait-bound": 10}, 0, "device-wait-bound"),
    ({"host-bound": 10}, 9, "host-bound"),
    ({"host-bound": 10}, 10, "unknown"),
    ({}, 0, "unknown"),
])
def test_else_the_largest_loss(losses, other: int, expected: str) -> None:
    limit, reason = verdict(100, 84, losses, {"copies": other}, modelled(1.0, compute=100))
    assert limit == expected and bool(reason) == (expected == "unknown")


def test_what_has_no_limit_of_its_own_is_named() -> None:
    others = {"copies that no computation hides": 50, "idle time of unknown cause": 0}
    assert verdict(100, 43, {"host-bound": 7}, others, NOTHING) == (
        "unknown", "no limit is named for the largest loss: copies that no computation hides (50% of the window)")


def test_no_time_at_all() -> None:
    assert verdict(0, 0, {}, {}, NOTHING)[0] == "unknown"
