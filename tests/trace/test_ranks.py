"""Stragglers planted in made traces: who is named, by how much, and when nothing can be said."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nsys_exports import Export
from traces import Recording

from saturate.records.analysis import Straggler
from saturate.trace import collectives, nsys, one_run, ranks
from saturate.trace.analyze import analyze
from saturate.trace.columns import Trace

NAME = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"
TRANSFER = 1_000
STEP = 100_000
COLLECTIVES = 4
MISSING = "ranks were compared: what they waited for the others cannot be told from their transfers"
LEFT_OUT = "recorded collectives have no counterpart on all ranks of their group and were left out"


def recorded(rank: int | None, world: dict[int, dict[int, int]], *, steps: range = range(3), clock: int = 0,
             arguments: dict[str, Any] | None = None) -> Trace:
    """One rank of a training with four all-reduces per step.

    `world`: rank -> collective -> ns by which that rank comes later. All end together, `TRANSFER` after the last one.
    """
    made = Recording(rank=rank, world_size=2, source=f"rank{rank}.json")
    for step in steps:
        at = step * STEP + clock
        made.annotation(f"ProfilerStep#{step}", at, at + STEP)
        for number in range(COLLECTIVES):
            due = at + 10_000 + number * 20_000
            own = due + world.get(rank or 0, {}).get(number, 0)
            last = due + max(each.get(number, 0) for each in world.values())
            made.collective(NAME, own, last + TRANSFER, launched=own - 50, arguments=dict(arguments or {}))
    return made.trace()


def pair(late: dict[int, int], clock: int = 0, **both: Any) -> list[Trace]:
    """Rank 1 is late; its clock is ahead by `clock`."""
    world = {0: {}, 1: late}
    return [recorded(0, world, **both), recorded(1, world, clock=clock, **both)]


def stragglers(traces: Iterable[Trace]) -> list[Straggler]:
    """Each rank across the collectives that all took part in."""
    return ranks.across([seen for trace in traces for seen in collectives.observe(trace)]).stragglers


def test_the_late_rank_and_its_peers_wait() -> None:
    first, second = stragglers(pair({2: 700, 3: 300}))
    assert (first.rank, first.late_ns, first.wait_ns) == (1, 3 * 1_000, 0)
    assert (second.rank, second.late_ns, second.wait_ns) == (0, 0, 3 * 1_000)
    assert first.transfer_ns == second.transfer_ns == 12 * TRANSFER
    assert first.collectives == second.collectives == 12
    assert first.late_from == "starts"


def test_nobody_late() -> None:
    assert [(each.late_ns, each.wait_ns) for each in stragglers(pair({}))] == [(0, 0), (0, 0)]


def test_three_ranks_and_two_culprits() -> None:
    world = {0: {}, 1: {0: 500}, 2: {1: 800, 0: 100}}
    traces = [recorded(rank, world, steps=range(1)) for rank in world]
    found = {each.rank: each for each in stragglers(traces)}
    assert {rank: each.late_ns for rank, each in found.items()} == {0: 0, 1: 500, 2: 900}
    assert {rank: each.wait_ns for rank, each in found.items()} == {0: 1300, 1: 800, 2: 400}


@pytest.mark.parametrize("clock", [5_000_000_000, -7_777])
def test_clocks_that_do_not_agree(clock: int) -> None:
    """The durations still tell."""
    study = ranks.across([seen for trace in pair({2: 700}, clock) for seen in collectives.observe(trace)])
    assert [(each.rank, each.late_ns, each.wait_ns, each.late_from) for each in study.stragglers] == [
        (1, 2_100, 0, "durations"), (0, 0, 2_100, "durations")]
    assert study.notes == ["the ranks' clocks do not agree, so lateness is from durations"]


@pytest.mark.parametrize("clock", [800, 8_000_000, -8_000_000])
@pytest.mark.parametrize("late", [0, 300])
@pytest.mark.parametrize("arguments", [{}, {"Seq": 1}])
def test_clocks_that_are_apart_by_less_than_a_transfer(clock: int, late: int, arguments: dict[str, Any]) -> None:
    """All ranks are in the collective at one instant by the clocks as they are, yet starts alone would name a rank."""
    def one(rank: int) -> Trace:
        made = Recording(rank=rank, world_size=2)
        for step in range(3):
            at = 100_000_000 * step + rank * clock
            made.annotation(f"ProfilerStep#{step}", at, at + 100_000_000)
            made.collective(NAME, at + 10_000_000 + rank * late, at + 30_000_000, launched=at + 10,
                            arguments={fact: value + step for fact, value in arguments.items()})
        return made.trace()

    study = ranks.across(collectives.observe(one(0)) + collectives.observe(one(1)))
    assert {each.rank: (each.late_ns, each.wait_ns, each.late_from) for each in study.stragglers} == {
        0: (0, 3 * late, "starts"), 1: (3 * late, 0, "starts")}
    assert study.notes == ([] if abs(clock) < 20_000 else [
        "the ranks' clocks are up to 8.00 ms apart; they were set by the ends of the collectives, which ranks finish "
        "together"])


def leaving_early(rank: int, kind: str, clock: int = 0, all_reduces: bool = True) -> list[collectives.Seen]:
    """Three collectives per step that both ranks reach at once and rank 0 leaves 4 us before rank 1; and, or not, an
    all-reduce that rank 1 reaches 1 us late. The clock of rank 1 is ahead by `clock`."""
    made = Recording(rank=rank, world_size=2)
    for step in range(10):
        at = step * STEP + rank * clock
        made.annotation(f"ProfilerStep#{step}", at, at + STEP)
        for number in range(3):
            due = at + 10_000 * (number + 1)
            made.collective(NAME, due, due + 5_000 + 4_000 * rank, launched=due - 50, arguments={"Collective name": kind})
        if all_reduces:
            made.collective(NAME, at + 60_000 + 1_000 * rank, at + 65_000, launched=at + 100, arguments={})
    return collectives.observe(made.trace())


@pytest.mark.parametrize("kind", ["broadcast", "_reduce_oop", "scatter", "gather"])
def test_a_rank_that_leaves_a_collective_early_was_not_late(kind: str) -> None:
    """Its ends tell nothing about the clocks; those of all-reduces do."""
    def late(**both: Any) -> tuple[dict[int | None, int], list[str]]:
        study = ranks.across(leaving_early(0, kind, **both) + leaving_early(1, kind, **both))
        return {each.rank: each.late_ns for each in study.stragglers}, study.notes

    assert late() == ({0: 0, 1: 10_000}, [])
    assert late(all_reduces=False) == ({0: 0, 1: 0}, [])
    assert late(clock=800) == ({0: 0, 1: 10_000}, []), "taken away"
    assert late(clock=5_000_000_000) == ({0: 0, 1: 10_000}, [
        "the ranks' clocks do not agree, so lateness is from durations, and only of the 10 of 40 collectives that ranks "
        "finish together"])


@pytest.mark.parametrize(("name", "together"), [
    (NAME, True), ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", True), ("_allgather_base", True), ("all_to_allv", True),
    ("gloo:barrier", True), ("ncclDevKernel_Reduce_Sum_f32_RING_LL", False), ("ncclDevKernel_Broadcast_RING_LL", False),
    ("gloo:gather", False), ("scatter", False)])
def test_which_collectives_ranks_finish_together(name: str, together: bool) -> None:
    assert bool(ranks.FINISHED_TOGETHER.search(name)) == together


def test_origins_are_part_of_the_clock() -> None:
    """The same instants, counted from another origin."""
    one, two = pair({2: 700})
    moved = recorded(1, {0: {}, 1: {2: 700}}, clock=-40_000)
    found = stragglers([one, Trace(**{**vars(moved), "origin_ns": 40_000})])
    assert found == stragglers([one, two])
    assert found[0].late_from == "starts"


def test_windows_of_other_steps_are_matched_by_their_numbers() -> None:
    """One rank recorded steps 0 to 2, the other 1 to 3: two steps are common. Matched by order, nothing would fit."""
    world = {0: {}, 1: {1: 400}}
    study = ranks.across(collectives.observe(recorded(0, world, steps=range(3)))
                         + collectives.observe(recorded(1, world, steps=range(1, 4))))
    assert [(each.rank, each.late_ns, each.collectives) for each in study.stragglers] == [(1, 800, 8), (0, 0, 8)]
    assert study.notes[0].startswith("8 of 24 recorded collectives")


def test_between_two_steps_is_in_none() -> None:
    """One rank recorded on for a moment after its step: that collective is not the second one of the step."""
    def one(rank: int, starts: list[int]) -> Trace:
        made = Recording(rank=rank, world_size=2)
        made.annotation("ProfilerStep#3", 0, 50_000)
        for at in starts:
            made.kernel(NAME, at + rank * 10, at + 1_000, launched=at)
        return made.trace()

    assert [(each.rank, each.late_ns, each.collectives) for each in stragglers(
        [one(0, [20_000, 60_000]), one(1, [20_000])])] == [(1, 10, 1), (0, 0, 1)]


def test_sequence_numbers_are_believed_before_steps() -> None:
    """The steps of one rank are numbered from 0, those of the other from 500, as after a restart of its loop."""
    def one(rank: int, first: int) -> Trace:
        made = Recording(rank=rank, world_size=2)
        made.annotation(f"ProfilerStep#{first}", 0, 90_000)
        for number in range(3):
            at = 10_000 * (number + 1)
            made.collective(NAME, at + rank * 100, at + 1_000, launched=at, arguments={"Seq": 40 + number})
        return made.trace()

    assert [(each.rank, each.late_ns, each.collectives) for each in stragglers([one(0, 0), one(1, 500)])] == [
        (1, 300, 3), (0, 0, 3)]


def test_sizes_tell_collectives_apart() -> None:
    """A small and a large one run side by side, and the ranks start them in different order."""
    def one(rank: int, order: list[int]) -> Trace:
        made = Recording(rank=rank, world_size=2)
        for place, size in enumerate(order):
            at = 10_000 + place
            made.collective(NAME, at, at + size, launched=at - 5, stream=size,
                            arguments={"Collective name": "allreduce", "In msg nelems": size})
        return made.trace()

    study = ranks.across(collectives.observe(one(0, [300, 900])) + collectives.observe(one(1, [900, 300])))
    assert {(each.wait_ns, each.transfer_ns, each.late_ns) for each in study.stragglers} == {(0, 1200, 1)}
    assert study.notes == []


def test_process_groups_keep_to_themselves() -> None:
    """Ranks 0 and 1 share one group, 2 and 3 another that starts later; in each the second rank is late."""
    def one(rank: int) -> Trace:
        group = [rank // 2 * 2, rank // 2 * 2 + 1]
        made = Recording(rank=rank, world_size=4)
        for number in range(2):
            at = 10_000 * (number + 1) + rank // 2 * 500
            made.collective(NAME, at + (rank % 2) * (100 + rank), at + 2_000, launched=at,
                            arguments={"Process Group Ranks": str(group), "Process Group Name": str(rank // 2)})
        return made.trace()

    found = {each.rank: each for each in stragglers([one(rank) for rank in range(4)])}
    assert {rank: each.late_ns for rank, each in found.items()} == {0: 0, 1: 202, 2: 0, 3: 206}
    assert all(each.collectives == 2 for each in found.values())


def test_a_group_with_a_missing_rank_is_judged_by_those_that_are_there() -> None:
    traces = pair({2: 700}, arguments={"Process Group Ranks": "[0, 1, 2, 3]"})
    study = ranks.across([seen for trace in traces for seen in collectives.observe(trace)])
    assert [each.late_ns for each in study.stragglers] == [2_100, 0]
    assert study.world_size == 4 and study.notes == [study.unknown] == ["2 of 4 " + MISSING]


@pytest.mark.parametrize(("given", "size", "said"), [
    ((0, 1, 2, 3), 4, ""), ((0, 1, 2), 4, "3 of 4 " + MISSING), ((1, 3), 4_000, "2 of 4,000 " + MISSING),
    ((0, 1), None, ""), ((0, 1), 2, ""),
])
def test_ranks_that_were_not_given_are_missed(given: tuple[int, ...], size: int | None, said: str) -> None:
    """All of these may have waited for one of those."""
    traces = [replace(recorded(rank, dict.fromkeys(given, {})), world_size=size) for rank in given]
    study = ranks.across([seen for trace in traces for seen in collectives.observe(trace)])
    assert len(study.stragglers) == len(given) and not study.mixed
    assert (study.unknown, study.notes) == (said, [said] if said else [])
    assert analyze(traces).unknown == ({"stragglers": said} if said else {})


def test_a_rank_that_was_given_but_ran_none_of_them_is_missed_as_well() -> None:
    silent = Recording(rank=2, world_size=3)
    silent.kernel("gemm", 10, 20, launched=5)
    traces = [replace(trace, world_size=3) for trace in pair({2: 700})] + [silent.trace()]
    assert analyze(traces).unknown == {"stragglers": "2 of 3 " + MISSING}


def test_counts_that_do_not_match_are_left_out_and_said() -> None:
    """A rank that ran one all-reduce more: which of them is the extra one cannot be known."""
    one, two = (Recording(rank=rank, world_size=2) for rank in (0, 1))
    for made, count in ((one, 3), (two, 4)):
        for number in range(count):
            made.kernel(NAME, 1_000 * number + 100, 1_000 * number + 200, launched=1_000 * number)
            if number < 2:
                made.kernel("ncclDevKernel_Broadcast(x)", 1_000 * number + 300, 1_000 * number + 400,
                            launched=1_000 * number)
    study = ranks.across([seen for made in (one, two) for seen in collectives.observe(made.trace())])
    assert [each.collectives for each in study.stragglers] == [2, 2]
    assert study.notes == [f"7 of 11 {LEFT_OUT}"]


def test_sends_and_receives_are_no_collectives() -> None:
    traces = pair({2: 700}, arguments={"Collective name": "send"})
    study = ranks.across([seen for trace in traces for seen in collectives.observe(trace)])
    assert study.stragglers == [] and "no collective could be matched" in study.unknown
    assert analyze(traces).integrity.problems == [], "nothing speaks against one run"
    assert study.notes == ["24 sends and receives are not collectives and were left out"]


@pytest.mark.parametrize("name", ["ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
                                  "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)"])
def test_sends_and_receives_without_recorded_arguments(name: str) -> None:
    """Rank 1 receives long after rank 0 has sent to another one: nobody waits for it."""
    def one(rank: int, host: tuple[str, ...] = (), **facts: Any) -> list[collectives.Seen]:
        made = Recording(rank=rank, world_size=2)
        for number in range(3):
            at = 100_000 * number
            for called in host:
                made.operator(called, at, at + 10)
            made.kernel(NAME, at, at + 1_000, launched=at)
            made.collective(name, at + 10_000, at + 20_000 + (0 if facts or host else 30_000 * rank), launched=at,
                            arguments=facts)
        return collectives.observe(made.trace())

    study = ranks.across(one(0) + one(1))
    assert [(each.wait_ns, each.collectives) for each in study.stragglers] == [(0, 3), (0, 3)]
    assert study.notes == ["6 sends and receives are not collectives and were left out"]
    told = ranks.across(one(0, **{"Collective name": "all_to_all"}) + one(1, **{"Collective name": "all_to_all"}))
    assert {each.collectives for each in told.stragglers} == {6} and told.notes == []
    for host, found in ((("c10d::alltoall_base_",), 6), (("nccl:all_to_all", "nccl:send 0->1"), 3),
                        (("nccl:all_to_all", "c10d::recv_"), 3), (("c10d::send",), 3)):
        seen = ranks.across(one(0, host) + one(1, host)).stragglers
        assert {each.collectives for each in seen} == {found}, host


@pytest.mark.parametrize(("traces", "reason"), [
    ([], "no collectives were recorded"),
    ([recorded(0, {0: {}})], "only one rank was given"),
    ([recorded(0, {0: {}}), recorded(0, {0: {}})], "are both of rank 0"),
    ([recorded(0, {0: {}}), recorded(None, {0: {}})], "rankNone.json does not say its rank"),
    ([Recording(rank=0).trace(), Recording(rank=1).trace()], "no collectives were recorded"),
])
def test_when_nothing_can_be_said(traces: list[Trace], reason: str) -> None:
    study = ranks.across([seen for trace in traces for seen in collectives.observe(trace)])
    assert study.stragglers == [] and reason in study.unknown
    assert stragglers(traces) == []


def of_run(source: str, rank: int | None = None, size: int | None = 2, at_s: float = 0.0) -> one_run.Member:
    first = 1_700_000_000_000_000_000 + round(at_s * 1e9)
    return one_run.Member(source, rank, size, first, first + 10**9)


@pytest.mark.parametrize(("members", "reason"), [
    ([of_run("a", 0), of_run("b", 1)], ""),
    ([of_run("a"), of_run("b")], ""),
    ([of_run("a", 0), of_run("b", 1, None)], ""),
    ([of_run("a", 0), of_run("b", 1, at_s=60)], ""),
    ([of_run("a", 0), of_run("b", 0)], "two files are of rank 0 (a, b)"),
    ([of_run("a", 0), of_run("b")], "b does not say its rank, and others do"),
    ([of_run("a", 0), of_run("b", 1, 16)], "a is of a run of 2 ranks and b of one of 16"),
    ([of_run("a", 1, at_s=62), of_run("b", 0)], "a was recorded 61 s after b"),
    ([one_run.Member("a", 0, 2, 5, 9), one_run.Member("b", 1, 2, 10**15, 10**15)], ""),     # clocks of their own
])
def test_files_that_cannot_be_one_run(members: list[one_run.Member], reason: str) -> None:
    assert one_run.not_one_run(members) == reason
    assert ranks.compared(members, []).mixed == bool(reason)


def test_what_cannot_be_compared_is_a_problem_of_the_files() -> None:
    """And only of what compares them: each file still tells of its own device."""
    def problems(*traces: Trace) -> list[tuple[str, list[str]]]:
        found = analyze(traces)
        assert all(device.busy_of_step is not None for device in found.devices)
        assert found.integrity.ok == (not any(problem.blocks for problem in found.integrity.problems))
        return [(problem.id, problem.blocks) for problem in found.integrity.problems]

    assert problems(*pair({2: 700})) == []
    assert problems(recorded(0, {0: {}}), replace(recorded(0, {0: {}}), source="again.json")) == [("not-one-run", ["ranks"])]
    other = recorded(1, {0: {}, 1: {}}, arguments={"Collective name": "broadcast"})
    assert problems(recorded(0, {0: {}}), other) == [("not-one-run", ["ranks"])], "nothing of it could be matched"
    silent = Recording(rank=1, world_size=2)
    silent.step(0, 100)
    silent.kernel("k", 10, 20, launched=5)
    assert problems(recorded(0, {0: {}}), silent.trace()) == [("not-one-run", ["ranks"])]


def test_files_without_ranks_are_numbered_in_their_order() -> None:
    traces = [recorded(None, {0: {2: 700}}), recorded(None, {0: {}})]
    study = ranks.across([seen for trace in traces for seen in collectives.observe(trace)])
    assert {each.rank for each in study.stragglers} == {0, 1}
    assert study.notes == ["the files do not say their rank; ranks are numbered in the order of the files"]
    devices = analyze(traces).devices
    assert [(device.rank, device.unknown.get("rank")) for device in devices] == [(0, None), (1, None)]
    assert analyze(traces[:1]).devices[0].unknown["rank"] == "the trace does not say its rank"


def processes(path: Path, of: dict[int, tuple[int, int]]) -> Path:
    """An export of several processes. `of`: process -> its device, and ns by which it is late."""
    made = Export(path)
    for number in range(3):
        for pid, (device, late) in of.items():
            made.kernel(NAME, 10_000 * number + 100 + late, 10_000 * number + 2_000, pid, device)
            made.kernel("gemm", 10_000 * number + 3_000, 10_000 * number + 4_000, pid, device)
    return made.write()


def test_two_processes_in_one_nsys_export_are_two_ranks(tmp_path: Path) -> None:
    trace = nsys.read(processes(tmp_path / "a.sqlite", {100: (0, 0), 200: (1, 250)}))
    assert [(each.rank, each.late_ns, each.collectives) for each in stragglers([trace])] == [
        (1, 750, 3), (0, 0, 3)]
    assert [(device.rank, device.id) for device in analyze([trace]).devices] == [(0, 0), (1, 1)]


def test_several_nsys_exports_of_several_processes(tmp_path: Path) -> None:
    """One of each machine, of one name; each numbers its devices from 0, and the processes come in any order."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    traces = [nsys.read(processes(tmp_path / machine / "two.sqlite", {200: (0, late), 100: (1, 0)}))
              for machine, late in (("a", 0), ("b", 250))]
    analysis = analyze(traces)
    assert [(device.rank, device.id) for device in analysis.devices] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert {each.rank: each.late_ns for each in analysis.stragglers} == {0: 0, 1: 0, 2: 750, 3: 0}
    assert [Path(source).parent.name for source in analysis.sources] == ["a", "b"]
    study = ranks.across([seen for trace in traces for seen in collectives.observe(trace)])
    assert study.notes == ["the files do not say their rank; ranks are numbered in the order of the files, and of the "
                           "devices in each"]


def test_a_device_of_several_ranks_has_no_rank(tmp_path: Path) -> None:
    device, = analyze([nsys.read(processes(tmp_path / "a.sqlite", {100: (0, 0), 200: (0, 250)}))]).devices
    assert device.rank is None and device.unknown["rank"] == "collectives of 2 ranks ran on this device"


def sampled(rank: int, kept: list[int], clock: int = 0) -> Trace:
    """A trace from which events were removed: of ten collectives of irregular lengths only some are left."""
    made = Recording(rank=rank, world_size=2)
    for number in kept:
        at = 10_000_000 * number + clock
        made.kernel(NAME, at + rank * 90_000, at + 1_000_000 + 300_000 * (number % 4), launched=at)
    return made.trace()


def test_positions_that_do_not_hold_are_not_believed() -> None:
    """Both ranks kept five, but not the same five: by position, 3 would be matched with 4, and so on."""
    study = ranks.across(collectives.observe(sampled(0, [0, 2, 3, 7, 9])) + collectives.observe(sampled(1, [0, 3, 4, 8, 9])))
    assert [(each.rank, each.late_ns, each.collectives, each.late_from) for each in study.stragglers] == [
        (1, 3 * 90_000, 3, "starts"), (0, 0, 3, "starts")]
    assert [note.partition(",")[0] for note in study.notes] == [
        "the n-th collectives of the ranks are not the same ones",
        f"4 of 10 {LEFT_OUT}"]


def test_neither_positions_nor_clocks() -> None:
    traces = [sampled(0, [0, 2, 3, 7, 9]), sampled(1, [0, 3, 4, 8, 9], 4_000_000)]
    study = ranks.across([seen for trace in traces for seen in collectives.observe(trace)])
    assert study.stragglers == [] and "no collective could be matched" in study.unknown


def test_by_time_each_has_one_counterpart_and_ends_with_it() -> None:
    """In microseconds. Those that end at 1,400 and at 2,000 overlap and are nearest to each other, but are not one.
    Two end near 3,385, and only the nearer one is the peer's."""
    def one(rank: int, spans: list[tuple[int, int]]) -> Trace:
        made = Recording(rank=rank, world_size=2)
        for start, end in spans:
            made.kernel(NAME, start * 1_000, end * 1_000, launched=start * 1_000)
        return made.trace()

    first = one(0, [(0, 500), (1_000, 1_400), (3_000, 3_370), (3_375, 3_380), (6_000, 6_100)])
    second = one(1, [(40, 500), (1_300, 2_000), (3_100, 3_385), (8_000, 8_100), (9_000, 9_100)])
    study = ranks.across(collectives.observe(first) + collectives.observe(second))
    assert {(each.collectives, each.late_from) for each in study.stragglers} == {(2, "starts")}
    late = {each.rank: each.late_ns for each in study.stragglers}
    assert late == {0: 277_500, 1: 37_500}, "one pair ends together, the other 5 us apart: clocks are set by the middle"


def test_one_position_that_does_not_hold_is_left_out() -> None:
    one, two = (Recording(rank=rank, world_size=2) for rank in (0, 1))
    for number in range(20):
        at = 10_000 * number
        one.kernel(NAME, at, at + 1_000, launched=at)
        at += 5_000 if number == 7 else 0
        two.kernel(NAME, at + 100, at + 1_000, launched=at)
    study = ranks.across([seen for made in (one, two) for seen in collectives.observe(made.trace())])
    assert [(each.rank, each.late_ns, each.collectives) for each in study.stragglers] == [(1, 1_900, 19), (0, 0, 19)]
    assert study.notes == [f"2 of 40 {LEFT_OUT}"]


def test_collectives_of_a_cpu() -> None:
    """Gloo's annotations lie on threads of its own, and its steps on the training thread."""
    def one(rank: int) -> Trace:
        made = Recording(rank=rank, world_size=2)
        for step in range(3):
            at = 100_000 * step
            made.annotation(f"ProfilerStep#{step}", at, at + 100_000)
            made.annotation("gloo:all_reduce", at + 10_000 + 7_000 * rank, at + 18_000, thread=f"1/{2 + step % 2}")
            made.operator("c10d::allreduce_", at + 9_000, at + 9_500)
            made.annotation("gloo:send", at + 20_000, at + 30_000)
        return made.trace()

    study = ranks.across(collectives.observe(one(0)) + collectives.observe(one(1)))
    assert [(each.rank, each.late_ns, each.wait_ns, each.collectives) for each in study.stragglers] == [
        (1, 21_000, 0, 3), (0, 0, 21_000, 3)]
    assert study.notes == ["6 sends and receives are not collectives and were left out"]


def test_two_of_128_ranks(shared_traces: Path) -> None:
    """The traces are sampled, so positions do not hold: five of ten collectives ended at one moment on both ranks."""
    from saturate.trace.read import read

    traces = [read(shared_traces / f"ws128_rank{rank}.json.gz") for rank in (0, 1)]
    study = ranks.across([seen for trace in traces for seen in collectives.observe(trace)])
    found = {each.rank: each for each in study.stragglers}
    assert {(each.collectives, each.late_from) for each in study.stragglers} == {(5, "starts")}
    assert found[1].late_ns == 31_865_000 and found[0].late_ns == 0
    assert study.notes[0].startswith("the n-th collectives of the ranks are not the same ones")
