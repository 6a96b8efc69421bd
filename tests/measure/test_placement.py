"""Where a thread goes on: on the other's CPU, and free again."""

from __future__ import annotations

import os
import threading

import pytest

from saturate.measure import placement

ALLOWED = sorted(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def own_thread():
    """Affinity belongs to a thread, and is put back."""
    yield
    os.sched_setaffinity(0, ALLOWED)


needs_two = pytest.mark.skipif(len(ALLOWED) < 2, reason="one CPU: nothing to choose from")


def apart() -> tuple[int, int]:
    """The CPU that this thread is on, and another one of the same node."""
    here = placement.current()
    assert here in ALLOWED
    return here, next(cpu for cpu in ALLOWED if cpu != here and placement._node(cpu) == placement._node(here))


@needs_two
def test_a_thread_goes_on_where_it_is_told_and_stays_free():
    for _ in range(20):
        here, there = apart()
        placement.move(there)
        assert placement.current() == there or here != placement.current()     # the kernel may have moved it on since
        assert sorted(os.sched_getaffinity(0)) == ALLOWED


@needs_two
def test_who_is_bound_stays(monkeypatch):
    here, there = apart()
    os.sched_setaffinity(0, {here})
    placement.move(there)
    assert os.sched_getaffinity(0) == {here} and placement.current() == here


@needs_two
def test_memory_that_would_be_farther_away_keeps_it_where_it_is(monkeypatch):
    here, there = apart()
    moved = []
    monkeypatch.setattr(placement.os, "sched_setaffinity", lambda *call: moved.append(call))
    placement.move(there)
    assert moved, "on one node it moves"
    moved.clear()
    monkeypatch.setattr(placement, "_node", lambda cpu: f"node{cpu}")
    placement.move(there)
    assert not moved


@needs_two
def test_other_threads_keep_their_place():
    seen = []
    ready, done = threading.Event(), threading.Event()

    def other():
        ready.set()
        done.wait(10)
        seen.append(sorted(os.sched_getaffinity(0)))

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait(10)
    placement.move(apart()[1])
    done.set()
    thread.join()
    assert seen == [ALLOWED]


def test_what_is_not_there_or_not_allowed_is_no_error(monkeypatch):
    placement.move(None)
    placement.move(1 << 20)

    def forbidden(*_):
        raise PermissionError

    monkeypatch.setattr(placement.os, "sched_setaffinity", forbidden)
    for cpu in ALLOWED:
        placement.move(cpu)
