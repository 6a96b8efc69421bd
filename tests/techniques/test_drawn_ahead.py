"""Workers are asked for batches ahead; what the sampler draws for them comes when it would without workers."""

from __future__ import annotations

import random

import numpy
import pytest

torch = pytest.importorskip("torch")

from saturate import notices  # noqa: E402
from saturate.agent.context import Context  # noqa: E402
from saturate.techniques import _drawn_ahead, _loaders, loader_workers  # noqa: E402


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return index


class AsItGoes(torch.utils.data.Sampler):
    """Draws each index from `draw`."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 24

    def __iter__(self):
        for _ in range(24):
            yield self.draw()


class Inline(AsItGoes):
    def __iter__(self):
        for _ in range(24):
            yield random.randrange(24)


class Tensors(AsItGoes):
    def __iter__(self):
        while True:
            yield from torch.randperm(24).tolist()


class Before(AsItGoes):
    def __iter__(self):
        order = torch.randperm(24).tolist()
        yield from order


class AtOnce(AsItGoes):
    """No generator: it draws where it is asked for its iterator, as many samplers of buckets do."""

    def __iter__(self):
        order = list(range(24))
        random.shuffle(order)
        return iter(order)


class ItsOwn(AsItGoes):
    def __iter__(self):
        generator = torch.Generator()
        while True:
            yield from torch.randperm(24, generator=generator).tolist()


def orders(script, **arguments):
    """What `script(loader, generator)` collects without workers, and with those of the technique."""
    found = []
    for technique in (False, True):
        torch.manual_seed(5)
        random.seed(5)
        numpy.random.seed(5)
        generator, context, changes, data = torch.Generator().manual_seed(3), Context(torch), {}, Numbers()
        given = {name: make(generator) for name, make in arguments.items()} or {"shuffle": True, "generator": generator}
        if technique:
            loader_workers.apply(context, loader_workers.Options(workers=2))
            defaults = {"batch_size": 4, "num_workers": 0, "persistent_workers": False, "prefetch_factor": None}
            changes = context.loader_rewrites[0](data, {**defaults, **given}, frozenset(given))
            assert changes["num_workers"] == 2
        loader = torch.utils.data.DataLoader(data, **{"batch_size": 4, **given, **changes})
        try:
            found.append([*script(loader, generator), torch.rand(1).item(), torch.rand(1, generator=generator).item(), random.random(),
                          numpy.random.rand()])
        finally:
            context.undo()
    return found


def left(loader, generator):
    """Shortly before its end, at any place."""
    found = []
    for after in (4, 5, 3, 0, 1):
        for place, batch in enumerate(loader):
            found.append(batch.tolist())
            if place == after:
                break
    return found


def noisy(loader, generator):
    return [(batch.tolist(), torch.rand(1, generator=generator).item()) for _ in range(3) for batch in loader]


def zipped(loader, generator):
    return [batch.tolist() for _ in range(3) for batch, _ in zip(loader, range(5))]


@pytest.mark.parametrize("script", [left, noisy, zipped])
def test_later_epochs_are_in_the_same_order_where_the_sampler_has_a_generator(script):
    plain, changed = orders(script)
    assert changed == plain


@pytest.mark.parametrize("sampler", [
    lambda generator: AsItGoes(lambda: random.randrange(24)),
    lambda generator: AsItGoes(lambda: int(numpy.random.randint(24))),
    lambda generator: torch.utils.data.RandomSampler(Numbers(), replacement=True, num_samples=70, generator=generator),
    lambda generator: AtOnce(None),
])
def test_what_a_sampler_draws_between_two_batches_is_drawn_when_it_would_be(sampler):
    plain, changed = orders(left, sampler=sampler)
    assert changed == plain


def test_where_the_training_draws_from_the_same_generator_in_between_it_is_said(capfd):
    notices.tell_once.cache_clear()

    def script(loader, generator):
        return [(batch.tolist(), random.random()) for batch in loader]

    plain, changed = orders(script, sampler=lambda _: AsItGoes(lambda: random.randrange(24)))
    assert changed != plain
    assert capfd.readouterr().err.count("AsItGoes draws random numbers between two batches") == 1


def test_samplers_that_draw_as_they_go_are_refused_by_name(capfd):
    names = {make(None): _loaders.draws_as_it_goes(make(None)) for make in (Inline, Tensors, Before, ItsOwn)}
    assert list(names.values()) == ["Inline", "Tensors", "", ""]
    batches = torch.utils.data.BatchSampler(Inline(None), 4, drop_last=False)
    assert _loaders.draws_as_it_goes(batches) == "Inline"
    assert _loaders.draws_as_it_goes(torch.utils.data.RandomSampler(Numbers(), generator=torch.Generator())) == ""


@pytest.mark.parametrize("generator", [torch.Generator(), random.Random(1), numpy.random.default_rng(1), numpy.random.RandomState(1),
                                       numpy.random.Generator(numpy.random.MT19937(1))])
def test_states_of_generators_come_back(generator):
    def draw():
        return torch.rand(1, generator=generator).item() if isinstance(generator, torch.Generator) else generator.random()

    before = _drawn_ahead.state_of(generator)
    first = draw()
    assert _drawn_ahead.state_of(generator) != before
    _drawn_ahead.set_state(generator, before)
    assert _drawn_ahead.state_of(generator) == before and draw() == first
