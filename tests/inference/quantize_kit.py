"""Small models, and a context to quantize them in."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from saturate.inference.techniques._api import Context
from saturate.records.inference import ModelFacts

nn = torch.nn

VNNI = frozenset({"avx2", "avx512f", "avx512_vnni"})
FACTS = ModelFacts(device="cpu", torch=torch.__version__, dtypes=("float32",), linears=3, convolutions=3, installed={"torchao": "0.18.0"},
                   cpu_flags=VNNI, exportable=True, calibration_samples=16, batch_size=2, trainable=True)


def context(tmp_path: Path, model: Any, *inputs: Any, **changes: Any) -> Context:
    """Two batches to measure with, four to calibrate with."""
    torch.manual_seed(0)
    batches = [tuple(torch.randn_like(x) if x.is_floating_point() else x for x in inputs) for _ in range(6)]
    facts = dataclasses.replace(FACTS, batch_size=inputs[0].shape[0], **changes.pop("facts", {}))
    return Context(torch=torch, model=model.eval().requires_grad_(False), device="cpu", inputs=batches[:2], calibration=batches[2:], facts=facts,
                   folder=tmp_path, threads=1, **changes)


def decibels(expected: Any, got: Any) -> float:
    expected, got = expected.double(), got.double()
    noise = (expected - got).square().sum()
    return math.inf if noise == 0 else float(10 * torch.log10(expected.square().sum() / noise))


class Block(nn.Module):
    """As in the most common of all networks: one ReLU for the whole block, a sum around it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.fc = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.blocks(self.pool(self.relu(self.stem(x))))
        return {"logits": self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1))}


def residual() -> Residual:
    """With BatchNorm statistics of its own, as after training."""
    torch.manual_seed(0)
    model = Residual().train()
    with torch.no_grad():
        for _ in range(8):
            model(torch.randn(16, 3, 12, 12))
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.bias.uniform_(-0.5, 0.5)
    return model.eval()


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.embed(tokens))
        return self.head(x + self.down(nn.functional.silu(self.gate(x)) * self.up(x)))


def transformer() -> Transformer:
    torch.manual_seed(0)
    return Transformer().eval()


def tokens() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 50, (2, 7))
