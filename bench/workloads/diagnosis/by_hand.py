"""A training loop with a clock around each of its parts, as a person would put one there to see where the time goes.

    python bench/workloads/diagnosis/by_hand.py --model gpt

Prints one line of nanoseconds per step: input, forward, backward, optimizer, and all since the line before.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from char_gpt import GPT, text
from conv_images import Packed, block
from slow_rows import Rows


def parts(kind: str) -> tuple[nn.Module, DataLoader, object]:
    if kind == "gpt":
        data = text()[: 64 * 65 * 64].view(-1, 65)
        return GPT(128, 4, 64), DataLoader(TensorDataset(data), 8, shuffle=True, drop_last=True), gpt_loss
    if kind == "conv":
        model = nn.Sequential(block(3, 24, 1), block(24, 48, 2), block(48, 96, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                              nn.Linear(96, 10))
        return model, DataLoader(Packed(6400, 32), 32, shuffle=True, drop_last=True), conv_loss
    model = nn.Sequential(nn.Linear(100, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1))
    return model, DataLoader(Rows(12800, 100), 64, shuffle=True, drop_last=True), rows_loss


def gpt_loss(model: nn.Module, batch: list) -> torch.Tensor:
    tokens = batch[0]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def conv_loss(model: nn.Module, batch: list) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def rows_loss(model: nn.Module, batch: list) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["gpt", "conv", "rows"], default="gpt")
    parser.add_argument("--out", type=argparse.FileType("w"), default=sys.stdout, metavar="FILE", help="instead of standard output")
    args = parser.parse_args()
    torch.manual_seed(0)
    model, loader, loss_of = parts(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    clock = time.perf_counter_ns
    last = clock()
    while True:
        batches = iter(loader)
        for _ in range(len(loader)):
            began = clock()
            batch = next(batches)
            fetched = clock()
            loss = loss_of(model, batch)
            forward = clock()
            loss.backward()
            backward = clock()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            ended = clock()
            print("step", fetched - began, forward - fetched, backward - forward, ended - backward, ended - last, flush=True, file=args.out)
            last = ended


if __name__ == "__main__":
    main()
