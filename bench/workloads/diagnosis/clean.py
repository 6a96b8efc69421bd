"""Nothing wrong: large products in the device's own format, and nothing that waits."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 2048)).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)
inputs = torch.randn(1024, 2048, dtype=torch.bfloat16)
while True:
    optimizer.zero_grad()
    model(inputs).mean().backward()
    optimizer.step()
