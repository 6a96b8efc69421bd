"""Ranks that speak to each other inside of a forward (SyncBatchNorm, tensor and expert parallelism).

Whether a forward runs once more each rank decides by itself, by the time that its blocks took or the memory that it has, and whoever
speaks alone waits for the others: so what speaks does not run twice, and not in parts.
"""

from __future__ import annotations

import functools
from typing import Any

#: Of the operators by which ranks speak to each other in torch; a library of its own (MPI) is not seen.
_NAMESPACES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_dtensor", "symm_mem"})

SPEAKS = "ranks speak to each other in it"


@functools.cache
def _mode() -> type:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Refused(TorchDispatchMode):
        """Raises an error of the class `refusal` before an operator by which ranks speak runs."""

        def __init__(self, refusal: type[Exception]):
            super().__init__()
            self.refusal = refusal

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in _NAMESPACES:
                raise self.refusal(SPEAKS)
            if any(one.__name__ == "DTensor" for one in types):
                return NotImplemented           # what it is made of comes by here as well, and may speak
            return func(*args, **(kwargs or {}))

    return Refused


def refused(refusal: type[Exception]) -> Any:
    """A context manager in which `refusal(SPEAKS)` is raised before ranks speak to each other."""
    return _mode()(refusal)
