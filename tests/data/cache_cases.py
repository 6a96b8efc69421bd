"""Datasets as scripts write them, costly enough to be worth a cache. In a module of their own, so that spawned workers can
import them."""

from __future__ import annotations

import os
import random
import time

import numpy
import torch

COST_S = 0.003


def slow() -> None:
    """What decoding costs: time of the processor."""
    until = time.thread_time() + COST_S
    while time.thread_time() < until:
        pass


class Files(torch.utils.data.Dataset):
    """Reads a small file for each item."""

    def __init__(self, root, scale=1.0):
        self.paths = sorted(os.path.join(root, name) for name in os.listdir(root))
        self.scale = scale

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        slow()
        pixels = numpy.fromfile(self.paths[index], "u1").astype("f4").reshape(4, 5, 3) * self.scale
        return torch.from_numpy(pixels).permute(2, 0, 1), index % 3


class Compose:
    """As torchvision's."""

    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for step in self.transforms:
            image = step(image)
        return image


class Scale:
    def __call__(self, image):
        slow()
        return image / 255


class RandomFlip:
    def __init__(self, p=0.5):
        self.p = p

    def __call__(self, image):
        return image.flip(-1) if torch.rand(()) < self.p else image


class RandomShift:
    """Draws from numpy, python and torch."""

    def __call__(self, image):
        return image + float(numpy.random.rand()) + random.random() + torch.rand(1)


class AddInPlace:
    def __call__(self, image):
        return image.add_(1)


class Folder(torch.utils.data.Dataset):
    """As torchvision's ImageFolder: a costly loader, then a transform, then another for the class."""

    def __init__(self, root, transform=None, target_transform=None):
        self.inner = Files(root)
        self.transform = transform
        self.target_transform = target_transform

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        image, target = self.inner[index]
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target


class RandomInside(Files):
    """Augments by itself."""

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return image + torch.rand(1), target


class DrawsForNothing(Files):
    def __getitem__(self, index):
        torch.rand(1)
        return super().__getitem__(index)


class Own(Files):
    """Has a generator of its own."""

    def __init__(self, root):
        super().__init__(root)
        self.random = random.Random(0)

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return image * self.random.random(), target


class RarelyOwn(Own):
    """Draws for every item, and changes hardly any."""

    def __getitem__(self, index):
        image, target = Files.__getitem__(self, index)
        return image.flip(-1) if self.random.random() < 0.02 else image, target


class LateOwn(RarelyOwn):
    """As many do, so that each worker has one."""

    def __init__(self, root):
        Files.__init__(self, root)
        self.random = None

    def __getitem__(self, index):
        self.random = self.random or numpy.random.default_rng(0)
        return super().__getitem__(index)


class ClassOwn(Files):
    """As MONAI's transforms, which share one on their class."""

    chance = numpy.random.RandomState(0)

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return self.flipped(image), target

    def flipped(self, image):
        return image.flip(-1) if self.chance.random() < 0.02 else image


class Unseeded(Files):
    """As `RarelyOwn`, by a generator that is made for each item."""

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return self.flipped(image), target

    def flipped(self, image):
        return image.flip(-1) if numpy.random.default_rng().random() < 0.02 else image


class SeededByItem(Files):
    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return image + numpy.random.default_rng(index).random(), target


CHANCE = torch.Generator()


class GlobalOwn(Files):
    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return self.flipped(image), target

    def flipped(self, image):
        return image.flip(-1) if torch.rand((), generator=CHANCE) < 0.02 else image


class FlipsByOwn:
    def __init__(self):
        self.chance = random.Random(0)

    def __call__(self, image):
        return image.flip(-1) if self.chance.random() < 0.02 else image


class After(Folder):
    """Changes what the transform returned."""

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return image * 2, target


class Counting(Files):
    """Opens lazily and counts, as many do."""

    def __init__(self, root):
        super().__init__(root)
        self.handle = None
        self.count = 0

    def __getitem__(self, index):
        self.handle = self.handle or object()
        self.count += 1
        return super().__getitem__(index)


class ByBatch(Files):
    """Has `__getitems__`; padded to the longest of a batch when told so."""

    def __init__(self, root, padded=False):
        super().__init__(root)
        self.padded = padded

    def __getitems__(self, indices):
        width = max(indices) % 7 if self.padded else 0
        return [torch.nn.functional.pad(self[index][0], (0, width)) for index in indices]


class PaddedTexts(torch.utils.data.Dataset):
    """Padded to the longest of a batch, as a tokenizer does it. One text in three is short, and of those that are looked at, none."""

    def __init__(self, count=31):
        self.sizes = [3 if index % 3 == 1 and index % 6 != 0 else 8 for index in range(count)]

    def __len__(self):
        return len(self.sizes)

    def __getitems__(self, indices):
        width = max(self.sizes[index] for index in indices)
        for _ in indices:
            slow()
        return [torch.tensor([index] * self.sizes[index] + [0] * (width - self.sizes[index])) for index in indices]

    def __getitem__(self, index):
        return self.__getitems__([index])[0]


class Texts(torch.utils.data.Dataset):
    """Tokenises, slowly, to dictionaries of lists."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        slow()
        return {"input_ids": list(range(index + 2)), "text": "x" * index, "score": float(index), "none": None}


class Dies(Files):
    def __getitem__(self, index):
        os.kill(os.getpid(), 9)


class Raises(Files):
    def __getitem__(self, index):
        raise KeyError("no such thing")


def write(root, count=20, seed=0):
    root.mkdir(exist_ok=True)
    chance = random.Random(seed)
    for index in range(count):
        (root / f"{index:02d}.bin").write_bytes(chance.randbytes(60))
    return root


class RarelyRandom(Files):
    """Random in an item that nobody looks at beforehand, and in the one case where the class says so."""

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return (image + torch.rand(1) if index == 5 else image), target


class RarelyUnsplit(Folder):
    """One item goes another way than through the transform, and draws on it."""

    def __getitem__(self, index):
        if index == 5:
            return self.inner[index][0] + torch.rand(1), 0
        return super().__getitem__(index)


class Prints(Files):
    def __getitem__(self, index):
        print("reading", "x" * 3000)
        return super().__getitem__(index)
