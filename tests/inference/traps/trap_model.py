"""A model with work to save, its data, and what the planted techniques share. Imported in candidates' processes too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from saturate.inference.techniques._api import Eligible, Proof, Technique, Touch

CLASSES = 8
GENERATOR = torch.Generator().manual_seed(0)
CENTRES = torch.randn(CLASSES, 64, generator=GENERATOR)


def samples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points around the centres of their classes, and the classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    return CENTRES[labels] + 0.3 * torch.randn(count, 64, generator=generator), labels


class Wasteful(torch.nn.Module):
    """Reads the class, and multiplies matrices that change nothing: what a technique may leave out."""

    def __init__(self, rounds: int = 24) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rounds = rounds
        self.waste = torch.nn.Linear(256, 256)
        self.head = torch.nn.Linear(64, CLASSES)
        with torch.no_grad():
            self.head.weight.copy_(CENTRES)
            self.head.bias.copy_(-CENTRES.square().sum(1) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.repeat(1, 4)
        for _ in range(self.rounds):
            wide = self.waste(wide)
        return self.head(x) + 0 * wide.mean()


class Dice(Wasteful):
    """Dropout that stays on: random at inference."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.nn.functional.dropout(x, 0.2, training=True))


@dataclass(frozen=True)
class Nothing:
    """Nothing to choose."""


def technique(id: str, numerics: str) -> Technique:
    return Technique(id=id, title=id, numerics=numerics, stage="number", touches=(Touch(id), Touch("number-format")))


def eligible(facts: Any) -> Eligible:
    return Eligible("planted")


def variants(facts: Any) -> list[Nothing]:
    return [Nothing()]


def bound(facts: Any) -> float | None:
    return None


def active(context: Any, options: Any) -> Proof:
    return Proof(True, "planted")


def as_code(options: Any) -> str:
    return "model.rounds = ..."
