"""What a training process writes down for a resume drill."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

import pytest
import torch

from saturate.agent import drill
from saturate.verify.resume_log import Log, Save, Step, saves, updates

SCRIPT = """
import io, os, tempfile, torch, torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
assert type(open).__name__ != "function" and io.open is open
class Holds:
    opener = open       # must not become a method
Holds().opener(os.devnull).close()
torch.manual_seed(0)
class Odd:
    values = 3          # an argument that is no container
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 1)
    def forward(self, x, odd, *, scale):
        return self.inner(x) * scale
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=0.01)
x = torch.arange(32.0).reshape(8, 4)
data = Subset(Subset(TensorDataset(x), [7, 6, 5, 4, 3, 2]), [1, 2, 3, 4])       # 6, 5, 4, 3
for epoch in range(4):
    for (batch,) in DataLoader(data, batch_size=2):
        net.train()
        opt.zero_grad(); net(batch, Odd(), scale=torch.ones(1)).sum().backward(); opt.step()
        net.eval()
        with torch.no_grad():
            for (seen,) in DataLoader(TensorDataset(x), batch_size=8): net(seen, None, scale=1.0)
    torch.save(net.state_dict(), "a.pt")
    with open("notes.txt", "w") as f: f.write("no checkpoint")
    with tempfile.NamedTemporaryFile(dir=".", suffix=".ckpt", delete=False) as f: torch.save({}, f)
    assert torch.load("a.pt")
"""


@pytest.fixture
def written(start, script, tmp_path: Path):
    """Run a script to its end; its log."""

    def run(source: str, **plan: object) -> Log:
        folder = tmp_path / f"events{len(list(tmp_path.glob('events*')))}"
        folder.mkdir()
        trial = start(str(script(source)), capture={"seed": 1}, plan={"drill": {"folder": str(folder), "written": [], "hold": None, **plan}})
        log, deadline = Log(), time.monotonic() + 120
        while trial.finished() is None and time.monotonic() < deadline:
            if any("held" in path.read_text() for path in folder.glob("*.jsonl")):
                break
            time.sleep(0.05)
        (path,) = folder.glob("*.jsonl")
        log.feed(path.read_bytes())
        assert not log.withdrawn, trial.output()
        return log

    return run


def test_what_is_written_down(written, tmp_path: Path) -> None:
    log = written(SCRIPT, written=[str(tmp_path / "a.pt")])
    found = updates(log.events, Step("S0"))
    assert [one.indices for one in found] == [(6, 5), (4, 3)] * 4, "indices of the dataset behind the subsets; no evaluation"
    assert [one.begins for one in found] == [True, False] * 4
    assert found[0].rows == found[2].rows != found[1].rows and len(found[0].given) == 2
    assert all(one.before != one.after for one in found) and [a.after for a in found[:-1]] == [b.before for b in found[1:]]
    assert [one.counter for one in found] == list(range(1, 9)) and found[0].rates == (0.01,)
    names = [[Path(path).suffix for path in save.paths] for save in saves(log.events, Step("S0"))]
    assert [save.update for save in saves(log.events, Step("S0"))] == [2, 4, 6, 8] and names == [[".pt", ".ckpt"]] * 4
    assert sum(event["at"] == "read" for event in log.events) == 1, "once per file"
    assert log.rank == 0 and log.step == Step("S0")


def test_it_stands_still_where_it_is_told_to(written, tmp_path: Path) -> None:
    log = written(SCRIPT, hold={"token": "S0", "count": 3})
    assert log.held and log.counts["S0"] == 3 and json.dumps(log.events[-1]) == '{"at": "held"}'


def test_it_stands_still_in_a_save(written, tmp_path: Path) -> None:
    log = written(SCRIPT, hold={"save": 2, "file": 1})
    seen = [event["at"] for event in log.events if event["at"] != "wrote"]      # the second one is opened, and then given to torch.save
    assert log.held and seen[-3:] == ["save", "save", "held"] and log.counts["S0"] == 4
    assert log.events[-2]["path"].endswith(".ckpt")


@pytest.mark.parametrize("tensors, count", [
    ([torch.ones(3, 2), torch.ones(3)], 3), ([torch.ones(3), torch.eye(3).to_sparse()], 0),
    ([torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])], 0)])
def test_samples_by_content_of_tensors_of_any_kind(tensors, count) -> None:
    assert len(drill._rows(tensors)) == count


RENAMED = """
import os, pathlib, torch
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
again = os.path.exists("a.pt")
for name in ("a.pt", "newest.pt", "last/b.pt", "early.pt") if again else (): torch.load(name)
torch.save(0, "early.new"); os.replace("early.new", "early.pt")
for step in range(2):
    net(torch.ones(2, 4)).sum().backward(); opt.step()
torch.save(net.state_dict(), "a.new"); os.replace("a.new", "a.pt")
os.mkdir("aside"); torch.save(net.state_dict(), "aside/b.pt"); pathlib.Path("aside").rename("later" if again else "last")
if not again: os.symlink("a.pt", "newest.pt")
net(torch.ones(2, 4)).sum().backward(); opt.step()
"""


def test_files_that_are_renamed_when_they_are_whole_are_known_by_their_new_names(written, tmp_path: Path) -> None:
    first = written(RENAMED)
    names = [event["path"] for event in first.events if event["at"] == "moved"]
    assert names == [str(tmp_path / "a.pt"), str(tmp_path / "last/b.pt")], "the folder's too; not what is no checkpoint"
    second = written(RENAMED, written=names)
    assert [event["path"] for event in second.events if event["at"] == "read"] == [
        str(tmp_path / name) for name in ("a.pt", "a.pt", "last/b.pt")], "of a link, what it leads to: that is what was saved"


BY_DESCRIPTOR = """
import os, subprocess, tempfile, torch
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(3):
    net(torch.ones(2, 4)).sum().backward(); opt.step()
    descriptor, name = tempfile.mkstemp(dir=".")
    with open(descriptor, "wb") as file: torch.save(net.state_dict(), file)
    os.replace(name, "a.pt")
    with open("a.pt", "rb") as file, os.fdopen(os.dup(file.fileno()), "rb") as again: assert torch.load(again)
    assert subprocess.run("cat", input=b"1", stdout=subprocess.PIPE).stdout == b"1"      # pipes are opened so, too
    with tempfile.TemporaryFile() as nameless: torch.save(0, nameless)
net(torch.ones(2, 4)).sum().backward(); opt.step()
"""


def test_files_that_are_opened_by_their_descriptors_are_known_by_their_paths(written, tmp_path: Path) -> None:
    log = written(BY_DESCRIPTOR, written=[str(tmp_path / "a.pt")])
    assert [save.update for save in saves(log.events, Step("S0"))] == [1, 2, 3], "of `tempfile.mkstemp`, which scripts save to and rename"
    assert {event["path"] for event in log.events if event["at"] in ("moved", "read")} == {str(tmp_path / "a.pt")}
    assert {str(Path(path).parent) for save in saves(log.events, Step("S0")) for path in save.paths} == {str(tmp_path)}


def test_a_sample_has_one_name_whatever_its_index_is_written_as() -> None:
    """A script that trains by a list and resumes by what is left of a permutation has the same samples."""
    torch, np = pytest.importorskip("torch"), pytest.importorskip("numpy")
    from torch.utils.data import Subset

    from saturate.agent.drill import _names

    data, order = list(range(100, 120)), [7, 3, 11]
    for kind in (list, np.array, torch.tensor):
        assert _names(Subset(data, kind(order)), [2, 0]) == [11, 7] == _names(data, [kind(order)[2], kind(order)[0]])
        assert _names(data, kind(order)) == order, "a batch that is cut from it"
    assert _names(data, range(3)) == [0, 1, 2] and _names(data, iter(order)) == [], "its text would be another one in each process"
    assert _names(data, ["a", (1, 2)]) == _names(data, ["a", (1, 2)]) != _names(data, ["b", (1, 2)])


SAFETENSORS = """
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(4):
    net(torch.ones(2, 4)).sum().backward(); opt.step()
    save_file(net.state_dict(), filename="a.safetensors")
    save_file(net.state_dict(), "b.safetensors")
    assert load_file("a.safetensors")
    with safe_open("b.safetensors", framework="pt") as file: assert list(file.keys())
"""


@pytest.mark.skipif(importlib.util.find_spec("safetensors") is None, reason="needs safetensors")
def test_safetensors_files_are_saves_too(written, tmp_path: Path) -> None:
    paths = tuple(str(tmp_path / name) for name in ("a.safetensors", "b.safetensors"))
    log = written(SAFETENSORS, written=list(paths), hold={"save": 3, "file": 1})
    assert [(save.update, save.paths) for save in saves(log.events, Step("S0"))] == [(1, paths), (2, paths), (3, paths)]
    assert [event["path"] for event in log.events if event["at"] == "read"] == list(paths)
    assert log.held and log.events[-2]["path"] == paths[1]


STREAM = """
import torch
from torch.utils.data import DataLoader, IterableDataset
class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(24.0).reshape(6, 4))
w = torch.nn.Linear(4, 1)
def work(batch):
    w.zero_grad(); w(batch).sum().backward()
    for p in w.parameters(): p.data.add_(p.grad, alpha=-0.1)
for epoch in range(3):
    for batch in DataLoader(Stream(), batch_size=2, num_workers=1, persistent_workers=True): work(batch)
"""


def test_a_stream_by_content_and_a_loop_without_an_optimizer(written) -> None:
    found = updates(written(STREAM).events, Step("B"))
    assert len(found) == 9 and not any(one.indices for one in found)
    assert [one.rows for one in found[:3]] == [one.rows for one in found[3:6]] and len(set(found[0].rows + found[1].rows)) == 4
    assert [one.begins for one in found] == [True, False, False] * 3
    assert len({one.before for one in found}) == 9, "parameters are seen to move"


OTHER_FILES = """
import io, pickle, time, torch
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(6):
    opt.zero_grad(); net(torch.ones(2, 4)).sum().backward(); opt.step()
    with open("history.pkl", "wb") as f: pickle.dump([step], f)
    if step == 3:
        buffer = io.BytesIO()
        torch.save(net.state_dict(), buffer)        # as libraries do that hand the bytes to a file system
        with open("a.ckpt", "wb") as f: f.write(buffer.getvalue())
"""


def test_only_what_torch_writes_is_a_checkpoint_unless_every_file_is_to_count(written, tmp_path: Path) -> None:
    log, step = written(OTHER_FILES), Step("S0")
    assert saves(log.events, step) == [Save(4, (str(tmp_path / "a.ckpt"),))] and log.saves == [4]
    assert log.others == [save.update for save in saves(log.events, step, "wrote")] == [1, 2, 3, 4, 5, 6]
    every = written(OTHER_FILES, others=True)
    assert every.saves == [1, 2, 3, 4, 5, 6] and not every.others
