"""Parts of every single step."""

from __future__ import annotations

import numpy as np
import pytest
from traces import V100, Recording

from saturate.trace import each_step as module
from saturate.trace.analyze import joined, view
from saturate.trace.breakdown import parts
from saturate.trace.each_step import each_step
from saturate.trace.intervals import union


def seen(made: Recording):
    return view(joined(made.trace()), 0)


@pytest.fixture
def two_steps():
    made = Recording(V100)
    made.step(1000, 1100)
    made.step(1100, 1400)
    made.kernel("gemm", 1010, 1050, launched=1005)
    made.kernel("ncclAllReduce", 1040, 1120, launched=1006)  # 10 hidden, 70 exposed, across the boundary
    made.copy("Memcpy HtoD (Pinned -> Device)", 1110, 1150, launched=1007)
    made.kernel("gemm", 1300, 1500, launched=1200)  # beyond the last step
    return seen(made)


def test_parts_of_two_steps(two_steps):
    first, second = each_step(two_steps.window, two_steps.work)
    assert (
        first.start_ns,
        first.compute_ns,
        first.exposed_communication_ns,
        first.exposed_copy_ns,
        first.idle_ns,
    ) == (0, 40, 50, 0, 10)
    assert (
        second.start_ns,
        second.compute_ns,
        second.exposed_communication_ns,
        second.exposed_copy_ns,
        second.idle_ns,
    ) == (100, 100, 20, 30, 150)


def test_they_are_the_breakdown_of_each_step():
    random = np.random.default_rng(7)
    made = Recording(V100)
    for number in range(20):
        made.step(number * 1000, number * 1000 + 900)
    for start in random.integers(0, 20_000, 300).tolist():
        name = ("gemm", "ncclAllReduce", "copy")[start % 3]
        add = made.copy if name == "copy" else made.kernel
        add(name, start, start + int(random.integers(1, 90)), launched=start - 1)
    found = seen(made)
    each = each_step(found.window, found.work)
    assert len(each) == 20
    for number, step in enumerate(each):
        expected = parts(found.work, union([number * 1000], [number * 1000 + 900]))
        assert (step.compute_ns, step.exposed_communication_ns, step.exposed_copy_ns, step.idle_ns) == (
            expected.compute_ns,
            expected.exposed_communication_ns,
            expected.exposed_copy_ns,
            expected.idle_ns,
        )
        assert sum((step.compute_ns, step.exposed_communication_ns, step.exposed_copy_ns, step.idle_ns)) == 900


def test_without_steps_there_are_none_and_many_are_cut(monkeypatch, two_steps):
    made = Recording(V100)
    made.kernel("gemm", 10, 50, launched=5)
    alone = seen(made)
    assert each_step(alone.window, alone.work) == []
    monkeypatch.setattr(module, "MOST", 1)
    assert len(each_step(two_steps.window, two_steps.work)) == 1
