"""Which stretch of time an analysis is about."""

from __future__ import annotations

import pytest
from traces import V100, Recording

from saturate.trace.intervals import length
from saturate.trace.windows import CPU, devices, loader, window


def test_steps_are_all_taken_and_the_span_is_apart() -> None:
    made = Recording(V100)
    for start, end in ((100, 200), (200, 300), (350, 400)):
        made.step(start, end)
    made.kernel("gemm", 150, 160)
    made.kernel("gemm", 420, 430)
    made.kernel("on another device", 0, 1000, device=1)
    here = window(made.trace(), 0)
    assert (here.kind, here.count, length(here.steps)) == ("steps", 3, 250)
    assert [bounds.tolist() for bounds in here.span] == [[150], [430]]
    assert [here.first.tolist(), here.last.tolist()] == [[100, 200, 350], [200, 300, 400]]


def test_without_steps_the_window_is_the_span_and_says_so() -> None:
    made = Recording(V100)
    made.kernel("gemm", 150, 160)
    made.kernel("gemm", 180, 200)
    made.operator("aten::mm", 0, 2, "1/4")
    made.operator("aten::mm", 0, 10, "1/5")
    made.operator("aten::mm", 4, 6, "1/4")
    trace = made.trace()
    here = window(trace, 0)
    assert (here.kind, here.count, length(here.steps)) == ("span", 0, 50)
    assert trace.threads[here.thread] == "1/5", "the thread of most operator time, not of most operators"


def test_steps_of_another_process_are_not_this_devices() -> None:
    made = Recording(V100)
    made.step(0, 100, "1/1")
    made.step(40, 200, "2/2")
    made.kernel("gemm", 10, 20, pid=1)
    made.kernel("gemm", 50, 90, device=1, pid=2)
    trace = made.trace()
    assert length(window(trace, 0).steps) == 100 and length(window(trace, 1).steps) == 160
    assert trace.threads[window(trace, 1).thread] == "2/2"


def test_only_the_training_thread_waits_for_input() -> None:
    made = Recording(V100)
    made.step(0, 100)
    made.kernel("gemm", 10, 20)
    made.loader(0, 50, thread="1/9")                # a prefetching thread
    assert loader(made.trace(), window(made.trace(), 0)) is None, "not recorded here: unknown, not 0"
    made.loader(5, 9)
    made.annotation("enumerate(DataPipe)#Mapper", 6, 12)
    trace = made.trace()
    waiting = loader(trace, window(trace, 0))
    assert waiting is not None and length(waiting) == 7


@pytest.mark.parametrize("operators, expected", [(0, []), (1, [CPU])])
def test_devices(operators: int, expected: list[int]) -> None:
    made = Recording(V100)
    for number in range(operators):
        made.operator("aten::mm", number, number + 1)
    assert devices(made.trace()) == expected
    made.kernel("lost", 0, 0, device=5)
    made.kernel("gemm", 5, 6, device=3)
    made.kernel("gemm", 5, 6, device=1)
    assert devices(made.trace()) == [1, 3]
