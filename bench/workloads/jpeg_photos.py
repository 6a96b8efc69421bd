"""Train on JPEG photographs: decoded, resized, cropped and flipped at random, as an image folder usually is.

    python bench/workloads/jpeg_photos.py --data photos --make 600     # cut the photographs, and end
    python bench/workloads/jpeg_photos.py --data photos --workers 2

Without a GPU, `--device-ms` stands in for one: a step takes that long without using a core, and the script, which never asks the
device for a number, is at most one step ahead of it. What is computed is computed on thumbnails, so that the cores are the loader's.
"""

import argparse
import random
import time
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

NAMES = ("astronaut.png", "coffee.png", "chelsea.png", "rocket.jpg", "hubble_deep_field.jpg", "motorcycle_left.png",
         "retina.jpg")
PIXELS, RESIZED, INPUT = 640, 160, 128
FIRST = 4       # batches of an epoch that are not timed: workers start, queues fill


def make(folder: Path, count: int) -> None:
    """Cut `count` pictures from the photographs inside the wheels of scikit-image and scikit-learn."""
    photographs = [files("skimage") / "data" / name for name in NAMES]
    photographs += [files("sklearn") / "datasets" / "images" / name for name in ("china.jpg", "flower.jpg")]
    folder.mkdir(parents=True)
    chance = random.Random(0)
    for number, photograph in enumerate(photographs):
        with photograph.open("rb") as file:
            image = Image.open(file).convert("RGB")
        for index in range(number, count, len(photographs)):
            side = chance.randint(min(image.size) // 2, min(image.size))
            x, y = chance.randint(0, image.width - side), chance.randint(0, image.height - side)
            cut = image.resize((PIXELS, PIXELS), Image.Resampling.BICUBIC, box=(x, y, x + side, y + side))
            cut.save(folder / f"{index:05d}-{number}.jpg", quality=90)


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


def resize(image):
    return image.resize((RESIZED, RESIZED), Image.Resampling.BILINEAR)


def crop_and_flip(image):
    x, y = random.randint(0, RESIZED - INPUT), random.randint(0, RESIZED - INPUT)
    image = image.crop((x, y, x + INPUT, y + INPUT))
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


def to_tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


class Photographs(Dataset):
    def __init__(self, folder, transform):
        self.paths = sorted(folder.glob("*.jpg"))
        self.transform = transform

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        return self.transform(Image.open(path).convert("RGB")), int(path.stem[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--make", type=int, help="cut this many pictures into DATA, and end")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=10**6)
    parser.add_argument("--device-ms", type=float, default=25.0)
    parser.add_argument("--replay", action="store_true", help="train on the first batch again and again: no loader")
    parser.add_argument("--rates", type=Path, help="write each epoch's pictures per second, after its first batches, here")
    args = parser.parse_args()
    if args.make:
        make(args.data, args.make)
        return
    random.seed(0)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(Photographs(args.data, Compose([resize, crop_and_flip, to_tensor])), args.batch, shuffle=True,
                        drop_last=True, num_workers=args.workers, persistent_workers=args.workers > 0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 7, stride=8), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(),
        torch.nn.Linear(128, 9),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [next(iter(loader))] * len(loader) if args.replay else loader
    done = 0.0      # when the device will have done what it was given
    for _ in range(args.epochs):
        for number, (images, labels) in enumerate(batches):
            if number == FIRST:
                began = time.perf_counter()
            if device.type == "cpu":
                images = images[:, :, ::4, ::4]
            images, labels = images.to(device).float() / 255, labels.to(device)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            if device.type == "cpu":
                time.sleep(max(0.0, done - time.perf_counter()))
                done = max(done, time.perf_counter()) + args.device_ms / 1e3
            optimizer.step()
        if args.rates:
            with open(args.rates, "a", encoding="utf-8") as file:
                file.write(f"{(len(batches) - FIRST) * args.batch / (time.perf_counter() - began)}\n")


if __name__ == "__main__":
    main()
