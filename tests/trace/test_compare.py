"""Before and after: what is said about changes planted in small analyses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from saturate.records.analysis import (
    Analysis,
    DataWait,
    Device,
    Finding,
    Integrity,
    Operator,
    Problem,
    Roofline,
)
from saturate.records.comparison import Change, Comparison
from saturate.trace.compare import compare


def operator(name: str, time_ns: int, calls: int = 10, kernels: tuple[str, ...] = ("gemm",),
             shapes: str = "[4, 8]") -> Operator:
    return Operator(name=name, shapes=shapes, dtypes="float", calls=calls, kernels=list(kernels), time_ns=time_ns,
                    flops=None, bytes=None)


def device(**changed: Any) -> Device:
    """Two steps of 1 ms: 600 us computing, 100 us exposed communication, 50 us exposed copies, 250 us idle."""
    fields: dict[str, Any] = {
        "id": 0, "name": "NVIDIA H100", "steps": 2, "span_ns": 1_900_000, "step_ns": 2_000_000, "busy_of_span": 0.8,
        "busy_of_step": 0.75, "compute_ns": 1_200_000, "exposed_communication_ns": 200_000,
        "exposed_copy_ns": 100_000, "idle_ns": 500_000, "communication_overlap": 0.5,
        "data_wait": DataWait(raw=0.2, exposed=0.1),
        "gap_ns": {"input": 200_000, "host_late": 100_000}, "edge_ns": {"input": 200_000},
        "window_gap_ns": {"input": 400_000, "host_late": 100_000}, "verdict": "input-bound",
        "roofline": Roofline(coverage=1.0, operators=[operator("aten::mm", 1_000_000)]),
    }
    return Device(**(fields | changed))


def analysis(*devices: Device, **changed: Any) -> Analysis:
    fields: dict[str, Any] = {"sources": ["a.json"], "devices": list(devices or (device(),)),
                              "verdict": "input-bound", "integrity": Integrity(ok=True, problems=[]), "findings": []}
    return Analysis(**(fields | changed))


def finding(id: str, bound: float = 1.2) -> Finding:
    return Finding(id=id, title=id, reason="", evidence=[], bound=bound, confidence="high")


def by_name(changes: list[Change]) -> dict[str, Change]:
    return {change.name: change for change in changes}


def test_nothing_changed() -> None:
    found = compare(analysis(), analysis())
    only = found.devices[0]
    assert only.step == Change(name="step", unit="ns per step", old=1_000_000, new=1_000_000, ratio=1.0)
    assert sum(part.old or 0 for part in only.parts) == only.step.old
    assert only.operators == [] and only.operators_left_out == 1
    assert found.notes == [] and found.findings_gone == found.findings_new == found.findings_kept == []
    assert found.direction == "ratios are old / new: above 1, the new one is smaller"


def test_operators_with_shapes_are_not_paired_with_operators_without() -> None:
    """Each would have vanished, and another one appeared."""
    bare = device(roofline=Roofline(coverage=0.0, operators=[operator("aten::mm", 1_000_000, shapes="")]))
    found = compare(analysis(), analysis(bare)).devices[0]
    assert (found.operators, found.unknown) == ([], {"operators": "only the old trace has the shapes of its operators, so none can be paired"})
    both = compare(analysis(bare), analysis(bare)).devices[0]
    assert both.operators_left_out == 1 and not both.unknown


def test_a_faster_step() -> None:
    """Input wait is gone: the step is 1.25 times as fast and all of it came from idle time."""
    faster = device(step_ns=1_600_000, idle_ns=100_000, busy_of_step=0.9375, verdict="compute-bound",
                    gap_ns={"host_late": 100_000}, edge_ns={}, window_gap_ns={"host_late": 100_000}, data_wait=DataWait(raw=0.01, exposed=0.0))
    found = compare(analysis(findings=[finding("input-bound", 1.25), finding("launch-bound")]),
                    analysis(faster, verdict="compute-bound",
                             findings=[finding("launch-bound", 1.05), finding("thermal")]))
    only = found.devices[0]
    assert only.step.ratio == 1.25
    parts = by_name(only.parts)
    assert (parts["idle"].old, parts["idle"].new, parts["idle"].ratio) == (250_000, 50_000, 5.0)
    assert parts["compute"].ratio == 1.0
    shares = by_name(only.shares)
    assert shares["busy_of_step"] == Change(name="busy_of_step", unit="of the step", old=0.75, new=0.9375)
    assert shares["busy_of_span"].unit == "of the span"
    assert (shares["idle"].old, shares["idle"].new, shares["idle"].unit) == (0.25, 0.0625, "of the step")
    assert (shares["data_wait_exposed"].old, shares["data_wait_exposed"].new) == (0.1, 0.0)
    gaps = by_name(only.gaps)
    assert (gaps["input"].old, gaps["input"].new, gaps["input"].ratio) == (200_000, 0, None)
    assert (gaps["host_late"].old, gaps["host_late"].new) == (50_000, 50_000)
    assert (only.old_verdict, only.new_verdict) == ("input-bound", "compute-bound")
    assert (found.old_verdict, found.new_verdict) == ("input-bound", "compute-bound")
    assert [one.id for one in found.findings_gone] == ["input-bound"]
    assert [one.id for one in found.findings_new] == ["thermal"]
    assert [(one.id, one.bound) for one in found.findings_kept] == [("launch-bound", 1.05)]


def test_what_one_trace_cannot_judge_is_neither_gone_nor_new() -> None:
    lost = Integrity(ok=False, problems=[Problem(id="lost-records", message="records were lost", blocks=["busy"])])
    old, new = analysis(findings=[finding("a"), finding("b"), finding("c")]), analysis(integrity=lost, findings=[finding("c")])

    def judges(id: str, analysis: Analysis) -> bool:
        return analysis.integrity.ok or id != "a"

    def ids(findings: list[Finding]) -> str:
        return "".join(one.id for one in findings)

    there, back = compare(old, new, judges), compare(new, old, judges)
    assert (ids(there.findings_gone), ids(there.not_judged_by_new), ids(there.findings_kept)) == ("b", "a", "c")
    assert (ids(back.findings_new), ids(back.not_judged_by_old), ids(back.findings_kept)) == ("b", "a", "c")
    assert there.not_judged_by_old == there.findings_new == back.findings_gone == back.not_judged_by_new == []


def test_other_numbers_of_steps_are_compared_per_step() -> None:
    longer = device(steps=5, **{field: getattr(device(), field) * 5 // 2 for field in (
        "step_ns", "compute_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns")},
        roofline=Roofline(coverage=1.0, operators=[operator("aten::mm", 2_500_000, calls=25)]))
    found = compare(analysis(), analysis(longer))
    assert found.notes == ["2 steps against 5: lengths are per step"]
    assert found.devices[0].step.ratio == 1.0 and all(part.ratio == 1.0 for part in found.devices[0].parts)
    assert found.devices[0].operators == []


@pytest.mark.parametrize(("old", "new", "note"), [
    (0, 0, "neither trace marks its steps: lengths depend on how much was recorded, so only shares are compared"),
    (2, 0, "only the old trace marks its steps, so no length can be compared"),
    (0, 2, "only the new trace marks its steps, so no length can be compared"),
])
def test_without_steps_no_length_is_compared(old: int, new: int, note: str) -> None:
    def of(steps: int) -> Analysis:
        return analysis(device() if steps else device(steps=0, step_ns=None, busy_of_step=None, compute_ns=1_000_000,
                                                      unknown={"step_ns": "no steps are marked"}))

    found = compare(of(old), of(new))
    only = found.devices[0]
    assert found.notes == [note]
    assert only.step.ratio is None and "no steps are marked" in only.step.unknown
    assert all(part.ratio is None for part in only.parts)
    assert only.operators == [] and only.unknown["operators"] == "at least one trace marks no steps"
    share = by_name(only.shares)["compute"]
    if old == new:
        assert (share.old, share.unit) == (1_000_000 / 1_900_000, "of the span")
    else:       # one is of the step, the other of the span
        assert (share.old, share.new) == (None, None)


def test_operators_that_came_went_and_changed() -> None:
    def of(*operators: Operator) -> Analysis:
        return analysis(device(roofline=Roofline(coverage=1.0, operators=list(operators))))

    found = compare(
        of(operator("aten::mm", 1_000_000, 10, ("sgemm",)), operator("aten::softmax", 400_000),
           operator("aten::add", 10_000), operator("aten::relu", 100_000)),
        of(operator("aten::mm", 250_000, 10, ("bf16gemm",)), operator("aten::sdpa", 300_000, 20),
           operator("aten::add", 10_100), operator("aten::relu", 100_000, shapes="[8, 8]")))
    only = found.devices[0]
    assert [(one.name, one.fate, one.old_ns, one.new_ns, one.ratio) for one in only.operators] == [
        ("aten::mm", "changed", 500_000, 125_000, 4.0),
        ("aten::softmax", "vanished", 200_000, 0, None),
        ("aten::sdpa", "appeared", 0, 150_000, None),
        ("aten::relu", "vanished", 50_000, 0, None),
        ("aten::relu", "appeared", 0, 50_000, None),
    ]
    assert (only.operators[0].kernels_old, only.operators[0].kernels_new) == (["sgemm"], ["bf16gemm"])
    assert (only.operators[2].calls_old, only.operators[2].calls_new) == (0, 10)
    assert only.operators_left_out == 1     # aten::add: 0.05 us in a step of 1 ms


def test_traces_without_operators_say_so() -> None:
    empty = analysis(device(roofline=Roofline(coverage=None, operators=[])))
    assert compare(empty, analysis()).devices[0].unknown["operators"] == "the old trace has no operators with kernels"


def test_another_device_is_mentioned() -> None:
    found = compare(analysis(), analysis(device(name="Tesla V100")))
    assert found.notes == ["the devices differ (NVIDIA H100 against Tesla V100): what changed is theirs as well as "
                           "the program's"]


def test_missing_is_never_zero() -> None:
    without = device(exposed_communication_ns=None, gap_ns={}, edge_ns={}, window_gap_ns={}, data_wait=DataWait(raw=None, exposed=None),
                     unknown={"exposed_communication_ns": "records were lost", "data_wait": "no loader",
                              "gaps": "blocked"})
    only = compare(analysis(), analysis(without)).devices[0]
    lost = by_name(only.parts)["exposed_communication"]
    assert (lost.old, lost.new, lost.ratio, lost.unknown) == (100_000, None, None, "the new trace: records were lost")
    assert by_name(only.shares)["exposed_communication"].new is None
    assert by_name(only.shares)["data_wait_raw"].unknown == "the new trace: no loader"
    assert by_name(only.gaps)["input"].new is None and "blocked" in by_name(only.gaps)["input"].unknown


def test_ranks_are_paired_by_their_numbers() -> None:
    old = analysis(*(device(rank=rank, step_ns=2_000_000 + rank) for rank in (0, 1)))
    new = analysis(*(device(rank=rank, step_ns=1_000_000 + rank) for rank in (2, 1)))
    found = compare(old, new)
    assert [(one.rank, one.step.old, one.step.new) for one in found.devices] == [(1, 1_000_000.5, 500_000.5)]
    assert found.notes == ["only in the old analysis, and not compared: device 0 of rank 0",
                           "only in the new analysis, and not compared: device 0 of rank 2"]


def test_a_single_device_is_compared_whatever_it_is_called() -> None:
    assert len(compare(analysis(device(id=0)), analysis(device(id=3, rank=1))).devices) == 1


def test_numbers_that_only_one_side_gave_its_ranks_pair_nothing() -> None:
    old = analysis(*(device(id=id, step_ns=2_000_000 + id) for id in (0, 1)))
    new = analysis(*(device(id=id, rank=id, step_ns=1_000_000 + id) for id in (0, 1)))
    found = compare(old, new)
    assert [one.id for one in found.devices] == [0, 1] and found.notes == []


def test_what_a_trace_cannot_carry_is_said() -> None:
    broken = Integrity(ok=False, problems=[Problem(id="lost-records", message="records were lost", blocks=["busy"]),
                                           Problem(id="no-steps", message="harmless", blocks=[])])
    assert compare(analysis(), analysis(integrity=broken)).notes == ["the new trace: records were lost"]


def test_a_comparison_survives_json() -> None:
    found = compare(analysis(findings=[finding("x")]), analysis(device(name="other")))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Comparison) == found


def test_two_recordings_of_resnet(shared_traces) -> None:
    """The same training with 0 and with 4 loader workers: the input wait is what went."""
    from saturate.trace.analyze import analyze
    from saturate.trace.read import read

    before, after = (analyze([read(shared_traces / f"resnet50_v100_workers{workers}.json.gz")]) for workers in (0, 4))
    only = compare(before, after).devices[0]
    assert only.step.ratio is not None and only.step.ratio > 1.1
    shares, parts = by_name(only.shares), by_name(only.parts)
    assert (shares["data_wait_exposed"].old or 0) > 0.3 > 0.02 > (shares["data_wait_exposed"].new or 0)
    assert parts["idle"].ratio is not None and parts["idle"].ratio > 1.5
    gained = (only.step.old or 0) - (only.step.new or 0)
    assert gained == pytest.approx(sum((part.old or 0) - (part.new or 0) for part in only.parts))
