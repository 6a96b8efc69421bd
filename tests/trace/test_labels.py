"""Time by label."""

from __future__ import annotations

from traces import V100, Recording

from saturate.trace.columns import Trace
from saturate.trace.labels import MOST, labels
from saturate.trace.launches import launching_calls, leaves


def table(trace: Trace) -> dict[str, tuple[int, int, int | None]]:
    rows, _ = labels(trace, launching_calls(trace))
    return {row["name"]: (row["count"], row["total_ns"], row["device_ns"]) for row in rows}


def test_labels_count_host_and_device_time() -> None:
    made = Recording(V100)
    made.step(0, 100)
    made.annotation("forward", 0, 40)
    made.annotation("forward", 50, 60)
    made.annotation("inner", 10, 20)
    made.annotation("Buffer Flush", 0, 100, "-1/0")
    made.kernel("a", 200, 230, launched=15)
    made.kernel("b", 210, 250, launched=30, stream=9)
    made.kernel("c", 250, 251, launched=55)
    made.kernel("not in it", 260, 300, launched=40)
    made.kernel("of another thread", 300, 400, launched=15, thread="1/2")
    made.kernel("of no known launch", 400, 500)
    assert table(made.trace()) == {"forward": (2, 50, 71), "inner": (1, 10, 30)}


def test_a_label_inside_itself_counts_once() -> None:
    made = Recording(V100)
    for start, end, thread in ((0, 100, "1/1"), (10, 50, "1/1"), (20, 30, "1/1"), (90, 120, "1/1"), (0, 10, "1/2")):
        made.annotation("recursive", start, end, thread)
    made.kernel("a", 200, 230, launched=25)
    made.kernel("b", 230, 240, launched=110)
    assert table(made.trace()) == {"recursive": (3, 140, 40)}


def test_a_label_around_a_backward_pass_counts_what_the_threads_of_autograd_launched() -> None:
    """They have labels of their own as well: those of the collectives, say."""
    made = Recording(V100)
    made.step(0, 100)
    made.operator("aten::mm", 1, 5)
    made.kernel("forward", 200, 210, launched=2)
    made.annotation("backward", 20, 60)
    for at in (25, 40):
        made.operator("autograd::engine::evaluate_function: MmBackward0", at, at + 10, "1/2")
        made.operator("aten::mm", at + 1, at + 9, "1/2")
        made.kernel("backward", 200 + at, 207 + at, launched=at + 3, thread="1/2")
    made.annotation("nccl:all_reduce", 40, 49, "1/2")
    made.operator("aten::mm", 25, 50, "1/3")      # of a thread that has nothing to do with it
    made.kernel("other", 300, 330, launched=30, thread="1/3")
    made.operator("autograd::engine::evaluate_function: MmBackward0", 25, 50, "9/9")     # nor has another process
    made.kernel("other", 300, 330, launched=30, thread="9/9", pid=9)
    assert table(made.trace()) == {"backward": (1, 40, 14), "nccl:all_reduce": (1, 9, 7)}


def test_without_launches_the_devices_part_is_unknown() -> None:
    made = Recording(V100)
    made.annotation("forward", 0, 40)
    made.kernel("a", 200, 230)
    assert table(made.trace()) == {"forward": (1, 40, None)}


def test_the_longest_names_are_kept() -> None:
    made = Recording()
    for number in range(MOST + 3):
        made.annotation(f"batch {number}", 0, 10 + number)
    rows, left_out = labels(made.trace(), launching_calls(made.trace()))
    assert (len(rows), left_out) == (MOST, 3) and rows[0]["total_ns"] == MOST + 12


def test_leaves_are_operators_with_nothing_inside() -> None:
    made = Recording()
    for name, start, end, thread in (("linear", 0, 50, "1/1"), ("t", 5, 10, "1/1"), ("addmm", 10, 50, "1/1"),
                                     ("add", 50, 60, "1/1"), ("other thread", 20, 30, "1/2")):
        made.operator(name, start, end, thread)
    trace = made.trace()
    assert sorted(trace.names[name] for name in trace.operators.name[leaves(trace.operators)]) \
        == ["add", "addmm", "other thread", "t"]
