"""Attributes that the agent replaces for a while, of torch's classes and modules mostly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute; what is returned puts back what stood there. A class may have inherited it, and inherits it again then, or have
    had one of its own, as `torch.Tensor.to` is once a technique has wrapped it. Where somebody has wrapped ours meanwhile, it stays."""
    had, original = name in vars(owner), vars(owner).get(name)

    def undo() -> None:
        if vars(owner).get(name) is not value:
            return
        if had:
            setattr(owner, name, original)
        else:
            delattr(owner, name)

    setattr(owner, name, value)
    return undo
