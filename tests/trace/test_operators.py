"""Kernels find their operators, and every nanosecond of them is somewhere."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from traces import V100, Recording

from saturate.trace import patterns
from saturate.trace.columns import HostEvents
from saturate.trace.nesting import nest
from saturate.trace.operators import DELEGATED, NO_OPERATOR, NO_SHAPES, REPLAYED, operators
from saturate.trace.windows import CPU, window

F32 = "float"
MATRICES = {"dims": ((64, 32), (32, 16)), "types": (F32, F32)}
MM = 2 * 64 * 32 * 16


def by_name(found):
    return {operator.name: operator for operator in found}


def test_a_kernel_belongs_to_the_innermost_operator_around_its_launch():
    made = Recording(V100)
    made.operator("aten::linear", 0, 100, dims=((64, 32), (16, 32)), types=(F32, F32))
    made.operator("aten::t", 5, 10, dims=((16, 32),), types=(F32,))
    made.operator("aten::mm", 20, 80, **MATRICES)
    made.operator("aten::empty", 30, 40)
    made.kernel("gemm", 200, 260, launched=50)
    made.kernel("bias", 260, 270, launched=90)
    found = by_name(operators(made.trace(), 0))
    assert found["aten::mm"].kernels == ["gemm"] and found["aten::mm"].time_ns == 60
    assert found["aten::mm"].flops == MM and found["aten::mm"].bytes == 4 * (64 * 32 + 32 * 16 + 64 * 16)
    assert found["aten::mm"].shapes == "[64, 32] [32, 16]" and found["aten::mm"].dtypes == "float32"
    assert found["aten::linear"].time_ns == 10
    assert set(found) == {"aten::mm", "aten::linear"}


def test_an_operator_without_shapes_gives_way_to_the_one_around_it():
    made = Recording(V100)
    made.operator("aten::mm", 0, 100, **MATRICES)
    made.operator("cublas wrapper", 10, 90)
    made.kernel("gemm", 200, 260, launched=50)
    made.operator("no shapes here", 300, 400)
    made.kernel("lonely", 500, 510, launched=350)
    found = by_name(operators(made.trace(), 0))
    assert found["aten::mm"].time_ns == 60
    assert found["no shapes here"].time_ns == 10 and found["no shapes here"].unknown == {"flops": NO_SHAPES}


def test_the_external_id_counts_before_time():
    """Microsecond clocks put calls on the edge between two operators; the id knows."""
    made = Recording(V100)
    first = made.operator("aten::mm", 0, 50, **MATRICES)
    made.operator("aten::add", 50, 100, dims=((8,), (8,)), types=(F32, F32))
    made.kernel("gemm", 200, 260, launched=50, external=first)
    assert operators(made.trace(), 0)[0].name == "aten::mm"


def test_the_id_of_the_call_serves_where_the_kernel_has_none():
    made = Recording(V100)
    first = made.operator("aten::mm", 0, 50, **MATRICES)
    made.operator("aten::add", 50, 100, dims=((8,), (8,)), types=(F32, F32))
    made.call("cudaLaunchKernel", 50, 51, correlation=900, external=first)
    made.kernel("gemm", 200, 260, correlation=900)
    assert operators(made.trace(), 0)[0].name == "aten::mm"


def test_the_id_serves_where_the_call_was_lost():
    made = Recording(V100)
    with_shapes = made.operator("aten::mm", 0, 50, **MATRICES)
    without = made.operator("aten::add", 50, 100)
    made.kernel("gemm", 200, 260, external=with_shapes)
    made.kernel("plus", 300, 310, external=without)
    found = by_name(operators(made.trace(), 0))
    assert {name: found[name].time_ns for name in found} == {"aten::mm": 60, "aten::add": 10}


def test_an_id_used_again_by_an_operator_that_was_not_running_is_not_believed():
    made = Recording(V100)
    old = made.operator("aten::add", 0, 10, dims=((8,), (8,)), types=(F32, F32))
    made.operator("aten::mm", 20, 100, **MATRICES)
    made.kernel("gemm", 200, 260, launched=50, external=old)
    assert operators(made.trace(), 0)[0].name == "aten::mm"


def test_nor_is_one_that_runs_on_another_thread():
    made = Recording(V100)
    elsewhere = made.operator("aten::add", 0, 100, thread="1/2", dims=((8,), (8,)), types=(F32, F32))
    made.operator("aten::mm", 20, 100, **MATRICES)
    made.kernel("gemm", 200, 260, launched=50, external=elsewhere)
    assert operators(made.trace(), 0)[0].name == "aten::mm"


def test_other_threads_and_processes_do_not_mix():
    made = Recording(V100)
    made.operator("aten::add", 0, 100, dims=((8,), (8,)), types=(F32, F32))
    made.operator("aten::mm", 0, 100, thread="1/2", **MATRICES)
    made.kernel("gemm", 200, 260, launched=50, thread="1/2")
    made.operator("aten::mul", 0, 100, thread="2/9", dims=((8,), (8,)), types=(F32, F32))
    made.call("cudaLaunchKernel", 60, 61, thread="2/9", correlation=77)
    made.call("cudaLaunchKernel", 60, 61, thread="1/1", correlation=77)
    made.kernel("theirs", 300, 303, correlation=77, pid=2)
    made.kernel("ours", 400, 405, correlation=77, pid=1)
    found = by_name(operators(made.trace(), 0))
    assert {name: found[name].time_ns for name in found} == {"aten::mm": 60, "aten::mul": 3, "aten::add": 5}


def test_calls_with_several_kernels_count_once_and_name_the_longest_first():
    made = Recording(V100)
    for at in (0, 1000):
        made.operator("aten::mm", at, at + 100, **MATRICES)
        made.kernel("reduce", at + 300, at + 310, launched=at + 60)
        made.kernel("splitK", at + 200, at + 260, launched=at + 50)
    found = operators(made.trace(), 0)[0]
    assert (found.calls, found.time_ns, found.kernels, found.flops) == (2, 140, ["splitK", "reduce"], 2 * MM)


def test_strides_and_numbers_that_read_the_same_are_one_operator():
    made = Recording(V100)
    for at, strides in ((0, ((32, 1), (16, 1))), (1000, ((32, 1), (1, 32)))):
        made.operator("aten::mm", at, at + 100, strides=strides, **MATRICES)
        made.kernel("gemm", at + 200, at + 260, launched=at + 50)
    found = operators(made.trace(), 0)
    assert len(found) == 1 and found[0].calls == 2 and found[0].flops == 2 * MM


def test_kernels_of_no_operator_stand_for_themselves():
    made = Recording(V100)
    made.kernel("graphed", 0, 30, launched=-10, by="cudaGraphLaunch", graph=1)
    made.operator("aten::mm", 100, 200, **MATRICES)
    made.kernel("graphed inside", 300, 340, launched=150, by="cudaGraphLaunch")
    made.kernel("unlaunched", 400, 450)
    found = by_name(operators(made.trace(), 0))
    assert found["graphed"].unknown == found["graphed inside"].unknown == {"flops": REPLAYED}
    assert found["unlaunched"].unknown == {"flops": NO_OPERATOR} and found["unlaunched"].flops is None
    assert sum(operator.time_ns for operator in found.values()) == 120


def test_communication_is_left_out_and_so_is_what_starts_outside_the_steps():
    made = Recording(V100)
    made.step(0, 1000)
    made.operator("aten::mm", 0, 100, **MATRICES)
    made.kernel("gemm", 200, 260, launched=50)
    made.kernel("ncclDevKernel_AllReduce", 300, 400, launched=60)
    made.kernel("gemm", 1500, 1900, launched=70)
    trace = made.trace()
    assert sum(operator.time_ns for operator in operators(trace, 0, window(trace, 0))) == 60
    assert sum(operator.time_ns for operator in operators(trace, 0)) == 460
    assert operators(trace, 3) == []


def test_formats_in_lists_come_from_the_kernels_name_or_from_the_only_one_there_is():
    def trace(kernel, *others):
        made = Recording(V100)
        made.operator("aten::_foreach_add_", 0, 100, dims=(((10, 10), (50,)), ((10, 10), (50,))),
                      types=("TensorList", "TensorList"))
        made.kernel(kernel, 200, 260, launched=50)
        for place, kind in enumerate(others):
            made.operator("aten::relu", 1000 + place, 1001 + place, dims=((4,),), types=(kind,))
        return operators(made.trace(), 0)[0]

    half = "void multi_tensor_apply_kernel<TensorListMetadata<2>, BinaryOp<c10::BFloat16, 2>, std::plus<float>>"
    assert (trace(half, F32).bytes, trace(half, F32).dtypes) == (3 * 150 * 2, "bfloat16")
    assert trace("mysterious", F32).bytes == 3 * 150 * 4
    both = trace("mysterious", F32, "c10::Half")
    assert both.bytes is None and "lists" in both.unknown["flops"]
    assert both.shapes == "2 tensors of 150 elements 2 tensors of 150 elements"


def test_on_a_cpu_operators_own_time_counts_and_those_that_delegate_add_no_flops():
    made = Recording()
    made.step(0, 1000)
    made.operator("aten::linear", 0, 100, dims=((64, 32), (16, 32)), types=(F32, F32))
    made.operator("aten::addmm", 10, 90, dims=((16,), (64, 32), (32, 16)), types=(F32, F32, F32))
    made.operator("aten::expand", 12, 15, dims=((16,),), types=(F32,))
    made.operator("aten::copy_", 15, 20, dims=((16,), (16,)), types=(F32, F32))
    made.operator("aten::mean", 100, 150, dims=((64, 16),), types=(F32,))
    made.operator("aten::sum", 105, 145, dims=((64, 16),), types=(F32,))
    made.operator("aten::fill_", 106, 108, dims=((1,),), types=(F32,))
    made.operator("aten::mm", 2000, 2050, **MATRICES)       # not in the step
    trace = made.trace()
    found = by_name(operators(trace, CPU, window(trace, CPU)))
    times = {name: operator.time_ns for name, operator in found.items()}
    assert times == {"aten::linear": 20, "aten::addmm": 72, "aten::expand": 3, "aten::copy_": 5, "aten::mean": 10,
                     "aten::sum": 38, "aten::fill_": 2}
    assert sum(times.values()) == 150
    assert found["aten::addmm"].flops == MM and found["aten::sum"].flops == 64 * 16
    assert found["aten::linear"].flops is found["aten::mean"].flops is None
    assert found["aten::linear"].unknown == found["aten::mean"].unknown == {"flops": DELEGATED}


def test_work_that_is_passed_through_several_operators_is_counted_once():
    made = Recording()
    for depth, name in enumerate(("aten::matmul", "aten::linear", "aten::addmm")):
        dims = {"aten::matmul": ((64, 32), (32, 16)), "aten::linear": ((64, 32), (16, 32)),
                "aten::addmm": ((16,), (64, 32), (32, 16))}[name]
        made.operator(name, depth * 10, 100 - depth * 10, dims=dims, types=(F32,) * len(dims))
    assert sum(operator.flops or 0 for operator in operators(made.trace(), CPU)) == MM


def test_a_recording_without_shapes_still_names_operators():
    made = Recording()
    made.operator("aten::linear", 0, 100)
    made.operator("aten::addmm", 10, 90)
    found = by_name(operators(made.trace(), CPU))
    assert {name: operator.time_ns for name, operator in found.items()} == {"aten::linear": 20, "aten::addmm": 80}
    assert found["aten::addmm"].unknown == {"flops": NO_SHAPES}


def test_sizes_of_no_device_are_not_modelled():
    made = Recording(V100)
    big = 1 << 23
    for at in (0, 1000):
        made.operator("aten::mm", at, at + 100, dims=((big, big), (big, big)), types=(F32, F32))
        made.kernel("gemm", at + 200, at + 260, launched=at + 50)
    found = operators(made.trace(), 0)[0]
    assert found.flops is None and found.unknown == {"flops": "its sizes make no sense"} and found.time_ns == 120
    huge = {"dims": ((1 << 40, 1 << 40), (1 << 40, 1)), "types": (F32, F32)}
    recording = Recording()
    recording.operator("aten::mm", 0, 100, **huge)
    assert operators(recording.trace(), CPU)[0].unknown == {"flops": "sizes make no sense"}


def test_arguments_that_are_no_sizes_end_nothing():
    """Texts in place of sizes, lists of more elements than have a name, and numbers beyond floats."""
    made = Recording()
    made.operator("aten::mm", 0, 100, dims=(("1 2",), (3, 4)), types=(F32, F32))
    made.operator("aten::cat", 100, 200, dims=(((10**18,) * 300,),), types=("TensorList",))
    made.operator("aten::convolution", 200, 300, dims=((1,) * 40, (1,) * 40, *[()] * 7), types=(F32, F32, *[""] * 7),
                  concrete=("", "", "", "[1]", f"[{10**17}]", "[1]", "False", "[0]", "1"))
    found = by_name(operators(made.trace(), CPU))
    assert patterns.dims(found["aten::mm"]) == ((3, 4),) and found["aten::mm"].shapes == "[1 2] [3, 4]"
    assert found["aten::cat"].shapes == "1 tensors"
    assert found["aten::convolution"].unknown == {"flops": "its sizes make no sense"}


def test_nothing_recorded_is_nothing():
    assert operators(Recording().trace(), CPU) == [] and operators(Recording(V100).trace(), 0) == []


def test_a_million_kernels_take_seconds():
    count = 1_000_000
    made = Recording(V100)
    made.operator("aten::mm", 0, 10, **MATRICES)
    made.operator("aten::add", 10, 20, dims=((8,), (8,)), types=(F32, F32))
    made.kernel("gemm", 20, 30, launched=5)
    made.kernel("plus", 30, 40, launched=15)
    trace = made.trace()

    def repeated(table, stride, ids=()):
        grown = {}
        for name in table.__dataclass_fields__:
            column = getattr(table, name)
            grown[name] = np.tile(column, count // 2)
            turn = np.repeat(np.arange(count // 2), len(column))
            if name in ("start", "end"):
                grown[name] = grown[name] + turn * stride
            elif name in ids:
                grown[name] = grown[name] + turn * 100
        return type(table)(**grown)

    ids = ("correlation",)
    trace = dataclasses.replace(trace, gpu=repeated(trace.gpu, 40, ids), calls=repeated(trace.calls, 40, ids),
                                operators=repeated(trace.operators, 40))
    began = time.process_time()
    found = by_name(operators(trace, 0))
    assert time.process_time() - began < 15
    assert found["aten::mm"].calls == count // 2 and found["aten::mm"].flops == MM * count // 2
    assert found["aten::add"].time_ns == 10 * count // 2


@st.composite
def stacks(draw):
    """Properly nested spans, and the moments to ask about."""
    spans = []

    def fill(low, high, depth):
        at = low
        while at < high and len(spans) < 25:
            start = draw(st.integers(at, high))
            end = draw(st.integers(start, high))
            if draw(st.booleans()):
                spans.append((start, end))
                if depth < 4:
                    fill(start, end, depth + 1)
            at = end + draw(st.integers(0, 2))
            if draw(st.integers(0, 2)) == 0:
                break

    fill(0, 40, 0)
    return spans, draw(st.lists(st.integers(-2, 42), max_size=10))


@given(stacks())
def test_nesting_against_looking_at_every_span(drawn):
    spans, times = drawn
    spans = sorted(spans, key=lambda span: (span[0], -span[1]))
    starts, ends = (np.array([span[side] for span in spans], "i8") for side in (0, 1))
    events = HostEvents(start=starts, end=ends, tid=np.zeros(len(spans), "i8"))
    tree = nest(events, np.arange(len(spans)))
    for moment, row in zip(times, tree.innermost(np.array(times, "i8")).tolist()):
        around = [span for span in spans if span[0] <= moment < span[1]]
        assert (row < 0) == (not around)
        if around:
            assert spans[row][1] - spans[row][0] == min(end - start for start, end in around)
    own = tree.end - tree.start
    parents = tree.parents()
    inner = parents >= 0
    np.subtract.at(own, parents[inner], (tree.end - tree.start)[inner])
    covered = {moment for start, end in spans for moment in range(start, end)}
    assert own.sum() == len(covered) and (own >= 0).all()
