"""The way that costs training least in total is taken, not the one that blocks least."""

from __future__ import annotations

import random

import pytest

from saturate.checkpoints.costs import LEAST_BYTES, RETRY_EVERY, TRIED, Costs

WAYS = ("sync", "thread", "process")


class Run:
    """A made-up training: steps of `step_s`, and what a checkpoint blocks and slows by way."""

    def __init__(self, blocked: dict[str, float], slowed: dict[str, float], lasting: int = 3, fixed: str | None = None):
        self.costs = Costs(WAYS, fixed)
        self.blocked, self.slowed, self.lasting = blocked, slowed, lasting
        self.now = 0.0
        self.draw = random.Random(1)

    def steps(self, count: int, extra: float = 0.0, writing: int = 0) -> None:
        for index in range(count):
            self.now += 0.1 * (1 + 0.02 * self.draw.random()) + (extra if index < self.lasting else 0.0)
            self.costs.step(self.now, index + 1 < writing)

    def checkpoint(self, size: int = 100 << 20, files: int = 1) -> str:
        way = self.costs.way()
        for _ in range(files):
            assert self.costs.way() == way, "files of one checkpoint go the same way"
            scale = size / (100 << 20)
            self.now += self.blocked[way] * scale / files
            self.costs.saved(way, size // files, self.blocked[way] * scale / files)
        lasting = 0 if way == "sync" else self.lasting
        self.steps(1, self.slowed[way] * scale / self.lasting, lasting)         # its interval holds the save itself
        self.steps(8, self.slowed[way] * scale / self.lasting, lasting)
        return way

    def settled(self, checkpoints: int = 12) -> str:
        self.steps(10)
        ways = [self.checkpoint() for _ in range(checkpoints)]
        return max(set(ways[-4:]), key=ways[-4:].count)


def test_blocked_time_alone_does_not_decide():
    """A thread that blocks briefly and slows down much loses to the synchronous save."""
    blocked = {"sync": 0.5, "thread": 0.02, "process": 0.03}
    assert Run(blocked, {"sync": 0.0, "thread": 0.9, "process": 0.7}).settled() == "sync"
    assert Run(blocked, {"sync": 0.0, "thread": 0.3, "process": 0.05}).settled() == "process"
    assert Run(blocked, {"sync": 0.0, "thread": 0.05, "process": 0.4}).settled() == "thread"


def test_every_way_is_measured_before_one_is_chosen():
    run = Run(dict.fromkeys(WAYS, 0.1), dict.fromkeys(WAYS, 0.0))
    run.steps(10)
    first = [run.checkpoint() for _ in range(TRIED * len(WAYS))]
    assert {way: first.count(way) for way in WAYS} == dict.fromkeys(WAYS, TRIED)


def test_it_comes_back_to_what_lost_now_and_then():
    run = Run({"sync": 0.5, "thread": 0.02, "process": 0.03}, {"sync": 0.0, "thread": 0.0, "process": 0.3})
    assert run.settled() == "thread"
    run.slowed["thread"], run.slowed["process"] = 2.0, 0.0          # something else runs now
    assert [run.checkpoint() for _ in range(4 * RETRY_EVERY)][-5:] == ["process"] * 5


def test_several_files_and_other_sizes_are_one_checkpoint():
    run = Run({"sync": 0.5, "thread": 0.02, "process": 0.03}, {"sync": 0.0, "thread": 0.9, "process": 0.9})
    run.steps(10)
    for index in range(12):
        run.checkpoint(size=(10 + 40 * (index % 2)) << 20, files=3)
    assert run.costs.choose() == "sync" and run.costs.checkpoints == 12 and run.costs.files == 36


def test_small_checkpoints_do_not_count():
    run = Run(dict.fromkeys(WAYS, 0.1), dict.fromkeys(WAYS, 0.0))
    run.steps(10)
    for _ in range(5):
        run.checkpoint(size=LEAST_BYTES // 2)
    assert not any(run.costs.per_byte.values())


def test_slowdown_within_a_single_step_counts():
    """Steps so long that the file is written before the next one ends."""
    run = Run({"sync": 0.05, "thread": 0.01, "process": 0.01}, {"sync": 0.0, "thread": 0.1, "process": 0.02}, lasting=1)
    assert run.settled() == "process"
    run = Run({"sync": 0.05, "thread": 0.01, "process": 0.01}, {"sync": 0.0, "thread": 0.1, "process": 0.09}, lasting=1)
    assert run.settled() == "sync"


def test_an_evaluation_between_steps_is_no_slowdown():
    run = Run({"sync": 0.5, "thread": 0.02, "process": 0.6}, {"sync": 0.0, "thread": 0.0, "process": 0.6}, lasting=5)
    run.steps(10)
    for _ in range(9):
        way = run.costs.way()
        run.costs.saved(way, 100 << 20, run.blocked[way])
        run.steps(2, 0.0, 5)
        run.now += 30.0             # an evaluation
        run.steps(7, 0.0, 3)
    assert run.costs.choose() == "thread"


def test_waiting_counts_and_a_fixed_way_stays():
    run = Run({"sync": 0.1, "thread": 0.01, "process": 0.01}, dict.fromkeys(WAYS, 0.0), fixed="thread")
    run.steps(10)
    run.checkpoint()
    run.costs.waited(0.25)          # a load, a barrier
    assert run.costs.blocked_s == pytest.approx(0.26)
    assert {run.checkpoint() for _ in range(20)} == {"thread"}


def test_without_steps_every_file_is_a_checkpoint():
    costs = Costs(WAYS)
    for _ in range(9):
        way = costs.way()
        costs.saved(way, 10 << 20, {"sync": 0.3, "thread": 0.1, "process": 0.2}[way])
    assert costs.checkpoints == 9 and costs.choose() == "thread"
    assert costs.lost_s("sync") == pytest.approx(0.3) and costs.lost_s("thread") == pytest.approx(0.1)
    text = costs.describe(1 << 20)
    assert text.startswith("9 checkpoint(s) in 9 file(s), 94.4 MB written; one costs 0.100 s of training by thread (")
    assert "0.300 s by sync" in text and text.endswith("1 MB of host memory held")
