"""The technique as a user meets it: `saturate run recipe.toml -- python train.py`, then plain Python, export, resume."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from saturate.checkpoints import pointer
from saturate.techniques import _registry

TRAIN = '''
import io, os, shutil, sys
import torch

steps, resume = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
torch.manual_seed(0)
first = 0
if resume:                                  # before anything shows that this process trains
    found = torch.load(resume, weights_only=True)
    first = found["step"] + 1
model = torch.nn.ModuleList([torch.nn.Linear(512, 800), torch.nn.Linear(800, 4)])
model[0].requires_grad_(False)
optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.01)
if resume:
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
for step in range(first, steps):
    torch.manual_seed(step)
    optimizer.zero_grad()
    model[1](model[0](torch.randn(8, 512))).square().mean().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, f"ckpt_{step}.pt")
    buffer = io.BytesIO()
    torch.save(state, buffer)               # a stream: what a save without saturate holds
    with open(f"true_{step}.bin", "wb") as file:
        file.write(buffer.getvalue())
    if step == 3:
        shutil.copyfile("ckpt_3.pt", "best.pt")
print("done")
if os.environ.get("CRASH") == "exit":
    os._exit(9)
if os.environ.get("CRASH"):
    os.abort()
'''

COMPARE = '''
import sys, torch
def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list) else a == b
for pair in zip(sys.argv[1::2], sys.argv[2::2]):
    a, b = (torch.load(name, weights_only=True) for name in pair)
    if not same(a, b):
        sys.exit(f"{pair} differ")
'''


class Place:
    def __init__(self, folder: Path, environment: dict[str, str]):
        self.folder, self.environment = folder, environment
        (folder / "train.py").write_text(TRAIN)
        (folder / "compare.py").write_text(COMPARE)
        (folder / "recipe.toml").write_text('schema = 1\n[[technique]]\nid = "incremental-checkpoint"\n')

    def __call__(self, *command: str, **variables: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, *command], cwd=self.folder, capture_output=True, text=True, timeout=120,
                              env={**self.environment, **variables})

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess:
        return self("-m", "saturate", "run", "recipe.toml", "--", sys.executable, *command, **variables)

    def named(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*.pt") if pointer.read(path))


@pytest.fixture
def place(tmp_path, clean_environment):
    return Place(tmp_path, {**clean_environment, "OMP_NUM_THREADS": "1"})


def test_a_script_that_renames_what_it_saved(place):
    script = TRAIN.replace("import io, os", "from os import replace\nimport io, os").replace(
        'torch.save(state, f"ckpt_{step}.pt")', 'torch.save(state, "tmp"); replace("tmp", f"ckpt_{step}.pt")')
    (place.folder / "renames.py").write_text(script)
    done = place.run("renames.py", "6")
    assert done.returncode == 0, done.stderr
    assert place.named() == ["ckpt_2.pt", "ckpt_3.pt", "ckpt_4.pt"]
    assert place("compare.py", "ckpt_5.pt", "true_5.bin").returncode == 0


def test_a_script_that_took_copyfile_by_name(place):
    script = TRAIN.replace("import io, os", "from shutil import copyfile\nimport io, os").replace("shutil.copyfile(", "copyfile(")
    (place.folder / "copies.py").write_text(script)
    done = place.run("copies.py", "6")
    assert done.returncode == 0, done.stderr
    assert place.named() == ["ckpt_2.pt", "ckpt_3.pt", "ckpt_4.pt"] and place("compare.py", "best.pt", "true_3.bin").returncode == 0


def test_a_run_its_files_its_resume_and_its_export(place):
    done = place.run("train.py", "6")
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr
    assert place.named() == ["ckpt_2.pt", "ckpt_3.pt", "ckpt_4.pt"]         # the first two, the last and the copy are plain
    assert "incremental saving would write" in done.stderr and "saves wrote" in done.stderr
    plain = [name for step in (0, 1, 5) for name in (f"ckpt_{step}.pt", f"true_{step}.bin")]
    compared = place("compare.py", *plain, "best.pt", "true_3.bin")
    assert compared.returncode == 0, compared.stderr
    without = place("compare.py", "ckpt_3.pt", "true_3.bin")
    assert without.returncode == 1 and "saturate checkpoint export FILE" in without.stderr
    stored = place.run("compare.py", *[name for step in (2, 3, 4) for name in (f"ckpt_{step}.pt", f"true_{step}.bin")])
    assert stored.returncode == 0, stored.stderr
    exported = place("-m", "saturate", "checkpoint", "export", "ckpt_3.pt")
    assert exported.returncode == 0, exported.stderr
    assert place.named() == ["ckpt_2.pt", "ckpt_4.pt"] and place("compare.py", "ckpt_3.pt", "true_3.bin").returncode == 0
    verified = place("-m", "saturate", "checkpoint", "verify")
    assert verified.returncode == 0 and " 0 damaged" in verified.stdout, verified.stdout + verified.stderr


@pytest.mark.slow
def test_after_a_crash_the_newest_is_in_the_store_and_training_resumes(place):
    crashed = place.run("train.py", "5", CRASH="1")
    assert crashed.returncode == -6
    assert place.named() == ["ckpt_2.pt", "ckpt_3.pt", "ckpt_4.pt"]
    (place.folder / "recipe.toml").write_text('schema = 1\n[[technique]]\nid = "zero-grad-none"\n')     # any recipe loads it
    resumed = place.run("train.py", "6", "ckpt_4.pt")
    assert resumed.returncode == 0, resumed.stderr
    plain = place.folder / "uninterrupted"
    plain.mkdir()
    other = Place(plain, place.environment)
    assert other("train.py", "6").returncode == 0
    assert place("compare.py", "ckpt_5.pt", str(plain / "ckpt_5.pt")).returncode == 0, "resumed training differs from uninterrupted"


def test_an_end_at_once_leaves_a_plain_file_too(place):
    """So ends who asks for `os._exit`, and whom the watchdog stops: the newest checkpoint could not be loaded without us."""
    done = place.run("train.py", "5", CRASH="exit")
    assert done.returncode == 9, done.stderr
    assert place.named() == ["ckpt_2.pt", "ckpt_3.pt"] and place("compare.py", "ckpt_4.pt", "true_4.bin").returncode == 0


@pytest.mark.slow
def test_a_store_that_cannot_be_written_changes_nothing_but_a_line(place):
    (place.folder / ".saturate").write_text("a file")
    done = place.run("train.py", "5")
    assert done.returncode == 0 and place.named() == []
    assert done.stderr.count("plain from now on") == 1
    assert place("compare.py", *[name for step in range(5) for name in (f"ckpt_{step}.pt", f"true_{step}.bin")]).returncode == 0


def test_it_is_never_raced_and_says_why():
    module = _registry.load()["incremental-checkpoint"]
    from saturate.testing.conformance import sample_facts

    for facts in sample_facts():
        answer = module.eligible(facts)
        assert not answer and "advise --forecast" in answer.reason


def test_the_lines_for_a_recipe_can_be_read_whatever_the_folder_is_called():
    import tomllib

    module = _registry.load()["incremental-checkpoint"]
    lines = module.as_code(module.Options(store='a "b\\c\n\u00e9')).splitlines()[1:]
    assert all(line.startswith("# ") for line in lines)
    read = tomllib.loads("\n".join(line[2:] for line in lines))["technique"][0]
    assert read["options"]["store"] == 'a "b\\c\n\u00e9'


def test_it_does_not_stack_with_another_checkpoint_writer():
    registry = _registry.load()
    both = [registry["incremental-checkpoint"], registry["async-checkpoint"]]
    assert _registry.conflicts(both) == [("incremental-checkpoint", "async-checkpoint", "checkpoint-writer")]


def test_undo_gives_torch_and_shutil_back(tmp_path, monkeypatch):
    import torch

    from saturate.agent.context import Context

    monkeypatch.chdir(tmp_path)
    module = _registry.load()["incremental-checkpoint"]
    before = torch.save, torch.serialization.save, shutil.copyfile
    context = Context(torch)
    assert isinstance(module.apply(context, module.Options()), str)
    assert torch.save is torch.serialization.save is not before[0]
    torch.save({"a": 1}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert torch.load(tmp_path / "old.pt") == {"a": 1}
    sent = pickle.dumps((os.replace, shutil.copyfile))         # by name, to another process
    context.undo()
    assert (torch.save, torch.serialization.save, shutil.copyfile) == before and pickle.loads(sent) == (os.replace, shutil.copyfile)
