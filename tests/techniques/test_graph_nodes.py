"""Looking into graphs with functions of a script's own, whose authors may give `ctx` any attribute."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from saturate.agent import leaves  # noqa: E402 - after the import that decides whether to run at all
from saturate.techniques import _autograd, _chunk_rescue  # noqa: E402


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, levels):
        ctx.variable = levels
        ctx.name = "rounded"
        return (x * levels).round() / levels

    @staticmethod
    def backward(ctx, gradient):
        return gradient * min(1.0, ctx.variable / 4), None


class AccumulateGrad(torch.autograd.Function):
    """Named as torch's own."""

    @staticmethod
    def forward(ctx, x):
        ctx.variable = 3
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@pytest.fixture
def graph():
    weight = torch.ones(3, requires_grad=True)
    return weight, AccumulateGrad.apply(Rounded.apply(weight.sin(), 8)).sum()


def test_leaves_are_the_tensors_that_gradients_are_added_to(graph):
    weight, loss = graph
    assert [reference() for reference in leaves.reached(loss)] == [weight]
    outputs, found = _chunk_rescue.leads_to([loss.grad_fn], {})
    assert not outputs and len(found) == 1 and found[0] is weight


def test_names_are_those_of_the_nodes(graph):
    names = [_autograd.node_name(node) for node in _autograd.graph_nodes(graph[1], torch)]
    assert names == ["SumBackward0", "AccumulateGradBackward", "RoundedBackward", "SinBackward0", "torch::autograd::AccumulateGrad"]
    assert _autograd.computed_in(graph[1], torch.float16, torch) == ""
