"""Trainings that save and resume, rightly or with one fault, and `saturate drill` on them as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tune_kit import Folder

#: 64 samples in epochs of 8 batches, an order per epoch that follows from its number, a checkpoint every 6 updates.
SCRIPT = '''
import os, sys, time
import torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
x = torch.randn(64, 8)
data = TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(64, 1))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}


class Order:
    """Batches of an epoch from one of them on."""

    def __init__(self, epoch, first):
        generator = torch.Generator().manual_seed(epoch)
        self.batches = torch.randperm(64, generator=generator).reshape(8, 8).tolist()[first:]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def save(step, path="checkpoint.pt"):
    state = {name: part.state_dict() for name, part in parts.items()} | {"step": step, "random": torch.get_rng_state()}
    torch.save(state, path + ".new")
    os.replace(path + ".new", path)


def load(path="checkpoint.pt"):
    if not os.path.exists(path):
        return 0
    state = torch.load(path)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    torch.set_rng_state(state["random"])
    return state["step"]


def order(step):
    return Order(step // 8, step % 8)


def update(batch):
    inputs, targets = batch
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()


LAST = 10**9
# (changes)
begun = step = load()
while step < LAST:
    for batch in DataLoader(data, batch_sampler=order(step)):
        update(batch)
        step += 1
        if step % 6 == 0:
            save(step)
        time.sleep(0.004)
        if step >= LAST:
            break
'''


def changed(changes: str) -> str:
    """The script with lines in front of its loop."""
    return SCRIPT.replace("# (changes)", changes)


def drill(folder: Path, source: str, *options: str, command: tuple[str, ...] = (), code: int = 0, seconds: float = 240.0,
          environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Run `saturate drill --json` on a script in `folder`; the object that it prints, with what it said as `stderr`."""
    here = Folder(folder)
    here.write("train.py", source)
    words = [sys.executable, "-m", "saturate", "drill", "--json", *options, "--", *(command or (sys.executable, "train.py"))]
    done = subprocess.run(words, cwd=folder, env={**here.environment(), **(environment or {})}, capture_output=True, text=True,
                          timeout=seconds, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == code, done.stderr[-4000:]
    assert done.stdout.count("\n") == 1, done.stdout
    assert not here.wait_until_nothing_lives()
    return {**json.loads(done.stdout), "stderr": done.stderr}
