"""The whole way with a technique of the house: `tune` finds that it pays, verifies it, writes it down, and `run` replays it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from parties import tune

#: Each sample takes a while to arrive, as from a slow disk: what workers are for.
STARVING = """
import sys, time
import torch, torch.nn as nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(7)

class Slow(Dataset):
    x = torch.randn(512, 12)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        time.sleep(0.002)
        return self.x[index], self.x[index, :3].sum()[None]

model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(Slow(), batch_size=8, shuffle=True)
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10**9
while steps > 0:
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps -= 1
        if not steps:
            print("the last loss is", loss.item())
            break
"""


def test_a_starving_loop_gets_workers_and_keeps_its_losses(tmp_path: Path) -> None:
    result = tune(tmp_path, STARVING, "--only", "loader-workers", budget="90s")
    found = result["by_id"]["loader-workers"]
    assert found["fate"] == "kept", (found, result["stderr"])
    assert result["verdict"] == "faster" and result["verified"] is True and result["speedup_ci"][0] > 1.2, result
    entry, = tomllib.loads(Path(result["recipe"]).read_text(encoding="utf-8"))["technique"]
    assert entry["id"] == "loader-workers" and entry["options"]["workers"] >= 1

    plain = [sys.executable, "train.py", "70"]        # into the second epoch
    replayed = [sys.executable, "-m", "saturate", "run", result["recipe"], "--", *plain]
    done = [subprocess.run(command, cwd=tmp_path / "work", capture_output=True, text=True, timeout=120) for command in (plain, replayed)]
    assert [one.returncode for one in done] == [0, 0] and "saturate:" not in done[1].stderr, done[1].stderr
    assert done[0].stdout == done[1].stdout != ""
