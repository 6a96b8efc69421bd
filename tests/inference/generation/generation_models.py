"""Causal language models of a few thousand parameters, with and without a cache, and wrong ones."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 13


class Block(nn.Module):
    def __init__(self, width: int, heads: int, index: int):
        super().__init__()
        self.heads, self.index = heads, index
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, cache):
        rows, count, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, count, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if cache is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            k, v = cache.update(k, v, self.index)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=cache.mask)
        x = x + self.out(y.transpose(1, 2).reshape(rows, count, width))
        return x + self.mlp(self.norm2(x))


class Cached(nn.Module):
    """forward(ids, cache) -> logits. Without a cache the same model computes from nothing."""

    def __init__(
        self,
        seed: int = 0,
        vocabulary: int = VOCABULARY,
        width: int = 16,
        layers: int = 2,
        context: int = 64,
        sharp: float = 6.0,
    ):
        super().__init__()
        torch.manual_seed(seed)
        self.context, self.sharp = context, sharp
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, 2, index) for index in range(layers))
        self.head = nn.Linear(width, vocabulary)
        self.eval()

    def forward(self, ids, cache=None):
        positions = torch.arange(ids.shape[1], device=ids.device) if cache is None else cache.positions
        x = self.token(ids) + self.position(positions)
        for block in self.blocks:
            x = block(x, cache)
        return self.head(x) * self.sharp


class Whole(nn.Module):
    """forward(ids) -> (logits, loss), as training scripts have it: no cache."""

    def __init__(self, inner: Cached):
        super().__init__()
        self.inner, self.context = inner, inner.context

    def forward(self, ids):
        return self.inner(ids, None), None


class LastAlone(nn.Module):
    """nanoGPT's way: the logits of the last token, and of all only where a loss is asked for."""

    def __init__(self, inner: Cached, takes_targets: bool = True):
        super().__init__()
        self.inner, self.block_size = inner, inner.context
        if not takes_targets:
            self.forward = lambda ids: self.inner(ids, None)[:, -1:]

    def forward(self, idx, targets=None):
        logits = self.inner(idx, None)
        if targets is None:
            return logits[:, [-1]], None
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class Bigram(nn.Module):
    """Logits of the next token from the last one alone: every probability of a text can be enumerated."""

    def __init__(self, table: torch.Tensor):
        super().__init__()
        self.table = nn.Parameter(table.log(), requires_grad=False)

    def forward(self, ids):
        return self.table[ids]


class Recurrent(nn.Module):
    """An LSTM that remembers, in itself, what it saw last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token, self.lstm, self.head = (
            nn.Embedding(VOCABULARY, 8),
            nn.LSTM(8, 8, batch_first=True),
            nn.Linear(8, VOCABULARY),
        )
        self.state = None

    def forward(self, ids):
        x, state = self.lstm(
            self.token(ids), self.state if self.state is not None and self.state[0].shape[1] == len(ids) else None
        )
        self.state = tuple(part.detach() for part in state)
        return self.head(x) * 20


class Bidirectional(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, ids):
        x = self.token(ids)
        return self.head(x + x.mean(1, keepdim=True))


class Forgetful(Cached):
    """Takes positions as if every row began at zero."""

    def forward(self, ids, cache=None):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, cache)
        return self.head(x) * self.sharp


def greedy(model: nn.Module, prompt: list[int], count: int, eos: int | None = None) -> list[int]:
    """The plainest loop that there is: everything again for each token."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            output = model(torch.tensor([ids]))
            logits = output[0] if isinstance(output, tuple) else output
            ids.append(int(logits[0, -1].argmax()))
            if ids[-1] == eos:
                break
    return ids[len(prompt):]
