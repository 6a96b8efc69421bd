"""Whatever a reader may hand over, analysis answers, and its answer adds up."""

from __future__ import annotations

from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traces import V100, Recording

from saturate.records.analysis import Analysis
from saturate.trace import intervals
from saturate.trace.analyze import analyze
from saturate.trace.columns import Trace
from saturate.trace.observe import observations

times = st.integers(0, 300)
sizes = st.integers(-5, 60)         # a negative duration is damage that readers may pass on
threads = st.sampled_from(["1/1", "1/2", "2/1"])
correlations = st.sampled_from([None, -1, 0, 1, 2, 3, 2**40])
numbers = st.sampled_from([-1, 0, 1, 256, 10**6])
kernels = st.fixed_dictionaries({
    "kind": st.sampled_from(["kernel", "copy", "memset"]), "start": times, "size": sizes,
    "launched": st.none() | times,
    "name": st.sampled_from(["gemm", "ncclDevKernel_AllReduce", "Memcpy HtoD (Pageable -> Device)", "triton_", "",
                             "<(", "\x1b["]),
    "columns": st.fixed_dictionaries({}, optional={
        "device": st.sampled_from([0, 1, 7]), "pid": st.sampled_from([-1, 1, 2]),
        "stream": st.sampled_from([-1, 7, 9]), "graph": st.sampled_from([0, 1]), "blocks": numbers,
        "threads": numbers, "registers": numbers, "bytes": numbers, "shared_bytes": numbers,
        "correlation": correlations})})
host = st.tuples(
    st.sampled_from(["operator", "call", "annotation"]), times, sizes, threads, st.sampled_from([
        "ProfilerStep#1", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "aten::item", "aten::mm",
        "aten::_softmax", "c10d::allreduce_", "cudaLaunchKernel", "cudaGraphLaunch", "cudaStreamSynchronize",
        "cudaStreamBeginCapture",
        "Optimizer.step#SGD.step", "autograd::engine::evaluate_function: X", "Buffer Flush", "aten::_foreach_add_",
        ""]),
    st.sampled_from([None, (), ((),), ((4, 4), (4, 4)), (((2,), (3,)), ()), ("odd",), ((4, -1), (0,))]))
problems = st.lists(st.sampled_from([("truncated", "cut"), ("lost-records", "lost"), ("odd", "")]), max_size=1)


def recorded(device: list[dict[str, Any]], rows: list[tuple[Any, ...]], facts: bool) -> Trace:
    made = Recording(*[V100] if facts else [])
    for row in device:
        place = {"launched": row["launched"], **row["columns"]}
        bounds = row["start"], row["start"] + row["size"]
        if row["kind"] == "memset":
            made.memset(*bounds, **place)
        else:
            (made.kernel if row["kind"] == "kernel" else made.copy)(row["name"], *bounds, **place)
    for kind, start, size, thread, name, dims in rows:
        if kind == "operator":
            made.operator(name, start, start + size, thread, dims=dims, types=("float", "float"))
        else:
            getattr(made, kind)(name, start, start + size, thread)
    return made.trace()


def shares(record: Any) -> list[float]:
    found = []
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, float):
            found.append(value)
        elif isinstance(value, msgspec.Struct) and name != "roofline":
            found += shares(value)
    return found


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(kernels, max_size=12), st.lists(host, max_size=12), st.booleans(), problems)
def test_any_trace(device: list[dict[str, Any]], rows: list[tuple[Any, ...]], facts: bool,
                   found: list[tuple[str, str]]) -> None:
    trace = recorded(device, rows, facts)
    trace.problems.extend(found)
    analysis = analyze([trace])
    assert msgspec.json.decode(msgspec.json.encode(analysis), type=Analysis) == analysis
    with mock.patch.object(intervals, "AT_ONCE", 2):
        in_parts = analyze([trace])
    for one, other in zip(analysis.devices, in_parts.devices, strict=True):
        assert one == msgspec.structs.replace(other, occupancy=one.occupancy)       # of sums of floats, their order
        assert shares(other.occupancy) == pytest.approx(shares(one.occupancy))
    assert analysis.integrity.ok == (not any(problem.blocks for problem in analysis.integrity.problems))
    for one in analysis.devices:
        parts = one.compute_ns, one.exposed_communication_ns, one.exposed_copy_ns, one.idle_ns
        whole = one.step_ns if one.steps else one.span_ns
        if None not in parts and whole is not None:         # how long the steps took may be blocked by itself
            assert sum(parts) == whole
        assert all(0.0 <= share <= 1.0 + 1e-12 for share in shares(one))
        missing = [name for name in one.__struct_fields__ if getattr(one, name) is None and name != "rank"]
        assert set(missing) <= set(one.unknown), "what is missing has a reason"
        for each in one.roofline.operators if one.roofline else ():
            assert {name for name in each.__struct_fields__ if getattr(each, name) is None} == set(each.unknown)
            assert all(each.unknown.values())
        seen = observations(trace, one)
        assert seen.integrity_blocks <= {block for problem in analysis.integrity.problems for block in problem.blocks}
        for share in (seen.busy, seen.input_wait, seen.sync_idle, seen.device_wait, seen.overhead,
                      seen.kernels.host_late):
            assert share is None or 0.0 <= share <= 1.0 + 1e-12
