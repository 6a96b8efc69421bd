"""Every nanosecond of the steps belongs to one part; each part planted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import V100, Recording, training

from saturate.trace import phases
from saturate.trace.breakdown import communication
from saturate.trace.intervals import length
from saturate.trace.launches import launching_calls
from saturate.trace.windows import CPU, devices, window


def split(made: Recording, device: int = CPU) -> dict[str, int]:
    """The parts that are not empty; their sum is checked."""
    trace = made.trace()
    found = phases.split(trace, device)
    assert list(found) == list(phases.PARTS)
    assert sum(found.values()) == length(window(trace, device, launching_calls(trace)).steps)
    return {name: ns for name, ns in found.items() if ns}


US = 1000
LONG = phases.BRIDGE_NS + 1


def cpu_step(*, sleep: int = 0) -> Recording:
    """input 100, zero_grad 10, forward 200, loss 20, backward 300, clip 30, update 40 (thousands); Python of 1 between."""
    made = Recording()
    at = 0

    def piece(size: int) -> tuple[int, int]:
        nonlocal at
        start, at = at + US, at + US + size * US
        return start, at

    made.loader(*piece(100))
    made.annotation("Optimizer.zero_grad#SGD.zero_grad", *piece(10))
    made.annotation("saturate.module Net (Net)", *piece(200))
    made.operator("aten::mse_loss", *piece(20))
    at += sleep
    made.annotation("saturate.backward", *piece(300))
    made.operator("aten::norm", *piece(30))
    made.annotation("Optimizer.step#SGD.step", *piece(40))
    made.step(0, at)
    return made


def test_the_parts_of_an_ordinary_step_on_a_cpu():
    """Short Python between two parts belongs to the one that comes next, or to the update before it."""
    assert split(cpu_step()) == {"input": 100 * US, "forward": 224 * US, "backward": 300 * US, "optimizer": 83 * US}


def test_clipping_is_no_update():
    """Of the 83 above: zero_grad 10 and the step 40. On a device what they launched."""
    def own(made: Recording, device: int) -> int:
        trace = made.trace()
        launches = launching_calls(trace)
        return phases.updating(trace, device, launches, communication(trace, launches))

    assert own(cpu_step(), CPU) == 50 * US
    made = device_step()
    made.kernel("norm", 650, 680, launched=405 - 7)      # before the step begins
    assert own(made, 0) == 50
    assert own(Recording(), CPU) == 0


def test_what_lasts_is_idle():
    """Python for longer than the bridge, beside no operator, is nobody's."""
    before, after = split(cpu_step()), split(cpu_step(sleep=LONG))
    assert after.pop("idle") == LONG + US
    assert before["forward"] - after["forward"] == US        # what lay around the pause is part of it now
    assert {name: before[name] for name in ("input", "backward", "optimizer")} == \
        {name: after[name] for name in ("input", "backward", "optimizer")}


def test_a_sync_wins_over_what_surrounds_it_and_input_over_a_sync():
    made = Recording()
    made.step(0, 1000 * US)
    made.annotation("saturate.module Net (Net)", 0, 1000 * US)
    made.annotation("saturate.sync train.py:3 Tensor.item", 100 * US, 150 * US)
    made.loader(140 * US, 200 * US)
    assert split(made) == {"sync": 40 * US, "input": 60 * US, "forward": 900 * US}


def test_only_the_training_thread_counts():
    made = Recording()
    made.step(0, 100)
    made.annotation("saturate.module Net (Net)", 0, 40)
    made.loader(0, 100, thread="1/2")
    made.operator("aten::mm", 40, 100, thread="1/3")
    assert split(made) == {"forward": 100}      # the rest is short Python before nothing: see below
    made = Recording()
    made.step(0, LONG + 40)
    made.annotation("saturate.module Net (Net)", 0, 40)
    made.operator("aten::mm", 40, LONG + 40, thread="1/3")
    assert split(made) == {"forward": 40, "idle": LONG}


def test_waiting_for_a_collective_is_communication():
    """Issued by the training thread, done elsewhere: only while this thread does nothing else it is waited for."""
    made = Recording()
    made.step(0, 1000)
    made.annotation("saturate.backward", 0, 1000)
    made.operator("autograd::engine::evaluate_function: AddmmBackward0", 0, 400)
    made.annotation("gloo:all_reduce", 300, 900)
    assert split(made) == {"backward": 500, "communication": 500}


def closure_step(*, evaluations: int = 1, at: int = 0, made: Recording | None = None) -> Recording:
    """Under Lightning the update begins before the forward pass: hooks 10, clearing 10, forward 100, loss 60, a gradient 50, residual 30,
    backward 200, clipping 20, update 40; for each further evaluation of the closure all but the update."""
    made = made or Recording()
    start = at
    for _ in range(evaluations):
        made.operator("aten::detach", at, at + 10)
        made.annotation("Optimizer.zero_grad#Adam.zero_grad", at + 10, at + 20)
        made.annotation("saturate.module Net (Net)", at + 20, at + 120)
        made.operator("aten::mse_loss", at + 120, at + 180)
        made.annotation("saturate.backward", at + 180, at + 230)
        made.operator("aten::mul", at + 230, at + 260)
        made.annotation("saturate.backward", at + 260, at + 460)
        made.operator("aten::norm", at + 460, at + 480)
        at += 480
    made.operator("aten::_fused_adam_", at, at + 40)
    made.annotation("Optimizer.step#Adam.step", start, at + 40)
    made.step(start, at + 40)
    return made


def test_what_a_closure_does_is_not_the_optimizer():
    """Seen: 296 of 298 ms were said to be Adam's, whose update took 2: Lightning evaluates the whole step inside of it."""
    once = {"forward": 200, "backward": 250, "optimizer": 70}
    assert split(closure_step()) == once
    assert split(closure_step(at=520, made=closure_step())) == {name: 2 * ns for name, ns in once.items()}


def test_a_closure_that_is_evaluated_again_lends_the_optimizer_what_follows_its_last_backward_pass():
    assert split(closure_step(evaluations=3)) == {"forward": 3 * 200 + 2 * 20, "backward": 3 * 250, "optimizer": 3 * 10 + 20 + 40}


def test_a_clock_and_the_recording_agree_about_a_closure():
    clocked = {"input": 0, "forward": 100, "backward": 250, "optimizer": 70, "rest": 100}
    found = phases.calibrated(closure_step().trace(), clocked)
    assert {name: ns for name, ns in found.items() if ns} == {"forward": 200, "backward": 250, "optimizer": 70}


def test_an_update_within_a_backward_pass_stays_backward():
    made = Recording()
    made.step(0, 300)
    made.annotation("saturate.backward", 0, 200)
    made.annotation("Optimizer.step#SGD.step", 100, 150)
    made.annotation("Optimizer.step#SGD.step", 200, 300)
    assert split(made) == {"backward": 200, "optimizer": 100}


def test_accumulation_puts_what_lies_between_into_the_next_forward():
    made = Recording()
    made.step(0, 700)
    for at in (0, 300):
        made.annotation("saturate.module Net (Net)", at, at + 100)
        made.annotation("saturate.backward", at + 100, at + 200)
        made.operator("aten::stack", at + 200, at + 300)        # of the next batch, and after the last of the update
    made.annotation("Optimizer.step#Adam.step", 600, 700)
    assert split(made) == {"forward": 300, "backward": 200, "optimizer": 200}


def test_an_update_by_hand_is_the_optimizer():
    made = Recording()
    for at in (0, 300):
        made.step(at, at + 300)
        made.annotation("saturate.module Net (Net)", at + 100, at + 200)
        made.annotation("saturate.backward", at + 200, at + 300)
    made.operator("aten::add_", 300, 400)
    assert split(made) == {"forward": 300, "backward": 200, "optimizer": 100}


def test_a_foreign_trace_without_labels_knows_the_engine():
    made = Recording()
    made.step(0, 400)
    made.operator("aten::conv2d", 0, 100)
    made.annotation("Optimizer.zero_grad#SGD.zero_grad", 100, 120)
    made.operator("autograd::engine::evaluate_function: ConvolutionBackward0", 120, 300)
    made.annotation("Optimizer.step#SGD.step", 300, 400)
    assert split(made) == {"forward": 100, "backward": 180, "optimizer": 120}


def test_inference_is_forward():
    made = Recording()
    made.step(0, 200)
    made.operator("aten::mm", 0, 100)
    made.operator("aten::relu", 100, 200)
    assert split(made) == {"forward": 200}


def device_step() -> Recording:
    """Launched early, done late: the parts follow the launch, not the time."""
    made = Recording(V100)
    made.step(0, 1000)
    made.loader(0, 200)
    made.annotation("saturate.module Net (Net)", 200, 300)
    made.annotation("saturate.backward", 300, 400)
    made.annotation("Optimizer.step#SGD.step", 400, 500)
    made.copy("Memcpy HtoD (Pageable -> Device)", 210, 250, launched=205)
    made.kernel("gemm", 250, 400, launched=215)
    made.kernel("gemm_backward", 400, 600, launched=310, thread="1/9")      # by a thread of the engine
    made.kernel("ncclDevKernel_AllReduce", 550, 700, launched=350, thread="1/9")
    made.kernel("sgd", 700, 750, launched=410)
    made.copy("Memcpy DtoH (Device -> Pageable)", 750, 770, launched=600)
    return made


def test_the_parts_of_an_ordinary_step_on_a_device():
    assert split(device_step(), 0) == {
        "input": 210, "host_to_device": 40, "forward": 150, "backward": 200, "communication": 100, "optimizer": 50,
        "sync": 20, "idle": 230,
    }


def test_idle_that_waits_for_a_value_is_sync():
    made = Recording(V100)
    made.step(0, 1000)
    made.kernel("a", 0, 100, launched=0)
    made.call("cudaStreamSynchronize", 20, 300)
    made.kernel("b", 320, 1000, launched=310)
    assert split(made, 0) == {"forward": 780, "sync": 220}


def test_a_copy_on_the_device_belongs_to_what_launched_it():
    made = Recording(V100)
    made.step(0, 300)
    made.annotation("saturate.backward", 0, 100)
    made.kernel("a", 0, 100, launched=0)
    made.copy("Memcpy DtoD (Device -> Device)", 100, 300, launched=50)
    assert split(made, 0) == {"backward": 300}


def test_a_trace_without_steps_splits_its_span():
    made = Recording(V100)
    made.kernel("a", 100, 200, launched=50)
    made.kernel("b", 300, 400, launched=60)
    assert split(made, 0) == {"forward": 200, "idle": 100}


def test_no_events():
    assert phases.split(Recording().trace(), CPU) == dict.fromkeys(phases.PARTS, 0)


def test_an_ordinary_training():
    found = phases.split(training(), 0)
    assert found["communication"] == 3 * 200_000 and found["host_to_device"] == 3 * 40_000


NAMES = st.sampled_from((
    "enumerate(DataLoader)#x.__next__", "saturate.backward", "saturate.module Net (Net)", "saturate.sync a:1 item",
    "Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad", "gloo:all_reduce", "user", "c10d::allreduce_",
    "autograd::engine::evaluate_function: X"))
SPANS = st.tuples(st.integers(0, 900_000), st.integers(0, 300_000))
HOST = st.lists(st.tuples(NAMES, SPANS, st.sampled_from(("1/1", "1/2")), st.booleans()), max_size=25)
KERNELS = st.lists(st.tuples(st.sampled_from(("gemm", "ncclKernel", "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pinned)",
                                              "Memcpy DtoD (Device -> Device)")),
                             SPANS, st.one_of(st.none(), st.integers(0, 900_000)), st.integers(1, 3)), max_size=25)


@settings(max_examples=150, deadline=None)
@given(host=HOST, kernels=KERNELS, steps=st.lists(SPANS, max_size=5))
def test_the_parts_sum_to_the_window(host, kernels, steps):
    """Whatever overlaps and crosses, on several threads and streams."""
    made = Recording(V100)
    for start, size in steps:
        made.step(start, start + size)
    for name, (start, size), thread, operator in host:
        (made.operator if operator else made.annotation)(name, start, start + size, thread)
    for name, (start, size), launched, stream in kernels:
        (made.copy if name.startswith("Memcpy") else made.kernel)(name, start, start + size, launched=launched, stream=stream)
    trace = made.trace()
    for device in {CPU, *devices(trace)}:
        found = phases.split(trace, device)
        assert sum(found.values()) == length(window(trace, device, launching_calls(trace)).steps)
        assert all(ns >= 0 for ns in found.values())


@pytest.mark.parametrize("name", ["resnet50_v100_workers0", "ddp2_v100", "owlv2_h100", "cpu_only"])
def test_shared_traces_are_split_exactly(shared_traces, name):
    from saturate.trace.read import read

    trace = read(shared_traces / f"{name}.json.gz")
    for device in devices(trace):
        assert sum(phases.split(trace, device).values()) == length(window(trace, device, launching_calls(trace)).steps)


def test_the_split_of_steps_without_a_profiler():
    """Each clocked group keeps its time, and is divided as the recording divides it."""
    trace = cpu_step(sleep=LONG).trace()
    recorded = phases.split(trace, CPU)
    clocked = {"input": 50_000, "forward": 70_000, "backward": 100_001, "optimizer": 33_333, "rest": 120_007}
    found = phases.calibrated(trace, clocked)
    assert sum(found.values()) == sum(clocked.values())
    assert (found["input"], found["backward"]) == (50_000, 100_001)
    between = recorded["optimizer"] - 50 * US
    loss = recorded["forward"] - 200 * US
    rest = loss + between + recorded["idle"]
    assert found["forward"] == pytest.approx(70_000 + 120_007 * loss / rest, abs=1)
    assert found["idle"] == pytest.approx(120_007 * recorded["idle"] / rest, abs=1)
    assert found["optimizer"] == pytest.approx(33_333 + 120_007 * between / rest, abs=1)


def test_a_clocked_part_that_was_not_recorded_keeps_its_name():
    made = Recording()
    made.step(0, 100)
    found = phases.calibrated(made.trace(), {"input": 7, "backward": 5, "rest": 3})
    assert {name: ns for name, ns in found.items() if ns} == {"input": 7, "backward": 5, "forward": 3}


def test_what_no_clock_saw_is_told_by_the_recording():
    """A backward pass through a function that the script had imported before: the clock counted it for the rest."""
    made = Recording()
    made.step(0, 100)
    made.operator("aten::mm", 0, 25)
    made.operator("autograd::engine::evaluate_function: MmBackward0", 25, 100)
    found = phases.calibrated(made.trace(), {"input": 0, "forward": 0, "backward": 0, "rest": 40})
    assert {name: ns for name, ns in found.items() if ns} == {"forward": 10, "backward": 30}


@settings(max_examples=80, deadline=None)
@given(host=HOST, steps=st.lists(SPANS, max_size=4),
       clocked=st.dictionaries(st.sampled_from(("input", "forward", "backward", "optimizer", "rest")), st.integers(0, 10**12)))
def test_a_calibrated_split_sums_to_the_clock(host, steps, clocked):
    made = Recording()
    for start, size in steps:
        made.step(start, start + size)
    for name, (start, size), thread, operator in host:
        (made.operator if operator else made.annotation)(name, start, start + size, thread)
    found = phases.calibrated(made.trace(), clocked)
    assert sum(found.values()) == sum(clocked.values()) and min(found.values()) >= 0
