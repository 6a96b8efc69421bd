"""Each damage planted, what it blocks, and what it must leave alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from traces import V100, Recording, training

from saturate.records.analysis import Problem
from saturate.trace.analyze import analyze_one
from saturate.trace.breakdown import communication, work
from saturate.trace.columns import Trace
from saturate.trace.integrity import CONCLUSIONS, blocked, of_window, problems, verdict
from saturate.trace.launches import launching_calls
from saturate.trace.windows import CPU, window


def found(trace: Trace, device: int = 0) -> dict[str, Problem]:
    launches = launching_calls(trace)
    here = window(trace, device, launches)
    done = work(trace, device, here, communication(trace, launches))
    return {problem.id: problem for problem in problems(trace, launches) + of_window(trace, here, done)}


def recorded(kernels: int = 100, *, tick: int = 1, empty: int = 0, unlaunched: int = 0, early: int = 0,
             lost: int = 0) -> Trace:
    """Kernels of 90 ticks every 100: the last `empty` without duration, `unlaunched` without a call (the first
    `early` of them launched before the recording), and `lost` launches without a kernel."""
    made = Recording(V100)
    made.next = 10_000
    for number in range(kernels):
        at = 1_000_000 + 100 * tick * number
        end = at if number >= kernels - empty else at + 90 * tick
        if number < unlaunched:
            made.kernel("k", at, end, correlation=number + 1 if number < early else 90_000 + number)
        else:
            made.kernel("k", at, end, launched=at - tick)
    for number in range(lost):
        at = 1_000_000 + 100 * tick * number
        made.call("cudaLaunchKernel", at + tick, at + 2 * tick)
    made.step(1_000_000, 1_000_000 + 100 * tick * kernels)
    return made.trace()


def test_an_ordinary_trace_is_whole() -> None:
    assert found(recorded()) == {} == found(training())
    assert verdict([]).ok


@pytest.mark.parametrize("unlaunched, expected", [(5, {}), (6, {"unmatched-kernels"})])
def test_kernels_without_a_launch(unlaunched: int, expected: set[str]) -> None:
    seen = found(recorded(unlaunched=unlaunched))
    assert set(seen) == set(expected)
    if expected:
        assert seen["unmatched-kernels"].blocks == ["gaps", "roofline"], "busy time is exact all the same"
        assert "94 of 100" in seen["unmatched-kernels"].message


def test_kernels_launched_before_the_recording_are_not_lost() -> None:
    """Their correlations are below the first recorded one: 12 % of the shared A100 trace, whose gaps still tell."""
    seen = found(recorded(unlaunched=20, early=18))
    assert set(seen) == {"launched-before-recording"} and not seen["launched-before-recording"].blocks
    assert set(found(recorded(unlaunched=20, early=10))) == {"unmatched-kernels"}


@pytest.mark.parametrize("early, expected", [(0, set()), (1, set()), (2, {"kernels-before-launch"})])
def test_kernels_that_start_before_their_call(early: int, expected: set[str]) -> None:
    """One of a hundred may be a clock's jitter; of more nothing follows that compares the device's times with the host's."""
    made = recorded()
    start = made.gpu.start.copy()
    start[:early] -= 900_000
    seen = found(replace(made, gpu=replace(made.gpu, start=start)))
    assert set(seen) - {"work-outside-steps"} == expected
    if expected:
        assert seen["kernels-before-launch"].blocks == ["busy", "gaps", "kernels"]
        assert "2 of 100" in seen["kernels-before-launch"].message and "0.900 ms" in seen["kernels-before-launch"].message


@pytest.mark.parametrize("drift, blocks", [(1, []), (10_000, []), (10_001, ["busy", "gaps", "kernels"])])
def test_two_clocks_that_drift_apart_by_microseconds_forbid_nothing(drift: int, blocks: list[str]) -> None:
    """Half of the kernels start as soon as they are launched, by a device's clock that is behind."""
    made = Recording(V100)
    for number in range(100):
        at = 1_000_000 + 100_000 * number
        made.kernel("k", at, at + 90_000, launched=at + drift if number % 2 else at - 5_000)
    made.step(1_000_000, 1_000_000 + 100 * 100_000)
    (problem,) = found(made.trace()).values()
    assert problem.id == "kernels-before-launch" and problem.blocks == blocks
    assert "50 of 100" in problem.message and ("no more exact" in problem.message) == (not blocks)


def test_no_kernel_starts_before_its_launch_at_the_median() -> None:
    made = Recording(V100)
    for number in range(9):
        made.kernel("k", 1_000_000 + 100_000 * number, 1_090_000 + 100_000 * number, launched=1_002_000 + 100_000 * number)
    made.step(1_000_000, 1_900_000)
    device = analyze_one(made.trace()).devices[0]
    assert device.median_launch_delay_ns == 0 and device.busy_of_step == 0.9


def test_each_process_counts_its_own_correlations() -> None:
    made = Recording(V100)
    made.step(0, 10_000)
    for process, first in ((1, 1000), (2, 5000)):
        for number in range(-20, 80):
            at = 100 * (number + 20)
            made.kernel("k", at, at + 80, correlation=first + number, pid=process, device=process - 1)
            if number >= 0:
                made.call("cudaLaunchKernel", at - 5, at - 4, f"{process}/1", correlation=first + number)
    assert set(found(made.trace())) == {"launched-before-recording"}


def test_launches_without_a_kernel() -> None:
    assert found(recorded(lost=5)) == {}
    seen = found(recorded(lost=6))
    assert set(seen) == {"lost-records"} and set(seen["lost-records"].blocks) == set(CONCLUSIONS) - {"steps"}


def test_what_was_still_queued_at_the_end_is_not_lost() -> None:
    made = Recording(V100)
    made.step(0, 1000)
    for number in range(10):
        made.kernel("k", 100 * number + 50, 100 * number + 90, launched=number + 1)
    for number in range(10):
        made.call("cudaLaunchKernel", 20 + number, 21 + number)
    assert found(made.trace()) == {}


def test_a_launch_into_a_graph_runs_nothing_yet() -> None:
    made = Recording(V100)
    made.step(0, 1000)
    made.call("cudaStreamBeginCapture", 10, 11)
    for number in range(20):
        made.call("cudaLaunchKernel", 20 + number, 21 + number)
    made.call("cudaStreamEndCapture", 50, 51)
    made.kernel("k", 100, 200, launched=90)
    assert found(made.trace()) == {}


def test_a_runtime_call_and_the_driver_call_in_it_launch_one_kernel() -> None:
    made = Recording(V100)
    made.step(0, 10_000)
    for number in range(20):
        at = 100 * number
        inner = made.call("cuLaunchKernelEx", at + 5, at + 8)
        made.call("cudaLaunchKernelExC", at + 4, at + 9)
        made.kernel("k", at + 20, at + 80, correlation=inner)
    assert found(made.trace()) == {}


def test_a_graph_whose_kernels_are_missing_is_a_loss() -> None:
    """Otherwise the device looks idle for as long as the graph ran."""
    made = Recording(V100)
    made.step(0, 10_000)
    for number in range(5):
        made.call("cudaGraphLaunch", 1000 * number, 1000 * number + 10)
    made.kernel("sample", 9000, 9100, launched=8000)
    assert "busy" in found(made.trace())["lost-records"].blocks


def test_a_graphs_kernels_have_no_operator_and_are_still_busy_time() -> None:
    made = Recording(V100)
    made.step(0, 10_000)
    graph = made.call("cudaGraphLaunch", 10, 20)
    for number in range(10):
        made.kernel("k", 100 + 100 * number, 190 + 100 * number, correlation=graph)
    assert found(made.trace())["graph-replay"].blocks == ["roofline"]


def test_zero_durations_block_only_what_they_can_falsify() -> None:
    """At a clock of microseconds a short kernel may read 0, and hides less than one tick; at nanoseconds none can."""
    assert found(recorded(empty=1)) == {}
    assert "busy" in found(recorded(empty=2))["zero-durations"].blocks
    assert found(recorded(empty=2, tick=1000))["zero-durations"].blocks == []
    assert "0.02%" in found(recorded(empty=2, tick=1000))["zero-durations"].message
    assert "busy" in found(recorded(empty=60, tick=1000))["zero-durations"].blocks, "so many are no short kernels that were rounded"

    made = Recording(V100)
    made.step(0, 1_000_000)
    for number in range(100):       # half of all: they may hide 50 of the 100 ticks of the span
        made.kernel("k", 10_000 + 1000 * number, 10_000 + 1000 * number + 1000 * (number % 2), launched=1000 * number)
    assert "busy" in found(made.trace())["zero-durations"].blocks


def test_events_that_lost_their_times() -> None:
    made = Recording(V100)
    made.step(1_000_000, 2_000_000)
    for number in range(20):
        made.kernel("k", 1_000_000 + 50_000 * number, 1_040_000 + 50_000 * number, launched=1_000_000)
    made.kernel("k", 0, 0, launched=1_000_000)
    assert "busy" in found(made.trace())["zero-durations"].blocks, "whole microseconds, yet not a short kernel"


def test_all_times_lost() -> None:
    made = Recording(V100)
    made.operator("aten::mm", 5, 9)
    made.kernel("k", 0, 0)
    assert set(found(made.trace(), CPU)) >= {"no-accelerator"}


def test_negative_durations() -> None:
    made = Recording(V100)
    made.step(0, 100_000)
    for number in range(99):
        made.kernel("k", 100 * number, 100 * number + 50, launched=100 * number)
    made.kernel("k", 5000, 4000, launched=4900)
    assert found(made.trace())["negative-durations"].blocks == []
    made.kernel("k", 6000, 4000, launched=4900)
    assert "busy" in found(made.trace())["negative-durations"].blocks


def test_no_steps() -> None:
    made = Recording(V100)
    made.kernel("k", 10, 20, launched=5)
    assert found(made.trace())["no-steps"].blocks == ["steps"]


def test_no_accelerator() -> None:
    made = Recording()
    made.step(0, 100)
    made.operator("aten::mm", 5, 50)
    assert found(made.trace(), CPU)["no-accelerator"].blocks == []
    assert set(problems(Recording().trace(), launching_calls(Recording().trace()))[0].blocks) == set(CONCLUSIONS)


def test_an_accelerator_that_is_not_read_is_not_taken_for_none() -> None:
    made = Recording()
    made.step(0, 100)
    made.operator("aten::mm", 5, 50)
    problem = found(replace(made.trace(), left_out={"mtia_runtime": 1823, "ac2g": 7}), CPU)["unknown-accelerator"]
    assert "mtia_runtime (1,823)" in problem.message and "ac2g" not in problem.message and "busy" in problem.blocks
    assert "no-accelerator" in found(replace(made.trace(), left_out={"python_function": 3}), CPU)


@pytest.mark.parametrize("name, expected", [
    ("aten::cudnn_convolution", "unknown-accelerator"), ("aten::_cudnn_rnn", "unknown-accelerator"),
    ("aten::miopen_batch_norm", "unknown-accelerator"), ("aten::_thnn_fused_lstm_cell", "unknown-accelerator"),
    ("aten::_scaled_dot_product_flash_attention", "unknown-accelerator"),
    ("aten::_efficient_attention_forward", "unknown-accelerator"),
    ("aten::_mps_convolution", "unknown-accelerator"), ("aten::mps_convolution_backward", "unknown-accelerator"),
    ("aten::_lstm_mps", "unknown-accelerator"), ("aten::_scaled_dot_product_attention_math_for_mps", "unknown-accelerator"),
    ("aten::_scaled_dot_product_flash_attention_for_cpu", "no-accelerator"),
    ("aten::cudnn_is_acceptable", "no-accelerator"), ("aten::mkldnn_convolution", "no-accelerator"),
])
def test_an_accelerator_that_was_not_recorded_is_not_taken_for_none(name: str, expected: str) -> None:
    made = Recording()
    made.step(0, 100)
    made.operator(name, 5, 50)
    seen = found(made.trace(), CPU)
    assert {"no-accelerator", "unknown-accelerator"} & set(seen) == {expected}
    assert ("busy" in seen[expected].blocks) == (expected == "unknown-accelerator")


@pytest.mark.parametrize("problem", ["lost-records", "truncated"])
def test_an_accelerator_whose_events_were_lost_is_not_taken_for_none(problem: str) -> None:
    made = Recording()
    made.step(0, 100)
    made.operator("aten::mm", 5, 50)
    seen = found(made.trace(problems=[(problem, "9,096 events could not be read")]), CPU)
    assert "no-accelerator" not in seen and "busy" in seen["unknown-accelerator"].blocks
    assert "no-accelerator" in found(made.trace(problems=[("odd-name", "a name is no UTF-8")]), CPU)


@pytest.mark.parametrize("call", ["cudaLaunchKernel", "hipExtModuleLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch", "urEnqueueKernelLaunch"])
def test_launches_of_a_device_that_no_event_tells_of_are_no_training_on_a_cpu(call: str) -> None:
    """A profiler under WSL, or whose records were all out of its range: the calls are there, and no kernel."""
    made = Recording()
    made.step(0, 100)
    made.operator("aten::mm", 5, 50)
    made.call("cudaDeviceSynchronize", 90, 95)
    assert "no-accelerator" in found(made.trace(), CPU), "as a training on a CPU ends where there is a GPU as well"
    made.call(call, 10, 20)
    seen = found(made.trace(), CPU)
    assert "no-accelerator" not in seen and "1 launch was" in seen["unknown-accelerator"].message
    assert analyze_one(made.trace()).verdict == "unknown"


@pytest.mark.parametrize("calls_too", [False, True])
def test_a_recording_of_the_device_that_ended_before_that_of_the_host(calls_too: bool) -> None:
    """Its buffers were full after four of ten steps. The device idles in the others only as far as the trace shows."""
    def trace(kernels: int, calls: int, operators: int = 10) -> Trace:
        made = Recording(V100)
        for number in range(10):
            at = 1000 * number
            made.step(at, at + 1000)
            for place in range(10 if number < kernels else operators):
                made.operator("aten::add", at + 100 * place, at + 100 * place + 50)
                if number < kernels:
                    made.kernel("k", at + 100 * place + 20, at + 100 * place + 90, launched=at + 100 * place)
                elif number < calls:
                    made.call("cudaLaunchKernel", at + 100 * place, at + 100 * place + 5)
        return made.trace()

    assert found(trace(10, 10)) == {}
    problem = found(trace(4, 4 if calls_too else 10))["lost-records"]
    assert "busy" in problem.blocks and ("6 of 10 steps" if calls_too else "60 of 100 kernel launches") in problem.message
    assert "lost-records" not in found(trace(9, 9, operators=4)), "a step that did nothing much has no need of a device"


def test_calls_of_one_correlation_have_launched_nobody_knows_what() -> None:
    def shared(kernels: int) -> Trace:
        made = Recording(V100)
        made.step(0, 100_000)
        for number in range(100):
            at = 1000 * number
            id = 7_000 if number < kernels else number + 1
            made.call("cudaLaunchKernel", at + 1, at + 5, correlation=id)
            made.kernel("k", at + 20, at + 900, correlation=id)
        return made.trace()

    assert found(shared(1)) == {} == found(shared(5))
    seen = found(shared(6))
    assert set(seen) == {"unmatched-kernels"} and seen["unmatched-kernels"].blocks == ["gaps", "roofline"]
    assert "only 94 of 100" in seen["unmatched-kernels"].message and "6 calls share" in seen["unmatched-kernels"].message
    assert set(found(shared(100))) == {"unmatched-kernels"}, "and no launch is called lost"


def test_lost_calls_leave_busy_time_alone() -> None:
    trace = recorded()
    trace.problems.append(("lost-calls", "50 of 100 CUDA calls have no time"))
    assert found(trace)["lost-calls"].blocks == ["gaps", "roofline"]


def test_work_outside_the_steps_is_said() -> None:
    made = Recording(V100)
    made.step(0, 100)
    made.kernel("k", 10, 90, launched=5)
    made.kernel("k", 100, 104, launched=90)
    assert found(made.trace()) == {}
    made.kernel("k", 104, 105, launched=91)
    assert found(made.trace())["work-outside-steps"].blocks == []


def test_steps_of_a_host_that_was_far_ahead_are_not_those_of_the_device() -> None:
    """Two steps of 50 are queued, and run for 200 each: a step of 50 would be wrong, and so would its shares."""
    made = Recording(V100)
    for at in (0, 50):
        made.step(at, at + 50)
        made.operator("aten::mm", at + 5, at + 10)
    made.kernel("k", 10, 210, launched=6)
    made.kernel("k", 210, 410, launched=56)
    trace = made.trace()
    problem = found(trace)["host-ahead"]
    assert problem.blocks == ["steps"] and "the device took 4.0 times as long" in problem.message
    device = analyze_one(trace).devices[0]
    assert (device.step_ns, device.busy_of_step, device.steps, device.span_ns, device.compute_ns, device.idle_ns) == (None, None, 0, 400, 400, 0)
    assert sum(operator.time_ns for operator in device.roofline.operators) == 400, "of all that was launched"
    made = Recording(V100)
    made.step(0, 100)
    made.kernel("k", 80, 200, launched=6)
    assert "host-ahead" not in found(made.trace()), "most of it ran later, and took as long as the step"
    made.kernel("k", 300, 900, launched=250)
    assert "host-ahead" not in found(made.trace()), "an evaluation behind the steps"
    made.kernel("k", 200, 206, launched=7)
    assert "host-ahead" in found(made.trace())


def test_the_profilers_own_work_is_said() -> None:
    made = Recording(V100)
    made.step(0, 100)
    made.kernel("k", 10, 90, launched=5)
    made.annotation("Activity Buffer Request", 0, 5, "1/0")
    assert found(made.trace()) == {}
    made.annotation("Activity Buffer Request", 50, 51, "1/0")
    assert "6%" in found(made.trace())["profiler-overhead"].message


def test_what_readers_found() -> None:
    trace = recorded()
    trace.problems.extend([("truncated", "the file ends in the middle"), ("odd-name", "a name is no UTF-8")])
    seen = found(trace)
    assert seen["truncated"].blocks == list(CONCLUSIONS) and seen["odd-name"].blocks == []
    reasons = blocked(list(seen.values()))
    assert reasons["busy"] == "the file ends in the middle" and not verdict(list(seen.values())).ok
