"""Three architectures as everybody knows them, with random weights: ResNet-50, BERT-base and ViT-B/16.

Written here so that a benchmark needs neither torchvision nor transformers nor a download. Random weights say nothing of
task accuracy; batch normalization gets the statistics of random images, so that activations have the sizes of a trained
network's. `small=True` gives the same shapes in miniature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride), 1x1, and a shortcut (He et al. 2015, version 1.5)."""

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.shortcut = None
        if stride > 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Module):
    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        blocks: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(depths):
            for block in range(depth):
                blocks.append(Bottleneck(channels, width * 2**stage, 2 if stage and not block else 1))
                channels = 4 * width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(n, 3, h, w) -> (n, classes)"""
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        n, length, width = x.shape
        query, key, value = (layer(x).view(n, length, self.heads, width // self.heads).transpose(1, 2)
                             for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).reshape(n, length, width))


class Layer(nn.Module):
    """A transformer encoder layer; `before`: normalization before each half (ViT), else after it (BERT)."""

    def __init__(self, width: int, heads: int, before: bool):
        super().__init__()
        self.before = before
        self.attention = Attention(width, heads)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.before:
            x = x + self.attention(self.norm1(x), mask)
            return x + self.down(F.gelu(self.up(self.norm2(x))))
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    def __init__(self, vocabulary: int = 30522, width: int = 768, depth: int = 12, heads: int = 12, length: int = 512,
                 classes: int = 16):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(Layer(width, heads, before=False) for _ in range(depth))
        self.pool, self.head = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Two times (n, length), int64; mask is 1 for words and 0 for padding. -> (n, classes)"""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.words(ids) + self.places(places))
        attended = mask[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, attended)
        return self.head(torch.tanh(self.pool(x[:, 0])))


class ViT(nn.Module):
    def __init__(self, side: int = 224, patch: int = 16, width: int = 768, depth: int = 12, heads: int = 12, classes: int = 1000):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.places = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, heads, before=True) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(n, 3, side, side) -> (n, classes)"""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


@dataclass(frozen=True)
class Subject:
    """A model in eval mode with batches of one sample: `inputs` to calibrate and measure with, `held_out` to check with."""

    model: nn.Module
    inputs: list[tuple[Tensor, ...]]
    held_out: list[tuple[Tensor, ...]]


NAMES = ("resnet50", "bert-base", "vit-b16")


def build(name: str, small: bool = False, calibration: int = 8, held_out: int = 192) -> Subject:
    """The same weights and inputs in every process: everything is seeded."""
    torch.manual_seed(0)
    if name == "resnet50":
        side = 64 if small else 224
        model: Any = ResNet((1, 1, 1, 1), 16, 10) if small else ResNet()
        batches = _images(side, calibration + held_out)
        _settle(model, torch.cat([image for (image,) in _images(side, 8)]))
    elif name == "bert-base":
        model = Bert(1000, 64, 2, 4, 64) if small else Bert()
        length, vocabulary = (32, 1000) if small else (128, 30522)
        batches = [(torch.randint(vocabulary, (1, length)), torch.ones(1, length, dtype=torch.long))
                   for _ in range(calibration + held_out)]
    elif name == "vit-b16":
        side = 64 if small else 224
        model = ViT(64, 16, 64, 2, 4, 10) if small else ViT()
        batches = _images(side, calibration + held_out)
    else:
        raise ValueError(f"{name}: one of {', '.join(NAMES)}")
    return Subject(model.eval().requires_grad_(False), batches[:calibration], batches[calibration:])


def _images(side: int, count: int) -> list[tuple[Tensor, ...]]:
    """Random images with structure at several scales, about normal."""
    found = []
    for _ in range(count):
        coarse = [F.interpolate(torch.randn(1, 3, size, size), (side, side), mode="bilinear") for size in (4, 16)]
        found.append(((sum(coarse) + torch.randn(1, 3, side, side)) / 2,))
    return found


def _settle(model: nn.Module, images: Tensor) -> None:
    """Give every batch normalization the statistics of these images."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None          # a plain average
    model.train()
    with torch.no_grad():
        model(images)
