"""Ranks that speak to each other in a forward: seen before they do, however they do it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from torch import distributed  # noqa: E402 - after what decides whether to run at all

from saturate.techniques import _collectives  # noqa: E402


class Refusal(Exception):
    pass


@pytest.fixture
def two_ranks():
    """This process is the first of two; what the other one would say is made up."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    distributed.destroy_process_group()


def synchronized(x):
    """As SyncBatchNorm, whose own function is one of an accelerator."""
    class Mean(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            total = x.sum(0)
            distributed.all_reduce(total)
            return x - total / len(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return Mean.apply(x)


def exchanged(x):
    """As experts get their tokens."""
    from torch.distributed._functional_collectives import all_to_all_single

    return all_to_all_single(x, [2, 2], [2, 2], distributed.group.WORLD) * 1.0


def implied(x):
    """A sum of which each rank has a part is needed: a distributed tensor asks for it by itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    return DTensor.from_local(x, init_device_mesh("cpu", (2,)), [Partial()]).tanh()


def as_objects(x):
    distributed.all_gather_object([None, None], x.tolist())


SPEAKING = [synchronized, exchanged, implied, as_objects, lambda x: distributed.barrier()]


@pytest.mark.parametrize("speaking", SPEAKING, ids=["reduced", "exchanged", "implied", "as objects", "a barrier"])
def test_it_is_seen_before_they_speak(two_ranks, speaking):
    x = torch.randn(4, 3, requires_grad=True)
    speaking(x)
    with pytest.raises(Refusal, match="ranks speak to each other in it"), _collectives.refused(Refusal):
        speaking(x)


def test_in_a_backward_as_well(two_ranks):
    x = torch.randn(4, 3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: distributed.all_reduce(gradient))
    with pytest.raises(Refusal), _collectives.refused(Refusal):
        torch.autograd.grad(y.sum(), [x])


def test_what_is_said_to_nobody_passes(two_ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    x = torch.randn(4, 3, requires_grad=True)
    of_ranks = DTensor.from_local(torch.ones(4, 3), init_device_mesh("cpu", (2,)), [Replicate()])
    with _collectives.refused(Refusal):
        assert torch.equal(torch.nn.functional.softmax(x, 1), x.softmax(1))
        assert torch.equal((of_ranks * 2).to_local(), torch.full((4, 3), 2.0))
        assert distributed.get_world_size() == 2
