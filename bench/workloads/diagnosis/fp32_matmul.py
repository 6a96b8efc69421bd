"""Large matrix products in fp32, on a device that multiplies bf16 in hardware."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())), nn.Linear(1024, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
inputs = torch.randn(512, 1024)
while True:
    optimizer.zero_grad()
    model(inputs).pow(2).mean().backward()
    optimizer.step()
