"""Ranks that do not accumulate alike find their step at one update, and a rank that does not come to the gate is named."""

from __future__ import annotations

import dataclasses
import itertools
import sys

import pytest

from saturate.agent import motif
from saturate.trial.process import TrialEnded

HEAD = """
import contextlib, itertools, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
def backward(last=True):
    with contextlib.nullcontext() if last else model.no_sync():
        model(torch.randn(4, 8)).mean().backward()
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def found_at(updates, ranks: int) -> tuple[int, motif.Step]:
    """The update, from 1, at whose end a step is known. `updates`: the tokens of each."""
    tokens: list[str] = []
    for number, update in enumerate(itertools.islice(updates, 20), 1):
        for token in update:
            tokens.append(token)
            if step := motif.find(tokens, ranks):
                return number, step
    raise AssertionError("no step")


def accumulating(*lengths: int):
    return (["B"] * length + ["S0"] for length in itertools.cycle(lengths))


@pytest.mark.parametrize("lengths", [(1,), (4,), (12,), (40,), (2, 3), (1, 7, 2), (0,)])
def test_all_ranks_find_their_step_at_one_update(lengths):
    """A rank with 26 tokens after two updates took those for two long repetitions, and one with ten waited for its third."""
    number, step = found_at(accumulating(*lengths), ranks=2)
    assert (number, step.token, step.count) == (3, "S0", 1)
    assert step.tokens == (*["B"] * lengths[2 % len(lengths)], "S0")


def test_several_optimizers_make_one_step_of_ranks_too():
    for micro_steps in (1, 9):
        update = [*["B"] * micro_steps, "S0", "B", "S0", *["B"] * micro_steps, "S1"]
        number, step = found_at(itertools.repeat(update), ranks=2)
        assert (number, step.token, step.count, step.tokens) == (3, "S1", 1, tuple(update))


@pytest.mark.parametrize("before", [[], ["S6", "S7"]])
def test_a_step_does_not_end_in_the_middle_of_an_update(before):
    """Pyro has an optimizer for each parameter: with eight, the 25th event made two repetitions of a step that ended with the sixth of
    them. Two had not stepped at the first boundary, and "saturate itself failed: the samples are of different parameters"."""
    update = ["B", *(f"S{number}" for number in range(8))]
    number, step = found_at(itertools.chain([before] if before else [], itertools.repeat(update)), ranks=1)
    assert step.tokens == tuple(update) and (step.token, number) == ("S7", 3 + bool(before))


@pytest.mark.parametrize(("length", "updates"), [(1, 3), (4, 3), (12, 2), (40, 2), (400, 2)])
def test_alone_a_long_step_is_known_after_two(length, updates):
    number, step = found_at(accumulating(length), ranks=1)
    assert (number, step.tokens) == (updates, (*["B"] * length, "S0"))
    assert found_at(accumulating(2, 3), ranks=1)[1].count == 2


def test_a_step_holds_every_optimizer_that_was_seen():
    """Five steps of a critic look like steps of their own, until the generator's comes."""
    update = [*["B", "S0"] * 5, "B", "S1"]
    number, step = found_at(itertools.chain([["B", "S1"]], itertools.repeat(update)), ranks=1)
    assert (number, step.tokens) == (3, tuple(update))


def test_where_nothing_repeats_the_optimizer_that_steps_most_often_makes_the_step():
    assert motif.irregular(["B", "S1", "B", "S0", "B", "B", "S0", "B", "S2"]) == motif.Step("S0", 1, ("S0",))


@pytest.mark.parametrize(("changes", "count"), [("-++", None), ("-+++", 1), ("+--+--+", 3), ("+-++", None), ("+-+++", 1)])
def test_updates_by_hand_are_steps_once_two_in_a_row_are_as_long(changes, count):
    found = motif.find_manual([change == "+" for change in changes])
    assert found == (count and motif.Step("B", count, ("B",) * count))


def test_ranks_that_accumulate_over_other_numbers_of_batches_come_to_the_gate(script, start):
    """One stood at its first gate while the other waited for it in an all-reduce, for good."""
    trial = start(*TORCHRUN, str(script(HEAD + """
n = (4, 12)[rank]
while True:
    opt.zero_grad()
    for micro in range(n): backward(micro == n - 1)
    opt.step()
""")))
    assert trial.wait_ready()["step"]["tokens"] == ["B"] * 4 + ["S0"]
    assert len(trial.run_block(1, 4).timed_ns) == 4
    assert [greeting["step"]["tokens"].count("B") for greeting in trial.greetings()] == [4, 12]


@pytest.mark.parametrize("loop", [
    "steps = itertools.count()\nwhile True: opt.zero_grad(); backward(last=rank == 1 or next(steps) < 4); opt.step()",
    "from torch.distributed.algorithms import Join\n"
    "with Join([model]):\n    for _ in range((1000, 8)[rank]): opt.zero_grad(); backward(); opt.step()",
], ids=["waits", "Join"])
def test_a_rank_that_does_not_come_is_named(loop, script, start):
    """The user was told that the command makes no progress, and fails by itself."""
    trial = start(*TORCHRUN, str(script(HEAD + loop)))
    trial.wait_ready()
    trial.workload = dataclasses.replace(trial.workload, timeout_s=3.0)
    with pytest.raises(TrialEnded) as ended:
        trial.run_block(0, 100)
    outcome = ended.value.outcome
    assert outcome.kind == "ranks_apart", outcome
    assert outcome.reason == "rank 0 stands at the end of a step, and rank 1 did not come to it within 3 s"
    assert "see what rank 1 waited for" in outcome.remedy
