"""What the baseline's facts say of where the time of a step goes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from saturate.study import baseline
from saturate.trial.process import Block

MS = 1_000_000


@pytest.fixture
def observed(monkeypatch):
    """`observe` of a process on `device`, whose block had these parts in each of its steps of 200 ms."""
    monkeypatch.setattr(baseline, "with_machine", lambda study, facts: None)
    monkeypatch.setattr(baseline.meter, "kernel_work", lambda pid: (0, 0.0))

    def observe(device, **parts_ms):
        asked = []

        def run_block(skip, steps, split):
            asked.append((skip, steps))
            return Block([200 * MS] * steps, {name: round(ms * MS * steps) for name, ms in parts_ms.items()}, steps=skip + steps)

        nothing = {name: lambda: None for name in ("thaw", "freeze", "resident_bytes", "ports")}
        trial = SimpleNamespace(run_block=run_block, ask=lambda question: {}, **nothing)
        live = SimpleNamespace(trial=trial, step_ms=20.0, too_long=False, hello={"pid": 0, "step": {}, "device": device},
                               startup_s=1.0, warmup_s=1.0, stationary=True, events={})
        found = baseline.observe(None, live)
        return found["facts"], found["split"], asked

    return observe


def test_on_a_cpu_nothing_hides_what_the_host_waits_for(observed):
    facts, split, asked = observed("cpu", input=50, backward=80, optimizer=20)
    assert (facts["input_wait_ms"], facts["input_exposed_ms"], facts["optimizer_ms"]) == (50, None, 20)
    assert split["input wait"] == 50 and split["forward and rest"] == 50 and asked == [(1, 50)]


def test_an_accelerator_hides_the_host_s_waits(observed):
    facts, split, asked = observed("cuda", input=0, fetch=50, backward=120, optimizer=20)
    assert (facts["input_wait_ms"], facts["input_exposed_ms"], facts["backward_ms"]) == (50, 0, 120)
    assert split["input wait"] == 0 and split["forward and rest"] == 60 and asked == [(8, 50)]
