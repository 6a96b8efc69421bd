"""What a long trace takes: columns as narrow as their values, and joins whose memory does not grow with all operators."""

from __future__ import annotations

import tracemalloc
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from saturate.trace import intervals
from saturate.trace._kineto_columns import Table
from saturate.trace.analyze import analyze_one
from saturate.trace.columns import DeviceInfo, GpuEvents, HostEvents, Signature, Trace
from saturate.trace.nesting import innermost
from saturate.trace.observe import observations


def filled(*batches: dict[str, list[int]]) -> dict[str, np.ndarray]:
    table = Table()
    for batch in batches:
        rows = len(next(iter(batch.values())))
        table.add({"start": np.arange(rows), **{name: np.array(values) for name, values in batch.items()}})
    return table.columns()


def test_ids_take_as_little_as_they_need():
    small = filled({"name": [1, 100], "tid": [0, 1], "shapes": [-1, 5], "device": [0, 7], "stream": [7, 7], "correlation": [1, 2]})
    assert {name: column.dtype.itemsize for name, column in small.items()} == {
        "start": 8, "name": 1, "tid": 1, "shapes": 1, "device": 1, "stream": 1, "correlation": 4}


def test_ids_that_outgrow_their_column_stay_what_they_are():
    found = filled({"name": [1, 100]}, {"name": [300, 2]}, {"name": [70_000, 3]})
    assert found["name"].dtype == "i4" and sorted(found["name"].tolist()) == [1, 2, 3, 100, 300, 70_000]
    wide = filled({"stream": [7]}, {"stream": [2**40]}, {"device": [0], "stream": [5]} | {"device": [0]})
    assert wide["stream"].dtype == "i8" and sorted(wide["stream"].tolist()) == [5, 7, 2**40]
    assert filled({"device": [3]}, {"device": [2**40]})["device"].tolist() == [3, -1]  # no device has such a number


def nested(lengths: list[tuple[int, int, int]]) -> HostEvents:
    """Spans of two threads that nest properly, by start."""
    rows = []
    clock = [0, 0]
    for thread, outer, inner in lengths:
        start = clock[thread]
        rows.append((start, start + 3 * outer, thread))
        rows += [(start + k * outer, start + k * outer + min(inner, outer), thread) for k in range(3)]
        clock[thread] = start + 3 * outer + 1
    rows.sort(key=lambda row: (row[0], -row[1]))
    start, end, thread = (np.array(column, "i8") for column in zip(*rows))
    return HostEvents(start=start, end=end, tid=thread)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 1), st.integers(2, 9), st.integers(1, 9)), min_size=1, max_size=12),
    times=st.lists(st.tuples(st.integers(0, 1), st.integers(-1, 200)), min_size=1, max_size=30),
    at_once=st.integers(1, 4),
)
def test_the_innermost_is_found_however_many_times_are_asked_for_at_once(lengths, times, at_once):
    events = nested(lengths)
    rows = np.arange(len(events.start), dtype="i4")
    thread, time = np.array([t for t, _ in times]), np.array([t for _, t in times], "i8")
    with mock.patch.object(intervals, "AT_ONCE", at_once):
        found = innermost(events, rows, thread, time)
    for row, of, moment in zip(found.tolist(), thread, time):
        around = np.flatnonzero((events.tid == of) & (events.start <= moment) & (moment < events.end))
        length = (events.end - events.start)[around]
        assert (row == -1) == (len(around) == 0)
        assert row == -1 or (row in around and events.end[row] - events.start[row] == length.min())


def long_trace(kernels: int) -> Trace:
    """Two operators around each launch of a kernel; every second one recorded its shapes."""
    at = np.arange(kernels, dtype="i8") * 10_000

    def host(start, end, **given):
        absent = {name: np.broadcast_to(np.int32(-1), len(start)) for name in ("correlation", "external", "shapes")}
        return HostEvents(start=start, end=end, pid=np.broadcast_to(np.int64(1), len(start)), tid=np.zeros(len(start), "i1"),
                          **{**absent, **given})

    ids = np.arange(1, kernels + 1, dtype="i4")
    outer = np.repeat(at, 2)
    steps = at[:: kernels // 100]
    return Trace(
        source="long.json", kind="kineto", names=["gemm", "cudaLaunchKernel", "aten::mm", "aten::linear", "ProfilerStep#1"],
        threads=["1/1"], signatures=[Signature(((64, 64), (64, 64)), ("float", "float"), ((64, 1), (64, 1)), ())],
        devices={0: DeviceInfo(0, "NVIDIA H100 80GB HBM3", 132, 2048, 80 << 30, (9, 0), 233472, 65536)},
        gpu=GpuEvents(
            start=at + 3000, end=at + 8000, kind=np.zeros(kernels, "i1"), name=np.zeros(kernels, "i1"), device=np.zeros(kernels, "i1"),
            stream=np.full(kernels, 7, "i1"), correlation=ids, external=np.full(kernels, -1, "i4"), bytes=np.full(kernels, -1, "i4"),
            blocks=np.full(kernels, 64, "i4"), threads=np.full(kernels, 128, "i4"), blocks_per_sm=np.full(kernels, 0.5, "f4"),
            occupancy=np.full(kernels, 0.5, "f4"), registers=np.full(kernels, 32, "i4"), shared_bytes=np.zeros(kernels, "i4"),
            graph=np.zeros(kernels, "i1"), pid=np.broadcast_to(np.int64(1), kernels)),
        calls=host(at + 500, at + 900, name=np.full(kernels, 1, "i1"), correlation=ids),
        operators=host(outer + np.tile([0, 200], kernels), outer + np.tile([2000, 1500], kernels),
                       name=np.tile(np.array([3, 2], "i1"), kernels), shapes=np.tile(np.array([0, -1], "i1"), kernels)),
        annotations=host(steps, np.append(steps[1:], at[-1] + 10_000), name=np.full(len(steps), 4, "i1")))


def test_what_an_analysis_takes_beside_the_columns():
    """Bytes per kernel at the peak, which do not grow with what is joined at once."""
    analyze_one(long_trace(1000))       # what is imported and compiled once is not counted
    kernels = 60_000
    trace = long_trace(kernels)
    with mock.patch.object(intervals, "AT_ONCE", 3000):
        tracemalloc.start()
        try:
            analysis = analyze_one(trace)
            of_analysis = tracemalloc.get_traced_memory()[1]
            tracemalloc.reset_peak()
            observations(trace, analysis.devices[0])
            of_rules = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert analysis.devices[0].kernels == kernels and analysis.devices[0].roofline.operators[0].name == "aten::linear"
    assert of_analysis < 185 * kernels and of_rules < 145 * kernels, (of_analysis / kernels, of_rules / kernels)
