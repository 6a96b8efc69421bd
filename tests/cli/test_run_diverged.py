"""`saturate run --on-divergence stop` behind a launcher, which has an exit code of its own and may start a training again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from saturate.cli import run
from saturate.records import recipe as recipes
from saturate.records.recipe import Entry, Recipe

#: Without a process group: the second one of a launcher that starts again does not always find its peers (seen with torch 2.13 alone).
DIVERGES = """
import torch
print("started", flush=True)
model = torch.nn.Linear(8, 1)
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(60):
    opt.zero_grad(); loss = model(torch.ones(4, 8)).pow(2).mean()
    (loss * float("nan") if step > 20 else loss).backward(); opt.step()
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
WARNED = "saturate: with --max-restarts 1, a training that is stopped when it diverges is started again: give --max-restarts 0\n"


@pytest.mark.parametrize(("options", "starts", "warned"), [((), 2, ""), (("--max-restarts=1",), 4, WARNED)])
def test_a_launcher_ends_with_a_code_of_its_own(options, starts, warned, script, tmp_path: Path, clean_environment):
    """README, "Exit codes": torchrun ends with 1, names the rank's 5, and starts all ranks again where it is told to."""
    recipes.write(tmp_path / "recipe.toml", Recipe(techniques=[Entry(id="zero-grad-none")]))
    words = [sys.executable, "-m", "saturate", "run", "--on-divergence", "stop", "recipe.toml", "--", *TORCHRUN, *options, str(script(DIVERGES))]
    done = subprocess.run(words, cwd=tmp_path, env=clean_environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stderr
    assert "ChildFailedError" in done.stderr and "exitcode  : 5 (" in done.stderr, done.stderr
    assert "the loss became nan at step 22 (rank " in done.stderr
    assert done.stdout.count("started") == starts
    assert (WARNED in done.stderr) == bool(warned), done.stderr


@pytest.mark.parametrize(("command", "times"), [
    (("torchrun", "--max-restarts", "3", "train.py"), 3), (("torchrun", "--max_restarts=3", "train.py"), 3),
    (("accelerate", "launch", "--max_restarts", "2", "train.py"), 2),
    ((sys.executable, "-m", "torch.distributed.run", "--max-restarts=4", "train.py"), 4),
    (("torchrun", "--max-restarts=0", "train.py"), 0), (("torchrun", "train.py", "--max-restarts=3"), 0), (("torchrun", "train.py"), 0),
    ((sys.executable, "train.py", "--max-restarts", "3"), 0), (("torchrun", "train.py", "--max-restarts"), 0),
])
def test_how_often_a_launcher_starts_again_is_read_in_front_of_the_script(command, times, script, tmp_path: Path, monkeypatch):
    script("")
    monkeypatch.chdir(tmp_path)
    assert run._restarts(list(command)) == times
