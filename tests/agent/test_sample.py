"""What is read from parameters is little, and spread over all of them."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace

import pytest
import torch

from saturate.agent import capture, observe
from saturate.agent.sample import all_strided, digest, entries_of, few, spread, stride_of, strided, totals


def test_few() -> None:
    assert few(list(range(5))) == list(range(5))
    assert few(list(range(80))) == list(range(0, 80, 10))


def test_strided() -> None:
    assert strided(torch.arange(3.0).reshape(3, 1), 16) == [0.0, 1.0, 2.0]
    assert strided(torch.arange(100.0), 4) == [0.0, 25.0, 50.0, 75.0]
    assert strided(torch.empty(0), 4) == []
    assert strided(torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), 4) == [1.0, 1.0]


@pytest.mark.parametrize("shape", [(768, 768), (3072, 768), (4096, 4096), (128, 784), (64, 3, 7, 7), (512, 512, 3, 3), (50257, 768), (64, 64),
                                   (10, 4096), (8, 16), (1000, 2)])
def test_no_dimension_of_a_tensor_is_read_at_one_place_only(shape: tuple[int, ...]) -> None:
    """All 64 entries of a weight were those of its first input (of a convolution, its first pixel): gradients whose elements had changed
    places had the right direction."""
    places = torch.arange(math.prod(shape)).reshape(shape)
    read = spread(places, 64)
    assert min(32, len(places.flatten())) <= len(read) <= 64
    assert read[-1] >= places.numel() - 2 * stride_of(shape, 64), "up to the end"
    for dimension, size in enumerate(shape):
        at = read // math.prod(shape[dimension + 1:]) % size
        assert len(at.unique()) >= min(size, 30), (dimension, at)
        assert at.max() >= 0.9 * (size - 1) and at.min() <= 0.1 * size and at.diff().abs().max() > 0.0
    if len(shape) == 4:
        mixed = places.permute(0, 2, 3, 1).contiguous().view(shape)
        assert (spread(mixed, 64) != read).float().mean() > 0.9


def test_tensors_of_any_class_and_layout_have_entries() -> None:
    """A volume of MONAI's was taken apart into millions of objects where it was indexed; a sparse batch ended the agent."""
    class Volume(torch.Tensor):
        def __getitem__(self, index):
            raise AssertionError("it would be taken apart")

    dense = torch.arange(9.0).reshape(3, 3)
    assert entries_of(torch, dense.as_subclass(Volume), 64) == dense.flatten().tolist()
    assert entries_of(torch, torch.nn.Parameter(dense), 64) == dense.flatten().tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sparse in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()):
            assert sorted(entries_of(torch, sparse, 64)) == [float(value) for value in range(1, 9)]
        assert entries_of(torch, torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), 64) == [1.0] * 3

    class Strange(torch.Tensor):
        def detach(self):
            raise NotImplementedError

    assert entries_of(torch, dense.as_subclass(Strange), 64) == []


def test_what_is_not_contiguous_is_read_in_the_same_order() -> None:
    base = torch.arange(360.0).reshape(6, 5, 4, 3)
    pairs = torch.complex(base, -base).conj()
    views = (base.transpose(0, 2), base.to(memory_format=torch.channels_last), base[1::2, :, ::3], base[:, :1].expand(6, 9, 4, 3),
             base[0, 0, 0, 0].expand(7, 8), base[:0].transpose(0, 1), base[0, 0, 0, 0], pairs.transpose(1, 3), pairs.imag.transpose(0, 1))
    for view in views:
        for entries in (1, 4, 7, 64, 4096):
            flat = view.reshape(-1)
            assert torch.equal(spread(view, entries), flat[:: stride_of(view.shape, entries)][:entries])
        assert strided(view, 7) == strided(view.contiguous(), 7) and digest(view) == digest(view.contiguous())


def test_many_tensors_are_read_as_each_of_them_is(monkeypatch) -> None:
    """In one go for each format."""
    made = [torch.randn(3, 5), torch.empty(0), torch.randn(200), torch.randn(4, 4).t(), torch.tensor(2.0), torch.randn(9, dtype=torch.float64),
            torch.randn(7, dtype=torch.bfloat16), torch.complex(torch.randn(3), torch.randn(3)), torch.nn.Parameter(torch.randn(6))]
    expected, copies, whole = [strided(one, 16) for one in made], [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: copies.append(tensor.numel()) or whole(tensor))
    assert all_strided(made, 16) == expected and all_strided([], 16) == []
    assert sorted(copies) == [9, sum(len(row) for row in expected) - 9]


def test_losses_are_read_at_once_as_their_sums() -> None:
    losses = [torch.tensor(0.1), torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor(0.25, dtype=torch.float64), torch.tensor(1 + 2j)]
    assert totals(losses) == [float(torch.tensor(0.1)), 3.0, 0.25, 3.0] and totals([]) == []

    class Own(torch.Tensor):
        def tolist(self):
            raise NotImplementedError

    assert totals([losses[0], torch.ones(3).as_subclass(Own)]) == [float(torch.tensor(0.1)), 3.0]


def test_an_expanded_tensor_is_not_copied_to_read_some_of_it() -> None:
    """Sixteen terabytes of indices over three numbers."""
    mask = torch.arange(3.0).reshape(1, 3).expand(1 << 40, 3)
    assert strided(mask, 4) == [index * stride_of(mask.shape, 4) % 3 for index in range(4)]
    assert len(digest(mask)) == 8


@pytest.mark.parametrize("make", [
    lambda one: torch.diag(one).to_sparse(), lambda one: torch.diag(one).to_sparse_csr(), lambda one: torch.zeros(3, 0, int(one[0])),
    lambda one: torch.nested.nested_tensor([one, one[:1]], layout=torch.jagged), lambda one: one.to("meta"),
    lambda one: torch.sparse_coo_tensor(one[None].long(), [1.0, 1.0], (4,))])
def test_a_tensor_of_any_layout_has_a_digest(make) -> None:
    """An adjacency matrix, given to the model of a graph: the drill failed."""
    assert digest(make(torch.tensor([1.0, 2.0]))) == digest(make(torch.tensor([1.0, 2.0])))
    assert make(torch.ones(2)).device.type == "meta" or digest(make(torch.tensor([1.0, 2.0]))) != digest(make(torch.tensor([3.0, 2.0])))


def test_a_shard_stands_for_its_tensor() -> None:
    class Sharded:
        def to_local(self) -> torch.Tensor:
            return torch.tensor([7.0])

    assert strided(Sharded(), 4) == [7.0]


def test_both_parts_of_complex_numbers_are_read_without_a_warning() -> None:
    """Weights that train along the imaginary axis alone were taken for ones that stand still."""
    imaginary = torch.arange(4.0) * 1j
    weight = torch.nn.Parameter(imaginary.clone())
    weight.grad = imaginary.conj()          # a view: its numbers are negated when they are read
    watch, session = observe.ChangeWatch(), SimpleNamespace(optimizers=SimpleNamespace(living=lambda: [torch.optim.SGD([weight])]), torch=torch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert strided(imaginary, 2) == [0.0, 0.0, 0.0, 2.0]
        assert float(capture._norm(torch, weight.grad)) == torch.arange(4.0).norm()
        assert not watch.changed(session)
        weight.data += 1j
        assert watch.changed(session)


def test_float64_is_read_as_float64() -> None:
    far = torch.tensor([7e6, 7e6 + 1e-4], dtype=torch.float64)
    assert strided(far, 2) == [7e6, 7e6 + 1e-4]
    assert strided(far.to(torch.complex128), 2) == [7e6, 0.0, 7e6 + 1e-4, 0.0]
    assert capture._norm(torch, far).dtype == torch.float64
