"""Set operations on intervals, against a sweep over every single nanosecond."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saturate.trace import intervals
from saturate.trace.intervals import (
    EMPTY,
    Intervals,
    between,
    contains,
    covered,
    cuts,
    intersect,
    join,
    length,
    subtract,
    union,
)

END = 60
pairs = st.lists(st.tuples(st.integers(0, END), st.integers(0, END)), max_size=12)
#: Epoch nanoseconds of 2026: a float64 cannot tell neighbours apart there.
EPOCH = 1_790_000_000_000_000_001


def made(rows: list[tuple[int, int]], shift: int = 0) -> Intervals:
    return union([low + shift for low, _ in rows], [high + shift for _, high in rows])


def moments(rows: list[tuple[int, int]]) -> set[int]:
    return {moment for low, high in rows for moment in range(low, high)}


def seen(of: Intervals, shift: int = 0) -> set[int]:
    assert (of.start < of.end).all()
    assert (of.start[1:] > of.end[:-1]).all(), "they must neither overlap nor touch"
    return moments([(low - shift, high - shift) for low, high in zip(*map(np.ndarray.tolist, of))])


@pytest.mark.parametrize("at_once", [1, 3, intervals.AT_ONCE])
@settings(deadline=None)
@given(pairs, pairs, st.sampled_from([0, EPOCH]))
def test_set_operations(at_once: int, a: list[tuple[int, int]], b: list[tuple[int, int]], shift: int) -> None:
    """At once, or in so small parts that cuts go through everything."""
    first, second = made(a, shift), made(b, shift)
    with mock.patch.object(intervals, "AT_ONCE", at_once):
        assert seen(first, shift) == moments(a)
        assert seen(join(first, second), shift) == moments(a) | moments(b)
        assert seen(intersect(first, second), shift) == moments(a) & moments(b)
        assert seen(subtract(first, second), shift) == moments(a) - moments(b)
        assert length(first) == len(moments(a))


@settings(deadline=None)
@given(pairs, pairs)
def test_cuts_hold_everything_once(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    first, second = made(a), made(b)
    with mock.patch.object(intervals, "AT_ONCE", 2):
        bounds = cuts(first, second)
    assert all(end == start for (_, end), (start, _) in zip(bounds, bounds[1:]))
    for one in (first, second):
        parts = [between(one, low, high) for low, high in bounds]
        assert sum(map(length, parts)) == length(one)
        assert set().union(*map(seen, parts)) == seen(one)


@settings(deadline=None)
@given(pairs, pairs, st.sampled_from([0, EPOCH]))
def test_queries(a: list[tuple[int, int]], queries: list[tuple[int, int]], shift: int) -> None:
    these = made(a, shift)
    inside = moments(a)
    times = np.arange(END + 1)
    assert contains(these, times + shift).tolist() == [int(time) in inside for time in times]
    expected = [len(inside & set(range(low, high))) for low, high in queries]
    asked = [low + shift for low, _ in queries], [high + shift for _, high in queries]
    assert covered(these, *asked).tolist() == expected


@pytest.mark.parametrize("operation", [intersect, subtract])
def test_empty(operation) -> None:
    one = made([(1, 5)])
    assert length(operation(EMPTY, one)) == 0 and length(operation(EMPTY, EMPTY)) == 0
    assert length(operation(one, EMPTY)) == (4 if operation is subtract else 0)
    assert length(join()) == 0


def test_a_length_beyond_float64_is_exact() -> None:
    assert length(union([0], [2**53 + 1])) == 2**53 + 1
