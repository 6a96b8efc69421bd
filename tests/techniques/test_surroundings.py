"""Forwards that touch something besides their output: they train as without us, to the last bit and the last call."""

from __future__ import annotations

import collections
import contextlib
import random

import numpy
import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402 - after the import that decides whether to run at all

from saturate.agent.context import Context  # noqa: E402
from saturate.techniques import activation_checkpointing, dynamic_batch, micro_batch  # noqa: E402
from saturate.techniques._api import NotApplied  # noqa: E402
from saturate.techniques._chunk_modes import Held, agrees  # noqa: E402
from saturate.techniques._surroundings import Surroundings  # noqa: E402

TECHNIQUES = {
    "activation-checkpointing": (activation_checkpointing, activation_checkpointing.Options(mode="blocks")),
    "micro-batch": (micro_batch, micro_batch.Options(4)),
    "dynamic-batch": (dynamic_batch, dynamic_batch.Options()),
}

GLOBAL_GENERATOR = numpy.random.default_rng(0)
AUXILIARY: list = []
HOOKED: list = []


class Meter:
    def __init__(self):
        self.calls, self.total = 0, torch.zeros(32)

    def update(self, x):
        self.calls += 1
        self.total += x.detach().sum(0)


METER = Meter()


class Schedule:
    def __init__(self):
        self.p = 0.1


SCHEDULE = Schedule()


class Block(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(x)))


class ListedGenerator(Block):
    def __init__(self, number):
        super().__init__(number)
        self.generators = [torch.Generator().manual_seed(number)]

    def forward(self, x):
        return super().forward(x) * (torch.rand(x.shape, generator=self.generators[0]) > 0.1)


class StochasticDepth(Block):
    def __init__(self, number):
        super().__init__(number)
        self.random = random.Random(number)

    def forward(self, x):
        return super().forward(x) if self.random.random() > 0.3 else x


class GlobalGenerator(Block):
    def forward(self, x):
        return super().forward(x) * float(GLOBAL_GENERATOR.random())


class Auxiliary(Block):
    """Leaves a loss in a list, as mixtures of experts do."""

    def forward(self, x):
        out = super().forward(x)
        AUXILIARY.append(out.square().mean())
        return out


class Counting(Block):
    def forward(self, x):
        METER.update(x)
        return super().forward(x)


class OnItsClass(Block):
    seen: collections.deque = collections.deque(maxlen=5)

    def forward(self, x):
        self.seen.append(x.shape[0])
        return super().forward(x)


class Scheduled(Block):
    def forward(self, x):
        return functional.dropout(super().forward(x), SCHEDULE.p)


class Hooking(Block):
    def forward(self, x):
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: HOOKED.append(tuple(gradient.shape)))
        return out


class Model(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.blocks = torch.nn.ModuleList(kind(number) for number in range(3))
        self.head = torch.nn.Linear(32, 10)

    def forward(self, x):
        AUXILIARY.clear()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(kind, technique=None):
    """Everything that a script sees of it."""
    global GLOBAL_GENERATOR
    GLOBAL_GENERATOR = numpy.random.default_rng(0)
    METER.__init__()
    SCHEDULE.p = 0.1
    AUXILIARY.clear(), HOOKED.clear(), OnItsClass.seen.clear()
    torch.manual_seed(0)
    model = Model(kind).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    context = Context(torch)
    context.modules, context.device, context.optimizers = (model,), "cpu", (optimizer,)
    if technique is not None:
        module, options = TECHNIQUES[technique]
        with contextlib.suppress(NotApplied):
            module.apply(context, options)
    seen = []
    try:
        for step in range(12):
            x, y = torch.randn(16, 32), torch.randint(0, 10, (16,))
            loss = functional.cross_entropy(model(x), y)
            if AUXILIARY:
                loss = loss + 0.1 * sum(AUXILIARY)
            SCHEDULE.p = 0.1 + 0.01 * step          # after the forward, before the backward
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append((loss.item(), len(AUXILIARY), METER.calls, METER.total.sum().item(), list(OnItsClass.seen), list(HOOKED)))
    finally:
        context.undo()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return seen, weights, torch.rand(1).item()


@pytest.mark.parametrize(("kind", "technique"), [
    (kind, technique) for technique in TECHNIQUES
    for kind in (ListedGenerator, StochasticDepth, GlobalGenerator, Auxiliary, Counting, OnItsClass, Scheduled, Hooking)
    if (kind, technique) != (Scheduled, "micro-batch")])       # chunks draw other masks than the whole batch
def test_it_trains_as_without(kind, technique, capfd):
    plain, tuned = train(kind), train(kind, technique)
    if kind is Hooking and technique == "activation-checkpointing":
        assert [step[0] for step in tuned[0]] == [step[0] for step in plain[0]]     # its hook is on what is recomputed as well
        return
    assert tuned[0] == plain[0] and tuned[2] == plain[2]
    assert all(map(torch.equal, tuned[1], plain[1]))


def test_what_touches_nothing_is_not_refused():
    for technique in TECHNIQUES:
        plain, tuned = train(Block), train(Block, technique)
        assert [step[0] for step in tuned[0]] == pytest.approx([step[0] for step in plain[0]], rel=1e-4)


def test_what_is_changed_is_put_back():
    numbers, inner = [1, 2], {"a": {3}}

    class Holds(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.held = (numbers, inner, collections.deque([4]), Meter(), numpy.zeros(3))
            self.register_buffer("own", torch.zeros(2))

        def forward(self, x):
            return x

    module = Holds()
    around = Surroundings(module, torch)
    assert around.changed() == "" == around.generator
    module.own.add_(1)
    assert around.changed() == ""                   # whoever runs a module again takes care of its buffers
    numbers.append(5)
    assert "a list" in around.changed()
    inner["a"].add(6)
    inner["b"] = 7
    module.held[2].clear()
    module.held[3].update(torch.ones(2, 32))
    module.held[4][:] = 8
    with around.as_they_were():
        assert (numbers, inner, list(module.held[2]), module.held[3].calls) == ([1, 2], {"a": {3}}, [4], 0)
        assert not module.held[4].any() and not module.held[3].total.any()
    assert (numbers, inner, list(module.held[2]), module.held[3].calls) == ([1, 2, 5], {"a": {3, 6}, "b": 7}, [], 1)
    assert around.restore() and not around.restore()
    assert (numbers, inner, list(module.held[2]), module.held[3].calls) == ([1, 2], {"a": {3}}, [4], 0)
    assert float(module.held[3].total.sum()) == 0 and not module.held[4].any()


@pytest.mark.parametrize("make", [torch.Generator, random.Random, numpy.random.default_rng, numpy.random.RandomState])
def test_generators_are_found_but_for_those_of_everybody(make):
    module = torch.nn.Linear(2, 2)
    module.everybodys = [random.uniform, random._inst, numpy.random.rand, numpy.random.mtrand._rand, torch.default_generator]
    assert Surroundings(module, torch).generator == ""
    module.deep = {"own": [make()]}
    assert Surroundings(module, torch).generator == type(make()).__name__


class Runner:
    """As a Trainer: it holds the module, and a loader with a generator of its own."""

    def __init__(self, module):
        self.inside, self.generator, self.steps = {"module": module}, torch.Generator(), 0


class Run(torch.nn.Module):
    """As a LightningModule: it knows its Trainer, which its forward does not ask."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(2, 2)
        self._runner = Runner(self)

    def forward(self, x):
        return self.body(x)


class Asks(Run):
    def forward(self, x):
        return self.body(x) + self.noise()

    def noise(self):
        return torch.rand(1, generator=self._runner.generator)


class Guided(Run):
    """Its runner does not lead back to it: whoever calls the forward may have given it what it draws from."""

    def __init__(self):
        super().__init__()
        self._runner.inside.clear()


def test_what_runs_the_module_is_not_its_own():
    module = Run()
    around, held = Surroundings(module, torch), Held(module, torch)
    assert not around.generator
    module._runner.steps = 5
    assert not around.restore() and module._runner.steps == 5
    with held.as_it_was():
        assert module._runner.steps == 5


@pytest.mark.parametrize("kind", [Asks, Guided])
def test_what_its_forward_may_reach_is(kind):
    module = kind()
    around, held = Surroundings(module, torch), Held(module, torch)
    assert around.generator == "Generator"
    module._runner.steps = 5
    with held.as_it_was():
        assert module._runner.steps == 0
    assert around.restore() and module._runner.steps == 0


def test_complex_outputs_are_compared_in_both_parts() -> None:
    ours = torch.tensor([3 + 4j, 1 - 2j])
    assert agrees(ours, ours.clone(), 1e-4)
    assert not agrees(ours, ours.conj(), 1e-4) and not agrees(ours, -ours.conj(), 1e-4)
