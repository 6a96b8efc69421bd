"""The count of living activations that activation checkpointing is judged by, and the benchmark that uses it."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def alive(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import _alive

    return _alive.Alive


def chain(x, count):
    for _ in range(count):
        x = torch.tanh(x)       # saves its result
    return x


def test_each_saved_storage_counts_once_while_it_lives(alive):
    model = torch.nn.Linear(10, 10, bias=False)
    x = torch.randn(5, 10)
    with alive(model) as count:
        y = chain(model(x), 3)
        assert count.peak == 4 * 50 * 4         # the input, and three results; no weights
        z = y.exp() * y                         # exp saves its result; the product saves both of its factors
        assert count.peak == 5 * 50 * 4
        z.sum().backward()
    before = count.peak
    with count:
        chain(model(x), 3).sum().backward()
    assert count.peak == before


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_makes_again_is_seen(alive, reentrant):
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(100, requires_grad=True)
    with alive() as count:
        y = checkpoint(chain, x * 2, 10, use_reentrant=reentrant)
        forward = count.peak
        y.sum().backward()
    assert forward <= 2 * 400 and 10 * 400 <= count.peak <= 12 * 400


def test_products_that_a_checkpoint_keeps_are_seen(alive):
    import functools

    checkpoint = pytest.importorskip("torch.utils.checkpoint")
    contexts = functools.partial(checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    weight = torch.nn.Parameter(torch.randn(100, 100))
    with alive(torch.nn.ParameterList([weight])) as count:
        y = checkpoint.checkpoint(lambda x: torch.tanh(x @ weight), torch.randn(50, 100), use_reentrant=False, context_fn=contexts)
        assert count.peak == 2 * 50 * 100 * 4           # what went in, and the product
        y.sum().backward()


@pytest.mark.slow
def test_smoke(smoke):
    row = smoke("activation_memory", r"^gpt +50% of it: peak +\d+\.\d% of the budget, +\d\.\d\d blocks below it")["rows"][0]
    assert row["within_budget"] and row["within_one_block"]
