"""Tensors inside what a model takes and returns (tuples, lists, dictionaries, dataclasses), and random numbers by seed."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Iterator
from typing import Any

from saturate.inference.batches import tensors
from saturate.techniques import _trees


def moved(torch: Any, value: Any, device: str) -> Any:
    """A copy of `value` with its tensors on `device`."""
    return _trees.copied(value, lambda _, leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf)


def answered(model: Any, batch: tuple[Any, ...]) -> Any:
    """What the model answers to a copy: it may write to its inputs, and every look at it is to get the same ones."""
    return model(*copy.deepcopy(batch))


def samples(torch: Any, batch: Any) -> int | None:
    """The first dimension that all tensors of a batch share, None where they do not."""
    sizes = {tensor.shape[0] if tensor.ndim else None for tensor in tensors(torch, batch)}
    return sizes.pop() if len(sizes) == 1 else None


def first_samples(torch: Any, value: Any, count: int) -> Any:
    """A batch cut down to its first samples."""
    return _trees.copied(value, lambda _, leaf: leaf[:count] if isinstance(leaf, torch.Tensor) else leaf)


@contextlib.contextmanager
def seeded(torch: Any, seed: int) -> Iterator[None]:
    """The random numbers of torch, NumPy and Python from `seed`; afterwards as before."""
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    numbers = numpy.random.get_state() if numpy is not None else None
    # GPUs that this process does not use stay so: asking one for its state takes memory there.
    used = torch.cuda.is_initialized()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count() if used else 0)):
        (torch if used else torch.default_generator).manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(numbers)
