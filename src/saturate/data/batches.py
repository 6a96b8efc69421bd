"""What a batch is made of: tensors in nested lists, tuples and mappings, those of a library's own kind among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def is_mapping(batch: Any) -> bool:
    """Also of a library's own kind. The `values` of a table or a column of pandas are no method."""
    return isinstance(batch, dict) or (_has_method(batch, "values") and _has_method(batch, "keys"))


def _has_method(batch: Any, name: str) -> bool:
    """Of the class, so that nothing is computed (the `values` of a table are); of the object where it looks names up by itself."""
    if hasattr(type(batch), name):
        return callable(getattr(type(batch), name))
    try:
        return callable(getattr(batch, name, None))
    except Exception:  # noqa: BLE001 - a `__getattr__` of the script's may raise what it likes where there is no such name
        return False


def tensors_of(torch: Any, batch: Any) -> Iterator[Any]:
    """Every tensor in a batch of nested lists, tuples and mappings."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif is_mapping(batch):
        for value in batch.values():
            yield from tensors_of(torch, value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_of(torch, value)
