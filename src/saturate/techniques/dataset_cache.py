"""Keep decoded samples in a file or in memory, so that each is made once instead of once an epoch.

What it does
------------
Stores what a map-style dataset's `__getitem__` returns, and reads it back when the same sample is asked for again, in
this epoch or run or in a later one. Where a dataset applies a `transform`, everything before its first random step is
stored and the rest is done anew for each sample, so that augmentation stays random.

When it helps
-------------
The step waits for samples that are costly to make: JPEG decoding, resizing, tokenization, spectrograms, slow file
servers. From the second epoch on. In the first one, processes of the lowest priority make and store what is missing on
cores that the training leaves idle, if its loader has no workers.

When it hurts
-------------
Decoded samples take room: 12 MB for a photograph of 4 million pixels. At most half of the free disk (or memory) is used; if that
does not hold all samples, the rest is made anew each time. If it runs full all the same, by a quota or by other programs, half of what is
stored is given back. Items that a dataset makes by the batch (`__getitems__`) are made once more, one by one, before they are stored.
Datasets that count or log inside `__getitem__` do so only for samples that are really made.

Numerics
--------
`exact`: the same bytes in the same order. A dataset is cached only if some items, made twice under different random numbers, came
out the same without drawing any. Later, too, a few items are made again and compared; one that differs ends the cache, with a message.
Some datasets make a whole batch at once: it is then read from the cache as a whole or not at all.

Refused are items that are random as a whole, or others in another worker; items that depend on the others of their batch (as
padding to its longest does); and datasets that have a random generator of their own (or whose transforms have, as in MONAI and
albumentations), or make one without a seed for an item (`numpy.random.default_rng()`), because that need not show in a few items.

How it is applied
-----------------
A stand-in takes the dataset's place inside the loader's iterator; `loader.dataset` stays the user's. One file per
version of the dataset, shared by workers and ranks, in `~/.cache/saturate/data` (or `SATURATE_DATA_CACHE`): its name
is a hash of the dataset's code, the environment variables that it reads, its attributes, and files with their sizes and times. The
files are checked again when a pass begins: up to 100,000 files, those with the endings of the files that Python opened to make some items.
Pictures and arrays are stored as bytes, never pickled.

Where a thread of the script's own reads, items come from the dataset: it may read ahead of a training, and what that draws meanwhile would be taken
for what items draw.

In trials, samples are stored before they are asked for, so that a warm cache is measured. In runs, forked helpers go through the
epoch's order ahead of the training, which itself makes what is not stored yet. They have their own positions in open files. Datasets that
hold open connections get no helpers. If torch has several threads here, helpers store no item that was made with an operation whose
rounding could depend on the number of threads.

References
----------
PyTorch documentation, "torch.utils.data", section "Map-style datasets".
Mohan, Phanishayee, Raniwala and Chidambaram, "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from saturate.data import cache
from saturate.records.facts import Evidence, Facts, LoaderFacts
from saturate.techniques import _common
from saturate.techniques._api import Eligible, Ineligible, Proof, Technique, Touch

TECHNIQUE = Technique(
    id="dataset-cache",
    title="cache of decoded samples",
    numerics="exact",
    stage="import",
    touches=(Touch("dataset"),),
    starts_alone=True,
)

#: What a study that keeps it says beside its gain.
REMARK = "measured with a warm cache; in the first epoch of a run every sample is still made, and stored"

#: Where stores lie, and how many seconds samples may be stored ahead; trials set both (see `trial.planning`).
FOLDER, AHEAD = "SATURATE_DATA_CACHE", "SATURATE_DATA_AHEAD_S"


@dataclass(frozen=True)
class Options:
    """`where` is "file" or "memory" (one for each rank, gone with its process), which is for disks that cannot take it: a warm file
    lies in the page cache anyway. `max_gb` 0: half of what is free."""

    where: Literal["file", "memory"] = "file"
    max_gb: float = field(default=0.0, metadata={"minimum": 0.0, "maximum": 1e9})


def _refusal(loader: LoaderFacts) -> str:
    if loader.iterable:
        return "the dataset is iterable: its samples have no numbers to find them by"
    if loader.holds_device_tensors:
        return "the dataset yields tensors that live on a device already"
    return ""


def eligible(facts: Facts) -> Eligible | Ineligible:
    return _common.waits_for_loaders(facts, _refusal)


def bound(facts: Facts) -> float | None:
    return _common.waiting(facts)


def apply(context: Any, options: Options) -> str:
    folder = _folder() if options.where == "file" else None
    caches = cache.Caches(context.torch, folder, int(options.max_gb * 1e9), float(os.environ.get(AHEAD) or 0))
    iterator = context.torch.utils.data.dataloader._BaseDataLoaderIter
    original = iterator.__init__

    @functools.wraps(original)
    def init(self: Any, loader: Any) -> None:
        original(self, loader)
        caches.serve(self, loader)

    context.set_attribute(iterator, "__init__", init)
    many = context.torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    again = many._reset

    @functools.wraps(again)
    def reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            caches.look_again(loader)
        again(self, loader, first_iter)

    context.set_attribute(many, "_reset", reset)
    context.note(TECHNIQUE.id, caches)      # as text, it says what became of them
    return f"samples are read through a cache in {folder or 'memory'}"


def _folder() -> Path | None:
    """None for a user who has no home, as in containers: then the cache is in memory."""
    named = os.environ.get(FOLDER)
    if named:
        return Path(named).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME") or ""
    if not os.path.isabs(home):
        home = os.path.expanduser("~/.cache")
    return Path(home) / "saturate" / "data" if os.path.isabs(home) else None


def active(evidence: Evidence, options: Options) -> Proof:
    seen = str(evidence.notes.get(TECHNIQUE.id, ""))
    if not seen:
        return Proof(False, "no DataLoader was iterated")
    return Proof("dropped: " not in seen and "cached: " in seen.replace("not cached: ", ""), seen)


def as_code(options: Options) -> str:
    limit = f"{options.max_gb:g} GB" if options.max_gb else "half of what is free"
    if options.where == "memory":
        where, imports, given = "in the memory of each worker, which must be persistent", "", ""
        made = "        self.items = {}\n"
        item = (
            "        if index not in self.items:\n"
            "            self.items[index] = self.dataset[index]\n"
            "        return tree_map_only(torch.Tensor, torch.clone, self.items[index])      # the training may write to it\n"
        )
    else:
        where, imports, given = "in a file each", "import os\n", ", folder=\"samples\""
        made = "        self.folder = folder\n        os.makedirs(folder, exist_ok=True)\n"
        item = (
            "        path = os.path.join(self.folder, f\"{index}.pt\")\n"
            "        if not os.path.exists(path):\n"
            "            item = tree_map_only(torch.Tensor, torch.clone, self.dataset[index])      # of a view, all would be saved\n"
            "            torch.save(item, f\"{path}.{os.getpid()}\")\n"
            "            os.replace(f\"{path}.{os.getpid()}\", path)      # whole or not at all: others read it\n"
            "        return torch.load(path, weights_only=False)      # a pickle, of your own making\n"
        )
    return (
        f"# A sketch: it keeps all items, {where}, for good.\n"
        f"# saturate takes at most {limit}, leaves out what is random (augmentation), and begins anew where the dataset or its\n"
        "# files have changed.\n"
        f"{imports}from torch.utils._pytree import tree_map_only\n"
        "\n"
        "class Cached(torch.utils.data.Dataset):\n"
        f"    def __init__(self, dataset{given}):\n"
        "        self.dataset = dataset\n"
        f"{made}"
        "\n"
        "    def __len__(self):\n"
        "        return len(self.dataset)\n"
        "\n"
        "    def __getitem__(self, index):\n"
        f"{item}"
        "\n"
        "dataset = Cached(dataset)      # before the loader is made"
    )
