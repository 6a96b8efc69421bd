"""A compiled model whose forward leaves the graph after each layer, because it looks at a value."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(512, 512) for _ in range(3))

    def forward(self, x):
        x = torch.relu(self.first(x))
        if x.amax() > 1e6:
            x = x / 2
        x = torch.relu(self.second(x))
        if x.amax() > 1e6:
            x = x / 2
        return self.third(x)


torch.manual_seed(0)
model = Net().bfloat16()
compiled = torch.compile(model, backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)
inputs = torch.randn(2048, 512, dtype=torch.bfloat16)
while True:
    optimizer.zero_grad()
    compiled(inputs).float().pow(2).mean().backward()
    optimizer.step()
