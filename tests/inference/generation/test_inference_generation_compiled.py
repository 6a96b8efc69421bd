"""Steps of generation that torch.compile makes, one program for each number of rows, tokens and slots."""

from __future__ import annotations

import inspect

import generation_models as toys
import pytest
import torch

from saturate.inference.generation import build, models
from saturate.inference.generation.decode import Request, Sequences
from saturate.inference.generation.sampling import GREEDY
from saturate.inference.generation.speculative import COMPILED_COUNTS, ModelDrafter

#: dynamo's own limit. Its name was `cache_size_limit` before torch 2.7.
USUAL = 8


@pytest.mark.parametrize("takes_limit", [True, False])
def test_more_shapes_than_dynamo_s_own_limit_are_compiled(takes_limit, monkeypatch):
    """Nothing but dynamo is at work: the backend runs what was captured as it is."""
    compiled, given = torch.compile, []

    def compile_it(function, mode, **options):
        given.append("recompile_limit" in options)
        return compiled(function, backend="eager", **options)

    known = inspect.signature(compiled)
    if takes_limit and "recompile_limit" not in known.parameters:
        pytest.skip("this torch takes no limit for one function")
    compile_it.__signature__ = known if takes_limit else inspect.signature(compile_it)
    monkeypatch.setattr(torch, "compile", compile_it)
    decoder = models.decoder(torch, toys.Cached(), compile_mode="default")
    limit = torch._dynamo.config.recompile_limit
    with torch.inference_mode():
        for capacity in (64, 128):
            ids = torch.arange(capacity).remainder(toys.VOCABULARY).repeat(2, 1)
            decoder.start(2, capacity)
            decoder.feed(ids, [0, 0], 30)
            for count in range(1, USUAL):
                assert decoder.feed(ids, [30, 30], count).shape[1] == count
    assert given and set(given) == {takes_limit}
    assert torch._dynamo.config.recompile_limit == limit, "as it was for everything else"


def test_shapes_beyond_what_is_compiled_are_run_as_they_are(monkeypatch):
    """A loop that lived long enough ended in torch's error about its limit."""
    compiled, seen, told = torch.compile, [], []
    monkeypatch.setattr(models.notices, "tell_once", told.append)

    def compile_it(function, mode, **options):
        def noted(*arguments):
            seen.append(tuple(arguments[0].shape))
            return function(*arguments)
        return noted

    compile_it.__signature__ = inspect.signature(compiled)
    monkeypatch.setattr(torch, "compile", compile_it)
    monkeypatch.setattr(models, "_MOST_SHAPES", 3)
    decoder = models.decoder(torch, toys.Cached(), compile_mode="default")
    ids = torch.arange(64).remainder(toys.VOCABULARY).repeat(2, 1)
    decoder.start(2, 64)
    decoder.feed(ids, [0, 0], 30)
    for count in (1, 2, 3, 4, 5, 2, 4):
        assert decoder.feed(ids, [30, 30], count).shape[:2] == (2, count)
    assert seen == [(2, 1), (2, 2), (2, 3), (2, 2)]
    assert set(told) == {"saturate: Cached met more than 3 shapes: steps of others are not compiled\n"}


class Noting:
    """A decoder that remembers how many tokens it was fed."""

    def __init__(self, inner):
        self.inner, self.counts = inner, []
        self.name, self.context = inner.name, inner.context

    def start(self, rows, capacity):
        self.inner.start(rows, capacity)

    def feed(self, ids, starts, count, keep=None):
        self.counts.append(count)
        return self.inner.feed(ids, starts, count, keep)


@pytest.mark.parametrize("counts", [(), COMPILED_COUNTS])
def test_a_draft_is_fed_few_numbers_of_tokens_and_drafts_the_same(counts):
    model = toys.Cached()
    decoder = Noting(models.decoder(torch, model))
    drafter = ModelDrafter(torch, decoder, toys.VOCABULARY, counts=counts)
    begun, added = ([1, 2, 3] * 4, [4] * 10), ([5, 6, 7] * 3, [8, 9, 8] * 3)
    with torch.inference_mode():
        for lacking in range(1, 10):
            sequences = Sequences(torch, begun, Request(20), 40, "cpu")
            drafter.start(sequences, 40)
            for row, tokens in enumerate(added):
                sequences.append(row, tokens[:lacking])
            sequences.ids = torch.tensor([row + [0] * (40 - len(row)) for row in sequences.known])
            decoder.counts.clear()
            drafter.propose(sequences, 2, GREEDY, None)
            assert decoder.counts == [min(count for count in counts or range(10) if count >= lacking), 1]
            for row, known in zip(sequences.ids.tolist(), sequences.known):
                assert row[len(known):len(known) + 2] == toys.greedy(model, known, 2)


def test_loops_that_are_compiled_fill_up(monkeypatch):
    """And no others: what is fed one by one costs no compilation."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    for mode, counts in ((None, ()), ("default", COMPILED_COUNTS)):
        way = build.Way(toys.Cached(seed=3), compile_mode=mode, lengths=(2,), may_stop=False)
        assert build.build(torch, toys.Cached(), way, [[1, 2, 3]], Request(4)).drafter._model._counts == counts
