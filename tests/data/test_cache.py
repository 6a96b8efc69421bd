"""The cache between a loader and its dataset: the same batches, fewer reads, and never a wrong one in silence."""

from __future__ import annotations

import gc
import os
import pickle
import random
import subprocess
import sys
import threading
import types
import weakref
from pathlib import Path

import numpy
import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
import cache_cases as cases  # noqa: E402

from saturate import ranks  # noqa: E402
from saturate.agent.context import Context  # noqa: E402
from saturate.data import (  # noqa: E402
    cache,
    cache_ahead,
    cache_codec,
    cache_helpers,
    cache_key,
    cache_probe,
    cache_reader,
    cache_store,
)
from saturate.records.facts import Evidence  # noqa: E402
from saturate.techniques import dataset_cache  # noqa: E402


@pytest.fixture
def root(tmp_path):
    return cases.write(tmp_path / "files")


@pytest.fixture
def on(tmp_path, monkeypatch):
    """Turn the technique on, anew each time; off after the test. Without helpers: what they do is tested by itself."""
    monkeypatch.setenv(dataset_cache.FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr(cache_ahead, "PATIENCE_S", 1e9)
    for module, name in ((cache, "LOOKED_S"), (cache_reader, "LOOKED_S"), (cache_reader, "AT_PASS_S")):
        monkeypatch.setattr(module, name, 60.0)         # however slow the machine is at the moment
    monkeypatch.setattr(cache_helpers, "_LEAST_PRIORITY", 0)
    contexts = []

    def apply(ahead=0, **options):
        off()
        monkeypatch.setenv(dataset_cache.AHEAD, str(ahead))
        context = Context(torch)
        dataset_cache.apply(context, dataset_cache.Options(**options))
        contexts.append(context)
        return context

    def off():
        while contexts:
            contexts.pop().undo()

    apply.off = off
    yield apply
    off()


def seed():
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)


def epochs(dataset, count=2, **arguments):
    """Batches of some epochs, and the random numbers drawn after them."""
    seed()
    loader = torch.utils.data.DataLoader(dataset, **{"batch_size": 4, "shuffle": True, **arguments})
    batches = [batch for _ in range(count) for batch in loader]
    return cache_codec.encode([batches, torch.rand(3), float(numpy.random.rand()), random.random()])


def told(context):
    return str(context.notes[dataset_cache.TECHNIQUE.id])


def counts(context):
    """(stored, read)"""
    words = told(context).replace(",", "").split()
    return int(words[words.index("cached:") + 2]), int(words[words.index("read") - 1])


DATASETS = {
    "whole": cases.Files,
    "texts": lambda root: cases.Texts(),
    "subset": lambda root: torch.utils.data.Subset(cases.Files(root), range(2, 18)),
    "batches": cases.ByBatch,
    "lazy": cases.Counting,
    "augmented": lambda root: cases.Folder(root, cases.Compose([cases.Scale(), cases.RandomFlip(), cases.RandomShift()])),
    "augmented subset": lambda root: torch.utils.data.Subset(cases.Folder(root, cases.RandomShift()), range(1, 17)),
    "concatenated": lambda root: torch.utils.data.ConcatDataset([cases.Files(root), cases.Files(root, 2.0)]),
}


@pytest.mark.parametrize("make", [cases.RarelyRandom, lambda root: cases.RarelyUnsplit(root, cases.RandomShift())])
def test_an_item_that_is_random_unlike_those_looked_at_stays_random(root, on, make):
    plain = epochs(make(root), 3)
    for _ in range(2):
        context = on()
        assert epochs(make(root), 3) == plain
        stored, read = counts(context)
    assert (stored, read) == (0, 57)            # nineteen of twenty, three times


def test_an_item_that_fails_among_others_raises_with_what_was_drawn_before_it(root, on):
    """Items are made in groups; the random numbers drawn until one fails are those of a loop over them all the same."""

    def drawn(dataset):
        seed()
        sampler = [[3, 4, 5], [6, 7, 99], [8]]
        with pytest.raises(IndexError):
            list(torch.utils.data.DataLoader(dataset, batch_sampler=sampler))
        return float(numpy.random.rand()), random.random(), torch.rand(1).item()

    def dataset():
        return cases.Folder(root, cases.RandomShift())

    plain = drawn(dataset())
    for _ in range(2):
        on()
        assert drawn(dataset()) == plain


def test_what_a_dataset_prints_comes_out_as_often_as_it_would(root, on, capfd):
    on(ahead=300)
    list(torch.utils.data.DataLoader(cases.Prints(root), batch_size=4, num_workers=1))
    assert capfd.readouterr().out.count("reading") <= 1         # stored ahead; one may be made again to compare


@pytest.mark.parametrize("name", DATASETS)
def test_batches_and_random_numbers_are_the_same_cold_and_warm(root, on, name):
    dataset = DATASETS[name](root)
    keep = {"collate_fn": list} if name == "texts" else {}
    plain = epochs(DATASETS[name](root), **keep)
    context = on()
    assert epochs(dataset, **keep) == plain
    stored, read = counts(context)
    assert stored == len(dataset) == read           # the second epoch comes from the store
    fresh = on()
    assert epochs(DATASETS[name](root), **keep) == plain
    assert counts(fresh) == (0, 2 * len(dataset))   # a later run finds it


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["file", "memory"])
def test_workers_share_it(root, on, where, method):
    arguments = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": method}
    dataset = cases.Folder(root, cases.Compose([cases.Scale(), cases.RandomFlip()]))
    plain = epochs(dataset, **arguments)
    context = on(where=where)
    assert epochs(dataset, **arguments) == plain
    stored, read = counts(context)
    assert stored == 20 and read == 20


def test_samples_are_stored_ahead(root, on):
    dataset = cases.Folder(root, cases.Compose([cases.Scale(), cases.RandomFlip()]))
    plain = {workers: epochs(dataset, num_workers=workers) for workers in (0, 2)}
    for workers in (0, 2):
        context = on(ahead=300)
        assert epochs(dataset, num_workers=workers) == plain[workers]
        assert counts(context)[1] == 40             # every sample of both epochs was read from the store


def test_the_script_s_own_objects_are_left_alone(root, on):
    context = on()
    dataset = cases.Files(root)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    batch = next(iter(loader))
    assert loader.dataset is dataset and type(dataset) is cases.Files and set(vars(dataset)) == {"paths", "scale"}
    assert pickle.loads(pickle.dumps(loader.dataset)).paths == dataset.paths
    iterator = iter(loader)
    assert isinstance(iterator._dataset, cases.Files) and iterator._dataset.paths == dataset.paths
    iterator._dataset.scale = 3.0
    assert dataset.scale == 3.0
    alive = weakref.ref(dataset)
    del dataset, loader, iterator, batch
    gc.collect()
    assert alive() is None
    context.undo()
    assert not hasattr(torch.utils.data.dataloader._BaseDataLoaderIter.__init__, "__wrapped__")


def test_a_loader_for_each_epoch_looks_once_and_keeps_nothing_alive(root, on, monkeypatch):
    looks = []
    real = cache.cache_probe.probe
    monkeypatch.setattr(cache.cache_probe, "probe", lambda *arguments: looks.append(1) or real(*arguments))
    context = on()
    dataset = cases.Folder(root, cases.Compose([cases.Scale(), cases.RandomFlip()]))
    descriptors = set()
    for _ in range(4):
        list(torch.utils.data.DataLoader(dataset, batch_size=10))
        descriptors.add(len(os.listdir("/proc/self/fd")))
    assert len(looks) == 1 and len(descriptors) == 1 and counts(context) == (20, 60)
    dataset.transform = cases.Compose([cases.RandomShift(), cases.Scale()])     # another prefix: it is looked at again
    list(torch.utils.data.DataLoader(dataset, batch_size=10))
    assert len(looks) == 2
    alive = weakref.ref(dataset)
    del dataset
    gc.collect()
    assert alive() is None


def test_of_more_datasets_than_there_may_be_stores_none_is_looked_at(root, on, monkeypatch):
    """As of one that a script draws anew for each epoch."""
    looks, real = [], cache.cache_probe.probe
    monkeypatch.setattr(cache.cache_probe, "probe", lambda *arguments: looks.append(1) or real(*arguments))
    monkeypatch.setattr(cache, "MOST_STORES", 2)
    context, files, first = on(), cases.Files(root), cases.Files(root, 2.0)
    plain = [torch.stack([files[index][0] for index in range(start, start + 4)]) for start in range(8)]
    list(torch.utils.data.DataLoader(first, batch_size=4))
    for start in range(8):
        loader = torch.utils.data.DataLoader(torch.utils.data.Subset(files, range(start, start + 4)), batch_size=4)
        assert torch.equal(next(iter(loader))[0], plain[start])
        list(torch.utils.data.DataLoader(first, batch_size=20))         # one that is known goes on
    assert len(looks) == 2 and "version number 3" in told(context) and counts(context) == (20, 160)
    caches = context.notes[dataset_cache.TECHNIQUE.id]
    assert set(caches._files) == set(caches._stores) and len(caches._looked_at) == 2


def test_a_worker_sees_its_dataset(root, on):
    on()

    def initialise(number):
        info = torch.utils.data.get_worker_info()
        assert isinstance(info.dataset, cases.Files)
        info.dataset.scale = 5.0        # as scripts do that give each worker its part

    plain = cases.Files(root, 5.0)
    loader = torch.utils.data.DataLoader(cases.Files(root), batch_size=20, num_workers=1, worker_init_fn=initialise)
    assert torch.equal(next(iter(loader))[0], torch.stack([plain[index][0] for index in range(20)]))


def test_a_dataset_that_is_changed_between_epochs_gets_another_cache(root, on):
    on()
    dataset = cases.Files(root)
    loader = torch.utils.data.DataLoader(dataset, batch_size=20)
    first = next(iter(loader))[0]
    dataset.scale = 2.0
    assert torch.equal(next(iter(loader))[0], 2 * first)
    iterator = iter(loader)
    dataset.scale = 4.0                 # within an epoch
    assert torch.equal(next(iterator)[0], 4 * first)
    for scale in (5.0, 6.0, 7.0):
        dataset.scale = scale
        assert torch.equal(next(iter(loader))[0], scale * first)


class Deep(cases.Files):
    """What its items are made from lies in a dictionary of another object."""

    def __init__(self, root):
        super().__init__(root)
        self.settings = types.SimpleNamespace(image={"gain": [1.0]})

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return image * self.settings.image["gain"][0], target


def test_what_is_changed_deep_inside_of_a_dataset_acts(root, on, capfd):
    on()
    dataset = Deep(root)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    first = torch.cat([batch[0] for batch in loader])
    for gain in (2.0, 3.0):                 # between epochs
        dataset.settings.image["gain"][0] = gain
        assert torch.equal(torch.cat([batch[0] for batch in loader]), gain * first)
        assert torch.equal(torch.cat([batch[0] for batch in loader]), gain * first)       # warm
    assert told_of(capfd) == ""
    batches = iter(loader)
    assert torch.equal(next(batches)[0], 3 * first[:4])
    dataset.settings.image["gain"][0] = 5.0         # within one
    assert torch.equal(next(batches)[0], 5 * first[4:8])
    assert "changed while it was read" in told_of(capfd)


def test_a_dataset_is_read_whole_once_however_little_time_there_is_to_look(root, on, monkeypatch, capfd):
    """Looks at each batch use up their time; as a pass begins there is one all the same."""
    digests, real = [], cache_key.digest
    monkeypatch.setattr(cache_key, "digest", lambda *arguments, **more: digests.append(1) or real(*arguments, **more))
    monkeypatch.setattr(cache_reader, "LOOKED", 0.0)
    monkeypatch.setattr(cache_reader, "LOOKED_S", 0.0)
    on()
    dataset = Deep(root)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    first = torch.cat([batch[0] for batch in loader])
    for _ in range(4):
        assert torch.equal(torch.cat([batch[0] for batch in loader]), first)
    assert len(digests) == 1
    dataset.settings.image["gain"][0] = 2.0         # between epochs
    batches = iter(loader)
    assert torch.equal(next(batches)[0], 2 * first[:4])
    dataset.settings.image["gain"][0] = 3.0         # within one, unseen: the next pass cannot be sure
    assert torch.equal(next(batches)[0], 3 * first[4:8])
    assert torch.equal(next(iter(loader))[0], 3 * first[:4])


def test_a_label_of_many_that_is_changed_between_epochs_acts(root, on):
    on()

    class Labelled(cases.Files):
        def __init__(self, root):
            super().__init__(root)
            self.labels = [0] * 20_000

        def __getitem__(self, index):
            return super().__getitem__(index)[0], self.labels[777 * index]

    dataset = Labelled(root)
    loader = torch.utils.data.DataLoader(dataset, batch_size=20)
    for index in range(5, 8):
        dataset.labels[777 * index] = index
        for _ in range(2):
            assert next(iter(loader))[1].tolist() == [dataset.labels[777 * index] for index in range(20)]


def told_of(capfd):
    return capfd.readouterr().err


def test_a_dataset_that_remembers_what_it_does_keeps_its_cache(root, on, capfd):
    """It is another thing after each item; what its items are made from is the same."""
    context = on()

    class Remembers(cases.Counting):
        def __init__(self, root):
            super().__init__(root)
            self.seen = {"last": [None]}

        def __getitem__(self, index):
            self.seen["last"][0] = index
            return super().__getitem__(index)

    loader = torch.utils.data.DataLoader(Remembers(root), batch_size=4)
    for _ in range(6):
        list(loader)
    assert told_of(capfd) == "" or "cannot be told" in told(context)
    assert counts(context)[1] >= 80


def test_a_transform_that_is_changed_acts(root, on):
    on()
    dataset = cases.Folder(root, cases.Compose([cases.Scale(), cases.RandomFlip(1.0)]))
    loader = torch.utils.data.DataLoader(dataset, batch_size=20)
    flipped = next(iter(loader))[0]
    dataset.transform.transforms[1].p = 0.0             # the rest is done live, with what it is now
    assert torch.equal(next(iter(loader))[0], flipped.flip(-1))
    dataset.transform.transforms[0] = cases.AddInPlace()
    assert not torch.equal(next(iter(loader))[0], flipped.flip(-1))
    dataset.transform = None
    assert torch.equal(next(iter(loader))[0][3], dataset.inner[3][0])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_is_written_anew_between_epochs_acts(root, on, monkeypatch, capfd, workers):
    monkeypatch.setattr(cache_reader, "RECHECKED", -1.0)
    context = on()
    dataset = cases.Files(root)
    loader = torch.utils.data.DataLoader(dataset, batch_size=20, num_workers=workers)
    first = next(iter(loader))[0]
    assert torch.equal(next(iter(loader))[0], first)
    (root / "notes.txt").write_text("what a training writes beside its data")
    Path(dataset.paths[7]).write_bytes(bytes(60))
    for _ in range(2):
        images = next(iter(loader))[0]
        assert images[7].abs().sum() == 0 and torch.equal(images[8:], first[8:])
    (root / "notes.txt").write_text("more of it")
    looks = []
    monkeypatch.setattr(cache_probe, "probe", lambda *given: looks.append(given))
    assert torch.equal(next(iter(loader))[0], images) and not looks
    assert told_of(capfd) == "" and "dropped" not in told(context)


class Masked(cases.Files):
    """The commonest datasets of segmentation: what the path of a mask is made from is held, and not the path."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        with open(self.paths[index].replace("images", "masks").replace(".bin", ".mask"), "rb") as file:
            return image, len(file.read()), label


def test_files_whose_paths_items_are_made_with_are_watched(tmp_path):
    """Masks that were drawn anew were served as they had been, from the store of an earlier run."""
    root = cases.write(tmp_path / "images")
    (tmp_path / "masks").mkdir()
    dataset = Masked(root)
    for path in map(Path, dataset.paths):
        (tmp_path / "masks" / f"{path.stem}.mask").write_bytes(b"1234")
    found = cache_probe.probe(dataset, len(dataset))
    assert not found.refusal and any(path.endswith(".mask") for path in found.opened)
    files = {}
    before = cache._key(dataset, found, 1, files)
    last = tmp_path / "masks" / f"{Path(dataset.paths[-1]).stem}.mask"
    assert str(last) in files and before == cache._key(dataset, found, 1)
    (tmp_path / "masks" / "notes.txt").write_text("of another kind")
    assert before == cache._key(dataset, found, 1)
    last.write_bytes(b"12345")
    assert before != cache._key(dataset, found, 1)
    assert cache_key.beside(["/etc/localtime", "/proc/self/stat", cases.__file__], {}) == {}


def test_files_beside_those_that_were_opened_are_found_and_not_all_of_a_home(tmp_path):
    for name in ("masks/a/1.png", "masks/b/2.png", "masks/c/3.png", "masks/a/deep/4.png", "5.png", "masks/6.png", "notes/7.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def found(*opened):
        return sorted(os.path.relpath(path, tmp_path) for path in cache_key.beside([str(tmp_path / name) for name in opened], {}))

    assert found("masks/a/1.png") == ["masks/a/1.png"]
    assert found("masks/a/1.png", "masks/b/2.png") == ["masks/a/1.png", "masks/b/2.png", "masks/c/3.png"]
    assert found("5.png", "notes/7.png") == ["5.png", "notes/7.png"] and found("gone/8.png") == []


def test_a_file_that_is_written_anew_acts_also_where_workers_persist(root, on, monkeypatch):
    monkeypatch.setattr(cache_reader, "RECHECKED", -1.0)
    context = on()
    dataset = cases.Files(root)
    loader = torch.utils.data.DataLoader(dataset, batch_size=20, num_workers=2, persistent_workers=True)
    first = torch.cat([images for images, _ in loader])
    assert torch.equal(torch.cat([images for images, _ in loader]), first)
    Path(dataset.paths[7]).write_bytes(bytes(60))
    images = torch.cat([images for images, _ in loader])
    assert images[7].abs().sum() == 0 and torch.equal(images[8:], first[8:])
    assert "files that its items are made from were changed" in told(context)


class Stacked(cases.Files):
    def __getitems__(self, indices):
        return torch.stack([self[index][0] for index in indices])


def test_a_dataset_that_makes_one_tensor_of_a_batch_is_left_alone(root):
    dataset = Stacked(root)
    assert cache_probe.examine(dataset, len(dataset)).refusal == "its __getitems__ returns a Tensor"


def test_the_stores_of_a_run_share_their_room(monkeypatch):
    """Each fold of a cross-validation took half of what was free then, until a checkpoint found no room."""
    limits = []
    monkeypatch.setattr(cache_store, "create", lambda folder, name, key, slots, limit, share: limits.append((limit, share)))
    caches = cache.Caches(torch, None, 0, 0.0)
    monkeypatch.setattr(caches, "_free_share", lambda: 10_000_000)
    for number in range(3):
        caches._store(bytes([number]), 100, 40_000)
    assert [limit > 0 for limit, _ in limits] == [True, True, True] and sum(limit for limit, _ in limits[-1:]) < 2_000_000
    assert limits[0][1] == limits[1][1] == cache_store.WHOLE > limits[2][1]


def test_files_are_looked_at_for_a_share_of_the_time(root):
    path = root / "00.bin"
    files = cache._Files({str(path): cache_key.stamp(path.stat())})
    assert files.unchanged()
    path.unlink()
    files._looking_s = 10.0
    assert files.unchanged()                # not looked at
    files._began -= 1001.0
    assert not files.unchanged()


def test_files_are_looked_at_though_passes_are_short(root, monkeypatch):
    """The share of one pass over a few items is less than one look."""
    path = root / "00.bin"
    files = cache._Files({str(path): cache_key.stamp(path.stat())})
    assert all(files.unchanged() for _ in range(9))
    path.unlink()
    assert not files.unchanged()


def write_unseen(path):
    """Other content for which neither the size nor the time of a file tells."""
    before = os.stat(path)
    Path(path).write_bytes(bytes(60))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("workers", [0, 2])
def test_items_that_change_between_reads_end_the_cache_loudly(root, on, capfd, workers):
    context = on()
    dataset = cases.Files(root)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=workers)
    list(loader)
    for path in dataset.paths:                          # written anew while the run goes on
        write_unseen(path)
    batches = [images for images, _ in loader] + [images for images, _ in loader]
    assert torch.cat(batches[5:]).abs().sum() == 0      # the second epoch is read from the files
    assert "dropped: item" in told(context)
    assert "is not what it was when it was stored: the cache is dropped" in capfd.readouterr().err
    assert not dataset_cache.active(Evidence(notes=context.notes), dataset_cache.Options()).active


def test_without_looking_again_it_would_go_unseen(root, on, monkeypatch):
    """The test above can fail."""
    monkeypatch.setattr(cache_reader, "RECHECKED", -1.0)
    on()
    dataset = cases.Files(root)
    loader = torch.utils.data.DataLoader(dataset, batch_size=20)
    first = next(iter(loader))[0]
    for path in dataset.paths:
        write_unseen(path)
    assert torch.equal(next(iter(loader))[0], first)


@pytest.mark.parametrize("ahead, patience_s", [(0, 1e9), (0, 0.0), (20, 1e9)])
def test_items_that_are_padded_to_the_longest_of_their_batch_end_the_cache(on, monkeypatch, capfd, ahead, patience_s):
    """Also where those that are looked at beforehand do not show it, and where items were made alone ahead of the training."""
    plain = epochs(cases.PaddedTexts(), 3)
    monkeypatch.setattr(cache_probe, "BATCHES", 0)
    context = on(ahead)
    monkeypatch.setattr(cache_ahead, "PATIENCE_S", patience_s)
    assert epochs(cases.PaddedTexts(), 3) == plain
    assert "depends on the batch" in capfd.readouterr().err and "dropped: item" in told(context)


def test_a_batch_is_never_partly_from_the_cache(root, on, monkeypatch):
    """What the dataset makes of a batch, it makes whole; new items are made alone as well before they are kept."""
    asked = []
    original = cases.ByBatch.__getitems__
    monkeypatch.setattr(cases.ByBatch, "__getitems__", lambda self, indices: asked.append(list(indices)) or original(self, indices))
    context, dataset = on(), cases.ByBatch(root)
    list(torch.utils.data.DataLoader(dataset, batch_size=4, sampler=[0, 1, 2, 3]))
    asked.clear()
    list(torch.utils.data.DataLoader(dataset, batch_size=4, sampler=[2, 3, 4, 5]))
    assert asked == [[2, 3, 4, 5], [4], [5]] and counts(context) == (6, 0)
    monkeypatch.setattr(cache_reader, "RECHECKED", -1.0)
    asked.clear()
    list(torch.utils.data.DataLoader(dataset, batch_size=4, sampler=[0, 2, 4, 5]))
    assert asked == [] and counts(context) == (6, 4)


@pytest.mark.parametrize("kind", [tuple, iter, numpy.array, torch.tensor])
@pytest.mark.parametrize("make", [cases.Files, cases.ByBatch])
def test_a_sampler_may_hand_out_batches_of_any_kind(root, on, make, kind):
    """What is read once only, or has no truth of its own, as arrays have."""

    class Batches:
        def __iter__(self):
            return (kind(range(start, start + 4)) for start in range(0, 16, 4))

    plain = epochs(make(root), batch_size=1, shuffle=False, batch_sampler=Batches())
    on()
    assert epochs(make(root), batch_size=1, shuffle=False, batch_sampler=Batches()) == plain


class Readable(cases.ByBatch):
    """Leaves out what cannot be read."""

    def __getitems__(self, indices):
        return super().__getitems__([index for index in indices if os.path.exists(self.paths[index])])


def test_a_dataset_that_leaves_samples_of_a_batch_out(root, on, capfd):
    def batches():
        dataset = Readable(root)
        found = iter(torch.utils.data.DataLoader(dataset, batch_sampler=[[0, 1, 2], [3, 13], [13, 4, 5], [6, 7]]))
        first = next(found)
        os.rename(dataset.paths[13], root.parent / "gone")
        try:
            return cache_codec.encode([first, *found])
        finally:
            os.rename(root.parent / "gone", dataset.paths[13])

    plain = batches()
    on()
    assert batches() == plain
    assert "depends on the batch that it is fetched in" in capfd.readouterr().err


class Awaited(cases.Files):
    """While item 5 is made by a thread, that waits."""

    def __getitem__(self, index):
        thread = threading.current_thread()
        if index == 5 and hasattr(thread, "drawn"):
            thread.asked.set()
            assert thread.drawn.wait(60)
        return super().__getitem__(index)


@pytest.mark.parametrize("begins", [False, True], ids=["a pass that was begun", "a pass of its own"])
def test_what_the_training_draws_while_a_thread_of_the_script_reads_ahead_is_its_own(root, on, capfd, begins):
    """As prefetching loaders in scripts do. It was taken for what items draw, and taken back: the same dropout twice."""

    def drawn():
        seed()
        batches = torch.utils.data.DataLoader(Awaited(root), batch_size=4)
        batches = batches if begins else iter(batches)
        reading = threading.Thread(target=lambda: list(batches))
        reading.asked, reading.drawn = threading.Event(), threading.Event()
        reading.start()
        assert reading.asked.wait(60)
        first = torch.rand(2).tolist()
        reading.drawn.set()
        reading.join(60)
        return first, torch.rand(2).tolist()

    plain = drawn()
    context = on()
    assert drawn() == plain
    assert "unused: Awaited" in told(context) and "a thread of the script's own" in capfd.readouterr().err


class Counted(cases.Files):
    """Cannot make item 9, and says how often."""

    failed = 0

    def __getitem__(self, index):
        if index == 9:
            self.failed += 1
            raise ValueError(index)
        return super().__getitem__(index)


def test_after_a_batch_that_could_not_be_made_the_cache_goes_on(root, on, capfd):
    context = on()
    batches = iter(torch.utils.data.DataLoader(Counted(root), batch_size=4))
    for place in range(5):
        if place == 2:
            with pytest.raises(ValueError):
                next(batches)
        else:
            next(batches)
    assert counts(context) == (17, 0) and "changed while it was read" not in capfd.readouterr().err


def test_an_item_that_cannot_be_read_any_more_raises_as_it_would(root, on, capfd):
    on()
    dataset = cases.Files(root)
    loader = torch.utils.data.DataLoader(dataset, batch_size=20)
    list(loader)
    batches = iter(loader)                  # what was removed before a pass begins is seen without making an item again
    for path in dataset.paths:
        os.unlink(path)
    with pytest.raises(FileNotFoundError):
        next(batches)
    assert "cannot be read any more" in capfd.readouterr().err


def test_items_whose_files_were_removed_between_passes_raise_as_they_would(root, on, monkeypatch, capfd):
    monkeypatch.setattr(cache_reader, "RECHECKED", -1.0)
    on()
    dataset = cases.Files(root)
    loader = torch.utils.data.DataLoader(dataset, batch_size=20)
    list(loader)
    for path in dataset.paths:
        os.unlink(path)
    with pytest.raises(FileNotFoundError):
        list(loader)
    assert "not cached: Files: making an item of it failed: FileNotFoundError" in capfd.readouterr().err


def test_refusals_are_said_once_and_nothing_changes(root, on, capfd):
    plain = epochs(cases.RandomInside(root))
    context = on()
    assert epochs(cases.RandomInside(root)) == plain
    assert capfd.readouterr().err.count("RandomInside: its items are not the same each time") == 1
    proof = dataset_cache.active(Evidence(notes=context.notes), dataset_cache.Options())
    assert not proof.active and "not the same each time" in proof.evidence
    for dataset in (list(range(10)), torch.utils.data.TensorDataset(torch.zeros(4, 2))):
        assert len(list(torch.utils.data.DataLoader(dataset, batch_size=2))) == len(dataset) // 2


def test_of_ranks_that_mp_spawn_started_one_says_why(root, on, monkeypatch, capfd):
    monkeypatch.setattr(ranks, "group", lambda: types.SimpleNamespace(get_rank=lambda: 1))
    context = on()
    epochs(cases.RandomInside(root))
    assert "not the same each time" in told(context) and "not cached" not in capfd.readouterr().err


def test_caches_in_memory_leave_room_for_those_of_other_ranks(monkeypatch):
    """The technique is applied before there is a process group: how many share the memory is asked when the first samples are stored."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(cache, "available_bytes", lambda: 8_000_000)
    caches = cache.Caches(torch, None, 0, 0.0)
    monkeypatch.setattr(ranks, "group", lambda: types.SimpleNamespace(get_world_size=lambda: 4))
    assert caches._left() == 1_000_000


def test_our_own_failure_costs_nothing_but_the_cache(root, on, monkeypatch, capfd):
    monkeypatch.setattr(cache.cache_probe, "probe", lambda *_: 1 / 0)
    context = on()
    assert len(list(torch.utils.data.DataLoader(cases.Files(root), batch_size=4))) == 5
    assert "ZeroDivisionError" in told(context) and "ZeroDivisionError" in capfd.readouterr().err


def test_a_full_disk_keeps_what_fits(root, on):
    plain = epochs(cases.Files(root))
    context = on(max_gb=1.1e-5)
    assert epochs(cases.Files(root)) == plain
    stored, read = counts(context)
    assert 0 < stored < 15 and read == stored


def test_a_folder_that_cannot_be_written(root, on, monkeypatch, tmp_path, capfd):
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv(dataset_cache.FOLDER, str(tmp_path / "occupied" / "below"))
    on()
    assert len(list(torch.utils.data.DataLoader(cases.Files(root), batch_size=4))) == 5
    assert "not cached: Files:" in capfd.readouterr().err


def test_a_cache_of_another_version_is_not_read(root, on):
    on()
    list(torch.utils.data.DataLoader(cases.Files(root), batch_size=4))
    cases.write(root, seed=1)
    dataset = cases.Files(root)
    expected = torch.stack([dataset[index][0] for index in range(20)])
    context = on()
    assert torch.equal(next(iter(torch.utils.data.DataLoader(dataset, batch_size=20)))[0], expected)
    assert counts(context) == (20, 0)


KILLED = """
import os, signal, sys
sys.path[:0] = [{here!r}]
import torch, cache_cases as cases
from saturate.agent.context import Context
from saturate.techniques import dataset_cache
dataset_cache.apply(Context(torch), dataset_cache.Options())
iterator = iter(torch.utils.data.DataLoader(cases.Files({root!r}), batch_size=1, num_workers=1))
for index, _ in enumerate(iterator):
    if index == 3:
        os.kill(iterator._workers[0].pid, signal.SIGKILL)
"""


def test_a_worker_that_the_kernel_kills_ends_as_without(root, on):
    """The script sees torch's own error; the store stays whole, and the next run uses it."""
    context = on()
    code = KILLED.format(here=str(Path(__file__).parent), root=str(root))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "Error" in done.stderr and "saturate" not in done.stderr, done.stderr
    list(torch.utils.data.DataLoader(cases.Files(root), batch_size=4))
    stored, read = counts(context)
    assert stored + read == 20 and read > 0


def test_a_collate_function_that_cannot_be_pickled(root, on):
    on()
    arguments = {"batch_size": 20, "num_workers": 1, "collate_fn": lambda items: len(items)}
    assert list(torch.utils.data.DataLoader(cases.Files(root), **arguments)) == [20]
    with pytest.raises((AttributeError, pickle.PicklingError)):     # torch's own error, as without a cache
        iter(torch.utils.data.DataLoader(cases.Files(root), multiprocessing_context="spawn", **arguments))


def test_a_store_that_a_spawned_worker_cannot_open(root, tmp_path):
    store = cache_store.create(tmp_path / "gone", "s", b"k" * 32, 20, 1 << 20)
    stored = pickle.dumps(cache.CachedDataset(cache.Reader(cases.Files(root), store, None, ())))
    os.unlink(store.path)
    assert type(pickle.loads(stored)) is cases.Files


def test_no_auto_collation(root, on):
    for dataset in (cases.Files(root), cases.ByBatch(root)):
        plain = [item[0] if isinstance(item, (list, tuple)) else item for item in torch.utils.data.DataLoader(dataset, batch_size=None)]
        on()
        for _ in range(2):
            loader = torch.utils.data.DataLoader(dataset, batch_size=None)
            again = [item[0] if isinstance(item, (list, tuple)) else item for item in loader]
            assert all(map(torch.equal, plain, again))
        on.off()


def test_stores_larger_than_half_of_the_limit_serve_the_next_run_as_well(root, on):
    """Room is made before a store is made, and only then, of what this run does not read: whichever loader is read first."""
    other = cases.write(root.parent / "other")
    for folders, read in (((other, root), 0), ((root, other), 20), ((other, root), 20)):
        context = on(max_gb=18e-6)
        assert all(epochs(cases.Files(folder), 1) for folder in folders)
        stores = context.notes[dataset_cache.TECHNIQUE.id]._stores.values()
        assert [store.counted()[0] for store in stores] == [read, read]
        assert all(store.used_bytes > store.limit_bytes / 2 for store in stores)


def test_eligibility():
    from saturate.records.facts import Facts, LoaderFacts

    usual = Facts(loaders=(LoaderFacts(),), step_ms=100.0, input_wait_ms=50.0)
    assert dataset_cache.eligible(usual) and dataset_cache.bound(usual) == 0.5
    for bad in (Facts(), Facts(loaders=(LoaderFacts(iterable=True),)), Facts(loaders=(LoaderFacts(),), step_ms=100.0, input_wait_ms=1.0)):
        assert not dataset_cache.eligible(bad)


def test_several_threads_store_ahead_in_the_process_itself(root, on, monkeypatch):
    """And under another key: loader workers, which have one thread, may round otherwise."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    context = on(ahead=300)
    forks = []
    real = os.fork
    monkeypatch.setattr(os, "fork", lambda: forks.append(1) or real())
    dataset = cases.Counting(root)
    list(torch.utils.data.DataLoader(dataset, batch_size=4))
    assert len(forks) == 1 and dataset.count >= 20          # the one that looked at the dataset
    assert counts(context)[1] == 20
    list(torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=1))
    assert len(context.notes[dataset_cache.TECHNIQUE.id]._stores) == 2
