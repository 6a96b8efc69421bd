"""Train a small convolutional network that reads scikit-learn's handwritten digits, and use it.

    python examples/digits_cnn.py
    python examples/digits_cnn.py --epochs 5 --seed 1

Other programs import what they need: `build()` is the trained network, `loader()` are batches of images that it has not
seen, and `score(run)` says for each validation image whether `run` reads it right.
"""

import argparse
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

CALIBRATION, VALIDATION = 128, 1024               # of 1797 images; the others are for training
BATCH = 32


def digits() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Grey images of 8 x 8 pixels with values -1 to 1, and what they show; the same parts each time."""
    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(raw.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    parts = order.split([len(labels) - CALIBRATION - VALIDATION, CALIBRATION, VALIDATION])
    return {name: (images[part], labels[part]) for name, part in zip(("train", "calibration", "validation"), parts)}


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.second, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


class Reader(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.fine = nn.Sequential(Residual(width), Residual(width))
        self.shrink = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.coarse = nn.Sequential(Residual(2 * width), Residual(2 * width))
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images):
        x = self.fine(F.relu(self.stem(images)))
        x = self.coarse(F.relu(self.shrink(x)))
        return self.head(x.mean(dim=(2, 3)))


def shifted(images):
    """Each image moved by up to one pixel in each direction."""
    padded = F.pad(images, (1, 1, 1, 1), value=-1.0)
    dx, dy = torch.randint(3, (2,)).tolist()
    return padded[:, :, dy:dy + 8, dx:dx + 8]


def build(path: str | Path = "runs/digits_cnn/model.pt") -> nn.Module:
    """The trained network."""
    saved = torch.load(path, weights_only=True)
    model = Reader(saved["width"])
    model.load_state_dict(saved["model"])
    return model.eval()


def loader() -> list[tuple[torch.Tensor]]:
    """Batches of images from the calibration part."""
    return [(images,) for images in digits()["calibration"][0].split(BATCH)]


def score(run) -> list[bool]:
    """For each validation image, whether it is read right."""
    images, labels = digits()["validation"]
    answers = torch.cat([run(batch).argmax(dim=1) for batch in images.split(BATCH)])
    return (answers == labels).tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/digits_cnn"))
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    images, labels = digits()["train"]
    model = Reader(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    steps = args.epochs * (len(images) // args.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps)
    start = time.perf_counter()
    for epoch in range(args.epochs):
        model.train()
        for batch in torch.randperm(len(images)).split(args.batch)[:len(images) // args.batch]:
            loss = F.cross_entropy(model(shifted(images[batch])), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            right = score(model)
        print(f"epoch {epoch:3d}  loss {loss.item():.4f}  validation accuracy {sum(right) / len(right):.3f}  "
              f"{time.perf_counter() - start:.1f} s", flush=True)

    args.output.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "width": args.width}, args.output / "model.pt")


if __name__ == "__main__":
    main()
