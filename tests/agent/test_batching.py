"""Batches of another size through the script's own DataLoader: order, drop_last, holding and ending epochs, the largest."""

from __future__ import annotations

import types

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler  # noqa: E402

from saturate.agent import batching, extents, seams  # noqa: E402
from saturate.agent.optimizers import Optimizers  # noqa: E402


class Numbers(Dataset):
    def __init__(self, count=20):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(20))


@pytest.fixture
def session():
    """What the agent's session gives to batching; torch is as it was afterwards."""
    found = types.SimpleNamespace(torch=torch, plan={"fit": {}}, undo=[], asleep=False, backwards=0, batching=None,
                                  context=types.SimpleNamespace(device="cpu", modules=()), optimizers=Optimizers(), leaves=[], inspection=None)

    def guard(function, *arguments):
        return function(*arguments)

    found.guard = guard
    batching.install(found)
    original = torch.utils.data.dataloader._BaseDataLoaderIter.__next__

    def next_batch(self):
        batch = original(self)
        found.batching.fetched(self, batch)
        return batch

    seams.replace(found, torch.utils.data.dataloader._BaseDataLoaderIter, "__next__", next_batch)
    yield found
    for undo in reversed(found.undo):
        undo()


def read(loader):
    return [batch.tolist() for batch in loader]


def trains(session, loader, **order):
    """Tell the session that this loader feeds the training."""
    session.batching.ordered({"loaders": [[batching.describe(loader), 1.0]], **order})


def test_nothing_changes_without_an_order(session):
    loader = DataLoader(Numbers(), 8)
    assert read(loader) == [list(range(8)), list(range(8, 16)), [16, 17, 18, 19]]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_order_of_samples_stays(session, workers):
    session.batching.ordered({"size": 6})
    torch.manual_seed(1)
    resized = read(DataLoader(Numbers(), 4, shuffle=True, num_workers=workers))
    session.batching.ordered({"size": None})
    torch.manual_seed(1)
    plain = read(DataLoader(Numbers(), 4, shuffle=True, num_workers=workers))
    assert [len(batch) for batch in resized] == [6, 6, 6, 2]
    assert sum(resized, []) == sum(plain, [])


def test_batches_that_can_be_read_once_stay_what_they_are(session):
    """A batch sampler may hand out iterators: they have no length, and the command failed."""

    class Batches(BatchSampler):
        def __iter__(self):
            return map(iter, super().__iter__())

    loader = DataLoader(Numbers(6), batch_sampler=Batches(SequentialSampler(range(6)), 2, False))
    assert read(loader) == [[0, 1], [2, 3], [4, 5]]
    trains(session, loader, size=4)
    assert read(loader) == [[0, 1, 2, 3], [4, 5]]


def test_drop_last_is_kept(session):
    session.batching.ordered({"size": 8})
    assert [len(batch) for batch in read(DataLoader(Numbers(), 4, drop_last=True))] == [8, 8]
    assert [len(batch) for batch in read(DataLoader(Numbers(), 4, drop_last=False))] == [8, 8, 4]


def test_a_size_changes_in_the_midst_of_an_epoch(session):
    loader = DataLoader(Numbers(), 4)
    trains(session, loader, size=4)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1, 2, 3]
    session.batching.ordered({"size": 7})
    assert next(batches).tolist() == [4, 5, 6, 7, 8, 9, 10]
    session.batching.ordered({"size": 2})
    assert next(batches).tolist() == [11, 12]


def test_evaluation_keeps_its_batches(session):
    training, evaluation = DataLoader(Numbers(), 4), DataLoader(Numbers(12), 3)
    trains(session, training, size=10)
    assert [len(batch) for batch in read(training)] == [10, 10]
    assert [len(batch) for batch in read(evaluation)] == [3, 3, 3, 3]
    with torch.no_grad():
        assert [len(batch) for batch in read(training)] == [4] * 5, "reading the training data without gradients is an evaluation"


def test_an_evaluation_in_batches_of_the_same_size_is_resized_too(session):
    """One argument sets both, more often than not: what is proved is to be what runs."""
    training, evaluation, other = DataLoader(Numbers(), 4), DataLoader(Numbers(12), 4), DataLoader(Numbers(12), 3)
    trains(session, training, size=10, own=4)
    with torch.no_grad():
        assert [len(batch) for batch in read(evaluation)] == [10, 2] and [len(batch) for batch in read(training)] == [10, 10]
        assert [len(batch) for batch in read(other)] == [3, 3, 3, 3]
    session.batching.ordered({"size": None})
    with torch.no_grad():
        assert [len(batch) for batch in read(evaluation)] == [4, 4, 4]


def test_two_loaders_of_one_step_keep_their_proportion(session):
    labelled, unlabelled = DataLoader(Numbers(), 2), DataLoader(Numbers(100), 14)
    session.batching.ordered({"size": 4, "loaders": [[batching.describe(labelled), 1.0], [batching.describe(unlabelled), 7.0]]})
    assert len(next(iter(labelled))) == 4 and len(next(iter(unlabelled))) == 28


def test_a_batch_sampler_that_was_wrapped_is_resized_once(session):
    """As Accelerate does: a new loader around a batch sampler that shards another one."""
    class Shard(BatchSampler):
        def __init__(self, inner):
            self.inner, self.batch_size, self.drop_last = inner, inner.batch_size, inner.drop_last

        def __iter__(self):
            return (batch for index, batch in enumerate(self.inner) if index % 2 == 0)

        def __len__(self):
            return (len(self.inner) + 1) // 2

    first = DataLoader(Numbers(), 4)
    again = DataLoader(first.dataset, batch_sampler=Shard(first.batch_sampler))
    session.batching.ordered({"size": 6})
    assert read(again) == [[0, 1, 2, 3, 8, 9], [10, 11, 16, 17, 18, 19]]
    assert first.batch_size == 4, "the loader itself is as it was"


def test_an_iterable_dataset_is_resized_too(session):
    session.batching.ordered({"size": 16})
    assert [len(batch) for batch in read(DataLoader(Stream(), 4))] == [16, 4]


def test_what_came_of_an_iterable_dataset_is_counted_not_what_was_asked_for(session):
    loader = DataLoader(Stream(), 4)
    trains(session, loader, size=16)
    read(loader)
    assert session.batching._pending == {batching.describe(loader): 20} and session.batching.delivered == 16
    session.batching.ordered({"size": 64})
    read(loader)
    assert session.batching.delivered == 20 and session.batching._pending == {batching.describe(loader): 40}


@pytest.mark.parametrize(("batch", "asked", "came"), [
    (torch.zeros(5, 3), 8, 5), (torch.zeros(8, 3), 8, 8), ([torch.zeros(7, 5), torch.zeros(5)], 8, 7), ({"x": torch.zeros(3, 8)}, 8, 8), (["a"], 8, 8),
    ((torch.tensor(1.0), {"x": torch.zeros(2, 3)}), 8, 2),
])
def test_the_samples_of_a_batch(batch, asked, came):
    assert batching._came(torch, batch, asked) == came


def test_where_no_pass_is_held_it_has_no_more_batches_than_the_scripts_own(session):
    loader = DataLoader(Numbers(), 4)
    trains(session, loader, size=2, bounded=True)
    assert [len(batch) for batch in read(loader)] == [2] * 5
    session.batching.ordered({"size": 8})
    assert [len(batch) for batch in read(loader)] == [8, 8, 4]
    assert session.batching.held == 0


def test_a_loader_without_batches_is_left_alone(session):
    session.batching.ordered({"size": 16})
    assert [int(value) for value in DataLoader(Numbers(3), batch_size=None)] == [0, 1, 2]


def test_a_held_epoch_goes_on_once_training_is_seen(session):
    loader = DataLoader(Numbers(6), 4)
    trains(session, loader, size=4, hold=True)
    assert len(read(loader)) == 2, "no backward pass has followed: whatever reads it must come to its end"
    batches = iter(loader)
    next(batches)
    session.backwards += 1
    assert [next(batches).tolist() for _ in range(4)] == [[4, 5, 0, 1], [2, 3, 4, 5], [0, 1, 2, 3], [4, 5, 0, 1]]
    assert session.batching.held == session.batching.standing()["held"] == 3
    session.batching.ordered({"end": True})
    with pytest.raises(StopIteration):
        next(batches)
    assert not session.batching.ending and next(iter(loader)).tolist() == [0, 1, 2, 3]


def test_a_sampler_that_can_be_read_once_is_not_read_for_ever(session):
    class Once:
        def __init__(self):
            self.lists = iter([[0, 1], [2, 3]])

        def __iter__(self):
            return self.lists

        def __len__(self):
            return 2

    loader = DataLoader(Numbers(), batch_sampler=Once())
    trains(session, loader, size=2, hold=True)
    batches = iter(loader)
    next(batches)
    session.backwards += 1
    assert [batch.tolist() for batch in batches] == [[2, 3]]


def test_an_endless_sampler_is_never_ended(session):
    class Endless(SequentialSampler):
        __len__ = None

        def __init__(self):
            pass

        def __iter__(self):
            while True:
                yield from range(20)

    loader = DataLoader(Numbers(), 4, sampler=Endless())
    trains(session, loader, size=4)
    batches = iter(loader)
    session.batching.ordered({"end": True})
    assert next(batches).tolist() == [0, 1, 2, 3], "next() on an endless loader is not prepared for StopIteration"


def test_the_largest_samples_come_first_once(session):
    loader = DataLoader(Numbers(), 4)
    trains(session, loader, size=4, first=True, largest=[17, 5, 9])
    assert read(loader)[:2] == [[17, 5, 9, 17], [4, 5, 6, 7]]


def test_what_was_delivered_is_counted_by_step(session):
    loader, other = DataLoader(Numbers(), 4, num_workers=1), DataLoader(Numbers(8), 2)
    found = session.batching
    trains(session, loader, size=4)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
        next(batches)
        found.fed()
        found.stepped(False)
    assert found.samples == [8, 8] and found.delivered == 4
    read(other)
    found.stepped(False)
    assert found.evaluations == 1 and found.samples[-1] == 0, "another loader was read between two steps"


def test_who_feeds_the_training(session):
    """A loader read before most backward passes does; one that is read now and then, or never, does not."""
    training, evaluation = DataLoader(Numbers(400), 4), DataLoader(Numbers(8), 2)
    found = session.batching
    batches = iter(training)
    for index in range(8):
        next(batches)
        if index % 4 == 3:
            read(evaluation)
        found.fed()
    loaders = found.answer("fit")["loaders"]
    assert [one["description"] for one in loaders] == [batching.describe(training)]
    assert loaders[0]["batch_size"] == 4 and loaders[0]["length"] == 400 and not loaders[0]["iterable"]


def test_of_several_that_feed_it_the_first_read_leads(session):
    """Descriptions are texts, and a set of texts has another order in every process."""
    loaders = [DataLoader(Numbers(40 * (number + 1)), 4) for number in range(6)]
    found, every = session.batching, [iter(one) for one in loaders]
    for _ in range(3):
        for batches in every:
            next(batches)
        found.fed()
    assert [one["description"] for one in found.answer("fit")["loaders"]] == [batching.describe(one) for one in loaders]


def test_saves_are_counted(session, tmp_path):
    torch.save({"a": 1}, tmp_path / "a.pt")
    assert session.batching.standing()["saves"] == 1 and torch.load(tmp_path / "a.pt") == {"a": 1}


class Texts(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"ids": list(range(index % 10)), "label": 1}


def first(samples):
    return samples[0]["label"]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_largest_samples_are_found(workers):
    found = extents.scan(torch, iter(DataLoader(Texts(), 4, num_workers=workers, collate_fn=first, shuffle=True)))
    assert sorted(found["largest"][:4]) == [9, 19, 29, 39] and found["varies"] and found["looked_at"] == found["of"] == 40


@pytest.mark.parametrize("kind", [torch.arange, lambda size: torch.arange(size).numpy()])
def test_the_largest_samples_are_found_by_numbers_of_any_kind(kind):
    """Of a split by numpy, the sampler has numpy's."""
    sampler = torch.utils.data.SubsetRandomSampler(kind(20))
    found = extents.scan(torch, iter(DataLoader(Texts(), 4, sampler=sampler, collate_fn=first)))
    assert sorted(found["largest"][:2]) == [9, 19] and all(type(index) is int for index in found["largest"])


def test_samples_of_one_shape_have_no_largest():
    found = extents.scan(torch, iter(DataLoader(Numbers(), 4)))
    assert found["varies"] is False and found["largest"] == []


def test_a_scan_changes_no_random_numbers():
    torch.manual_seed(3)
    expected = torch.rand(1)
    batches = iter(DataLoader(Texts(), 4, shuffle=True, collate_fn=first))
    torch.manual_seed(3)
    extents.scan(torch, batches)
    assert torch.rand(1) == expected


def test_datasets_that_cannot_be_looked_into_are_named():
    class Bad(Numbers):
        def __getitem__(self, index):
            raise RuntimeError("not now")

    assert "iterable" in extents.scan(torch, iter(DataLoader(Stream(), 4)))["reason"]
    assert "not now" in extents.scan(torch, iter(DataLoader(Bad(), 4)))["reason"]


@pytest.mark.parametrize(("sample", "size"), [
    (torch.zeros(3, 4), 12), ("four", 4), ([1, 2, 3], 3), ({"a": torch.zeros(2), "b": [1]}, 3), (7, 1), ((torch.zeros(2), 1), 3)])
def test_extents(sample, size):
    assert extents.extent(sample) == size
