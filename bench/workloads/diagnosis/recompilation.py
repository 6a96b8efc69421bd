"""A compiled model that is given another Python value in every step, and is compiled for each."""

import torch
from torch import nn

torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1_000_000


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 8))

    def forward(self, x, name: str):
        y = self.layers(x)
        return y * 2 if name == "" else y


torch.manual_seed(0)
model = Net()
compiled = torch.compile(model, backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(256, 256)
step = 0
while True:
    step += 1
    optimizer.zero_grad()
    compiled(inputs, f"step {step}").pow(2).mean().backward()
    optimizer.step()
