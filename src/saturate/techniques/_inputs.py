"""What a trained module is called with: its shapes, how much larger they are than others, a cache that it need not build."""

from __future__ import annotations

import inspect
from math import prod
from typing import Any

from saturate.techniques import _common


def shapes(value: Any, torch: Any) -> tuple[Any, ...]:
    return tuple(tuple(tensor.shape) for tensor in _common.tensors(value, torch))


def growth(measured: tuple[Any, ...] | None, now: tuple[Any, ...]) -> float:
    """How many times the measured activations the inputs `now` may need at most, at least 1: as many as there are more
    values, times what the dimension that grew most grew by (attention without a fused kernel takes that twice)."""
    if not measured or not now:
        return 1.0
    more = sum(map(prod, now)) / max(1, sum(map(prod, measured)))
    if [len(shape) for shape in measured] != [len(shape) for shape in now]:
        return max(1.0, more * more)
    longer = [size / max(1, then) for shape, before in zip(now, measured) for size, then in zip(shape, before)]
    return max(1.0, more * max(1.0, *longer))


def without_cache(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Hugging Face models fill a cache of keys and values in training too, which nobody reads there, unless told not to."""
    if getattr(getattr(module, "config", None), "use_cache", None) is not True or kwargs.get("use_cache") is not None:
        return kwargs
    names = tuple(inspect.signature(type(module).forward).parameters)
    if "use_cache" not in names or names.index("use_cache") <= len(args):
        return kwargs
    return {**kwargs, "use_cache": False}
