"""Batches of a packed image dataset, decoded by NVIDIA DALI: on the GPU where there is one, else on the CPU.

    from saturate.data.dali import loader
    for images, labels in loader("packed/", batch_size=64, size=224):
        ...             # uint8 of (batch, 3, size, size), int64 of (batch,), on the device that decoded them

An optional extra: `pip install 'saturate[dali]'`. Files are read through the page cache; what crosses to the GPU is compressed.

NVIDIA DALI documentation, "External Source Operator" and "PyTorch Plugin API".
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from saturate.data.pack import STATE
from saturate.errors import EnvironmentProblem, UsageError
from saturate.machine import facts

Transform = Callable[[Any], Any]


def installed() -> bool:
    return find_spec("nvidia") is not None and find_spec("nvidia.dali") is not None


def loader(folder: str | Path, batch_size: int, size: int = 224, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False,
           rank: int = 0, world_size: int = 1, device: str | None = None, threads: int | None = None,
           transform: Transform | None = None) -> Loader:
    """A loader of the images that `saturate pack` wrote to `folder`; each pass over it is an epoch.

    size: the shorter side is scaled to it, and the middle cut out. transform: takes the decoded images, as a DALI node of shape HWC, and returns
    nodes of one shape in their place: augmentations. shuffle: another order in each epoch, which follows from `seed`. rank, world_size: of
    `world_size` loaders with one seed, each gives as many images of an epoch, none twice; what cannot be shared out evenly is left out, of each
    epoch other images if they are shuffled. device: "cuda", "cuda:1", "cpu" (default: torch's current CUDA device, if there is one). threads: of
    the CPU's part.

    Raises UsageError for a folder that is no pack of images, and EnvironmentProblem without DALI or pyarrow.
    """
    for package, extra in (("nvidia.dali", "dali"), ("pyarrow", "pack")):
        if not (installed() if extra == "dali" else find_spec(package)):
            raise EnvironmentProblem(f"decoding by DALI needs {package}", remedy=f"pip install 'saturate[{extra}]'")
    if batch_size < 1 or size < 1:
        raise UsageError(f"a batch of {batch_size} images of {size} pixels is none", remedy="both at least 1")
    if not 0 <= rank < world_size:
        raise UsageError(f"there is no rank {rank} of {world_size}", remedy="from 0 to world_size - 1")
    rows = Rows(Path(folder))
    own = len(rows) // world_size
    if own < (batch_size if drop_last else 1):
        raise UsageError(f"{len(rows)} images are too few", cause=f"that is {own} for each of {world_size}, and not one batch",
                         remedy="a smaller batch_size, or fewer ranks")
    return Loader(rows, Share(batch_size, shuffle, seed, drop_last, rank, world_size), size, device, threads, transform)


class Rows:
    """Compressed images and their labels by number, from memory-mapped files. Labels are 0 where the pack has none."""

    def __init__(self, folder: Path):
        import pyarrow as pa

        try:
            names = [file["filename"] for file in json.loads((folder / STATE).read_text(encoding="utf-8"))["_data_files"]]
            tables = [pa.ipc.open_stream(pa.memory_map(str(folder / name))).read_all() for name in names]
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowInvalid) as error:
            raise UsageError(f"{folder} is no packed dataset", cause=str(error), remedy="saturate pack SRC DST makes one") from error
        if not tables or "image" not in tables[0].column_names:
            raise UsageError(f"{folder} holds no images", remedy="saturate pack --kind images SRC DST packs a folder of them")
        self._images = [chunk for table in tables for chunk in table.column("image").chunks]
        self._labels = [chunk for table in tables if "label" in table.column_names for chunk in table.column("label").chunks]
        self._ends = list(accumulate(map(len, self._images)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, row: int) -> tuple[Any, int]:
        """The bytes of an image as a uint8 array, not copied, and its label."""
        import numpy as np

        chunk = bisect_right(self._ends, row)
        place = row - (self._ends[chunk - 1] if chunk else 0)
        image = self._images[chunk][place]["bytes"].as_buffer()
        return np.frombuffer(image, np.uint8), self._labels[chunk][place].as_py() if self._labels else 0


@dataclass(frozen=True)
class Share:
    """Which rows of an epoch belong to a rank, and how they are cut into batches."""

    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    rank: int
    world_size: int

    def order(self, rows: int, epoch: int) -> Any:
        """Numbers of the rows, in their order."""
        import numpy as np

        numbers = np.random.default_rng([self.seed, epoch]).permutation(rows) if self.shuffle else np.arange(rows)
        return numbers[: rows // self.world_size * self.world_size][self.rank::self.world_size]

    def batches(self, rows: int) -> int:
        whole, rest = divmod(rows // self.world_size, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)


class Loader:
    """Epochs of (images, labels). One pass at a time: DALI's pipeline is one, and is read ahead."""

    def __init__(self, rows: Rows, share: Share, size: int, device: str | None, threads: int | None, transform: Transform | None):
        import torch

        self.rows, self.share = rows, share
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._epoch, self._order = -1, None
        self._begun = self._ends = False
        self._batches = self._built(size, threads or max(1, int(facts.cpu_count())), transform)

    def __len__(self) -> int:
        return self.share.batches(len(self.rows))

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        self._leave()                   # the pass before, where that was not read to its end
        self._begun = True
        for (batch,) in self._batches:
            yield batch["images"], batch["labels"].flatten()
        self._leave()

    def _leave(self) -> None:
        """End a pass. DALI begins no other one before it has seen the end of the first: what it has read ahead is thrown away."""
        if self._begun:
            self._ends = True
            for _ in self._batches:
                pass
            self._begun = self._ends = False
            self._batches.reset()           # asks for batches of the next epoch at once

    def batch(self, info: Any) -> tuple[list[Any], list[Any]]:
        """What DALI asks for: a batch by its number and that of its epoch. Raises StopIteration behind the last one."""
        import numpy as np

        if self._ends or info.iteration >= len(self):
            raise StopIteration
        if info.epoch_idx != self._epoch or self._order is None:
            self._epoch, self._order = info.epoch_idx, self.share.order(len(self.rows), info.epoch_idx)
        begin = info.iteration * self.share.batch_size
        chosen = [self.rows[int(row)] for row in self._order[begin:begin + self.share.batch_size]]
        return [image for image, _ in chosen], [np.array([label]) for _, label in chosen]

    def _built(self, size: int, threads: int, transform: Transform | None) -> Any:
        from nvidia.dali import fn, pipeline_def, types
        from nvidia.dali.plugin.base_iterator import LastBatchPolicy
        from nvidia.dali.plugin.pytorch import DALIGenericIterator

        on_gpu = self.device.type == "cuda"

        def cut(images: Any) -> Any:
            return fn.crop(fn.resize(images, resize_shorter=size), crop=(size, size))

        @pipeline_def
        def decoded() -> Any:
            encoded, labels = fn.external_source(source=self.batch, num_outputs=2, batch=True, batch_info=True,
                                                 dtype=[types.UINT8, types.INT64], ndim=[1, 1])
            images = fn.decoders.image(encoded, device="mixed" if on_gpu else "cpu", output_type=types.RGB)
            return fn.transpose((transform or cut)(images), perm=(2, 0, 1)), labels.gpu() if on_gpu else labels

        pipeline = decoded(batch_size=self.share.batch_size, num_threads=threads, device_id=self.device.index if on_gpu else None, seed=self.share.seed)
        return DALIGenericIterator(pipeline, ["images", "labels"], last_batch_policy=LastBatchPolicy.PARTIAL, auto_reset=False)
