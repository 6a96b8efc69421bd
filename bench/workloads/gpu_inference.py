"""ResNet-50 and ViT-B/16 with random weights, one image at a time, where there is a GPU on it: what bench/gpu_evidence.py optimizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from _inference_models import Subject, build  # bench/ is on PYTHONPATH: a candidate's process imports it as well

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = DEVICE == "cpu"         # a rehearsal


def model(name: str = "resnet50") -> torch.nn.Module:
    return subject(name, held_out=0).model.to(DEVICE)


def inputs(name: str = "resnet50") -> list[tuple[torch.Tensor, ...]]:
    return [_moved(batch) for batch in subject(name, held_out=0).inputs]


def check(run: Callable[..., Any], name: str = "resnet50") -> list[float]:
    """For each held-out image whether the class is the one that the model itself gives: the weights are random, and so it is agreement
    and no accuracy."""
    return [float(int(run(*batch).argmax(1)) == wanted) for batch, wanted in _wanted(name)]


def transformer_model() -> torch.nn.Module:
    return model("vit-b16")


def transformer_inputs() -> list[tuple[torch.Tensor, ...]]:
    return inputs("vit-b16")


def transformer_check(run: Callable[..., Any]) -> list[float]:
    return check(run, "vit-b16")


def subject(name: str, held_out: int) -> Subject:
    return build(name, SMALL, held_out=held_out)


@functools.cache
def _wanted(name: str) -> list[tuple[tuple[torch.Tensor, ...], int]]:
    """Held-out images with the classes that the model itself gives; their number changes the model that comes with them."""
    images, own = subject(name, held_out=40 if SMALL else 192).held_out, model(name)
    with torch.no_grad():
        return [(batch, int(own(*batch).argmax(1))) for batch in map(_moved, images)]


def _moved(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.to(DEVICE) for tensor in batch)
