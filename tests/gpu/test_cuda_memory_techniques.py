"""Activation checkpointing and the optimizer in backward on a CUDA device: bits, bytes and proof."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

PROBE = """
import gc, json, sys, torch
from torch import nn
from saturate.agent.context import Context
from saturate.techniques import activation_checkpointing, optimizer_in_backward
torch.use_deterministic_algorithms(True, warn_only=True)

def train(apply):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    context = Context(torch)
    context.modules, context.optimizers, context.device = (model,), (optimizer,), "cuda"
    apply(context)
    losses = []
    for step in range(6):
        if step == 4:
            torch.cuda.reset_peak_memory_stats()
        loss = model(torch.randn(16, 256, 256, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    sums = [p.double().sum().item() for p in model.parameters()]
    found = losses, sums, torch.cuda.max_memory_allocated(), dict(context.notes)
    context.undo()
    del model, layer, optimizer, context, loss
    gc.collect()            # what refers to itself would count in the peak of the next one
    return found

options = activation_checkpointing.Options
ways = {
    "plain": lambda context: None,
    "blocks": lambda context: activation_checkpointing.apply(context, options(mode="blocks")),
    "operators": lambda context: activation_checkpointing.apply(context, options(mode="operators")),
    "budget": lambda context: activation_checkpointing.apply(context, options(share=0.5)),
    "updates": lambda context: optimizer_in_backward.apply(context, optimizer_in_backward.Options()),
}
print(json.dumps({name: train(apply) for name, apply in ways.items()}))
"""


def test_the_same_bits_in_less_memory():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    losses, sums, peak, _ = found.pop("plain")
    for name, (ours, others, less, notes) in found.items():
        assert (ours, others) == (losses, sums), name
        assert less < peak, name
        assert any(not key.endswith("refused") for key in notes), (name, notes)
