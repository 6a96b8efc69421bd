"""Datasets that do something to each sample (`transform`): where they keep it, and how it is cut into what comes first and the rest."""

from __future__ import annotations

import copy
import sys
from typing import Any

#: Where a dataset keeps what it does to each sample.
_ATTRIBUTES = ("transform", "transforms")


def owner_of(dataset: Any) -> tuple[list[Any], str] | None:
    """The datasets from the outermost to the one that has a transform (`Subset` has its `.dataset`), and the
    attribute's name; None where there is none."""
    chain: list[Any] = []
    while dataset is not None and len(chain) < 16:
        chain.append(dataset)
        own = getattr(dataset, "__dict__", {})
        for name in _ATTRIBUTES:
            if callable(own.get(name)):
                return chain, name
        dataset = own.get("dataset")
    return None


def steps_of(transform: Any) -> list[Any]:
    """The steps that a transform consists of; itself when it does not say."""
    inner = getattr(transform, "transforms", None)
    if isinstance(inner, (list, tuple)) and all(map(callable, inner)):
        return list(inner)
    torch = sys.modules.get("torch")
    if torch is not None and type(transform) is torch.nn.Sequential:
        return list(transform)
    return [transform]


class Prefix:
    """Stands where a transform stood, and does its first steps only. Remembers the latest result."""

    def __init__(self, steps: list[Any]):
        self.steps = steps
        self.calls = 0
        self.result: Any = None

    def __call__(self, sample: Any) -> Any:
        self.calls += 1
        for step in self.steps:
            sample = step(sample)
        self.result = sample
        return sample

    def __reduce__(self) -> Any:
        return Prefix, (self.steps,)        # what it remembers is no part of it: also for a fingerprint


def cut(dataset: Any, count: int) -> tuple[Any, Prefix, list[Any]]:
    """A copy of `dataset`, sharing its data, whose transform is cut after `count` steps; the stand-in for it; the
    rest."""
    found = owner_of(dataset)
    assert found is not None
    chain, name = found
    transform = vars(chain[-1])[name]
    steps = steps_of(transform)
    prefix = Prefix(steps[:count])
    twin = copy.copy(chain[-1])
    vars(twin)[name] = prefix
    both = vars(twin).get("transforms")
    if name == "transform" and getattr(both, "transform", None) is transform:     # torchvision keeps it in two places
        both = copy.copy(both)
        vars(both)["transform"] = prefix
        vars(twin)["transforms"] = both
    for outer in reversed(chain[:-1]):
        around = copy.copy(outer)
        vars(around)["dataset"] = twin
        twin = around
    return twin, prefix, steps[count:] if count else [transform]


def find_place(item: Any, wanted: Any) -> tuple[Any, ...] | None:
    """Where in nested tuples, lists and dictionaries the very object `wanted` stands; None unless exactly once."""
    found = list(_places(item, wanted, ()))
    return found[0] if len(found) == 1 else None


def _places(item: Any, wanted: Any, way: tuple[Any, ...]) -> Any:
    if item is wanted:
        yield way
    elif type(item) in (tuple, list):
        for index, inner in enumerate(item):
            yield from _places(inner, wanted, (*way, index))
    elif type(item) is dict:
        for key, inner in item.items():
            yield from _places(inner, wanted, (*way, key))


def replaced(item: Any, place: tuple[Any, ...], change: Any) -> Any:
    """`item` with `change(what stands at place)` there."""
    if not place:
        return change(item)
    first, *rest = place
    inner = replaced(item[first], tuple(rest), change)
    if type(item) is tuple:
        return (*item[:first], inner, *item[first + 1:])
    item[first] = inner
    return item


def through(steps: list[Any], sample: Any) -> Any:
    for step in steps:
        sample = step(sample)
    return sample


def one(dataset: Any, index: int) -> Any:
    """One item, the way a loader asks for it."""
    many = getattr(dataset, "__getitems__", None)
    return many([index])[0] if callable(many) else dataset[index]


def made_together(dataset: Any) -> bool:
    """Whether items of a batch may know of each other. A Subset has `__getitems__`, and asks its dataset for one after the other where
    that has none."""
    torch = sys.modules.get("torch")
    while torch is not None and type(dataset) is torch.utils.data.Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))
