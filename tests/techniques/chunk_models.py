"""Small models for the tests of chunked batches, and a memory that runs out on demand."""

from __future__ import annotations

import random

import torch
from torch.nn import functional


def out_of_memory():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Quota:
    """Memory for `limit` samples at once. `fails`: where it runs out, chosen at random among the places of a model. In slots: it
    stands for the machine, which nobody finds by looking at a model."""

    __slots__ = ("limit", "phases", "random", "transient", "error", "failures", "armed", "visits")

    def __init__(self, limit=None, phases=("forward", "backward"), seed=0, transient=0.0, error=None):
        self.limit = limit
        self.phases = phases
        self.random = random.Random(seed)
        self.transient = transient
        self.error = error or out_of_memory
        self.failures = []
        self.armed = True
        self.visits = []

    def visit(self, phase, place, samples):
        self.visits.append((phase, place, samples))
        if not self.armed or phase not in self.phases or self.limit is None:
            return
        above = samples > self.limit and self.random.random() < 0.7
        if above or (samples > 1 and self.random.random() < self.transient):
            self.failures.append((phase, place, samples))
            raise self.error()


class Checkpointed(torch.autograd.Function):
    """The identity, seen by a quota in both directions."""

    @staticmethod
    def forward(ctx, x, quota, place):
        quota.visit("forward", place, x.shape[0])
        ctx.quota, ctx.place = quota, place
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.quota.visit("backward", ctx.place, gradient.shape[0])
        return gradient, None, None


class Net(torch.nn.Module):
    """Four layers with a quota after each, LayerNorm, and optionally dropout; one parameter is frozen and one unused."""

    def __init__(self, dropout=0.0, quota=None, width=6):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(4))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, 3)
        self.unused = torch.nn.Linear(2, 2)
        self.layers[1].bias.requires_grad_(False)
        self.dropout = dropout
        self.quota = [quota or Quota()]         # in a list: a deep copy shares nothing that matters

    def forward(self, x):
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + x
            x = functional.dropout(x, self.dropout, self.training)
            x = Checkpointed.apply(x, self.quota[0], place)
        return self.head(self.norm(x))


class Language(torch.nn.Module):
    """Logits and, given targets, their mean loss over what is not padding, as nanoGPT and others do."""

    def __init__(self, reduce=None):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.mix = torch.nn.GRU(8, 8, batch_first=True)
        self.head = torch.nn.Linear(8, 11)
        self.reduce = reduce

    def forward(self, tokens, targets=None):
        logits = self.head(self.mix(self.embed(tokens))[0])
        if targets is None:
            return logits, None
        if self.reduce is not None:
            return logits, self.reduce(logits, targets)
        return logits, functional.cross_entropy(logits.view(-1, 11), targets.view(-1), ignore_index=-1)
