"""Samples come from a file on a slow disk: every read takes as long as a seek. The wait is emulated, with a sleep after a
real read, because a test cannot slow a disk down."""

import os
import tempfile
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

RECORD = 4096
SEEK_S = 0.003


class Records(Dataset):
    def __init__(self, count: int):
        self.count = count
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self.file.truncate(count * RECORD)

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> bytes:
        data = os.pread(self.file.fileno(), RECORD, index * RECORD)
        time.sleep(SEEK_S)
        return data

    def __getitem__(self, index: int):
        data = self.read(index)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)[:64].float(), index % 4


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(Records(4096), batch_size=16, shuffle=True)
while True:
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
