"""A perceptron on rows of text that a Dataset parses in Python, one by one. An ordinary training script.

    python bench/workloads/slow_rows.py --steps 100
"""

import argparse
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    """Lines of numbers with a target in the last field, as a text file would hold them."""

    def __init__(self, count: int, fields: int):
        draw = random.Random(0)
        self.lines = []
        for _ in range(count):
            values = [draw.gauss(0, 1) for _ in range(fields)]
            target = sum(values[::2]) - abs(values[1])
            self.lines.append(",".join(f"{value:.4f}" for value in (*values, target)))

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int):
        values = [float(field.strip()) for field in self.lines[index].split(",")]
        largest = max(abs(value) for value in values) or 1.0
        scaled = [value / largest for value in values]
        return torch.tensor(scaled[:-1]), torch.tensor(scaled[-1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--fields", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(args.fields, args.width), nn.GELU(), nn.Linear(args.width, args.width), nn.GELU(),
                          nn.Linear(args.width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(Rows(args.rows, args.fields), batch_size=args.batch, shuffle=True, drop_last=True)
    step = 0
    while step < args.steps:
        for rows, targets in loader:
            loss = nn.functional.mse_loss(model(rows), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 100 == 0:
                print(f"step {step}  loss {loss.item():.4f}", flush=True)
            step += 1
            if step >= args.steps:
                break


if __name__ == "__main__":
    main()
