"""loader-workers beside what a script says of how its processes start, and in scripts that others would run again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from saturate import notices, ranks  # noqa: E402 - after the import that decides whether to run at all
from saturate.agent.context import Context  # noqa: E402
from saturate.records.facts import Evidence, LoaderFacts  # noqa: E402
from saturate.techniques import _loaders, _passes_with_workers, loader_workers  # noqa: E402
from saturate.techniques._api import Proof  # noqa: E402

CHOOSES_LATER = """
import multiprocessing, os
import torch
from torch.utils.data import DataLoader, TensorDataset
from saturate.agent import seams
from saturate.agent.context import Context
from saturate.techniques import loader_workers

context = Context(torch)
loader_workers.apply(context, loader_workers.Options(workers=1))
arguments = {"batch_size": 2, "num_workers": 0, "persistent_workers": False, "prefetch_factor": None, "multiprocessing_context": None}
rows = TensorDataset(torch.arange(8.0))
changed = context.loader_rewrites[0](rows, arguments, frozenset({"batch_size"}))
assert changed["num_workers"] == 1, changed
loader = DataLoader(rows, 2, **changed)
assert [float(batch.sum()) for (batch,) in loader] == [1.0, 5.0, 9.0, 13.0]
assert multiprocessing.get_start_method(allow_none=True) is None
multiprocessing.set_start_method("spawn")
assert sum(float(batch.sum()) for (batch,) in loader) == 28.0
os._exit(0)
"""


def test_a_script_may_still_choose_how_its_processes_start():
    """Neither to ask for it nor to start workers settles it."""
    done = subprocess.run([sys.executable, "-c", CHOOSES_LATER], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_loader_that_loses_its_workers_can_be_built_again():
    """Frameworks build loaders from the attributes of others, and torch takes no context without workers."""
    context = Context(torch)
    loader_workers.apply(context, loader_workers.Options(workers=1))
    loader = torch.utils.data.DataLoader(list(range(8)), 2, num_workers=1, multiprocessing_context="fork")
    try:
        process = loader_workers.multiprocessing.current_process()
        process._config["daemon"] = True
        assert len(list(loader)) == 4 and not loader.num_workers
    finally:
        process._config.pop("daemon")
        context.undo()
    assert loader.multiprocessing_context is None


class Drawing(torch.utils.data.Dataset):
    """Sinusoids, say, drawn by a generator of its own."""

    def __init__(self, drawn=True):
        self.random = random.Random(0) if drawn else None

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.tensor(float(index))


class Place(torch.utils.data.Sampler):
    def __iter__(self):
        for self.at in range(100):
            yield self.at


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(100))


DRAWS = "Drawing or its collate_fn has a random generator of its own (Random): each worker would draw the same numbers from a copy of it"


@pytest.mark.parametrize("loaders, reason", [
    ([], ""),
    ([(Drawing(), {})], DRAWS),
    ([(Drawing(), {"num_workers": 2})], DRAWS),
    ([(Drawing(), {"num_workers": 1}), (list(range(4)), {}), (Drawing(), {})], f"{DRAWS}; it has fewer than two batches"),
    ([(Stream(), {})], "the dataset is iterable: workers would change what is read"),
    ([(Drawing(False), {"sampler": Place()})], "Place may go on where the last pass was left: workers are asked for batches ahead"),
], ids=["none", "draws", "override", "two", "iterable", "place"])
def test_why_no_loader_was_rewritten_is_said(loaders, reason):
    """Seen: the reason was on stderr only, and the report said that none was rewritten."""
    context, options = Context(torch), loader_workers.Options(workers=2, override=True)
    loader_workers.apply(context, options)
    try:
        for dataset, arguments in loaders:
            assert not context.loader_rewrites[0](dataset, {"batch_size": 10, "num_workers": 0, **arguments}, frozenset(arguments))
        proof = loader_workers.active(Evidence(notes=dict(context.notes)), options)
    finally:
        context.undo()
    assert proof == Proof(False, "no DataLoader was rewritten" + (f": {reason}" if reason else ""))


def test_why_a_loader_has_lost_its_workers_is_said():
    """The script gives its dataset a generator after the loader was built."""
    context, options = Context(torch), loader_workers.Options(workers=2)
    loader_workers.apply(context, options)
    dataset = Drawing(False)
    try:
        changed = context.loader_rewrites[0](dataset, {"batch_size": 10, "num_workers": 0}, frozenset())
        loader = torch.utils.data.DataLoader(dataset, 10, **changed)
        dataset.random = random.Random(0)
        assert len(list(loader)) == 10 and not loader.num_workers
        proof = loader_workers.active(Evidence(notes=dict(context.notes), loaders=(LoaderFacts(num_workers=0),)), options)
    finally:
        context.undo()
    assert proof == Proof(False, f"the DataLoader that the training reads from has no workers: {DRAWS}")


@pytest.mark.parametrize("rank, lines", [(0, 1), (1, 0)])
def test_what_is_to_be_said_once_one_rank_says(rank, lines, monkeypatch, capfd):
    """Ranks that `mp.spawn` has started know which one they are from their process group."""
    for name in ranks.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ranks, "group", lambda: types.SimpleNamespace(get_rank=lambda: rank))
    notices.tell_once.cache_clear()
    for _ in range(2):
        loader_workers._say_once(_passes_with_workers._out_of_order("Sampler"))
    assert capfd.readouterr().err.count("Sampler draws random numbers") == lines


MAINS = {
    "guarded": ("import torch\nif __name__ == '__main__':\n    print('trains')\n", True),
    "guarded with more": ("import sys\nif len(sys.argv) > 0 and '__main__' == __name__: print('trains')\n", True),
    "bare": ("import torch\nprint('trains')\n", False),
    "guarded in a function only": ("def f():\n    if __name__ == '__main__': pass\nprint('trains')\n", False),
    "unreadable": ("def f(:\n", False),
}


@pytest.mark.parametrize("name", MAINS)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_scripts_that_would_train_in_their_workers_have_none(name, method, tmp_path, monkeypatch):
    """A worker that is not forked imports the main module."""
    source, guarded = MAINS[name]
    main = types.ModuleType("__main__")
    main.__file__, main.__spec__ = str(tmp_path / "train.py"), None
    (tmp_path / "train.py").write_text(source, encoding="utf-8")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(_loaders.multiprocessing, "get_start_method", lambda allow_none=False: method)
    may = _loaders.may_have_workers(list(range(100)), {"batch_size": 10}, torch)
    assert may is (method == "fork" or guarded)


@pytest.mark.parametrize(("file", "spec", "again"), [(None, None, False), ("train.py", "package.__main__", False), ("train.py", "package.train", True)])
def test_what_children_do_not_import_is_no_reason(file, spec, again, tmp_path, monkeypatch):
    main = types.ModuleType("__main__")
    main.__spec__ = types.SimpleNamespace(name=spec) if spec else None
    if file is not None:
        main.__file__ = str(tmp_path / file)
        (tmp_path / file).write_text("print('trains')\n", encoding="utf-8")
    monkeypatch.setitem(sys.modules, "__main__", main)
    arguments = {"batch_size": 10, "multiprocessing_context": "spawn"}
    assert _loaders.may_have_workers(list(range(100)), arguments, torch) is not again


def test_where_the_sockets_of_workers_have_no_room_there_are_none(monkeypatch):
    """A long TMPDIR, as of a job on a cluster: no batch ever came, and the training stood still for good."""
    data = torch.utils.data.TensorDataset(torch.zeros(8, 1))
    for length, left in ((loader_workers.MOST_OF_A_PATH, False), (loader_workers.MOST_OF_A_PATH + 1, True)):
        monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * (length - 1))
        reason = loader_workers._left_alone(data, {"batch_size": 2}, loader_workers.Options(), torch)
        assert ("TMPDIR" in reason) is left, reason


@pytest.mark.parametrize(("more", "fits"), [(0, True), (1, False)])
def test_a_socket_in_the_longest_folder_can_be_bound(more, fits):
    """And one byte more is too many: what this Python makes of the folder has as many bytes as is counted with."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        folder = Path(base, "x" * (loader_workers.MOST_OF_A_PATH + more - len(base) - 1))
        folder.mkdir()
        code = "from multiprocessing.connection import Listener; Listener(family='AF_UNIX')"
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True, timeout=60)
        assert fits == (done.returncode == 0) or (not fits and sys.version_info >= (3, 14)), done.stderr      # newer ones take another folder then
