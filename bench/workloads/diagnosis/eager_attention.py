"""Attention written out: scores, softmax and the weighted sum as separate operators over a long sequence."""

import math

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(width / self.heads)
        mixed = torch.softmax(scores, dim=-1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))


torch.manual_seed(0)
model = nn.Sequential(Attention(64, 4), Attention(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(2, 384, 64)
while True:
    optimizer.zero_grad()
    model(inputs).pow(2).mean().backward()
    optimizer.step()
