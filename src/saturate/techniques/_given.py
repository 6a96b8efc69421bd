"""Recognises the loaders that a technique has changed, by their datasets: when it changes one, only its arguments are there. No
dataset is kept alive longer than its loaders. Used by `loader-workers`."""

from __future__ import annotations

import weakref
from typing import Any

#: Datasets without weak references that wait for the first pass over a loader of theirs, at most: some are never passed over.
MOST_HELD = 16


class Given:
    """`add` the dataset of a loader that is about to be built; `in` says of a loader whether it is one of these."""

    def __init__(self) -> None:
        self._datasets: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()      # by id
        self._held: dict[int, tuple[Any, int]] = {}     # by id: a list or tuple, and its loaders that are not known yet
        self._loaders: weakref.WeakSet[Any] = weakref.WeakSet()     # those of lists and tuples

    def add(self, dataset: Any) -> None:
        if referable(dataset):
            self._datasets[id(dataset)] = dataset
            return
        _, count = self._held.pop(id(dataset), (None, 0))
        self._held[id(dataset)] = dataset, count + 1
        while len(self._held) > MOST_HELD:
            del self._held[next(iter(self._held))]

    def __contains__(self, loader: Any) -> bool:
        if loader.timeout:      # torch takes none without workers: they are the script's own
            return False
        dataset = loader.dataset
        if loader in self._loaders or self._datasets.get(id(dataset)) is dataset:
            return True
        if id(dataset) not in self._held:
            return False
        _, count = self._held.pop(id(dataset))
        if count > 1:
            self._held[id(dataset)] = dataset, count - 1
        self._loaders.add(loader)
        return True


def referable(dataset: Any) -> bool:
    """Whether there can be weak references to it: a plain list or tuple takes none."""
    return type(dataset).__weakrefoffset__ != 0
