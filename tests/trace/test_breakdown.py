"""Busy time and the exclusive parts, against a sweep over every nanosecond; and what counts as communication."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import V100, Recording, training

from saturate.trace.breakdown import Parts, Work, communicates, communication, idle, parts, work
from saturate.trace.columns import Trace
from saturate.trace.intervals import length
from saturate.trace.launches import launching_calls
from saturate.trace.windows import CPU, window

END = 80
NAMES = {0: "gemm", 1: "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", 2: "Memcpy HtoD (Pinned -> Device)",
         3: "Memset"}
events = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), st.integers(0, END), st.integers(0, 20),
                            st.integers(0, 3), st.integers(0, 1)), max_size=25)
steps = st.lists(st.tuples(st.integers(0, END), st.integers(0, 30)), max_size=4)


def split(trace: Trace, device: int = 0) -> tuple[Work, Parts]:
    here = window(trace, device)
    done = work(trace, device, here, communication(trace, launching_calls(trace)))
    return done, parts(done, here.steps)


def recorded(rows: list[tuple[int, int, int, int, int]], marks: list[tuple[int, int]], shift: int) -> Trace:
    made = Recording(V100)
    for start, size in marks:
        made.step(start + shift, start + size + shift)
    for kind, start, size, stream, device in rows:
        place = {"stream": stream, "device": device}
        if kind == 2:
            made.copy(NAMES[kind], start + shift, start + size + shift, **place)
        elif kind == 3:
            made.memset(start + shift, start + size + shift, **place)
        else:
            made.kernel(NAMES[kind], start + shift, start + size + shift, **place)
    return made.trace()


@settings(deadline=None)
@given(events, steps, st.sampled_from([1, 1_790_000_000_000_000_001]))
def test_every_nanosecond_is_counted_once(rows: list[tuple[int, int, int, int, int]], marks: list[tuple[int, int]],
                                          shift: int) -> None:
    """Overlapping events on several streams and devices, with steps or none, at times no float64 can tell apart."""
    own = [(kind, start, start + size) for kind, start, size, _, device in rows if device == 0]
    does = {kind: {moment for which, low, high in own if which == kind for moment in range(low, high)}
            for kind in NAMES}
    computing, sending, copying = does[0] | does[3], does[1], does[2]
    within = {moment for start, size in marks for moment in range(start, start + size)}
    if not within:
        within = set(range(min((low for _, low, _ in own), default=0), max((high for *_, high in own), default=0)))

    done, found = split(recorded(rows, marks, shift))
    assert found == Parts(
        window_ns=len(within),
        compute_ns=len(computing & within),
        exposed_communication_ns=len(sending & within - computing),
        exposed_copy_ns=len(copying & within - computing - sending),
        idle_ns=len(within - computing - sending - copying),
        communication_ns=len(sending & within),
        overlapped_ns=len(sending & within & computing),
    )
    exclusive = found.compute_ns, found.exposed_communication_ns, found.exposed_copy_ns, found.idle_ns
    assert sum(exclusive) == found.window_ns == found.busy_ns + found.idle_ns
    assert length(done.busy) == len(computing | sending | copying)


def test_an_ordinary_training() -> None:
    """Per step of 100 units: copy 12-16, computation 16-60 and 80-90, communication 55-80; the rest is idle."""
    _, found = split(training(3, step_ns=100_000))
    unit = 3 * 1000
    assert (found.window_ns, found.compute_ns, found.exposed_communication_ns, found.exposed_copy_ns, found.idle_ns) \
        == (100 * unit, 54 * unit, 20 * unit, 4 * unit, 22 * unit)
    assert (found.communication_ns, found.overlapped_ns) == (25 * unit, 5 * unit)


@pytest.mark.parametrize("name, expected", [
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True),
    ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", True),
    ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(unsigned int*)", True),
    ("void sglang::cross_device_reduce_1stage<half, 8>(RankData*)", True),
    ("void deep_ep::intranode::dispatch<8, 768>(int4*)", True),
    ("void softmax_warp_forward<float, WarpAllReduce<4>>(float*)", False),
    ("void mscclpp::allreduce7<float>(float*)", True),
    ("void one_shot_all_reduce_kernel<c10::BFloat16>(x)", True),
    ("void cub::DeviceReduceKernel<Policy>(float*)", False),
    ("triton_poi_fused_add_all_reduce_0", False),
    ("triton_poi_fused_all_gather_into_tensor_cat_0", False),
    ("void block_all_reduce_sum(float*)", False),
    ("_ZN2at6native15warpAllReduceSumEPf", False),
    ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_tn", False),
])
def test_names_of_collectives(name: str, expected: bool) -> None:
    assert communicates(name) is expected


def test_the_operator_says_more_than_the_name() -> None:
    """A kernel of any name launched by a collective communicates; what an operator inside it launches does not."""
    made = Recording(V100)
    made.operator("c10d::allreduce_", 0, 100)
    made.operator("aten::copy_", 10, 30)
    made.kernel("flatten", 200, 210, launched=20)
    made.kernel("one_shot_kernel", 210, 250, launched=50)
    made.kernel("gemm", 250, 300, launched=120)
    made.kernel("of another thread", 300, 310, launched=60, thread="1/2")
    made.collective("opaque", 310, 320, arguments={"Collective name": "allreduce"}, launched=130)
    trace = made.trace()
    found = communication(trace, launching_calls(trace))
    assert [trace.names[name] for name in trace.gpu.name[found]] == ["one_shot_kernel", "opaque"]


def test_a_name_that_says_what_a_kernel_does_is_no_word_against_an_ordinary_operator() -> None:
    """A library's name is: DistributedDataParallel calls NCCL from what happens to run."""
    made = Recording(V100)
    made.operator("torch::autograd::AccumulateGrad", 0, 100)
    made.operator("aten::sum", 10, 30)
    made.operator("triton_poi_fused_all_reduce_0", 40, 60)
    made.operator("_C_custom_ar::all_reduce", 70, 90)
    made.kernel("my_all_reduce_of_rows", 200, 210, launched=20)
    made.kernel("triton_poi_fused_all_reduce_0", 210, 220, launched=50)
    made.kernel("ncclDevKernel_AllReduce_Sum", 220, 230, launched=15)
    made.kernel("all_reduce_of_vllm", 230, 240, launched=80)
    made.kernel("all_reduce_without_operator", 240, 250, launched=150)
    made.kernel("all_reduce_without_launch", 250, 260)
    trace = made.trace()
    found = communication(trace, launching_calls(trace))
    assert [trace.names[name] for name in trace.gpu.name[found]] == [
        "ncclDevKernel_AllReduce_Sum", "all_reduce_of_vllm", "all_reduce_without_operator", "all_reduce_without_launch"]


def test_an_event_that_lost_its_times_is_no_work() -> None:
    """A row of start 0 and end 0 would stretch the span over the epoch."""
    made = Recording(V100)
    made.kernel("lost", 0, 0)
    made.kernel("reversed", 5_000_300, 5_000_200)
    made.kernel("gemm", 5_000_000, 5_000_100)
    done, found = split(made.trace())
    assert found.window_ns == 100 == found.compute_ns and length(done.busy) == 100


def test_operators_play_the_kernels_part_on_a_cpu() -> None:
    made = Recording()
    made.step(0, 100)
    made.loader(0, 30)
    made.operator("aten::stack", 5, 25)                     # the loader's own work: input, not computation
    made.operator("aten::mm", 40, 60)
    made.operator("aten::mm", 50, 70, thread="1/2")
    made.operator("c10d::allreduce_", 65, 80)
    made.operator("aten::add", 200, 300)
    trace = made.trace()
    done, found = split(trace, CPU)
    assert (found.compute_ns, found.exposed_communication_ns, found.exposed_copy_ns, found.idle_ns) == (30, 10, 0, 60)
    assert length(idle(done, window(trace, CPU).steps)) == 60


@pytest.mark.parametrize("name, node, computing", [
    ("OdeintAdjointMethod", "OdeintAdjointMethodBackward", 50),         # the operators inside
    ("CompiledFunction", "CompiledFunctionBackward", 180),              # kernels that are no operators
    ("aten::mm", "MmBackward0", 180),                                   # torch's own node
])
def test_what_a_function_of_the_script_does_around_its_operators_is_no_computation(name: str, node: str, computing: int) -> None:
    """An adjoint's solver is a loop in Python, 45 % of whose time was "computing"."""
    made = Recording()
    made.step(0, 200)
    made.operator(name, 0, 80)
    made.operator("aten::mul", 20, 40)
    made.operator(f"autograd::engine::evaluate_function: {node}", 100, 200)
    made.operator(node, 101, 199)
    made.operator("aten::mm", 150, 180)
    _, found = split(made.trace(), CPU)
    assert (found.compute_ns, found.idle_ns) == (computing, 200 - computing)


@pytest.mark.parametrize("scale", [1, 10**12])
def test_two_processes_do_not_share_a_correlation(scale: int) -> None:
    """Correlations are unique within a process only: rank 1's launch must not be taken for rank 0's."""
    made = Recording(V100)
    made.call("cudaLaunchKernel", 0, 1, "1/1", correlation=7)
    made.call("cudaLaunchKernel", 50, 51, "2/2", correlation=7)
    made.call("cudaLaunchKernel", 70, 71, "2/2", correlation=9 * scale)
    made.call("cudaFree", 72, 73, correlation=0)            # CUPTI's "unknown"
    made.kernel("a", 10, 20, correlation=7)
    made.kernel("b", 60, 70, correlation=7, pid=2)
    made.kernel("c", 80, 90, correlation=9 * scale, pid=2)
    made.kernel("d", 90, 95, correlation=9 * scale, pid=1)
    made.kernel("e", 95, 99, correlation=0)
    trace = made.trace()
    assert launching_calls(trace).tolist() == [0, 1, 2, -1, -1]
    untold = replace(trace, gpu=replace(trace.gpu, pid=trace.gpu.pid * 0 - 1))
    assert launching_calls(untold).tolist() == [-1, -1, 2, 2, -1], "calls of both processes have correlation 7"


@pytest.mark.parametrize("scale", [1, 10**12])
def test_of_calls_with_one_correlation_the_outer_one_launched(scale: int) -> None:
    made = Recording(V100)
    for start, correlation in ((0, 3), (10, 5), (11, 5), (20, 5 * scale + 1)):
        made.call("cudaLaunchKernel", start, start + 5, correlation=correlation)
    for correlation in (5, 3, 4, 2, 9 * scale, 5 * scale + 1):
        made.kernel("k", 100, 110, correlation=correlation)
    assert launching_calls(made.trace()).tolist() == [1, 0, -1, -1, -1, 3]
