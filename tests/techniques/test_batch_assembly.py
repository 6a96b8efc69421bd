"""batch-assembly: the same batches, bit by bit and stride by stride, and left alone where that is not certain."""

from __future__ import annotations

import pickle

import numpy
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Subset, TensorDataset  # noqa: E402

from saturate.agent.context import Context  # noqa: E402
from saturate.data import rows  # noqa: E402
from saturate.records.facts import Evidence, Facts, LoaderFacts  # noqa: E402
from saturate.techniques import batch_assembly  # noqa: E402


@pytest.fixture
def on():
    context = Context(torch)
    yield lambda: batch_assembly.apply(context, batch_assembly.Options()) and context
    context.undo()


def data():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(23, 3, 4, 5, generator=generator), torch.arange(23), torch.rand(23, 2, generator=generator) > 0.5,
                         torch.rand(23, 0), torch.rand(23, 3, generator=generator).bfloat16())


def epochs(dataset, **arguments):
    torch.manual_seed(3)
    loader = DataLoader(dataset, **{"batch_size": 4, "shuffle": True, **arguments})
    found = [batch for _ in range(2) for batch in loader]
    return found, torch.rand(1).item()


def same(first, second):
    return (first[1] == second[1] and len(first[0]) == len(second[0]) and all(
        type(a) is type(b) and all(x.dtype == y.dtype and x.stride() == y.stride() and torch.equal(x, y) for x, y in zip(a, b))
        for a, b in zip(first[0], second[0])))


def test_a_default_device_of_the_script_is_not_that_of_its_rows():
    with torch.device("meta"):          # as a GPU would be: other than where the data lies
        found = rows.Rows(TensorDataset(torch.arange(6, device="cpu"))).__getitems__([1, -1])
    assert found[0].tolist() == [1, 5]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make", [data, lambda: Subset(data(), range(3, 20)), lambda: Subset(Subset(data(), [5, -1, 2, 2]), [0, 3, 1])])
def test_the_same_batches(on, make, workers, monkeypatch):
    plain = epochs(make(), num_workers=workers)
    context = on()
    calls = []
    real = rows.Rows.__getitems__
    monkeypatch.setattr(rows.Rows, "__getitems__", lambda self, indices: calls.append(1) or real(self, indices))
    dataset = make()
    assert same(epochs(dataset, num_workers=workers), plain)
    assert workers or calls
    assert batch_assembly.active(Evidence(notes=context.notes), batch_assembly.Options()).active
    loader = DataLoader(dataset)
    assert loader.dataset is dataset and iter(loader)._dataset._saturate_source is dataset and pickle.loads(pickle.dumps(rows.Rows(dataset)))


class Own(TensorDataset):
    def __getitem__(self, index):
        return tuple(2 * tensor for tensor in super().__getitem__(index))


@pytest.mark.parametrize("dataset, arguments", [
    (Own(torch.arange(8.0)), {}),
    (TensorDataset(torch.arange(8.0)), {"collate_fn": lambda items: len(items)}),
    (TensorDataset(torch.arange(8.0)), {"batch_size": None, "shuffle": False}),
    (TensorDataset(torch.arange(24.0).reshape(3, 8).t()), {}),
    (TensorDataset(torch.zeros(8, requires_grad=True)), {}),
    (list(range(8)), {}),
])
def test_others_are_left_alone(on, dataset, arguments):
    context = on()
    loader = DataLoader(dataset, **{"batch_size": 2, **arguments})
    assert rows.refusal(torch, loader) and iter(loader)._dataset is dataset
    assert not batch_assembly.active(Evidence(notes=context.notes), batch_assembly.Options()).active


def test_data_that_is_written_to_or_replaced_is_seen(on):
    on()
    dataset = TensorDataset(torch.zeros(4))
    loader = DataLoader(dataset, batch_size=2)
    iterator = iter(loader)
    next(iterator)
    dataset.tensors[0][3] = 7
    assert next(iterator)[0].tolist() == [0, 7]
    dataset.tensors = (torch.ones(4),)
    assert [batch[0].tolist() for batch in loader] == [[1, 1], [1, 1]]


def test_a_batch_is_no_view_and_an_index_out_of_bounds_raises(on):
    on()
    dataset = TensorDataset(torch.zeros(4))
    for (batch,) in DataLoader(dataset, batch_size=4):
        batch += 1
    assert dataset.tensors[0].sum() == 0
    with pytest.raises(IndexError):
        list(DataLoader(dataset, batch_size=2, sampler=[0, 4]))


class Batches(torch.utils.data.Sampler):
    def __init__(self, kind):
        self.kind = kind

    def __iter__(self):
        return map(self.kind, [[0, 3], [2, 1, 5], [4]])


@pytest.mark.parametrize("kind", [iter, tuple, torch.tensor, numpy.array])
@pytest.mark.parametrize("make", [data, lambda: Subset(data(), numpy.arange(8))])
def test_batches_of_indices_of_any_kind(on, kind, make):
    arguments = {"batch_sampler": Batches(kind), "batch_size": 1, "shuffle": False}
    plain = epochs(make(), **arguments)
    on()
    assert same(epochs(make(), **arguments), plain)


@pytest.mark.parametrize("indices", [
    [[0, 1, 2], [3, 4, 5], [6, 7, 0], [1, 1, 1]], [torch.tensor([0, 1]), torch.tensor([2, 3])], [torch.tensor([3]), torch.tensor([1])],
    [slice(0, 2), slice(2, 4)], [True, False], [torch.tensor(3), numpy.int64(2)], [numpy.uint8(3), torch.tensor(-1, dtype=torch.int8)],
    [torch.tensor(1, dtype=torch.uint8), 0], [numpy.array([0, 1]), 2], [2.5, 1], ["a", 1], [1, [2]]])
@pytest.mark.parametrize("make", [data, lambda: Subset(data(), torch.arange(8)), lambda: Subset(data(), [[0, 1], [2, 3], [4, 5], [6, 7]]),
                                  lambda: Subset(Subset(data(), torch.arange(20)), list(range(8)))])
def test_indices_of_several_rows_and_of_none_are_the_dataset_s(on, indices, make):
    """Episodes of few-shot learning, for one."""

    def outcome():
        try:
            return epochs(make(), batch_size=2, shuffle=False, sampler=indices)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the same with the technique
            return type(error), str(error)

    plain = outcome()
    on()
    found = outcome()
    assert found == plain if isinstance(plain[0], type) else same(found, plain)


def test_eligibility():
    usual = Facts(loaders=(LoaderFacts(tensor_rows=True),), step_ms=10.0, input_wait_ms=5.0)
    assert batch_assembly.eligible(usual) and batch_assembly.bound(usual) == 0.5
    for bad in (Facts(), Facts(loaders=(LoaderFacts(),)), Facts(loaders=(LoaderFacts(tensor_rows=True),), step_ms=10.0, input_wait_ms=0.1)):
        assert not batch_assembly.eligible(bad)


def _scales(number):
    dataset = torch.utils.data.get_worker_info().dataset
    assert isinstance(dataset, TensorDataset) and dataset[1][1] == 1
    dataset.tensors = tuple(tensor * 2 for tensor in dataset.tensors)


def _cuts(number):
    dataset = torch.utils.data.get_worker_info().dataset
    dataset.indices = [index + 1 for index in dataset.indices]
    dataset.dataset.tensors = dataset.dataset.tensors[:2]


@pytest.mark.parametrize("make, initialise", [(data, _scales), (lambda: Subset(data(), range(3, 20)), _cuts)])
def test_a_worker_sees_its_dataset(on, make, initialise):
    """As scripts do that give each worker its part: what they set was set on the stand-in, and had no effect."""
    plain = epochs(make(), num_workers=2, worker_init_fn=initialise)
    context = on()
    assert same(epochs(make(), num_workers=2, worker_init_fn=initialise), plain)
    assert "assembled at once" in context.notes[batch_assembly.TECHNIQUE.id]
