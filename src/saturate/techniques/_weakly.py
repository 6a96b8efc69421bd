"""Callbacks that do not keep a model alive. What outlives a training (an exit handler, a class of torch's, the list of what is to be undone)
must not hold what it has left behind: a script drops its model to make room for the next."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any


def weakly(method: Any) -> Callable[..., Any]:
    """A bound method, for as long as something else holds its object: the hooks of an optimizer, say. After that a call does nothing,
    and returns None."""
    held = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        found = held()
        return found(*args, **kwargs) if found is not None else None

    return call


def held_weakly(things: Iterable[Any]) -> Callable[[], list[Any]]:
    """Asks which of some things are still there."""
    held = [weakref.ref(thing) for thing in things]
    return lambda: [thing for reference in held if (thing := reference()) is not None]


class OfOptimizer:
    """What acts on one optimizer, whose hooks hold it: the optimizer must be gone with the script's last reference to it."""

    def __init__(self, optimizer: Any):
        self._optimizer = weakref.ref(optimizer)

    @property
    def optimizer(self) -> Any:
        return self._optimizer()
