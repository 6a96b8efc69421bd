"""Traces of a CUDA device with one planted bottleneck each, as tests/trace/h200 holds them: `python bench/record_gpu_traces.py FOLDER`.

Plain `torch.profiler` recordings of a few steps; nothing in them knows saturate. tests/trace/test_recorded_traces.py says what an
analysis must find in each. Needs torch with CUDA and 2 GB of the device's memory; takes some ten seconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

Step = Callable[[], None]


def record(path: Path, step: Step, steps: int = 3) -> None:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(record_shapes=True, schedule=torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1)) as profiler:
        for _ in range(steps + 1):
            step()
            profiler.step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def training(model: nn.Module, batch: Callable[[], torch.Tensor], dtype: torch.dtype | None = None, waits: bool = True) -> Step:
    """`waits`: for the loss, in each step."""
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = model(batch()).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if waits:
            loss.item()

    return step


def perceptron(width: int, layers: int = 4) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())))


class Attention(nn.Module):
    """(8, 1024, 512) -> (8, 8, 1024, 64), written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(512, 1536)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(8, 1024, 3, 8, 64).permute(2, 0, 3, 1, 4)
        return (q @ k.transpose(-2, -1) * 0.125).softmax(-1) @ v


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 3
    folder.mkdir(parents=True, exist_ok=True)

    def on_device(*sizes: int) -> Callable[[], torch.Tensor]:
        made = torch.randn(*sizes, device="cuda")
        return lambda: made

    square, low = on_device(4096, 4096), torch.bfloat16
    record(folder / "fp32.json.gz", training(perceptron(4096), square))
    torch.backends.cuda.matmul.allow_tf32 = True
    record(folder / "tf32.json.gz", training(perceptron(4096), square))
    torch.backends.cuda.matmul.allow_tf32 = False
    record(folder / "odd.json.gz", training(perceptron(5185), on_device(4096, 5185), low))
    host = torch.randn(16384, 4096)
    record(folder / "pageable.json.gz", training(nn.Linear(4096, 64), lambda: host.cuda(), low))
    narrow = nn.Sequential(*(layer for _ in range(40) for layer in (nn.Linear(64, 64), nn.ReLU())))
    record(folder / "launchbound.json.gz", training(narrow, on_device(64, 64)))
    record(folder / "clean.json.gz", training(perceptron(8192), on_device(8192, 8192), low, waits=False), steps=4)
    record(folder / "eager.json.gz", training(Attention(), on_device(8, 1024, 512), low))
    return 0


if __name__ == "__main__":
    sys.exit(main())
