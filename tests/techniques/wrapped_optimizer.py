"""An optimizer as frameworks hand it to scripts."""

from __future__ import annotations


class Wrapped:
    """As Lightning (in manual optimization) and Fabric hand an optimizer to the script: of its class, with all that it has not itself."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Wrapped" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    def step(self, closure=None):
        return self._optimizer.step(closure)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)
