"""Who came late to a collective on a CPU, from the host's own spans."""

from __future__ import annotations

from traces import Recording

from saturate.trace import arrivals
from saturate.trace.columns import Trace


def rank(number: int, starts: list[int], end: int = 900, name: str = "gloo:all_reduce") -> Trace:
    made = Recording(rank=number, world_size=2)
    made.step(0, 10_000)
    for index, start in enumerate(starts):
        made.annotation(name, start + 1000 * index, end + 1000 * index)
    return made.trace()


def test_the_late_rank_is_named():
    last, first = arrivals.stragglers([rank(0, [100, 100]), rank(1, [700, 600])])
    assert (last.rank, last.late_ns, last.collectives) == (1, 600 + 500, 2)
    assert (first.rank, first.late_ns, first.wait_ns) == (0, 0, 600 + 500)


def test_one_rank_tells_nothing():
    assert arrivals.stragglers([rank(0, [100])]) == []


def test_ranks_that_ran_different_collectives_are_not_compared():
    assert arrivals.stragglers([rank(0, [100, 100]), rank(1, [700])]) == []
    assert arrivals.stragglers([rank(0, [100]), rank(1, [700], name="gloo:broadcast")]) == []


def test_what_lies_outside_the_steps_does_not_count():
    """Setting up a process group takes as long as it takes."""
    late = rank(1, [700])
    made = Recording(rank=0, world_size=2)
    made.step(0, 10_000)
    made.annotation("gloo:all_reduce", 100, 900)
    made.annotation("gloo:all_reduce", 20_000, 30_000)
    assert [one.late_ns for one in arrivals.stragglers([made.trace(), late])] == [600, 0]
