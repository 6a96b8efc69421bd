"""Every nanosecond on the clock belongs to the innermost part."""

from __future__ import annotations

import threading

import pytest

from saturate.agent.partclock import REST, PartClock


def test_inner_parts_are_taken_from_the_outer_one(ticks):
    clock = PartClock(ticks)

    def backward() -> None:
        ticks.now += 5

    def step() -> None:
        ticks.now += 10
        clock.around("backward", backward)()
        ticks.now += 20

    clock.start()
    ticks.now += 1
    clock.around("optimizer", step)()
    ticks.now += 2
    assert clock.lap() == {REST: 3, "optimizer": 30, "backward": 5}


def test_an_exception_ends_its_part(ticks):
    clock = PartClock(ticks)

    def fails() -> None:
        ticks.now += 7
        raise ValueError

    clock.start()
    with pytest.raises(ValueError):
        clock.around("backward", fails)()
    ticks.now += 1
    assert clock.lap() == {REST: 1, "backward": 7}


def test_a_window_that_begins_inside_a_part(ticks):
    clock = PartClock(ticks)
    clock.start()
    clock.leave()
    ticks.now += 4
    clock.enter("optimizer")
    ticks.now += 1
    assert clock.lap() == {REST: 4, "optimizer": 1}


def test_other_threads_do_not_count(ticks):
    clock = PartClock(ticks)

    def work() -> None:
        ticks.now += 3

    clock.start()
    thread = threading.Thread(target=clock.around("backward", work))
    thread.start()
    thread.join()
    assert clock.lap() == {REST: 3}


def test_laps_begin_anew(ticks):
    clock = PartClock(ticks)
    clock.start()
    ticks.now += 3
    clock.enter("backward")
    ticks.now += 4
    assert clock.lap() == {REST: 3, "backward": 4}
    ticks.now += 5
    clock.leave()
    assert clock.lap() == {"backward": 5, REST: 0}
