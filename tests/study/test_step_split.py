"""What the baseline's facts say of where the time of a step goes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from saturate.study import baseline
from saturate.trial.process import Block

MS = 1_000_000


@pytest.fixture
def observed(monkeypatch):
    """`observe` of a process on `device`, whose block had these parts in each of its steps of 20 ms; 3 page faults come in each step, and
    the kernel takes 2 ms for them."""
    monkeypatch.setattr(baseline, "with_machine", lambda study, facts: None)

    def observe(device, slower=1, **parts_ms):
        asked = []
        monkeypatch.setattr(baseline.meter, "kernel_work", lambda pid: (100 + 3 * sum(map(sum, asked)), 1.0 + 2e-3 * sum(map(sum, asked))))

        def run_block(skip, steps, split):
            asked.append((skip, steps))
            return Block([slower * 20 * MS] * steps, {name: round(slower * ms * MS * steps) for name, ms in parts_ms.items()}, steps=skip + steps)

        nothing = {name: lambda: None for name in ("thaw", "freeze", "resident_bytes", "ports")}
        trial = SimpleNamespace(run_block=run_block, ask=lambda question: {}, **nothing)
        live = SimpleNamespace(trial=trial, step_ms=20.0, too_long=False, hello={"pid": 0, "step": {}, "device": device},
                               startup_s=1.0, warmup_s=1.0, stationary=True, events={})
        found = baseline.observe(None, live)
        return found["facts"], found["split"], asked

    return observe


def test_on_a_cpu_nothing_hides_what_the_host_waits_for(observed):
    facts, split, asked = observed("cpu", input=5, backward=8, optimizer=2)
    assert (facts["input_wait_ms"], facts["input_exposed_ms"], facts["optimizer_ms"]) == (5, None, 2)
    assert split["input wait"] == 5 and split["forward and rest"] == 5 and asked == [(1, 50)]


def test_an_accelerator_hides_the_host_s_waits(observed):
    facts, split, asked = observed("cuda", input=0, fetch=5, backward=12, optimizer=2)
    assert (facts["input_wait_ms"], facts["input_exposed_ms"], facts["backward_ms"]) == (5, 0, 12)
    assert split["input wait"] == 0 and split["forward and rest"] == 6 and asked == [(8, 50)]
    assert (facts["page_faults"], facts["kernel_ms"]) == pytest.approx((3, 2)), "in each step, those that are not timed among them"


@pytest.mark.parametrize("slower", [1, 5])
def test_parts_are_of_the_step_that_all_else_is_told_of(slower, observed):
    """Seen under load: a step of 17 ms whose backward took 53 of them, and techniques that could "remove at most 0.0 % of a step"."""
    facts, split, _ = observed("cpu", slower=slower, input=5, backward=8, optimizer=2)
    assert (facts["input_wait_ms"], facts["backward_ms"], facts["optimizer_ms"]) == pytest.approx((5, 8, 2))
    assert sum(split.values()) == pytest.approx(20) and split["forward and rest"] == pytest.approx(5)
