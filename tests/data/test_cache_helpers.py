"""Helpers store what is missing beside the training: it gets the same batches, and nothing of them stays."""

from __future__ import annotations

import collections
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
from pathlib import Path
from typing import ClassVar

import numpy
import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
import cache_cases as cases  # noqa: E402
from waiting import until  # noqa: E402

from saturate import ranks  # noqa: E402
from saturate.agent.context import Context  # noqa: E402
from saturate.data import cache_ahead, cache_codec, cache_fork, cache_helpers, cache_reader, cache_store  # noqa: E402
from saturate.techniques import dataset_cache  # noqa: E402

ITEMS = 120
MOST_FORKING_S = cache_helpers.MOST_FORKING_S       # the product's own; most tests here are not about it


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "files"
    root.mkdir()
    chance = random.Random(0)
    for index in range(ITEMS):
        (root / f"{index:03d}.bin").write_bytes(chance.randbytes(60))
    return root


@pytest.fixture
def context(tmp_path, monkeypatch):
    monkeypatch.setenv(dataset_cache.FOLDER, str(tmp_path / "cache"))
    monkeypatch.delenv(dataset_cache.AHEAD, raising=False)
    monkeypatch.setattr(cache_ahead, "PATIENCE_S", 0.0)
    monkeypatch.setattr(cache_helpers, "usable_cpus", lambda: 2)
    monkeypatch.setattr(cache_helpers, "MOST_FORKING_S", 60.0)  # both of them, however long a fork takes at the moment
    for name in ("LOOKED_S", "AT_PASS_S"):
        monkeypatch.setattr(cache_reader, name, 60.0)           # however slow the machine is at the moment
    monkeypatch.setattr(cache_helpers, "_LEAST_PRIORITY", 0)    # beside other load, they would have a hundredth of a core
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    context = Context(torch)
    dataset_cache.apply(context, dataset_cache.Options())
    yield context
    context.undo()


@pytest.fixture
def helpers(monkeypatch):
    """Those that were made."""
    made = []
    original = cache_helpers.Helpers.__init__

    def init(self, *arguments, **keywords):
        original(self, *arguments, **keywords)
        made.append(list(self._running.values()))

    monkeypatch.setattr(cache_helpers.Helpers, "__init__", init)
    return made


def loader(dataset, **arguments):
    return torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True, **arguments)


def one_pass(of, pause_s=0.0):
    """What a training that computes for so long sees of it."""
    seen = []
    for batch in of:
        seen.append(cache_codec.encode(batch))
        time.sleep(pause_s)
    return seen, torch.rand(1).item(), random.random()


def seeded(dataset, pause_s=0.0, passes=2):
    torch.manual_seed(3)
    random.seed(3)
    of = loader(dataset)
    return [one_pass(of, pause_s) for _ in range(passes)]


def told(context):
    return str(context.notes[dataset_cache.TECHNIQUE.id])


def gone(pids):
    """Ended; whoever adopted them may not have waited for them yet."""
    return all(not os.path.exists(f"/proc/{pid}") or " Z " in Path(f"/proc/{pid}/stat").read_text() for pid in pids)


def reader_of(context):
    (served,) = context.notes[dataset_cache.TECHNIQUE.id]._loaders.values()
    return served.reader


@pytest.mark.parametrize("kind", ["whole", "cut"])
def test_the_training_gets_the_same_and_makes_less_itself(root, context, helpers, kind):
    transform = cases.Compose([cases.Scale(), cases.RandomFlip()]) if kind == "cut" else None
    dataset = cases.Folder(root, transform)
    context.undo()
    plain = seeded(dataset)
    dataset_cache.apply(context, dataset_cache.Options())
    assert seeded(dataset, pause_s=0.02) == plain
    assert len(helpers) == 1 and len(helpers[0]) == 2 and gone(helpers[0])
    stored = int(told(context).partition(", ")[2].partition(" items")[0])
    assert ITEMS <= stored < ITEMS * 5 / 4, told(context)       # some are made by two at the same time


def test_what_the_helpers_made_is_read(root, context, helpers):
    """The count of the items that the training process makes: without helpers it is all of them."""
    dataset = cases.Counting(root)
    of = loader(dataset)
    iterator = iter(of)
    for _ in range(4):
        next(iterator)
    store = reader_of(context).store
    until(lambda: sum(map(store.holds, range(ITEMS))) > ITEMS / 2)
    assert helpers and len(list(iterator)) == ITEMS // 4 - 4 and dataset.count < ITEMS * 3 / 4


def test_where_memory_runs_out_they_go_before_the_training(tmp_path):
    """Each dirties its copy of the dataset; the kernel ended the training, which is the largest."""
    def run(number):
        (tmp_path / "score").write_bytes(Path("/proc/self/oom_score_adj").read_bytes())

    before = Path("/proc/self/oom_score_adj").read_text()
    training = os.pidfd_open(os.getpid())
    child = os.fork()
    if child == 0:
        cache_helpers._help(types.SimpleNamespace(training=training, run=run), 0)
    os.waitpid(child, 0)
    os.close(training)
    assert (tmp_path / "score").read_text() == "1000\n" and Path("/proc/self/oom_score_adj").read_text() == before


def test_a_short_pass_and_a_warm_one_have_none(root, context, helpers, monkeypatch):
    dataset = cases.Files(root)
    for _ in range(5):
        next(iter(loader(dataset)))
    monkeypatch.setattr(cache_ahead, "PATIENCE_S", 100.0)
    one_pass(loader(dataset))
    monkeypatch.setattr(cache_ahead, "PATIENCE_S", 0.0)
    one_pass(loader(dataset))           # warm
    assert not helpers


class Endless(cases.Files):
    """Its helpers are at work until they are ended. The process that looks at the dataset beforehand is none."""

    pid = os.getpid()

    def __getitem__(self, index):
        while os.getpid() != self.pid and not os.environ.get("LOOKING"):
            time.sleep(60)
        return super().__getitem__(index)


def endless(root, monkeypatch):
    """An iterator whose helpers have begun."""
    with monkeypatch.context() as patched:
        patched.setenv("LOOKING", "1")
        iterator = iter(loader(Endless(root)))
    for _ in range(4):
        next(iterator)
    return iterator


def test_a_pass_that_is_left_takes_its_helpers_along(root, context, helpers, monkeypatch):
    iterator = endless(root, monkeypatch)
    assert helpers and not gone(helpers[0])
    del iterator
    assert gone(helpers[0])


def test_a_script_that_waits_for_its_children_does_not_meet_them(root, context, helpers, monkeypatch):
    iterator = endless(root, monkeypatch)
    assert helpers[0] and not gone(helpers[0])
    for helper in helpers[0]:
        with pytest.raises(ChildProcessError):
            os.waitpid(helper, os.WNOHANG)
    assert len(list(iterator)) == ITEMS // 4 - 4


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_what_a_script_does_about_children_that_end(root, context, helpers, handler):
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        one_pass(loader(cases.Files(root)))
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert helpers and gone(helpers[0])


def test_a_fork_of_the_training_leaves_them_alone(root, context, helpers, monkeypatch):
    iterator = endless(root, monkeypatch)
    child = os.fork()
    if child == 0:
        try:
            del iterator
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert not gone(helpers[0])


class Lines(torch.utils.data.Dataset):
    """Reads from one file, which it opens when it is first asked, as many do; after the one transform that is not random."""

    def __init__(self, path, random_last=False):
        self.path, self.file = path, None
        self.transform = cases.Compose([torch.Tensor.float, cases.RandomShift()]) if random_last else None

    def __len__(self):
        return ITEMS

    def read(self, index):
        self.file = self.file or open(self.path, "rb")      # noqa: SIM115 - as such datasets do
        self.file.seek(index * 6000)
        return self.file.read(6000)

    def __getitem__(self, index):
        cases.slow()
        item = torch.frombuffer(bytearray(self.read(index)), dtype=torch.uint8)
        return item if self.transform is None else self.transform(item)


class Hidden(Lines):
    """Nobody finds its file by looking at the dataset."""

    files: ClassVar = {}

    def read(self, index):
        if self.path not in self.files:
            self.files[self.path] = open(self.path, "rb")       # noqa: SIM115
        self.files[self.path].seek(index * 6000)
        return self.files[self.path].read(6000)


class NextLine(Lines):
    """Gives what comes next, whatever it is asked for."""

    def read(self, index):
        self.file = self.file or open(self.path, "rb", buffering=0)     # noqa: SIM115
        return self.file.read(6000)


@pytest.mark.parametrize("random_last", [False, True])
@pytest.mark.parametrize("kind", [Lines, Hidden, NextLine])
def test_the_place_in_an_open_file_is_the_training_s_alone(tmp_path, context, helpers, kind, random_last):
    path = tmp_path / "lines"
    path.write_bytes(random.Random(0).randbytes(6000 * 4 * ITEMS))

    def read():
        torch.manual_seed(5)
        random.seed(5)
        numpy.random.seed(5)
        dataset = kind(path, random_last)
        Hidden.files.clear()
        if kind is NextLine:
            dataset[0]                  # it is open before anybody looks at it
        return one_pass(loader(dataset), 0.002)[0]

    context.undo()
    plain = read()
    dataset_cache.apply(context, dataset_cache.Options())
    for _ in range(3):
        assert read() == plain
    assert bool(helpers) is (kind is not NextLine)


def test_what_a_fork_would_share_it_has_for_itself(tmp_path):
    """The same files at the same places; no socket and no pipe but its own."""
    (tmp_path / "file").write_text("0123456789")
    reader, writer = os.pipe()
    _, other = os.pipe()
    ours, theirs = socket.socketpair()
    with (tmp_path / "file").open("rb", buffering=0) as file, tempfile.TemporaryFile() as nameless:
        file.read(3)
        nameless.write(b"abcdef")
        nameless.flush()
        child = cache_fork.fork(writer)
        if child == 0:
            try:
                nameless.seek(1)
                seen = [file.read(2), file.read(2), nameless.read(2)]
                try:
                    ours.send(b"x")
                except OSError as error:
                    seen.append(type(error).__name__.encode())
                os.write(other, b"lost")
                os.write(writer, repr(seen).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reader, 1000) == repr([b"34", b"56", b"bc", b"OSError"]).encode()
        assert file.read(2) == b"34" and nameless.tell() == 6
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    for descriptor in (reader, writer, other, _):
        os.close(descriptor)


@pytest.mark.parametrize("variable, group, count", [(None, 4, 2), ("2", 4, 4), ("2", None, 4), (None, None, 8), (None, 16, 1)])
def test_ranks_share_the_cores(root, monkeypatch, variable, group, count):
    """Also those that no torchrun has started."""
    monkeypatch.setattr(cache_helpers, "usable_cpus", lambda: 8)
    monkeypatch.setattr(ranks, "group", lambda: types.SimpleNamespace(get_world_size=lambda: group) if group else None)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if variable:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", variable)
    assert cache_helpers.most(cases.Files(root)) == count


def test_a_dataset_with_an_open_connection_has_no_helpers(tmp_path, root, context, helpers):
    for shared in (socket.create_server(("localhost", 0)), {"pool": collections.deque([socket.socket()])}):
        dataset = cases.Files(root)
        assert cache_helpers.most(dataset) == 2
        dataset.shared = shared
        assert cache_helpers.most(dataset) == 0
        one_pass(loader(dataset))
    assert not any(helpers)
    cache_helpers.Helpers(None, [[1]], 0)
    assert helpers[-1] == []


class FromServer(cases.Files):
    """Asks for each item over one connection."""

    def __init__(self, root, connection):
        super().__init__(root)
        self.connection = connection

    def __getitem__(self, index):
        cases.slow()
        self.connection.sendall(index.to_bytes(4, "big"))
        return torch.frombuffer(bytearray(self.connection.recv(4)), dtype=torch.uint8)


def test_nobody_else_uses_a_connection_of_the_dataset(root, context, capfd):
    ours, theirs = socket.socketpair()
    asked = []

    def serve():
        while question := theirs.recv(4):
            asked.append(question)
            theirs.sendall(question)

    thread = threading.Thread(target=serve)
    thread.start()
    one_pass(loader(FromServer(root, ours)))
    ours.close()
    thread.join()
    assert len(asked) == ITEMS
    assert "open socket" in capfd.readouterr().err


class Eager(torch.utils.data.Sampler):
    """Draws its order when it is asked for an iterator, as many do."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(torch.randperm(self.count).tolist())


@pytest.mark.parametrize("sampler", [Eager, lambda n: torch.utils.data.SubsetRandomSampler(range(n)),
                                     lambda n: torch.utils.data.RandomSampler(range(n), replacement=True, num_samples=n),
                                     lambda n: torch.utils.data.WeightedRandomSampler([1.0] * n, n)])
@pytest.mark.parametrize("batch_size", [4, None])
def test_the_order_is_drawn_as_it_would_be(root, context, sampler, batch_size):
    def order():
        torch.manual_seed(1)
        of = torch.utils.data.DataLoader(cases.Files(root), batch_size=batch_size, sampler=sampler(ITEMS))
        seen = []
        for batch in of:
            seen.append((cache_codec.encode(batch), torch.rand(1).item()))
        return seen, torch.rand(1).item()

    context.undo()
    plain = order()
    dataset_cache.apply(context, dataset_cache.Options())
    assert order() == plain
    assert order() == plain             # warm


@pytest.mark.parametrize("ahead", [0, 20])
@pytest.mark.parametrize("batch_size, left_after", [(4, None), (7, None), (4, 3), (7, 2), (None, 9)])
def test_the_generator_of_a_sampler_is_drawn_from_when_it_would_be(root, context, monkeypatch, ahead, batch_size, left_after):
    """RandomSampler draws once more behind its last index: not in a pass that is left, and after what the script draws before."""
    def order():
        chance = torch.Generator().manual_seed(1)
        of = torch.utils.data.DataLoader(cases.Files(root), batch_size=batch_size, shuffle=True, generator=chance)
        seen = []
        for _ in range(3):
            for place, batch in enumerate(of):
                seen.append((cache_codec.encode(batch), torch.rand(1, generator=chance).item()))
                if place == left_after:
                    break
        return seen

    context.undo()
    plain = order()
    monkeypatch.setenv(dataset_cache.AHEAD, str(ahead))
    dataset_cache.apply(context, dataset_cache.Options())
    assert order() == plain


@pytest.mark.parametrize("ahead", [0, 20])
def test_a_pass_without_a_batch(root, context, monkeypatch, ahead):
    """With fewer samples than a batch has, and the last one dropped."""
    context.undo()
    monkeypatch.setenv(dataset_cache.AHEAD, str(ahead))
    dataset_cache.apply(context, dataset_cache.Options())
    few = torch.utils.data.Subset(cases.Files(root), range(8))
    assert list(torch.utils.data.DataLoader(few, batch_size=9, shuffle=True, drop_last=True, generator=torch.Generator())) == []
    assert "cached: " in str(context.notes[dataset_cache.TECHNIQUE.id]) or "unused: " in str(context.notes[dataset_cache.TECHNIQUE.id])


class Normalised(cases.Files):
    """A sum over the whole item: several threads may round it otherwise than one."""

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return image - image.mean(), target


class Pictures(cases.Files):
    """As most datasets of pictures end."""

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        image = image.contiguous().float().div(255).sub_(torch.tensor([0.5, 0.4, 0.3])[:, None, None])
        assert not (image > 9).any()
        return torch.stack([image, image.flip(-1)]), torch.tensor(target)


@pytest.mark.parametrize(("kind", "helped"), [(Normalised, False), (Pictures, True)])
def test_where_several_threads_make_items_a_helper_makes_only_what_one_makes_alike(root, context, helpers, monkeypatch, kind, helped):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    of = loader(kind(root))
    iterator = iter(of)
    for _ in range(3):
        next(iterator)
    reader = reader_of(context)
    until(lambda: gone(helpers[0]) or sum(map(reader.store.holds, range(ITEMS))) > reader.kept)
    assert (sum(map(reader.store.holds, range(ITEMS))) > reader.kept) is helped
    for _ in iterator:
        pass


def test_a_helper_that_makes_other_items_stores_none(root, context, helpers):
    """Here: because it is another process."""
    class ByProcess(cases.Files):
        pid = os.getpid()

        def __getitem__(self, index):
            image, target = super().__getitem__(index)
            here = os.getpid() == self.pid or os.environ.get("LOOKING")
            return (image if here else image + 1), target

    os.environ["LOOKING"] = "1"         # the process that looks at the dataset beforehand
    of = loader(ByProcess(root))
    try:
        iterator = iter(of)
    finally:
        del os.environ["LOOKING"]
    for _ in range(3):
        next(iterator)
    until(lambda: gone(helpers[0]))
    reader = reader_of(context)
    assert helpers and sum(map(reader.store.holds, range(ITEMS))) == reader.kept


def test_what_a_script_does_when_told_to_end_only_it_does(root, context, helpers, tmp_path):
    mark = tmp_path / "checkpoint"
    before = signal.signal(signal.SIGTERM, lambda *_: mark.write_text("saved"))
    try:
        iterator = iter(loader(cases.Files(root)))
        for _ in range(3):
            next(iterator)
        for child in helpers[0]:
            os.kill(child, signal.SIGTERM)
        until(lambda: gone(helpers[0]))
        assert not mark.exists()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(list(iterator)) == ITEMS // 4 - 3


def test_no_room_for_another_process(root, context, helpers, monkeypatch):
    iterator = iter(loader(cases.Files(root)))

    def refuse():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    assert len(list(iterator)) == ITEMS // 4 and helpers[0] == []


def test_they_end_with_a_training_that_is_killed(root, tmp_path):
    code = f"""
        import os, sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import torch, cache_cases
        from saturate.agent.context import Context
        from saturate.data import cache_ahead, cache_helpers
        from saturate.techniques import dataset_cache
        torch.set_num_threads(1)
        cache_ahead.PATIENCE_S = 0.0
        cache_helpers.usable_cpus = lambda: 2
        cache_cases.COST_S = 0.2
        dataset_cache.apply(Context(torch), dataset_cache.Options())
        iterator = iter(torch.utils.data.DataLoader(cache_cases.Files({str(root)!r}), batch_size=4))
        for _ in range(3):
            next(iterator)
        import gc
        (helpers,) = (one for one in gc.get_objects() if isinstance(one, cache_helpers.Helpers))
        print(*helpers._running.values(), flush=True)
        time.sleep(600)
    """
    environment = {**os.environ, dataset_cache.FOLDER: str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=environment, stdout=subprocess.PIPE, text=True) as process:
        children = list(map(int, process.stdout.readline().split()))
        assert len(children) == 2
        process.kill()
    until(lambda: gone(children))


def test_of_a_process_that_takes_long_to_fork_there_are_few(root, context, helpers, monkeypatch):
    real, now = os.fork, [0.0]

    def slow():
        now[0] += 0.2
        return real()

    of = loader(cases.Files(root))
    iterator = iter(of)
    clock = types.SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(cache_helpers, "time", clock)
    monkeypatch.setattr(cache_helpers, "usable_cpus", lambda: 16)
    monkeypatch.setattr(cache_helpers, "MOST_FORKING_S", MOST_FORKING_S)
    monkeypatch.setattr(os, "fork", slow)
    assert len(list(iterator)) == ITEMS // 4
    assert len(helpers[0]) == 2


def test_overtaken_helpers_leave_what_comes_next_to_the_training():
    """Otherwise both would make the same again and again."""
    batches = [[2 * place, 2 * place + 1] for place in range(40)]
    asked: list[list[int]] = []

    class Reader:
        class store:
            full = dropped = False
            wanted = staticmethod(lambda index: True)
            holds = staticmethod(lambda index: False)

        def store_ahead(self, indices):
            asked.append(indices)
            if len(asked) == 2:
                work.shared[:8] = (20).to_bytes(8, sys.byteorder)      # the training has come to batch 20

    work = cache_helpers._Work(Reader(), batches, cache_helpers.mmap.mmap(-1, 16), 1, -1, float("inf"))
    work.shared[8] = 1                              # helper
    work.run(0)
    assert asked[0][0] // 4 == (2 * (1 + 8) + 3) // 4       # the batch that is asked for, and some after it, are left to the training
    assert asked[2][0] // 4 == (2 * (21 + 5) + 3) // 4      # a quarter of the twenty that are left
    assert asked[-1][-1] == 79


def test_the_disk_is_full(root, context, helpers, monkeypatch):
    monkeypatch.setattr(cache_store.Store, "put_all", lambda self, samples: 0)
    assert len(list(loader(cases.Files(root)))) == ITEMS // 4
    assert not helpers                  # nothing can be stored: so there is nothing to help with


def test_at_the_end_of_a_script_nothing_is_said(root, tmp_path):
    """Also where it ends in the middle of a pass, whose iterator is still there when modules are taken apart."""
    code = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import torch, cache_cases
        from saturate.agent.context import Context
        from saturate.data import cache_ahead
        from saturate.techniques import dataset_cache
        torch.set_num_threads(1)
        cache_ahead.PATIENCE_S = 0.0
        context = Context(torch)
        dataset_cache.apply(context, dataset_cache.Options())
        iterator = iter(torch.utils.data.DataLoader(cache_cases.Files({str(root)!r}), batch_size=4))
        for _ in range(3):
            next(iterator)
    """
    environment = {**os.environ, dataset_cache.FOLDER: str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
