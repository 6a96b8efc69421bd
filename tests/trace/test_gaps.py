"""Each cause of a gap, planted; and nothing idle is left without a class."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from traces import V100, Recording

from saturate.trace.breakdown import communication, work
from saturate.trace.columns import Trace
from saturate.trace.gaps import CLASSES, Causes, edges, gaps
from saturate.trace.intervals import length, subtract
from saturate.trace.launches import launching_calls
from saturate.trace.windows import loader, window


def explained(trace: Trace, *, outside: bool = False) -> Causes:
    launches = launching_calls(trace)
    here = window(trace, 0)
    done = work(trace, 0, here, communication(trace, launches))
    return (edges if outside else gaps)(trace, done, here, launches, loader(trace, here))


def causes(trace: Trace, *, outside: bool = False) -> list[tuple[str, int]]:
    found = explained(trace, outside=outside)
    return [(CLASSES[cause], int(end - start)) for cause, start, end in zip(found.cause, *found.where)]


def two_kernels(launched: int | None, **columns: object) -> Recording:
    """A gap from 100 to 200."""
    made = Recording(V100)
    made.step(0, 300)
    made.kernel("first", 50, 100, launched=40)
    made.kernel("second", 200, 300, launched=launched, **columns)
    return made


def test_host_late() -> None:
    assert causes(two_kernels(190).trace()) == [("host_late", 100)]


def test_already_launched() -> None:
    assert causes(two_kernels(100).trace()) == [("already_launched", 100)]
    assert causes(two_kernels(101).trace()) == [("host_late", 100)], "one nanosecond later it was the host"


def test_no_known_launch() -> None:
    assert causes(two_kernels(None).trace()) == [("unattributed", 100)]


def test_input_comes_first() -> None:
    """Half of the gap in the loader is enough; less is not."""
    half, less, queued = two_kernels(190), two_kernels(190), two_kernels(90)
    half.loader(120, 170)
    less.loader(120, 169)
    queued.loader(100, 200)
    assert causes(half.trace()) == [("input", 100)]
    assert causes(less.trace()) == [("host_late", 100)]
    assert causes(queued.trace()) == [("input", 100)]
    other = two_kernels(190)
    other.loader(100, 200, thread="1/9")
    assert causes(other.trace()) == [("host_late", 100)], "a loader of another thread explains nothing"


def test_sync() -> None:
    """Half of the time up to the launch (not of the gap) spent waiting, by the launching or the training thread."""
    made = two_kernels(180)
    made.call("cudaStreamSynchronize", 60, 140)
    assert causes(made.trace()) == [("sync", 100)]
    short = two_kernels(180)
    short.call("cudaStreamSynchronize", 60, 139)
    assert causes(short.trace()) == [("host_late", 100)]
    elsewhere = two_kernels(180)
    elsewhere.call("cudaEventSynchronize", 60, 180, thread="1/9")       # a pinning thread
    assert causes(elsewhere.trace()) == [("host_late", 100)]
    backward = two_kernels(180, thread="1/2")                           # launched by the autograd thread
    backward.call("cudaStreamSynchronize", 60, 170)
    assert causes(backward.trace()) == [("sync", 100)]


def test_an_event_wait_on_the_device_is_no_host_sync() -> None:
    made = two_kernels(180)
    made.call("cudaStreamWaitEvent", 60, 180)
    assert causes(made.trace()) == [("host_late", 100)]


def test_a_copy_to_pageable_memory_waits_and_one_to_pinned_does_not() -> None:
    for memory, expected in (("Pageable", "sync"), ("Pinned", "host_late")):
        made = two_kernels(180)
        copy = made.call("cudaMemcpyAsync", 90, 170)
        made.copy(f"Memcpy DtoH (Device -> {memory})", 95, 100, correlation=copy)
        assert causes(made.trace()) == [(expected, 100)]


def test_item_waits_only_where_something_in_it_does() -> None:
    on_cpu, on_device = two_kernels(180), two_kernels(180)
    on_cpu.operator("aten::item", 100, 175)
    on_cpu.call("cudaStreamSynchronize", 10, 20)
    on_device.operator("aten::item", 100, 175)
    on_device.call("cudaStreamSynchronize", 110, 120)
    assert causes(on_cpu.trace()) == [("host_late", 100)]
    assert causes(on_device.trace()) == [("sync", 100)]


def test_a_graphs_kernels_belong_to_its_launch() -> None:
    made = Recording(V100)
    graph = made.call("cudaGraphLaunch", 10, 20)
    for start in (30, 60, 90):
        made.kernel("replayed", start, start + 10, correlation=graph, graph=1)
    made.kernel("after", 300, 310, launched=290)
    assert causes(made.trace()) == [("already_launched", 20), ("already_launched", 20), ("host_late", 200)]


def test_the_steps_head_and_tail_are_told_apart() -> None:
    made = Recording(V100)
    made.step(0, 1000)
    made.loader(0, 60)
    made.kernel("first", 100, 200, launched=90)
    made.kernel("last", 250, 300, launched=110)
    assert causes(made.trace()) == [("already_launched", 50)]
    assert causes(made.trace(), outside=True) == [("input", 100), ("host_late", 700)]
    made.call("cudaDeviceSynchronize", 300, 700)
    assert causes(made.trace(), outside=True) == [("input", 100), ("sync", 700)]


rows = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 30), st.integers(0, 2), st.integers(-1, 400)),
                min_size=1, max_size=20)
spans = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 60)), max_size=4)


@settings(deadline=None)
@given(rows, spans, spans, spans)
def test_all_idle_time_has_one_class(kernels, steps, waits, syncs) -> None:
    made = Recording(V100)
    for start, size, stream, launched in kernels:
        made.kernel("k", start, start + size, stream=stream, launched=None if launched < 0 else launched)
    for start, size in steps:
        made.step(start, start + size)
    for start, size in waits:
        made.loader(start, start + size)
    for start, size in syncs:
        made.call("cudaDeviceSynchronize", start, start + size)
    trace = made.trace()
    here = window(trace, 0)
    done = work(trace, 0, here, communication(trace, launching_calls(trace)))
    inner, outer = explained(trace), explained(trace, outside=True)
    assert sum(inner.total_ns().values()) == length(subtract(here.span, done.busy))
    assert sum(outer.total_ns().values()) == length(subtract(here.steps, here.span))
    idle = length(subtract(here.steps, done.busy))
    assert sum(inner.total_ns(here.steps).values()) + sum(outer.total_ns().values()) == idle
