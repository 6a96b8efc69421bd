"""Which loaders the facts tell of, and which of them is trained on."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset, Subset  # noqa: E402

from saturate.agent import observe  # noqa: E402


class Numbers(Dataset):
    def __init__(self, length):
        self.length = length
        self.asked = 0

    def __len__(self):
        self.asked += 1
        return self.length

    def __getitem__(self, index):
        return torch.tensor(float(index))


@pytest.fixture
def session():
    return SimpleNamespace(torch=torch, loaders={}, backwards=0)


def passes(session, dataset, trains=False, batch_size=4, most=None):
    """One pass over a loader that is built for it."""
    iterator = iter(DataLoader(dataset, batch_size))
    for _, batch in zip(range(most or 10**6), iterator):
        observe.remember_loader(session, iterator, batch)
        session.backwards += trains


def lengths(session):
    return [entry["facts"].dataset_length for entry in session.loaders.values()]


def test_the_loader_that_is_trained_on_comes_first(session):
    """Seen: Lightning validates two batches before it trains, and the facts told of the validation's loader alone."""
    whole = Numbers(100)
    train, validation = Subset(whole, range(80)), Subset(whole, range(80, 100))
    passes(session, validation, most=2)
    assert lengths(session) == [20]
    passes(session, train, trains=True, most=2)
    assert lengths(session) == [80, 20]
    for _ in range(3):
        passes(session, train, trains=True)
        passes(session, validation)
        assert lengths(session) == [80, 20]


def test_a_loader_that_is_built_anew_is_the_same(session):
    """Of a dataset that is built anew as well, or that grows; what it holds is not kept alive by it."""
    for _ in range(3):
        passes(session, Numbers(20), trains=True)
    buffer = Numbers(40)
    passes(session, buffer, trains=True, most=1)
    asked = buffer.asked
    for length in range(50, 90, 10):
        buffer.length = length
        passes(session, buffer, trains=True)
        passes(session, list(range(8)))
    assert sorted(lengths(session)) == [8, 20, 40]
    assert buffer.asked - asked <= 4 * (1 + 2), "not for each of its batches"
    gone = weakref.ref(buffer)
    del buffer
    gc.collect()
    assert gone() is None


def test_loaders_are_not_kept_without_end(session):
    """A curriculum, whose dataset is longer in each epoch. Those that are trained on stay."""
    passes(session, Numbers(400), trains=True)
    for length in range(20, 100, 4):
        passes(session, Numbers(length))
    assert len(session.loaders) == observe.MOST_LOADERS
    assert lengths(session)[0] == 400 and 96 in lengths(session)
