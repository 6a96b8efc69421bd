"""A small perceptron that can be made slower by a known share: each step waits for that share of its own duration.

    python bench/workloads/difference.py --slower 0.05

The wait follows the duration just measured, so that the difference keeps its size whatever else the machine does.
"""

import argparse
import time

import torch
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slower", type=float, default=0.0, metavar="SHARE")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(args.width, args.width), nn.GELU(), nn.Linear(args.width, args.width), nn.GELU(),
                          nn.Linear(args.width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(256, args.width), torch.randn(256, 1)
    began = time.perf_counter()
    for step in range(args.steps):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = time.perf_counter()
        until = now + args.slower * (now - began)
        while time.perf_counter() < until:
            pass
        began = time.perf_counter()
        if step % 1000 == 0:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
