"""What of a dataset's items is the same each time: found, or refused with the reason."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numpy")

sys.path.insert(0, str(Path(__file__).parent))
import cache_cases as cases  # noqa: E402

from saturate.data import cache_probe, random_states, transforms  # noqa: E402


@pytest.fixture
def root(tmp_path):
    return cases.write(tmp_path / "files")


def look(dataset):
    return cache_probe.probe(dataset, len(dataset))


def test_whole_items(root):
    for dataset in (cases.Files(root), cases.Texts(), cases.Folder(root, cases.Compose([cases.Scale(), cases.AddInPlace()])),
                    torch.utils.data.Subset(cases.Files(root), [3, 1, 2]), cases.ByBatch(root), cases.Counting(root)):
        found = look(dataset)
        assert (found.refusal, found.steps) == ("", None)
        assert found.make_s >= cases.COST_S and found.make_s > 5 * found.read_s > 0 and found.record_bytes > 50


@pytest.mark.parametrize("steps, expected", [
    ([cases.Scale(), cases.RandomFlip()], 1),
    ([cases.RandomFlip(0.0), cases.Scale()], 0),            # never flips, but draws: the order of draws must stay
    ([cases.AddInPlace(), cases.Scale(), cases.RandomShift(), cases.Scale()], 2),
])
def test_the_longest_prefix_that_is_not_random(root, steps, expected):
    dataset = cases.Folder(root, cases.Compose(steps))
    for outer in (dataset, torch.utils.data.Subset(dataset, range(3, 13)),
                  torch.utils.data.Subset(torch.utils.data.Subset(dataset, range(3, 13)), range(5))):
        found = look(outer)
        assert (found.refusal, found.steps, found.place) == ("", expected, (0,))


def test_other_shapes_of_transforms(root):
    single = look(cases.Folder(root, cases.RandomShift()))
    assert (single.refusal, single.steps) == ("", 0)
    sequential = look(cases.Folder(root, torch.nn.Sequential(torch.nn.Flatten(0), torch.nn.Dropout(0.5))))
    assert (sequential.refusal, sequential.steps) == ("", 1)


@pytest.mark.parametrize("make, reason", [
    (cases.RandomInside, "not the same each time"),
    (cases.Own, "generator of its own (Random)"),
    (cases.RarelyOwn, "generator of its own (Random)"),
    (cases.LateOwn, "generator of its own (Generator)"),
    (cases.ClassOwn, "generator of its own (RandomState)"),
    (cases.GlobalOwn, "generator of its own (Generator)"),
    (cases.Unseeded, "random numbers that no seed decides (default_rng)"),
    (lambda root: cases.Folder(root, cases.Compose([cases.Scale(), cases.FlipsByOwn()])), "generator of its own (Random)"),
    (cases.DrawsForNothing, "draws random numbers"),
    (lambda root: cases.After(root, cases.RandomShift()), "changed after it"),
    (lambda root: cases.Folder(root, cases.RandomShift(), lambda y: y + torch.rand(1)), "random outside of its transform"),
    (lambda root: cases.ByBatch(root, padded=True), "depend on the batch"),
    (lambda root: cases.PaddedTexts(), "depend on the batch"),
    (cases.Dies, "died"),
    (cases.Raises, "no such thing"),
])
def test_what_cannot_be_cached_says_why(root, make, reason):
    assert reason in look(make(root)).refusal


class BySeedOfWorker(cases.Texts):
    """Augmentation that is seeded by the worker, and by nothing where there is none."""

    def __getitem__(self, index):
        worker = torch.utils.data.get_worker_info()
        assert worker is None or worker.dataset is self
        generator = torch.Generator().manual_seed(worker.seed + index if worker else index)
        return super().__getitem__(index), torch.rand(3, generator=generator)


def test_what_a_worker_makes_otherwise_than_another_is_not_stored_for_all():
    """It was, until one was made again to be compared."""
    assert "not the same each time" in look(BySeedOfWorker()).refusal
    assert torch.utils.data.get_worker_info() is None


def test_a_generator_that_is_seeded_for_each_item_is_no_obstacle(root):
    assert look(cases.SeededByItem(root)).refusal == ""


def test_what_costs_nothing_is_not_cached():
    found = look(torch.utils.data.TensorDataset(torch.zeros(50, 3)))
    assert "making an item takes" in found.refusal and f"where making takes {cache_probe.LEAST_GAIN} times as long" in found.refusal


def test_code_that_runs_for_the_first_time_is_not_what_reading_costs(monkeypatch):
    """A dataset of rows was refused because its first six readings, in a new process, took as long as making the items."""
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 100

        def __getitem__(self, index):
            time.sleep(0.005)
            return torch.full((4,), float(index))

    decode, seen = cache_probe.cache_codec.decode, set()

    def slow_at_first(record):
        if bytes(record) not in seen:
            seen.add(bytes(record))
            time.sleep(0.02)
        return decode(record)

    monkeypatch.setattr(cache_probe.cache_codec, "decode", slow_at_first)
    found = cache_probe.probe(Slow(), 100)
    assert not found.refusal and found.read_s < found.make_s


def test_a_dataset_that_hangs_is_left_alone(root, monkeypatch):
    monkeypatch.setattr(cache_probe, "MOST_S", 0.3)

    class Hangs(cases.Files):
        def __getitem__(self, index):
            time.sleep(60)

    began = time.monotonic()
    assert "longer than" in look(Hangs(root)).refusal
    assert time.monotonic() - began < 30


def test_the_training_sees_nothing_of_it(root):
    """No draws, no open handles, no counts, no children."""
    dataset = cases.Counting(root)
    children = Path("/proc/self/task", str(os.getpid()), "children")
    alive = children.read_text()
    before = random_states.comparable(random_states.states())
    look(dataset)
    look(cases.Folder(root, cases.Compose([cases.Scale(), cases.RandomShift()])))
    assert random_states.comparable(random_states.states()) == before
    assert (dataset.handle, dataset.count) == (None, 0)
    assert children.read_text() == alive


def test_cutting_shares_the_data_and_changes_nothing(root):
    transform = cases.Compose([cases.Scale(), cases.RandomFlip()])
    inner = cases.Folder(root, transform)
    outer = torch.utils.data.Subset(inner, [1, 2])
    twin, prefix, rest = transforms.cut(outer, 1)
    assert twin.dataset.inner is inner.inner and twin.dataset.transform is prefix and rest == transform.transforms[1:]
    assert outer.dataset is inner and inner.transform is transform and type(twin) is type(outer)


def test_places():
    wanted = object()
    assert transforms.find_place((1, [wanted, 2]), wanted) == (1, 0)
    assert transforms.find_place({"a": wanted}, wanted) == ("a",)
    assert transforms.find_place(wanted, wanted) == ()
    assert transforms.find_place((wanted, wanted), wanted) is None and transforms.find_place((1,), wanted) is None
    assert transforms.replaced((1, [2, {"a": 3}]), (1, 1, "a"), lambda x: x + 1) == (1, [2, {"a": 4}])
