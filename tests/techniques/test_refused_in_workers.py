"""What workers of a loader refuse: the pass goes on in the training process, with the batches that the script would have had."""

from __future__ import annotations

import errno
import json
import multiprocessing.resource_sharer
import multiprocessing.synchronize
import os
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402 - after the check for torch

from saturate import notices  # noqa: E402
from saturate.agent.context import Context  # noqa: E402
from saturate.techniques import _passes_with_workers, _refused_in_workers, loader_workers  # noqa: E402
from saturate.techniques._given import MOST_HELD, Given  # noqa: E402

HERE = os.getpid()

#: What a test of this file may take: where a pass waits for ever, its test fails, and the others have their turn.
LIMIT_S = 120


@pytest.fixture(autouse=True)
def in_time():
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"not over in {LIMIT_S} s"))
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index


class Moving:
    """A collate function that moves batches to a device from `start` on."""

    def __init__(self, start=0, message=_refused_in_workers.REFUSAL):
        self.start, self.message = start, message

    def __call__(self, samples):
        if os.getpid() != HERE and max(samples) >= self.start:
            raise RuntimeError(f"{self.message}. To use CUDA with multiprocessing, you must use the 'spawn' start method")
        return samples, os.getpid() == HERE


class OutOfOrder(torch.utils.data.Sampler):
    """Draws from its own generator for each index."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __len__(self):
        return 12

    def __iter__(self):
        for _ in range(12):
            yield int(torch.randint(12, (), generator=self.generator))


#: CUDA was not initialized by the training process; a fork knows that it must not, as soon as devices were counted.
BUILT_FOR_CUDA = types.SimpleNamespace(**{**vars(torch), "version": types.SimpleNamespace(cuda="13.0", hip=None),
                                          "cuda": types.SimpleNamespace(is_initialized=lambda: False)})


def epochs(collate, sampler=None, technique=True, dataset=None, count=2):
    torch.manual_seed(0)
    dataset, changes, drawn = Rows() if dataset is None else dataset, {}, []
    context = Context(BUILT_FOR_CUDA)
    arguments = {"batch_size": 2, "shuffle": sampler is None, "sampler": sampler, "collate_fn": collate,
                 "generator": None if sampler else torch.Generator().manual_seed(1)}
    if technique:
        loader_workers.apply(context, loader_workers.Options(workers=2))
        changes = context.loader_rewrites[0](dataset, {"num_workers": 0, **arguments}, frozenset())
        assert changes["num_workers"] == 2
    loader = DataLoader(dataset, **{**arguments, **changes})
    try:
        found = []
        for _ in range(count):
            for samples, here in loader:
                found.append((samples, here))
                drawn.append(torch.rand(1).item())
        assert not technique or sampler is not None or loader.num_workers == (0 if collate.start < 12 else 2)
        return [samples for samples, _ in found], [here for _, here in found], drawn
    finally:
        context.undo()


@pytest.mark.parametrize("start", [0, 6, 99])
def test_batches_come_in_their_order_whoever_makes_them(start, capfd):
    plain, _, draws = epochs(Moving(start), technique=False)
    found, here, drawn = epochs(Moving(start))
    assert (found, drawn) == (plain, draws)
    told = "uses CUDA, which forked workers cannot" in capfd.readouterr().err
    if start == 0:
        assert all(here) and told
    elif start == 6:
        assert here == sorted(here) and here[-6:] == [True] * 6       # from the first failure on, the second epoch as well
    else:
        assert not any(here) and not told


def test_a_sampler_that_draws_as_it_goes_draws_the_same():
    plain, _, _ = epochs(Moving(), OutOfOrder(), technique=False)
    found, here, _ = epochs(Moving(), OutOfOrder())
    assert found == plain and all(here)


@pytest.mark.parametrize("kind", [list, tuple])
def test_datasets_without_weak_references_go_on_as_well(kind, capfd):
    plain, _, draws = epochs(Moving(), technique=False, dataset=kind(range(12)))
    found, here, drawn = epochs(Moving(), dataset=kind(range(12)))
    assert (found, drawn) == (plain, draws) and all(here)
    assert f"{kind.__name__} or its collate_fn uses CUDA" in capfd.readouterr().err


class Killing(Moving):
    """Whoever makes the batch with sample `start` is killed: a worker, the first time."""

    def __init__(self, start, signal_number):
        super().__init__(start)
        self.signal_number = signal_number

    def __call__(self, samples):
        if os.getpid() != HERE and self.start in samples:
            os.kill(os.getpid(), self.signal_number)
        return samples, os.getpid() == HERE


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGBUS])
@pytest.mark.parametrize("outside", [False, True])
def test_a_worker_that_is_killed_ends_no_training_that_had_none(signal_number, outside, capfd, monkeypatch):
    """Whether the training waits for a batch then, or does something else."""
    plain, _, draws = epochs(Moving(6), technique=False)
    if outside:
        real = torch.rand
        monkeypatch.setattr(torch, "rand", lambda *size: (time.sleep(0.3), real(*size))[1])
    found, here, drawn = epochs(Killing(6, signal_number))
    assert (found, drawn) == (plain, draws)
    assert here[-6:] == [True] * 6 and not here[0]
    assert "Rows has lost a worker (DataLoader worker (pid" in capfd.readouterr().err


class Thoughtful(OutOfOrder):
    """Takes its time to draw: whoever is lost is lost meanwhile."""

    def __iter__(self):
        for index in super().__iter__():
            time.sleep(0.05)
            yield index


def test_a_worker_that_is_lost_while_a_sampler_draws_ends_no_sampler(capfd):
    plain, _, draws = epochs(Moving(6), Thoughtful(), technique=False)
    found, here, drawn = epochs(Killing(plain[3][0], signal.SIGKILL), Thoughtful())
    assert (found, drawn) == (plain, draws) and here[-1]
    assert "has lost a worker" in capfd.readouterr().err


def test_a_worker_that_is_killed_between_two_passes_ends_no_training_that_had_none():
    """Nobody looks then: the next pass waited for its answer."""
    context = Context(torch)
    loader_workers.apply(context, loader_workers.Options(workers=2))
    try:
        dataset = Rows()
        changes = context.loader_rewrites[0](dataset, {"num_workers": 0, "batch_size": 2}, frozenset())
        loader = DataLoader(dataset, batch_size=2, **changes)
        first = [batch.tolist() for batch in loader]
        os.kill(loader._iterator._workers[0].pid, signal.SIGKILL)
        loader._iterator._workers[0].join(60)
        assert [batch.tolist() for batch in loader] == first and all(worker.is_alive() for worker in loader._iterator._workers)
    finally:
        context.undo()


class Redrawn(torch.utils.data.Sampler):
    """Draws where it is asked for an iterator."""

    def __len__(self):
        return 6

    def __iter__(self):
        return iter(torch.randperm(12).reshape(6, 2).tolist())


@pytest.mark.parametrize("where", ["fork", "second fork", "semaphore"])
@pytest.mark.parametrize("batch_sampler", [None, Redrawn()])
def test_where_no_process_can_be_started_the_training_has_none(where, batch_sampler, capfd, monkeypatch):
    notices.tell_once.cache_clear()

    def script(**changes):
        torch.manual_seed(3)
        arguments = {"batch_sampler": batch_sampler} if batch_sampler else {"batch_size": 2, "shuffle": True}
        loader = DataLoader(dataset, **arguments, **changes)
        return [batch.tolist() for _ in range(2) for batch in loader] + [torch.rand(1).item(), loader.num_workers]

    def refuse(*arguments, **named):
        refused.append(1)
        if where == "second fork" and len(refused) == 1:
            return fork()
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    refused, fork, dataset, context, before = [], os.fork, Rows(), Context(torch), multiprocessing.active_children()
    plain = script()
    loader_workers.apply(context, loader_workers.Options(workers=2))
    try:
        changes = context.loader_rewrites[0](dataset, {"num_workers": 0, "batch_size": 2}, frozenset())
        owner = multiprocessing.synchronize.SemLock if where == "semaphore" else os
        monkeypatch.setattr(owner, "__init__" if where == "semaphore" else "fork", refuse)
        assert script(**changes) == plain and refused
    finally:
        context.undo()
    assert multiprocessing.active_children() == before
    told = capfd.readouterr().err
    assert told.count("workers of Rows cannot be started") == 1 and "Exception ignored" not in told


def test_processes_that_the_script_wants_itself_are_missed(monkeypatch):
    def refuse():
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    context = Context(torch)
    loader_workers.apply(context, loader_workers.Options(workers=2))
    try:
        loader = DataLoader(Rows(), batch_size=2, num_workers=1)
        monkeypatch.setattr(os, "fork", refuse)
        with pytest.raises(BlockingIOError):
            list(loader)
    finally:
        context.undo()


class Tensors(Rows):
    def __getitem__(self, index):
        return torch.tensor(index)


@pytest.mark.parametrize("error", [ConnectionResetError, EOFError, FileNotFoundError])
def test_a_worker_that_is_killed_while_it_hands_over_a_batch_ends_no_training_that_had_none(error, capfd, monkeypatch):
    """The connection to it is cut off before the kernel tells that it has ended."""
    notices.tell_once.cache_clear()
    context = Context(torch)
    loader_workers.apply(context, loader_workers.Options(workers=2))
    try:
        dataset = Tensors()
        changes = context.loader_rewrites[0](dataset, {"num_workers": 0, "batch_size": 2}, frozenset())
        batches = iter(DataLoader(dataset, batch_size=2, **changes))
        found = [next(batches).tolist()]

        def detach(self):
            threading.Timer(0.2, os.kill, (batches._workers[1].pid, signal.SIGKILL)).start()
            raise error

        monkeypatch.setattr(multiprocessing.resource_sharer.DupFd, "detach", detach)
        found += [batch.tolist() for batch in batches]
    finally:
        context.undo()
    assert found == [[n, n + 1] for n in range(0, 12, 2)]
    assert "Tensors has lost a worker" in capfd.readouterr().err


class Remote(Rows):
    def __getitem__(self, index):
        if index == 5:
            raise ConnectionResetError("a server")
        return index


class Served(torch.utils.data.Sampler):
    def __len__(self):
        return 12

    def __iter__(self):
        yield from range(11)
        raise EOFError("a server")


@pytest.mark.parametrize(("dataset", "sampler", "error"), [(Remote(), None, ConnectionResetError), (Rows(), Served(), EOFError)])
def test_a_connection_that_fails_where_all_workers_live_is_the_script_s(dataset, sampler, error):
    context = Context(torch)
    loader_workers.apply(context, loader_workers.Options(workers=2))
    try:
        changes = context.loader_rewrites[0](dataset, {"num_workers": 0, "batch_size": 2, "sampler": sampler}, frozenset())
        loader = DataLoader(dataset, batch_size=2, sampler=sampler, **changes)
        with pytest.raises(error, match="a server"):
            list(loader)
        assert loader.num_workers == 2
    finally:
        context.undo()


class Kills(Rows):
    """Its worker ends one of another loader, while its last batch is waited for."""

    other = None

    def __getitem__(self, index):
        if index == 10:
            time.sleep(0.5)
            os.kill(self.other, signal.SIGKILL)
            time.sleep(2)
        return index


def test_a_worker_that_the_script_had_itself_is_nobody_else_s():
    context = Context(torch)
    loader_workers.apply(context, loader_workers.Options(workers=2))
    try:
        dataset = Kills()
        changes = context.loader_rewrites[0](dataset, {"num_workers": 0, "batch_size": 2}, frozenset())
        ours = DataLoader(dataset, batch_size=2, **changes)
        others = iter(DataLoader(list(range(12)), batch_size=2, num_workers=1))
        next(others)
        dataset.other = others._workers[0].pid
        with pytest.raises(RuntimeError, match="is killed by signal"):
            list(ours)
        assert ours.num_workers == 2
    finally:
        context.undo()


class Slow(Rows):
    def __getitem__(self, index):
        time.sleep(3 * (index == 4))
        return index


def test_a_loader_that_the_script_gave_workers_and_a_time_limit_keeps_both():
    """Though another loader of its dataset was given workers."""
    context = Context(torch)
    loader_workers.apply(context, loader_workers.Options(workers=1))
    try:
        dataset = Slow()
        assert context.loader_rewrites[0](dataset, {"num_workers": 0, "batch_size": 2}, frozenset())["num_workers"]
        loader = DataLoader(dataset, batch_size=2, num_workers=1, timeout=1)
        with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
            list(loader)
        assert loader.num_workers == 1
    finally:
        context.undo()


@pytest.mark.parametrize("message", ["Too many open files. Communication with the workers is no longer possible.", "received 0 items of ancdata"])
def test_batches_that_the_training_keeps_end_no_training_that_had_no_workers(message, capfd):
    notices.tell_once.cache_clear()
    plain, _, draws = epochs(Moving(6), technique=False)
    found, here, drawn = epochs(Moving(6, message=message))
    assert (found, drawn) == (plain, draws) and here[-1]
    assert "more than files may be open" in capfd.readouterr().err


def test_a_training_with_workers_may_have_more_open_files():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        loader_workers._allow_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == (min(hard, loader_workers.MOST_FILES) if hard >= 0 else loader_workers.MOST_FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Unreadable(Exception):
    """Its constructor wants more than a text."""

    def __init__(self, path, offset):
        super().__init__(f"{path} at {offset}")
        self.path = path


class Damaged(Rows):
    """Files of which some cannot be read, one does not parse, and one ends its iterator."""

    def __getitem__(self, index):
        if index == 3:
            raise Unreadable("three", index)
        if index == 5:
            return json.loads("{")
        if index == 7:
            raise StopIteration
        return index


def skipping(technique, kill_after=99):
    """Batches in the words of a script that passes over what cannot be read; after so many its workers are killed."""
    dataset, changes, found, context = Damaged(), {}, [], Context(torch)
    if technique:
        loader_workers.apply(context, loader_workers.Options(workers=1))
        changes = context.loader_rewrites[0](dataset, {"num_workers": 0, "batch_size": 2}, frozenset())
    try:
        for _ in range(2):
            batches = iter(DataLoader(dataset, batch_size=2, **changes))
            for number in range(6):
                try:
                    found.append(next(batches).tolist())
                except Unreadable as error:
                    found.append((error.path, error.__context__))
                except json.JSONDecodeError as error:
                    found.append((error.pos, str(error)))
                except StopIteration:
                    found.append("over")
                if technique and number == kill_after:
                    for worker in batches._workers:
                        worker.kill()
                        worker.join()
        return found
    finally:
        context.undo()


@pytest.mark.parametrize("kill_after", [99, 1, 2])
def test_every_other_failure_is_the_script_s(kill_after):
    """As it is without workers, for a script that expects it; nor does one that it passes over count as a batch to come."""
    plain = skipping(technique=False)
    assert plain[:4] == [[0, 1], ("three", None), (1, plain[2][1]), "over"] and len(plain) == 12
    assert skipping(technique=True, kill_after=kill_after) == plain


def test_what_fails_in_workers_alone_is_made_where_the_script_makes_it(capfd):
    context = Context(torch)
    loader_workers.apply(context, loader_workers.Options(workers=2))
    try:
        dataset = Rows()
        changes = context.loader_rewrites[0](dataset, {"num_workers": 0, "batch_size": 2}, frozenset())
        loader = DataLoader(dataset, batch_size=2, collate_fn=Moving(6, message="something else"), **changes)
        for _ in range(2):
            assert [(samples, here) for samples, here in loader] == [([n, n + 1], n >= 6) for n in range(0, 12, 2)]
        assert loader.num_workers == 2
    finally:
        context.undo()
    assert "has raised RuntimeError over a batch of Rows" in capfd.readouterr().err


def of_a_local_class(samples):
    class Batch:
        def __init__(self):
            self.samples = samples

    return Batch()


class AsksItself:
    """Whoever puts it together again asks it for `__setstate__`, and it asks itself for what it does not have yet."""

    def __init__(self, samples):
        self.samples = samples

    def __getattr__(self, name):
        return getattr(self.samples, name)


@pytest.mark.parametrize(("collate", "reason"), [(of_a_local_class, "cannot be sent to another process"),
                                                 (AsksItself, "cannot be received (RecursionError"),
                                                 (AsksItself, "cannot be received (RuntimeError: Pin memory thread exited")])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_batches_that_do_not_cross_are_made_in_the_training_process(collate, reason, capfd, monkeypatch):
    """The training waited for ever for those that a worker cannot send."""
    pinned = "Pin memory" in reason
    if pinned:      # the thread runs without a device, too: nothing in these batches can be pinned
        for name, value in {"is_available": True, "current_device_index": 0, "set_device_index": None}.items():
            monkeypatch.setattr(torch.accelerator, name, lambda *_, value=value: value)
    notices.tell_once.cache_clear()
    context = Context(torch)
    loader_workers.apply(context, loader_workers.Options(workers=2))
    try:
        dataset = Rows()
        changes = context.loader_rewrites[0](dataset, {"num_workers": 0, "batch_size": 2}, frozenset())
        loader = DataLoader(dataset, batch_size=2, collate_fn=collate, pin_memory=pinned, **changes)
        for _ in range(2):
            assert [batch.samples for batch in loader] == [[n, n + 1] for n in range(0, 12, 2)]
        assert loader.num_workers == 0
    finally:
        context.undo()
    assert reason in capfd.readouterr().err


class Spectra(Rows):
    def __getitem__(self, index):
        spectrum = torch.tensor([complex(index, index + 1)]).conj()
        return spectrum, spectrum.imag


def test_tensors_that_are_yet_to_be_conjugated_come_as_they_are():
    context = Context(torch)
    loader_workers.apply(context, loader_workers.Options(workers=2))
    try:
        dataset = Spectra()
        changes = context.loader_rewrites[0](dataset, {"num_workers": 0, "batch_size": None}, frozenset())
        loader = DataLoader(dataset, batch_size=None, **changes)
        assert [(a.tolist(), b.tolist()) for a, b in loader] == [(a.tolist(), b.tolist()) for a, b in map(dataset.__getitem__, range(12))]
        assert loader.num_workers == 2
    finally:
        context.undo()


SPAWNED = """
import multiprocessing
import sys

import torch
from torch.utils.data import DataLoader, Dataset

from saturate.agent.context import Context
from saturate.techniques import loader_workers


class Spectra(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        spectrum = torch.tensor([complex(index, index + 1)]).conj()
        return spectrum, spectrum.imag


def with_a_lambda(samples):
    return samples, lambda: 0


def numbers(samples):
    return [(a.tolist(), b.tolist()) for a, b in samples]


if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    context = Context(torch)
    loader_workers.apply(context, loader_workers.Options(workers=1))
    dataset = Spectra()
    samples = numbers(map(dataset.__getitem__, range(12)))
    changes = context.loader_rewrites[0](dataset, {"num_workers": 0, "batch_size": None}, frozenset())
    loader = DataLoader(dataset, batch_size=None, **changes)
    assert [numbers(loader) for _ in range(2)] == [samples, samples] and loader.num_workers == 1

    loader = DataLoader(dataset, batch_size=2, collate_fn=with_a_lambda, **changes)
    for _ in range(2):
        assert [numbers(batch) for batch, _ in loader] == [samples[n:n + 2] for n in range(0, 12, 2)]
    assert loader.num_workers == 0
    context.undo()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_send_what_they_have_made_or_say_why_not(method, tmp_path):
    (tmp_path / "script.py").write_text(SPAWNED)
    done = subprocess.run([sys.executable, "script.py", method], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "Spectra or its collate_fn makes batches that cannot be sent to another process" in done.stderr


class Curriculum(torch.utils.data.Dataset):
    level = 0

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index + 1000 * self.level


@pytest.mark.parametrize("persistent", [True, False])
def test_a_dataset_that_is_changed_within_a_pass_is_read_as_it_is_now(persistent, monkeypatch, capfd):
    """Workers have a copy as it was when the pass began: the curriculum stood still until the next one."""
    monkeypatch.setattr(_passes_with_workers, "LOOKED_S", 60.0, raising=False)      # however slow the machine is at the moment
    notices.tell_once.cache_clear()

    def read(workers):
        torch.manual_seed(0)
        context, dataset = Context(torch), Curriculum()
        loader_workers.apply(context, loader_workers.Options(workers=2, persistent=persistent))
        arguments = {"batch_size": 2, "shuffle": True, "num_workers": 0}
        loader = DataLoader(dataset, **(arguments | (context.loader_rewrites[0](dataset, arguments, frozenset()) if workers else {})))
        found, counts = [], []
        try:
            for _ in range(4):
                counts.append(loader.num_workers)
                for number, batch in enumerate(loader):
                    found.append(batch.tolist())
                    if number in (5, 12):
                        dataset.level += 1
        finally:
            context.undo()
        return found, counts

    (plain, _), (found, counts) = read(False), read(True)
    assert found == plain and counts == [2, 2, 0, 0]
    assert capfd.readouterr().err.count("Curriculum or its collate_fn was changed within a pass") == 1


def test_a_loader_of_a_list_is_known_again_and_the_list_is_let_go():
    given, rows = Given(), list(range(4))
    references = sys.getrefcount(rows)
    loaders = [DataLoader(rows) for _ in range(3)]
    alone = sys.getrefcount(rows)
    given.add(rows)
    given.add(rows)
    assert DataLoader(list(rows)) not in given, "another list that is equal"
    assert loaders[0] in given and loaders[1] in given and loaders[0] in given
    assert sys.getrefcount(rows) == alone, "both are known"
    assert loaders[2] not in given, "whose workers are the script's own"
    for _ in range(3 * MOST_HELD):
        given.add([0])              # of loaders that nobody passes over
    assert len(given._held) == MOST_HELD
    loaders.clear()
    assert sys.getrefcount(rows) == references


def test_a_pass_goes_on_where_the_technique_is_taken_back():
    context = Context(BUILT_FOR_CUDA)
    loader_workers.apply(context, loader_workers.Options(workers=2))
    dataset = Rows()
    changes = context.loader_rewrites[0](dataset, {"num_workers": 0, "batch_size": 2}, frozenset())
    batches = iter(DataLoader(dataset, batch_size=2, collate_fn=Moving(), **changes))
    first = next(batches)
    context.undo()
    assert [first, *batches] == [([n, n + 1], True) for n in range(0, 12, 2)]


class Hardest(torch.utils.data.Dataset):
    """Of each group of examples the one that the model is worst at; from `start` on. What it is told by the model it reads from
    `found`, or from a global."""

    def __init__(self, start=0, found=None):
        self.start, self.found = start, found

    def __len__(self):
        return 24

    def __getitem__(self, index):
        group = torch.arange(3.0).reshape(3, 1) + index
        if index < self.start:
            return group[0]
        with torch.no_grad():
            return group[torch.sin(20 * (self.found or judge)(group)).argmax()]


def judge(group):
    return scorer(group)


def frozen(group):
    return extractor(group)


def named(group):
    """As datasets do that say which item it was."""
    try:
        return scorer(group)
    except Exception as error:
        raise ValueError("no such item") from error


scorer = extractor = None


def trained_losses(start, found, technique, peek=False):
    """Of a training that mines its examples, and how many of its loaders' workers were left at the end."""
    global scorer, extractor
    torch.manual_seed(0)
    scorer, extractor, context, changes = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1).eval(), Context(torch), {}
    dataset = Hardest(start, {"global": None, "held": scorer, "closure": lambda group, own=scorer: own(group), "frozen": frozen, "named": named}[found])
    # Another model is trained as well, and the making of one optimizer has failed.
    optimizers = [types.SimpleNamespace(), torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1e-3)]
    context.built_optimizers = lambda: list(optimizers)
    if technique:
        loader_workers.apply(context, loader_workers.Options(workers=2))
        arguments = {"batch_size": 4, "num_workers": 0, "persistent_workers": False, "prefetch_factor": None}
        changes = context.loader_rewrites[0](dataset, arguments, frozenset())
        assert changes["num_workers"] == 2
    loader = DataLoader(dataset, batch_size=4, shuffle=True, **changes)
    try:
        if peek:
            next(iter(loader))
        optimizers.append(torch.optim.SGD(scorer.parameters(), lr=1e-3))
        losses = []
        for _ in range(3):
            for batch in loader:
                optimizers[-1].zero_grad()
                loss = (scorer(batch) - 3 * batch).pow(2).mean()
                loss.backward()
                optimizers[-1].step()
                losses.append(loss.item())
        return losses, loader.num_workers
    finally:
        context.undo()


@pytest.mark.parametrize(("found", "start", "peek"), [("global", 0, False), ("held", 0, True), ("closure", 0, False), ("held", 20, False),
                                                      ("global", 0, True), ("named", 0, True)])
def test_examples_that_are_chosen_by_the_model_are_chosen_by_the_one_that_trains(found, start, peek, capfd):
    """Workers would ask a copy, as it was when they began."""
    notices.tell_once.cache_clear()
    plain, _ = trained_losses(start, found, technique=False, peek=peek)
    assert trained_losses(start, found, technique=True, peek=peek) == (plain, 0)
    assert capfd.readouterr().err.count("Hardest or its collate_fn calls the model that is being trained") == 1


def test_workers_call_models_that_are_not_trained():
    plain, _ = trained_losses(0, "frozen", technique=False)
    assert trained_losses(0, "frozen", technique=True) == (plain, 2)
