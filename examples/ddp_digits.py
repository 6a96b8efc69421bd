"""Train a small convolutional network on scikit-learn's handwritten digits, data-parallel over several processes.

    torchrun --standalone --nproc-per-node 2 examples/ddp_digits.py
    torchrun --standalone --nproc-per-node 2 examples/ddp_digits.py --epochs 5 --seed 1
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VALIDATION = 360                                  # the last images, of 1797


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Grey images of 8 x 8 pixels with values 0 to 16."""
    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(raw.target)
    return (TensorDataset(images[:-VALIDATION], labels[:-VALIDATION]),
            TensorDataset(images[-VALIDATION:], labels[-VALIDATION:]))


def network(width: int) -> nn.Module:
    def stage(channels: int, out: int):
        return [nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(8, out), nn.ReLU()]

    return nn.Sequential(
        *stage(1, width), *stage(width, width), nn.MaxPool2d(2),
        *stage(width, 2 * width), *stage(2 * width, 2 * width), nn.Flatten(),
        nn.Linear(16 * 2 * width, 4 * width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4 * width, 10),
    )


@torch.no_grad()
def accuracy(model, loader, device) -> float:
    """Over all ranks: each counts its share, and the counts are added."""
    model.eval()
    counts = torch.zeros(2, device=device)
    for images, labels in loader:
        counts[0] += (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
        counts[1] += len(labels)
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32, help="images per process")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/ddp_digits"))
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(args.seed)                  # the same weights everywhere
    model = DistributedDataParallel(network(args.width).to(device), device_ids=[device.index] if cuda else None)
    torch.manual_seed(args.seed + rank)           # but each rank its own dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    train, validation = digits()
    sampler = DistributedSampler(train, seed=args.seed, drop_last=True)
    loader = DataLoader(train, args.batch, sampler=sampler, drop_last=True)
    test = DataLoader(validation, args.batch, sampler=DistributedSampler(validation, shuffle=False))

    start = time.perf_counter()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        right = accuracy(model, test, device)
        if rank == 0:
            print(f"epoch {epoch:3d}  loss {loss.item():.4f}  validation accuracy {right:.3f}  "
                  f"{time.perf_counter() - start:.1f} s", flush=True)

    if rank == 0:
        args.output.mkdir(parents=True, exist_ok=True)
        torch.save(model.module.state_dict(), args.output / "model.pt")
    dist.barrier()                                # gloo lets go of its last result before anyone ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
