"""One loader worker decodes without pause while the other cores have nothing to do."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Parsed(Dataset):
    def __init__(self, count: int):
        self.lines = [",".join(f"{(row * 31 + column) % 97 / 97:.4f}" for column in range(256)) for row in range(64)]
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        values = [float(text) ** 2 for text in self.lines[index % 64].split(",") for _ in range(4)]
        return torch.tensor(values[:256]), index % 4


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Parsed(65536), batch_size=64, num_workers=1)
    while True:
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
