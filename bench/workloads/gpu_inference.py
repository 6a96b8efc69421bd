"""ResNet-50 with random weights, one image at a time, where there is a GPU on it: what bench/gpu_evidence.py optimizes."""

from __future__ import annotations

import torch
from _inference_models import build as subject  # bench/ is on PYTHONPATH: a candidate's process imports it as well

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = DEVICE == "cpu"         # a rehearsal


def model() -> torch.nn.Module:
    return subject("resnet50", SMALL, held_out=0).model.to(DEVICE)


def inputs() -> list[tuple[torch.Tensor, ...]]:
    return [tuple(tensor.to(DEVICE) for tensor in batch) for batch in subject("resnet50", SMALL, held_out=0).inputs]
