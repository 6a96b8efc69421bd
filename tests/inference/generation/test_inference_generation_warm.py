"""What is compiled at the first sight of a batch belongs to the preparation: it takes no part in a race, and no hang limit ends it.
And what drafts cost, where the first batch could not show it. Time is that of a clock which nothing else moves."""

from __future__ import annotations

from types import SimpleNamespace

import generation_models as toys
import pytest
import torch

from saturate.inference.generation import decode, generate, host, optimize
from saturate.inference.generation.decode import Request
from saturate.inference.generation.recipe import Recipe

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [3, 1, 2, 3], [9, 8, 9, 8], [5, 5, 1]]
CLOCK = [0]


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(decode.Loop, "_now", lambda self: CLOCK[0])


class Slow(toys.Cached):
    """Takes as long for several tokens as for one."""

    def __init__(self, seed=0, step_ns=1_000_000, context=64):
        super().__init__(seed, context=context)
        self.step_ns = step_ns

    def forward(self, ids, cache=None):
        CLOCK[0] += self.step_ns
        return super().forward(ids, cache)


class Cold(host.Local):
    """Takes a hundred times as long for a batch that it has not seen."""

    def __init__(self, *given):
        super().__init__(*given)
        self.seen = set()

    def generate(self, batch, request):
        run, key = super().generate(batch, request), str(batch)
        if key not in self.seen:
            self.seen.add(key)
            run.prefill_ns, run.decode_ns = 100 * run.prefill_ns, 100 * run.decode_ns
        return run


def searched(monkeypatch, kind):
    monkeypatch.setattr(host, "Local", kind)
    return optimize(Slow(), PROMPTS, max_new_tokens=12, draft=Slow(step_ns=50_000), time="30s", ways=("draft",), isolate=False).record


def test_what_a_batch_costs_at_first_sight_takes_no_part_in_a_race(monkeypatch):
    warm, cold = searched(monkeypatch, host.Local), searched(monkeypatch, Cold)
    assert warm.best.id == cold.best.id == "speculative, draft model" and cold.best.fate == "kept"
    for one, other in ((warm.best, cold.best), (warm.baseline, cold.baseline), (warm.candidates[0], cold.candidates[0])):
        assert other.speedup == pytest.approx(one.speedup) and other.fate == one.fate
        assert other.timing.decode_tokens_per_s == pytest.approx(one.timing.decode_tokens_per_s)
        assert other.timing.prefill_ms == pytest.approx(one.timing.prefill_ms)
    assert cold.best.speedup_ci == pytest.approx(warm.best.speedup_ci)


def test_the_first_sight_of_a_batch_has_the_time_of_a_preparation():
    limits = []

    def ask(function, *given, limit_s):
        limits.append((function.partition(":")[2], limit_s))
        return SimpleNamespace(tokens=[])

    worker = SimpleNamespace(ask=ask, freeze=lambda: None, close=lambda: None)
    left = [500.0]
    remote = host.Remote(worker, Recipe(), PROMPTS, Request(4), lambda: left[0], lambda: 61.0)
    remote.prepare(PROMPTS, Request(4))
    remote.generate(PROMPTS, Request(4))
    left[0] = 20.0
    remote.prepare(PROMPTS, Request(4))
    assert limits == [("start", 500.0), ("generate", 500.0), ("generate", 61.0), ("generate", 61.0)]


def test_preparing_the_first_batch_and_compiling_are_told_apart(monkeypatch):
    compilers, clock_s = [0.0], [0.0]

    class Compiled(host.Local):
        def __init__(self, *given):
            super().__init__(*given)
            clock_s[0] += 0.25

        def generate(self, batch, request):
            if self.first_call_s is None:
                clock_s[0] += 0.75
                compilers[0] += 0.5
            return super().generate(batch, request)

    monkeypatch.setattr(host.compiling, "seconds", lambda: compilers[0])
    monkeypatch.setattr(host.time, "monotonic", lambda: clock_s[0])
    record = searched(monkeypatch, Compiled)
    for way in (record.baseline, record.candidates[0]):
        assert (way.prepare_s, way.first_call_s, way.compile_s) == (0.25, 0.75, 0.5), way


def test_a_first_batch_without_room_does_not_switch_the_choice_of_lengths_off():
    """A draft as slow as its target, and wrong: ten tokens of it were drafted in every round of all later batches."""
    long = [number % 13 for number in range(40)]
    draft = Slow(9, context=36)
    found = generate(Slow(), [long, *PROMPTS], max_new_tokens=20, draft=draft, batch_size=1)
    assert found.runs[0].drafted == 0 and all(run.drafted < 12 for run in found.runs[1:]), [run.drafted for run in found.runs]
    assert found.tokens == generate(Slow(), [long, *PROMPTS], max_new_tokens=20, batch_size=1).tokens


def test_a_draft_that_pays_is_used_from_the_first_batch_with_room_on():
    long = [number % 13 for number in range(40)]
    draft = Slow(step_ns=10_000)
    draft.context = 36
    found = generate(Slow(), [long, *PROMPTS], max_new_tokens=20, draft=draft, batch_size=1)
    assert found.runs[0].drafted == 0 and all(run.stayed + run.quoted_stayed > 8 for run in found.runs[1:]), found.runs


def test_costs_that_were_measured_are_not_measured_again(monkeypatch):
    asked = []
    real = host.build.__globals__["measure"].costs
    monkeypatch.setattr(host.build.__globals__["measure"], "costs", lambda *given: asked.append(1) or real(*given))
    generate(Slow(), PROMPTS, max_new_tokens=6, draft=Slow(step_ns=10_000), batch_size=1)
    assert len(asked) == 1
    assert torch.is_grad_enabled()
