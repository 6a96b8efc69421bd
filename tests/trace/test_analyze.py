"""From columns to the printed record: what is blocked is None with a reason, and what is not is there."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from traces import V100, Recording, training

from saturate.records.analysis import Analysis, Gaps
from saturate.trace.analyze import analyze, analyze_one, combine
from saturate.trace.columns import Trace
from saturate.trace.view import facts


def test_an_ordinary_training() -> None:
    """Per step of 100: input 0-10, copy 12-16, computation 16-60 and 80-90, communication 55-80; the rest is idle."""
    analysis = analyze([training(3, step_ns=1_000_000)])
    device = analysis.devices[0]
    assert analysis.integrity.ok and not analysis.integrity.problems
    assert (device.steps, device.kernels, device.step_ns, device.span_ns) == (3, 12, 3_000_000, 2_780_000)
    assert (device.busy_of_step, device.busy_of_span) == (0.78, pytest.approx(2_340_000 / 2_780_000))
    assert (device.communication_overlap, device.data_wait.raw, device.data_wait.exposed) == (0.2, 0.1, 0.1)
    assert device.gap_ns == {"input": 0, "host_late": 440_000, "sync": 0, "already_launched": 0, "unattributed": 0}, \
        "the tail of one step and the head of the next are one gap, of which the loader has less than half"
    assert device.edge_ns == {**dict.fromkeys(device.gap_ns, 0), "input": 120_000, "host_late": 100_000}
    assert device.gaps == Gaps(input=0.0, host_late=1.0, sync=0.0, already_launched=0.0, unattributed=0.0)
    assert len(device.each_step) == 3 and device.verdict == analysis.verdict == "communication-bound"
    assert (device.median_kernel_ns, device.short_kernels, device.median_launch_delay_ns) == (200_000, 0.0, 30_000)


def test_what_is_idle_between_steps_is_no_part_of_them() -> None:
    """Steps of 1 ms with 1 ms between them, in which the host launches nothing: no more of a step than it is idle."""
    made = Recording(V100)
    for at in range(0, 6_000_000, 2_000_000):
        made.step(at, at + 1_000_000)
        made.kernel("k", at + 100_000, at + 850_000, launched=at + 90_000)
    device = analyze([made.trace()]).devices[0]
    assert sum(device.window_gap_ns.values()) == device.idle_ns == 750_000 < sum(device.gap_ns.values())


def test_idle_time_is_not_said_to_be_free_of_input_where_the_loader_was_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = training(3, step_ns=1_000_000)
    known = analyze_one(trace).devices[0]
    monkeypatch.setattr("saturate.trace.view.loader", lambda trace, window: None)
    blind = analyze_one(trace).devices[0]
    assert blind.data_wait.raw is None and blind.gaps.input is None and "not known" in blind.unknown["gaps.input"]
    assert "input" not in blind.gap_ns and "input" not in blind.edge_ns and blind.gaps.host_late == 1.0
    assert sum(blind.gap_ns.values()) == sum(known.gap_ns.values()) and sum(blind.edge_ns.values()) == sum(known.edge_ns.values())


def test_what_is_blocked_is_none_and_says_why() -> None:
    trace = training()
    trace.problems.append(("lost-records", "CUPTI dropped 12 records"))
    device = analyze_one(trace).devices[0]
    for field in ("busy_of_step", "compute_ns", "idle_ns", "communication_overlap", "median_kernel_ns"):
        assert getattr(device, field) is None and device.unknown[field] == "CUPTI dropped 12 records"
    assert device.step_ns == 3_000_000 and device.data_wait.raw == 0.1 and device.data_wait.exposed is None
    assert device.gaps.input is None and device.gap_ns == {} == device.edge_ns and device.each_step == []
    assert device.occupancy.sm_fill is None and device.roofline.operators == [] and device.verdict == "unknown"


def test_every_none_of_a_device_has_a_reason() -> None:
    made = Recording()
    made.kernel("k", 10, 20)
    device = analyze([made.trace()]).devices[0]
    fields = {name for name in device.__struct_fields__ if getattr(device, name) is None}
    assert fields == {"rank", "step_ns", "busy_of_step", "communication_overlap", "median_launch_delay_ns"}
    assert fields <= set(device.unknown) and {"gaps", "data_wait", "roofline"} <= set(device.unknown)


def test_of_no_time_no_share_waits_for_input_and_it_says_why() -> None:
    made = Recording()
    made.loader(0, 10)
    made.kernel("k", 20, 20, launched=15)
    device = analyze([made.trace()]).devices[0]
    assert device.data_wait.raw is None and device.unknown["data_wait"] == "nothing that was recorded took any time"


def test_without_steps_the_parts_sum_to_the_span() -> None:
    made = Recording(V100)
    made.kernel("a", 10, 40, launched=5)
    made.kernel("b", 60, 90, launched=55)
    analysis = analyze([made.trace()])
    device = analysis.devices[0]
    assert (device.steps, device.step_ns, device.busy_of_step, device.span_ns) == (0, None, None, 80)
    assert (device.compute_ns, device.idle_ns, device.busy_of_span) == (60, 20, 0.75)
    assert not analysis.integrity.ok and device.verdict == "host-bound"


def test_copies_are_not_computation() -> None:
    """Copying all the time is no reason to look at the few operators."""
    made = Recording(V100)
    made.step(0, 1000)
    made.copy("Memcpy HtoD (Pinned -> Device)", 0, 950, launched=0)
    made.kernel("k", 950, 1000, launched=1)
    device = analyze([made.trace()]).devices[0]
    assert device.verdict == "unknown" and "copies that no computation hides (95% of the window)" in device.unknown["verdict"]


def test_nothing_at_all() -> None:
    analysis = analyze([Recording().trace()])
    assert analysis.devices == [] and analysis.verdict == "unknown" and not analysis.integrity.ok
    assert analyze([]).devices == []


def test_a_cpu_is_a_device_too() -> None:
    made = Recording()
    for at in (0, 100):
        made.step(at, at + 100)
        made.loader(at, at + 50)
        made.operator("aten::mm", at + 60, at + 90, dims=((4, 8), (8, 2)), types=("float", "float"))
    device = analyze([made.trace()]).devices[0]
    assert (device.id, device.kernels, device.step_ns, device.compute_ns, device.idle_ns) == (-1, 0, 200, 60, 140)
    assert (device.data_wait.raw, device.data_wait.exposed, device.verdict) == (0.5, 0.5, "input-bound")
    assert device.gap_ns == {} and "CPU" in device.unknown["gaps"]


def test_two_devices_of_one_trace() -> None:
    made = Recording(V100)
    for device in (0, 1):
        made.kernel("k", 10, 20 + 10 * device, device=device, launched=5)
    analysis = analyze([made.trace()])
    assert [(device.id, device.span_ns) for device in analysis.devices] == [(0, 10), (1, 20)]
    assert [problem.id for problem in analysis.integrity.problems] == ["no-steps"], "one problem, said once"


def test_ranks_are_told_apart_and_their_labels_added() -> None:
    def rank(number: int) -> Trace:
        made = Recording(V100, source=f"rank{number}.json", rank=number)
        made.annotation("forward", 0, 10)
        made.kernel("k", 10, 20, launched=5)
        return made.trace()

    analysis = analyze(rank(number) for number in range(3))
    assert [device.rank for device in analysis.devices] == [0, 1, 2]
    assert analysis.annotations == [{"name": "forward", "count": 3, "total_ns": 30, "device_ns": 30}]
    assert analysis.sources == ["rank0.json", "rank1.json", "rank2.json"]
    assert [problem.message.partition(":")[0] for problem in analysis.integrity.problems] == analysis.sources


def test_the_verdict_is_that_of_most_of_the_time() -> None:
    parts = [analyze_one(training(steps)) for steps in (1, 4)]
    waiting = msgspec.structs.replace(parts[0].devices[0], verdict="input-bound")
    other = msgspec.structs.replace(parts[0], devices=[waiting])
    assert combine([other, parts[1]]).verdict == "communication-bound"
    assert combine([other, other, parts[0]]).verdict == "input-bound"


def test_a_device_that_the_trace_numbers_differently_is_the_only_one_described() -> None:
    trace = training()
    assert facts(trace, 9) == replace(V100, id=9) and facts(trace, -1) is None
    two = replace(trace, devices={0: V100, 1: replace(V100, id=1, sms=108)})
    assert facts(two, 9) is None and facts(two, 1).sms == 108


def test_it_is_one_object_of_json() -> None:
    analysis = analyze([training(rank=1)])
    assert msgspec.json.decode(msgspec.json.encode(analysis), type=Analysis) == analysis
