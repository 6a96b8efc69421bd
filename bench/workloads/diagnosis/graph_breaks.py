"""A compiled model whose forward leaves the graph after each layer, because it looks at a value. Its products are as large
as those of `clean.py`, beside which allocating costs nothing."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(2048, 2048) for _ in range(3))

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
inputs = torch.randn(1024, 2048, dtype=torch.bfloat16)
while True:
    optimizer.zero_grad()
    compiled(inputs).mean().backward()
    optimizer.step()
