"""Set operations on intervals, against a sweep over every single nanosecond."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saturate.trace.intervals import (
    EMPTY,
    Intervals,
    contains,
    covered,
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


def seen(intervals: Intervals, shift: int = 0) -> set[int]:
    assert (intervals.start < intervals.end).all()
    assert (intervals.start[1:] > intervals.end[:-1]).all(), "they must neither overlap nor touch"
    return moments([(low - shift, high - shift) for low, high in zip(*map(np.ndarray.tolist, intervals))])


@settings(deadline=None)
@given(pairs, pairs, st.sampled_from([0, EPOCH]))
def test_set_operations(a: list[tuple[int, int]], b: list[tuple[int, int]], shift: int) -> None:
    first, second = made(a, shift), made(b, shift)
    assert seen(first, shift) == moments(a)
    assert seen(join(first, second), shift) == moments(a) | moments(b)
    assert seen(intersect(first, second), shift) == moments(a) & moments(b)
    assert seen(subtract(first, second), shift) == moments(a) - moments(b)
    assert length(first) == len(moments(a))


@settings(deadline=None)
@given(pairs, pairs, st.sampled_from([0, EPOCH]))
def test_queries(a: list[tuple[int, int]], queries: list[tuple[int, int]], shift: int) -> None:
    intervals = made(a, shift)
    inside = moments(a)
    times = np.arange(END + 1)
    assert contains(intervals, times + shift).tolist() == [int(time) in inside for time in times]
    expected = [len(inside & set(range(low, high))) for low, high in queries]
    asked = [low + shift for low, _ in queries], [high + shift for _, high in queries]
    assert covered(intervals, *asked).tolist() == expected


@pytest.mark.parametrize("operation", [intersect, subtract])
def test_empty(operation) -> None:
    one = made([(1, 5)])
    assert length(operation(EMPTY, one)) == 0 and length(operation(EMPTY, EMPTY)) == 0
    assert length(operation(one, EMPTY)) == (4 if operation is subtract else 0)
    assert length(join()) == 0


def test_a_length_beyond_float64_is_exact() -> None:
    assert length(union([0], [2**53 + 1])) == 2**53 + 1
