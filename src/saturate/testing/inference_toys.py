"""Two models small enough for a test, with what models out there do: images through convolutions, normalizations and a
residual, answered by a dictionary; token ids and a mask through attention, with tied weights, answered by a dataclass.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from saturate.inference.techniques._api import Train
from saturate.machine import facts as machine
from saturate.records.inference import ModelFacts

BATCH, WIDTH, LENGTH, WORDS, CLASSES = 4, 32, 16, 64, 8

PACKAGES = ("torchao", "onnx", "onnxruntime", "onnxscript", "openvino", "tensorrt", "torch_tensorrt")


class Images(torch.nn.Module):
    """(n, 3, 16, 16) float32 -> {"logits": (n, 8), "features": (n, 32)}."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, WIDTH, 3, stride=2, padding=1)
        self.norm = torch.nn.BatchNorm2d(WIDTH)
        self.body = torch.nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.hidden = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        x = functional.relu(self.norm(self.stem(images)))
        x = functional.relu(x + self.body(x))
        features = functional.relu(self.hidden(x.mean((2, 3))))
        return {"logits": self.head(features), "features": features}


@dataclass
class Answer:
    """What `Tokens` returns."""

    logits: Any
    pooled: Any = None


class Tokens(torch.nn.Module):
    """ids (n, 16) int64, mask (n, 16) bool -> Answer(logits (n, 16, 64), pooled (n, 32))."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.before = torch.nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.after = torch.nn.LayerNorm(WIDTH)
        self.wide = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = torch.nn.Linear(2 * WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Answer:
        x = self.embedding(ids)
        parts = [layer(self.before(x)).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        attended = functional.scaled_dot_product_attention(*parts, attn_mask=mask[:, None, None, :])
        x = x + attended.transpose(1, 2).flatten(2)
        x = x + self.narrow(functional.gelu(self.wide(self.after(x))))
        return Answer(self.head(x), x.mean(1))


@dataclass
class Toy:
    """How to make a model in evaluation mode, its inputs, and how to train it."""

    name: str
    make: Callable[[], Any]
    batches: list[tuple[Any, ...]]
    calibration: list[tuple[Any, ...]]
    train: Train
    facts: ModelFacts


def toys() -> list[Toy]:
    """Both, seeded: the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        images = [(torch.randn(BATCH, 3, 16, 16),) for _ in range(4)]
        masks = [torch.ones(BATCH, LENGTH, dtype=torch.bool) for _ in range(4)]
        tokens = [(torch.randint(WORDS, (BATCH, LENGTH)), mask) for mask in masks]
    return [
        _toy("images", Images, images, lambda output: output["logits"], lambda batch: torch.arange(BATCH) % CLASSES),
        _toy("tokens", Tokens, tokens, lambda output: output.logits.flatten(0, 1), lambda batch: batch[0].flatten()),
    ]


def _toy(name: str, kind: type, batches: list[tuple[Any, ...]], pick: Callable[[Any], Any],
         target: Callable[[Any], Any]) -> Toy:
    def make() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            model = kind().eval().requires_grad_(False)
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):        # as after training: not the identity
                module.running_mean.copy_(torch.linspace(-0.2, 0.2, WIDTH))
                module.running_var.copy_(torch.linspace(0.5, 1.5, WIDTH))
        return model

    def loss(output: Any, wanted: Any) -> Any:
        return functional.cross_entropy(pick(output), wanted)

    train = Train([(*batch, target(batch)) for batch in batches], loss, epochs=1)
    return Toy(name, make, batches[:2], batches[2:], train, _facts(make()))


def _facts(model: Any) -> ModelFacts:
    """What the search would know of a toy on this machine's CPU."""
    kinds = [type(module).__name__ for module in model.modules()]
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ModelFacts(
        kind=type(model).__name__, torch=torch.__version__, parameters=sum(p.numel() for p in model.parameters()),
        parameter_bytes=sum(p.numel() * p.element_size() for p in model.parameters()), dtypes=("float32",),
        linears=kinds.count("Linear"), convolutions=kinds.count("Conv2d"), embeddings=kinds.count("Embedding"),
        norms=kinds.count("LayerNorm"), batch_norms=kinds.count("BatchNorm2d"), attentions=int(isinstance(model, Tokens)),
        batch_size=BATCH, exportable=True, installed=installed, cores=max(1, int(machine.cpu_count())),
        cpu_flags=frozenset(machine.cpu_information().get("flags", "").split()), threads=torch.get_num_threads(),
        calibration_samples=2 * BATCH, trainable=True,
    )
