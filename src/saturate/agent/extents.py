"""Which samples of a dataset are the largest: a batch of them needs the most memory.

Samples are read for a few seconds, in the order of the sampler. Where the script reads its dataset in workers, one worker
reads it here too: a dataset that opens its files when it is first read must not do so in the process that later forks.
"""

from __future__ import annotations

import math
import operator
import time
from typing import Any

from saturate.data import batches

#: Longest time spent reading, and the most samples: beyond them the largest of what was read stands for the rest.
SECONDS = 3.0
MOST_SAMPLES = 8192

#: Samples whose extents are all the same after this many do not vary.
ALIKE = 256

#: How many of the largest are told: a batch of more of them repeats them.
MOST_TOLD = 2048

_DEPTH = 4


def nothing(reason: str) -> dict[str, Any]:
    """The answer where no sample can be looked at."""
    return {"largest": [], "varies": None, "looked_at": 0, "of": None, "reason": reason}


def scan(torch: Any, iterator: Any, context: Any = None) -> dict[str, Any]:
    """Indices of the largest samples, largest first (empty where they do not vary), and how many were looked at. `iterator` is
    one of a DataLoader: the loader itself may be gone. `context`: how it starts its workers."""
    if not iterator._auto_collation or isinstance(iterator._dataset, torch.utils.data.IterableDataset):
        return nothing("samples of an iterable dataset cannot be looked up")
    state = torch.get_rng_state()
    try:
        indices = _indices(iterator)
        if not indices:
            return nothing("the sampler's indices are no numbers")
        found = _read(torch, iterator, indices, context)
    except Exception as error:  # noqa: BLE001 - the dataset is the user's: whatever it raises, training has shown that it works
        return nothing(f"reading samples failed here: {type(error).__name__}: {error}")
    finally:
        torch.set_rng_state(state)
    varies = len(set(found.values())) > 1
    ordered = sorted(found, key=lambda index: -found[index]) if varies else []
    return {"largest": ordered[:MOST_TOLD], "varies": varies, "looked_at": len(found), "of": len(iterator._dataset), "reason": ""}


def _indices(iterator: Any) -> list[int]:
    """The first samples of a pass, each once. Of numpy and torch, too, as the sampler of a subset has them; none where one is no number."""
    found: dict[int, None] = {}
    for batch in iterator._index_sampler:
        try:
            found.update(dict.fromkeys([operator.index(index) for index in batch]))
        except TypeError:
            return []
        if len(found) >= MOST_SAMPLES:
            break
    return list(found)[:MOST_SAMPLES]


def _read(torch: Any, iterator: Any, indices: list[int], context: Any) -> dict[int, int]:
    """Extent by index, of as many as the time allows."""
    deadline = time.monotonic() + SECONDS
    found: dict[int, int] = {}
    for index, size in zip(indices, _sizes(torch, iterator, indices, context)):
        found[index] = size
        if time.monotonic() > deadline or (len(found) >= ALIKE and len(set(found.values())) == 1):
            break
    return found


def _sizes(torch: Any, iterator: Any, indices: list[int], context: Any) -> Any:
    dataset = iterator._dataset
    if not iterator._num_workers:
        return (extent(dataset[index]) for index in indices)
    reader = torch.utils.data.DataLoader(dataset, batch_size=1, sampler=indices, num_workers=1, collate_fn=_only,
                                         worker_init_fn=iterator._worker_init_fn, multiprocessing_context=context)
    return iter(reader)


def _only(samples: list[Any]) -> int:
    return extent(samples[0])


def extent(sample: Any, depth: int = 0) -> int:
    """How large a sample is, in numbers or characters: its tensors and arrays, lists of numbers, texts and images."""
    if isinstance(sample, (str, bytes)):
        return len(sample)
    if callable(numel := getattr(sample, "numel", None)):
        return int(numel())
    size = getattr(sample, "size", None)
    if isinstance(size, int):
        return size                         # an array
    if isinstance(size, tuple):
        return math.prod(size)              # an image of PIL
    if depth < _DEPTH:
        if batches.is_mapping(sample):
            return sum(extent(value, depth + 1) for value in sample.values())
        if isinstance(sample, (list, tuple)):
            return sum(extent(value, depth + 1) for value in sample)
    return 1
