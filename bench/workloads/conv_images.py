"""A convolutional net on compressed images that a DataLoader unpacks. An ordinary training script.

    python bench/workloads/conv_images.py --steps 100
"""

import argparse
import zlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Packed(Dataset):
    """Images of ten textures, kept compressed; the label is the texture."""

    def __init__(self, count: int, side: int):
        generator = torch.Generator().manual_seed(0)
        angles = torch.arange(10) * 0.3
        rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        waves = torch.sin(angles.cos()[:, None, None] * rows + angles.sin()[:, None, None] * columns)
        self.labels = torch.randint(10, (count,), generator=generator).tolist()
        self.side = side
        self.packed = []
        for label in self.labels:
            noise = torch.randint(0, 64, (3, side, side), generator=generator)
            pixels = (96 + 64 * waves[label] + noise).to(torch.uint8)
            self.packed.append(zlib.compress(pixels.numpy().tobytes()))

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, index: int):
        pixels = torch.frombuffer(bytearray(zlib.decompress(self.packed[index])), dtype=torch.uint8)
        image = pixels.view(3, self.side, self.side).float() / 255
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return (image - image.mean()) / image.std(), self.labels[index]


def block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    torch.manual_seed(0)
    width = args.width
    model = nn.Sequential(block(3, width, 1), block(width, 2 * width, 2), block(2 * width, 4 * width, 2),
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loader = DataLoader(Packed(args.images, args.side), batch_size=args.batch, shuffle=True, drop_last=True)
    step = 0
    while step < args.steps:
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 100 == 0:
                print(f"step {step}  loss {loss.item():.3f}", flush=True)
            step += 1
            if step >= args.steps:
                break


if __name__ == "__main__":
    main()
