"""Train a small ResNet to tell from which photograph a JPEG patch was cut.

The photographs are those inside the wheels of scikit-image and scikit-learn; patches are cut from them once, into
`--data`. A checkpoint is written after each epoch, and a later run goes on from it.

    python examples/photo_resnet.py
    python examples/photo_resnet.py --epochs 2 --workers 2
"""

import argparse
import os
import random
import tempfile
import time
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

PHOTOGRAPHS = [files("skimage") / "data" / name for name in (
    "astronaut.png", "brick.png", "chelsea.png", "coffee.png", "grass.png", "gravel.png", "hubble_deep_field.jpg",
    "motorcycle_left.png", "retina.jpg", "rocket.jpg",
)] + [files("sklearn") / "datasets" / "images" / name for name in ("china.jpg", "flower.jpg")]
PATCH, INPUT = 192, 64                            # pixels: a patch on disk, and what the network sees


def cut_patches(folder: Path, train: int, validation: int) -> None:
    """Validation patches come from the right end of each photograph, training patches from the rest of it."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        for label, photograph in enumerate(PHOTOGRAPHS):
            with photograph.open("rb") as file:
                image = Image.open(file).convert("RGB")
            border = image.width - max(PATCH, int(0.3 * image.width))
            for split, count, left, right in (("train", train, 0, border), ("val", validation, border, image.width)):
                target = Path(unfinished) / "patches" / split / f"{label:02d}"
                target.mkdir(parents=True)
                for index in range(count):
                    x = chance.randint(left, right - PATCH)
                    y = chance.randint(0, image.height - PATCH)
                    image.crop((x, y, x + PATCH, y + PATCH)).save(target / f"{index:04d}.jpg", quality=90)
        os.rename(Path(unfinished) / "patches", folder)         # an interrupted run leaves no half-filled folder


class Patches(Dataset):
    def __init__(self, folder: Path, augment: bool):
        self.paths = sorted(folder.glob("*/*.jpg"))
        self.augment = augment

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        image = Image.open(path).convert("RGB")
        if self.augment:
            image = image.rotate(random.uniform(-15, 15), Image.Resampling.BICUBIC)
            size = random.randint(PATCH // 2, PATCH)
            x, y = random.randint(0, PATCH - size), random.randint(0, PATCH - size)
            image = image.resize((INPUT, INPUT), Image.Resampling.BILINEAR, box=(x, y, x + size, y + size))
            if random.random() < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
                image = enhance(image).enhance(random.uniform(0.6, 1.4))
        else:
            image = image.resize((INPUT, INPUT), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float()
        return (pixels - 127.5) / 63.75, int(path.parent.name)


class Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out),
        )
        self.shortcut = nn.Identity() if stride == 1 else nn.Sequential(
            nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out),
        )

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x))


def resnet(classes: int, width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 5, stride=2, padding=2, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
        Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2),
        Block(4 * width, 8 * width, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, classes),
    )


@torch.no_grad()
def accuracy(model, loader, device) -> float:
    model.eval()
    right = sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in loader)
    return right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--patches", type=int, default=200, help="training patches of each photograph, when cut")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/photo_resnet"))
    parser.add_argument("--data", type=Path, help="folder of the patches (default: OUTPUT/patches)")
    args = parser.parse_args()

    random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = args.data or args.output / "patches"
    cut_patches(data, args.patches, max(1, args.patches // 5))
    train = DataLoader(Patches(data / "train", augment=True), args.batch, shuffle=True, drop_last=True,
                       num_workers=args.workers)
    validation = DataLoader(Patches(data / "val", augment=False), args.batch, num_workers=args.workers)

    model = resnet(len(PHOTOGRAPHS)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train))
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    checkpoint, first = args.output / "last.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        first = saved.pop("epoch") + 1
        for name, state in saved.items():
            parts[name].load_state_dict(state)
        print(f"going on from {checkpoint} at epoch {first}")

    start = time.perf_counter()
    for epoch in range(first, args.epochs):
        model.train()
        for step, (images, labels) in enumerate(train):
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 10 == 0:
                print(f"epoch {epoch:3d}  step {step:4d}  loss {loss.item():.4f}  "
                      f"{time.perf_counter() - start:.1f} s", flush=True)
        print(f"epoch {epoch:3d}  validation accuracy {accuracy(model, validation, device):.3f}", flush=True)
        args.output.mkdir(parents=True, exist_ok=True)
        torch.save({**{name: part.state_dict() for name, part in parts.items()}, "epoch": epoch}, checkpoint)


if __name__ == "__main__":
    main()
