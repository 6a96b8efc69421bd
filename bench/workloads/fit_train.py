"""A training whose memory is nearly all activations: some 3 MiB a sample. It trains, or it looks for its own batch with a finder of
Lightning or Accelerate, under a limit that a CPU does not have by itself.

    fit_train.py --batch-size 64 --steps 50                        train, evaluate, save a checkpoint
    fit_train.py --finder power|binsearch|accelerate --limit N     print what the finder found, as JSON
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

FEATURES, LAYERS, SAMPLES = 65536, 8, 4096
LARGE = 1 << 20


class Rows(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((FEATURES,), index / SAMPLES)


class Net(nn.Module):
    """Keeps a tensor of the size of its input for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(FEATURES)) for _ in range(LAYERS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            rows = torch.tanh(rows * scale)
        return rows.mean()


class Limit(TorchDispatchMode):
    """Raises what torch's CPU allocator raises when the process has more than `limit` bytes resident after an operation with a
    large result. What the C library keeps of freed memory is returned first: a real allocator would use it again."""

    def __init__(self, limit: int):
        super().__init__()
        self.limit = limit
        self.trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)
        self.page = os.sysconf("SC_PAGE_SIZE")

    def resident(self) -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * self.page

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        large = isinstance(result, torch.Tensor) and result.numel() * result.element_size() >= LARGE
        if large and self.resident() > self.limit:
            self.trim(0)
            if self.resident() > self.limit:
                raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: limit of {self.limit} bytes")
        return result


def train(size: int, steps: int) -> None:
    """`steps` steps in epochs of the loader, then an evaluation and a checkpoint; again and again without a number."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader, test = DataLoader(Rows(), size, shuffle=True), DataLoader(Rows(), 8)
    done = 0
    while not steps or done < steps:
        model.train()
        for rows in loader:
            optimizer.zero_grad()
            model(rows).backward()
            optimizer.step()
            done += 1
            if steps and done >= steps:
                break
        model.eval()
        with torch.no_grad():
            for rows, _ in zip(test, range(4)):
                model(rows)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")


def with_lightning(mode: str, limit: int) -> tuple[int, int]:
    """Found size and trials of Lightning's Tuner.scale_batch_size with its defaults."""
    import lightning as L
    from lightning.pytorch.tuner import Tuner, batch_size_scaling

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.batch_size = Net(), 2

        def training_step(self, batch, index):
            return self.net(batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def train_dataloader(self):
            return DataLoader(Rows(), self.batch_size, shuffle=True)

    trials = 0
    original = batch_size_scaling._try_loop_run

    def counted(*args, **kwargs):
        nonlocal trials
        trials += 1
        return original(*args, **kwargs)

    batch_size_scaling._try_loop_run = counted
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=True, enable_progress_bar=False,
                        enable_model_summary=False, max_epochs=1)
    with Limit(limit):
        found = Tuner(trainer).scale_batch_size(Module(), mode=mode)
    return int(found or 0), trials


def with_accelerate(limit: int, start: int = 1024) -> tuple[int, int]:
    """Found size and calls of Accelerate's find_executable_batch_size, from a start that is too large."""
    from accelerate.utils import find_executable_batch_size

    trials = 0

    @find_executable_batch_size(starting_batch_size=start)
    def attempt(batch_size: int) -> int:
        nonlocal trials
        trials += 1
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for rows, _ in zip(DataLoader(Rows(), batch_size, shuffle=True), range(3)):
            optimizer.zero_grad()
            model(rows).backward()
            optimizer.step()
        return batch_size

    with Limit(limit):
        return attempt(), trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=0, help="0: until it is stopped")
    parser.add_argument("--finder", choices=["power", "binsearch", "accelerate"])
    parser.add_argument("--limit", type=int, default=0, help="bytes")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.finder is None:
        train(arguments.batch_size, arguments.steps)
        return
    found, trials = with_accelerate(arguments.limit) if arguments.finder == "accelerate" else with_lightning(arguments.finder, arguments.limit)
    print(json.dumps({"found": found, "trials": trials}))


if __name__ == "__main__":
    main()
