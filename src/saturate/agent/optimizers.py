"""The optimizers of one process: those that were built, those that step, and under which names.

A name (`S0`, `S1`, ...) is given at the first step, and is the optimizer's token among the events that steps are found in.
Everything here is weak: scripts may build an optimizer for every step.
"""

from __future__ import annotations

import weakref
from typing import Any


class Optimizers:
    """Who steps. What a newcomer is to a step that is known already, `agent.succession` decides."""

    def __init__(self) -> None:
        self.built: list[weakref.ref[Any]] = []                 # by their constructors, whether they step or not
        self.by_name: dict[str, weakref.ref[Any]] = {}          # those that stepped; the dead are forgotten when the next is met
        self.stepped: dict[str, weakref.ref[Any]] = {}          # the same, the latest that stepped last
        self.held: dict[str, weakref.WeakValueDictionary[int, Any]] = {}       # parameters by part
        self.roles: dict[str, str] = {}                         # of successors: whose part they play
        self.moved_to: set[str] = set()                         # those that techniques act on, or did
        self.counts: dict[int, int] = {}                        # steps by the optimizer's id
        self.counts_before: dict[int, int] = {}                 # the same at the latest gate
        self._drew: dict[int, weakref.ref[Any]] = {}            # those with which the script drew a schedule, by id
        self._names: dict[int, str] = {}
        self._named = 0
        self._crowded = 64                                      # as many are looked through for dead ones

    def add_built(self, optimizer: Any) -> None:
        """One is being built."""
        if len(self.built) >= self._crowded:
            self.built = [reference for reference in self.built if reference() is not None]
            self._crowded = 64 + 2 * len(self.built)
        self.built.append(weakref.ref(optimizer))

    def count(self, optimizer: Any) -> None:
        """One more step of it has ended."""
        self.counts[id(optimizer)] = self.steps_of(optimizer) + 1

    def steps_of(self, optimizer: Any) -> int:
        return self.counts.get(id(optimizer), 0)

    def living(self) -> list[Any]:
        """Those that stepped and are still there, in the order of their first steps."""
        return [optimizer for reference in self.by_name.values() if (optimizer := reference()) is not None]

    def constructed(self) -> list[Any]:
        """Those that were built and are still there."""
        return [optimizer for reference in self.built if (optimizer := reference()) is not None]

    def drew(self, optimizer: Any) -> None:
        """It made a step that changed nothing, before anything was trained: nobody need wait for one that does."""
        self._drew.setdefault(id(optimizer), weakref.ref(optimizer))

    def waiting(self) -> bool:
        """Whether one that was built has not stepped yet."""
        known = {id(optimizer) for optimizer in self.living()}
        known |= {id(optimizer) for reference in self._drew.values() if (optimizer := reference()) is not None}
        return any(id(optimizer) not in known for optimizer in self.constructed())

    def name(self, optimizer: Any) -> tuple[str, bool]:
        """Its name, and whether it is a new one; it counts as the latest that stepped."""
        name = self._names.get(id(optimizer))
        new = name is None or self.by_name[name]() is not optimizer
        if new:
            name = self._introduce(optimizer)
        assert name is not None
        self.stepped[name] = self.stepped.pop(name, None) or weakref.ref(optimizer)
        return name, new

    def _introduce(self, optimizer: Any) -> str:
        """Name it; those that are gone are forgotten."""
        for key, name in list(self._names.items()):
            if self.by_name[name]() is None:
                self._forget(name, key, counted=key != id(optimizer))
        name = f"S{self._named}"
        self._named += 1
        self._names[id(optimizer)] = name
        self.by_name[name] = weakref.ref(optimizer)
        return name

    def _forget(self, name: str, key: int, counted: bool) -> None:
        """One is gone. `counted`: the steps at its id are its own, and no living one's."""
        del self.by_name[name], self._names[key]
        self.stepped.pop(name, None)
        self.moved_to.discard(name)
        if counted:
            self.counts.pop(key, None)
            self.counts_before.pop(key, None)
        if not self.held.get(name):     # nothing lives any more that a successor could hold as well
            self.held.pop(name, None)
            self.roles.pop(name, None)


def changes_nothing(optimizer: Any) -> bool:
    """Whether a step of it does nothing: it is one of torch's own, which read gradients, and holds none."""
    module = getattr(getattr(type(optimizer), "step", None), "__module__", None) or ""
    return module.startswith("torch.optim.") and all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"])
