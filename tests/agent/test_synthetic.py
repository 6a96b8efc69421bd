"""One batch replayed: what comes out of the loader, how long epochs stay, and what the loader is said to cost."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset  # noqa: E402
from torch.utils.data.dataloader import _BaseDataLoaderIter  # noqa: E402

from saturate.agent.session import Session  # noqa: E402
from saturate.agent.synthetic import Kept, Replay  # noqa: E402
from saturate.agent.window import Window  # noqa: E402
from saturate.records.facts import Facts, LoaderFacts  # noqa: E402
from saturate.study import loadercost  # noqa: E402


class Numbers(Dataset):
    def __init__(self):
        self.asked = 0

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.asked += 1
        return {"x": torch.full((2,), float(index)), "y": index}


@pytest.fixture
def window():
    """A session without a training; begin a replay in it and end it."""
    session = Session(torch, {"mode": "trial", "techniques": []})
    windows = []

    def begin():
        windows.append(Replay(session, {"kind": "replay", "skip": 1, "steps": 5}))
        windows[-1].prepare()
        return windows[-1]

    yield begin
    for one in windows:
        one.withdraw()
    while session.undo:
        session.undo.pop()()
    assert _BaseDataLoaderIter.__next__.__module__ == "torch.utils.data.dataloader"


@pytest.mark.parametrize("workers, persistent", [(0, False), (1, False), (1, True)])
def test_epochs_keep_their_lengths(window, workers, persistent):
    loader = DataLoader(Numbers(), batch_size=3, num_workers=workers, persistent_workers=persistent)
    iterator = iter(loader)
    assert next(iterator)["x"][0, 0] == 0
    replay = window()
    seen = [next(iterator)["y"].tolist() for _ in range(2)]
    assert seen == [[3, 4, 5]] * 2 and replay.replayed == 1     # the first is a real one, which is kept
    replay.withdraw()
    assert next(iterator)["y"].tolist() == [6, 7, 8]
    with pytest.raises(StopIteration):
        next(iterator)
    iterator = iter(loader)
    batches = [next(iterator)["y"].tolist() for _ in range(3)]
    late = window()
    assert [batch["y"].tolist() for batch in iterator] == [[9, 10, 11]]     # the last one, kept as the epoch ends
    late.withdraw()
    assert len(batches) == 3
    again = window()
    assert [batch["y"].tolist() for batch in loader] == [[0, 1, 2]] * 4
    again.withdraw()
    assert [batch["y"].tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_evaluation_in_inference_mode_has_its_own_batches(window, workers):
    """Such tensors have no versions: the script's validation ended with torch's error about that."""
    window()
    loader = DataLoader(Numbers(), batch_size=3, num_workers=workers)
    training = iter(loader)
    next(training)
    with torch.inference_mode():
        assert [batch["y"].tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert next(training)["y"].tolist() == [0, 1, 2] and sum(1 for _ in training) == 2


def test_nothing_is_loaded_while_it_replays(window):
    dataset = Numbers()
    iterator = iter(DataLoader(dataset, batch_size=1))
    window()
    for _ in range(8):
        next(iterator)
    assert dataset.asked == 1


def test_each_loader_has_its_own_batch(window):
    train, evaluate = DataLoader(Numbers(), batch_size=4), DataLoader(Numbers(), batch_size=2)
    window()
    assert [len(batch["y"]) for batch in train] == [4] * 3 and [len(batch["y"]) for batch in evaluate] == [2] * 6


def test_loaders_of_one_dataset_that_make_other_batches_of_it_have_their_own(window):
    """A second head that is trained on the same samples got the batch of the first one."""
    dataset = Numbers()
    first = iter(DataLoader(dataset, batch_size=2, collate_fn=lambda samples: torch.tensor([one["y"] for one in samples])))
    second = iter(DataLoader(dataset, batch_size=2, collate_fn=lambda samples: [one["x"] for one in samples]))
    window()
    for _ in range(3):
        assert next(first).tolist() == [0, 1] and [x.tolist() for x in next(second)] == [[0.0, 0.0], [1.0, 1.0]]


def test_a_loader_without_end_has_none(window):
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(10**9))

    iterator = iter(DataLoader(Endless(), batch_size=2))
    replay = window()
    assert [next(iterator).tolist() for _ in range(50)] == [[0, 1]] * 50
    replay.withdraw()
    assert next(iterator).tolist() == [2, 3]


def test_what_the_script_does_to_a_batch_is_undone():
    class Encoding(dict):
        pass

    batch = {"x": torch.ones(2), "rest": [torch.zeros(2), ("a", 1)], "odd": Encoding(a=torch.ones(1))}
    kept = Kept(torch, batch)
    first = kept.again()
    first["x"].mul_(5)
    first.pop("rest")[0].add_(1)
    first["odd"].pop("a")
    second = kept.again()
    assert second["x"].tolist() == [1, 1] and second["rest"][0].tolist() == [0, 0] and second["odd"]["a"].tolist() == [1]
    assert type(second["odd"]) is Encoding and second["x"].data_ptr() == batch["x"].data_ptr()   # no copy where nothing was written


def test_each_batch_has_leaves_of_its_own():
    """Scripts normalise a batch in place, ask it for gradients and take it apart, the first one as well as all others."""
    batch = {"x": torch.full((2, 3), 255.0), "y": torch.arange(2), "wanted": torch.ones(1, requires_grad=True)}
    kept = Kept(torch, batch)
    for turn in range(4):
        given = kept.again() if turn else batch
        x, wanted = given.pop("x"), given["wanted"]
        assert x.tolist() == [[255.0] * 3] * 2 and not x.requires_grad and x.is_leaf and wanted.requires_grad
        assert x.grad is None and wanted.grad is None
        x.div_(255.0).unsqueeze_(0).requires_grad_(True)
        (x.square().sum() * wanted).sum().backward()
        assert x.grad.sum() == 12 and wanted.grad == 6
        given["y"].unsqueeze_(1)


def test_a_batch_of_the_scripts_own_class_is_as_it_was():
    class Batch:
        def __init__(self, x):
            self.x, self.parts, self.name = x, [x.clone()], "a"

    batch = Batch(torch.ones(2))
    kept = Kept(torch, batch)
    for _ in range(3):
        batch.parts[0].add_(1)
        batch.x, batch.name = batch.x.mul_(3).unsqueeze(0), "b"
        batch = kept.again()
        assert type(batch) is Batch and batch.x.tolist() == [1, 1] and batch.parts[0].tolist() == [1, 1] and batch.name == "a"


class Sample:
    """A batch that holds its tensors in containers."""

    def __init__(self, **items):
        self.data, self.more = items, [items["x"].clone()]

    def __getitem__(self, name):
        return self.data[name]

    def __setitem__(self, name, value):
        self.data[name] = value

    def keys(self):
        return self.data.keys()


@dataclasses.dataclass(slots=True)
class Slotted:
    data: dict
    more: list


@pytest.mark.parametrize("make", [
    lambda x, y: Sample(x=x, y=y), lambda x, y: Slotted({"x": x, "y": y}, [x.clone()]), lambda x, y: SimpleNamespace(data={"x": x, "y": y}, more=[x.clone()])])
def test_a_batch_that_the_script_takes_apart_is_whole_the_next_time(make):
    """The label that it had popped was missing, and the KeyError was called one of the script's own."""
    batch = make(torch.ones(2), torch.zeros(2))
    kept = Kept(torch, batch)
    for _ in range(3):
        assert batch.data.pop("y").add_(1).tolist() == [1, 1] and batch.more.pop().mul_(2).tolist() == [2, 2]
        batch.data["x"] = batch.data["x"].mul_(3).unsqueeze(0)
        batch = kept.again()
        assert batch.data["x"].tolist() == [1, 1] and batch.data["y"].tolist() == [0, 0] and batch.more[0].tolist() == [1, 1]


def test_cost_of_a_loader():
    cost = loadercost.summed([(40e6, 10e6), (44e6, 11.1e6), (36e6, 8.9e6), (40e6, 10.4e6)])
    assert cost.step_ms == pytest.approx(40) and 29 < cost.cost_ms < 31 and 0.7 < cost.share_ci[0] < cost.share < cost.share_ci[1] < 0.8
    nothing = loadercost.summed([(10e6, 10.1e6), (10e6, 9.9e6), (10e6, 10e6), (10e6, 10.05e6)])
    assert nothing.share_ci[0] < 0 < nothing.share_ci[1]


def test_steps_with_a_replayed_batch_are_timed_behind_the_same_lead_as_others():
    """On a device both begin when the host has got ahead of it, and every timed step replays."""
    blocks = []

    def run_block(skip, steps, watch=None):
        blocks.append((skip, steps, watch))
        return SimpleNamespace(mean_ns=10e6, step_ns=[10_000_000] * steps)

    trial = SimpleNamespace(run_block=run_block, ask=lambda question: {"replayed": 1})
    assert loadercost.measure(trial, Facts(device="cuda", loaders=(LoaderFacts(batch_size=8),)), 10.0).cost_ms == 0
    assert {skip for skip, _, _ in blocks} == {15}
    for skip, steps, watch in blocks:
        assert watch is None or (watch["skip"], watch["skip"] + watch["steps"]) == (1, skip + steps - 1)


@pytest.mark.parametrize("kind, drains", [(Window, 2), (Replay, 0)])
def test_nothing_is_drained_where_a_batch_is_replayed(kind, drains):
    session, drained = Session(torch, {"mode": "trial", "techniques": []}), []
    session.drain = lambda: drained.append(True)
    session.window = kind(session, {"kind": "replay", "skip": 1, "steps": 2})
    session.window.advance()
    while session.window is not None:
        session.window.boundary()
    while session.undo:
        session.undo.pop()()
    assert len(drained) == drains and session.seen["steps"] == 2


SCRIPT = """
import time, torch
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.rand(8), index % 4
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(Slow(), batch_size=4, num_workers={workers})
lengths = []
for epoch in range(10000):
    for count, (x, y) in enumerate(loader, 1):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        time.sleep(0.02)
        optimizer.step()
    lengths.append(count)
    assert set(lengths) == {{10}}, lengths
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers, cost_ms", [(0, 40), (1, 20)])
def test_profile_says_what_the_loader_costs(script, tmp_path, workers, cost_ms):
    pytest.importorskip("numpy")
    path = script(SCRIPT.format(workers=workers))
    done = subprocess.run([sys.executable, "-m", "saturate", "profile", "--synthetic-input", "--json", "--dir",
                           str(tmp_path / "study"), "--", sys.executable, str(path)], capture_output=True, text=True,
                          cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    cost = json.loads(done.stdout)["loader_cost"]
    low, high = cost["share_ci"]
    assert 0.4 * cost_ms < cost["cost_ms"] < 2.5 * cost_ms and low < cost["share"] < high and cost["rounds"] >= 4
    assert "ms with one batch replayed" in done.stderr and "of the step" in done.stderr
    assert "with one batch replayed" in next((tmp_path / "study").glob("**/*.html")).read_text()
