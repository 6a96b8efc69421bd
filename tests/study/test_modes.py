"""Both race modes and both isolation modes find a real gain, keep an honest technique, and leave the user's tree alone."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from kernel import overlays_refused
from parties import WORKLOAD, tune

pytestmark = pytest.mark.slow

_WRITES = WORKLOAD.replace("updates = int", """
open("log.txt", "a").write("started\\n")
os.makedirs("checkpoints", exist_ok=True)
torch.save(model.state_dict(), "checkpoints/last.pt")
updates = int""").replace("import sys, time", "import os, sys, time")


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file() and ".saturate" not in path.parts}


@pytest.mark.parametrize("race", ["concurrent", "alternate"])
@pytest.mark.parametrize("isolation", ["overlay", "intercept"])
def test_a_real_gain_is_found(race: str, isolation: str, tmp_path: Path) -> None:
    if isolation == "overlay" and overlays_refused():
        pytest.skip(f"no overlays here: {overlays_refused()}")
    work = tmp_path / "work"
    work.mkdir()
    (work / "log.txt").write_text("mine\n", encoding="utf-8")
    environment = {"SATURATE_ISOLATION": "intercept"} if isolation == "intercept" else {}
    result = tune(tmp_path, _WRITES, "--race", race, names=("waits_less",), budget="150s", environment=environment)
    entry = result["by_id"]["waits-less"]
    assert entry["fate"] == "kept", (entry, result["stderr"])
    assert result["verified"] is True and result["verdict"] == "faster"
    assert result["speedup"] > 1.3 and result["speedup_ci"][0] > 1.02
    recipe = tomllib.loads(Path(result["recipe"]).read_text(encoding="utf-8"))
    assert [one["id"] for one in recipe["technique"]] == ["waits-less"]
    assert tree(work) == {"log.txt": b"mine\n", "train.py": (work / "train.py").read_bytes()}
    assert sorted(path.name for path in work.iterdir()) == [".saturate", "log.txt", "train.py"]
    said = "writes are intercepted" if isolation == "intercept" else "overlays in a mount namespace"
    assert said in Path(result["report"]).read_text(encoding="utf-8")


_RANKS = """
import os, sys
import torch, torch.nn as nn, torch.distributed as dist, torch.multiprocessing as mp

def main(rank):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="12355")         # as many tutorials do
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(200_000):
        x = torch.randn(16, 32)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()

if __name__ == "__main__":
    mp.spawn(main, nprocs=2)
"""


def test_a_command_that_listens_on_a_port_is_never_run_twice_at_once(tmp_path: Path) -> None:
    """The second process of a pair found the port taken: "the command failed when it was run again"."""
    result = tune(tmp_path, _RANKS, "--only", "fused-optimizer", budget="240s")
    entry = result["by_id"]["fused-optimizer"]
    raced = entry["fate"] in ("kept", "no_difference", "inconclusive", "slower")
    assert raced or "too noisy" in entry["reason"], (entry, result["stderr"])
    assert "fresh runs alternate" in Path(result["report"]).read_text(encoding="utf-8")
