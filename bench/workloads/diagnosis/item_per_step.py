"""Every step reads its metrics from tensors, one number at a time."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, labels = torch.randn(2048, 128), torch.randint(4, (2048,))
right = 0
while True:
    optimizer.zero_grad()
    outputs = model(inputs)
    loss = nn.functional.cross_entropy(outputs, labels)
    loss.backward()
    optimizer.step()
    guesses = outputs.argmax(1)
    for index in range(len(labels)):
        right += guesses[index].item() == labels[index].item()
