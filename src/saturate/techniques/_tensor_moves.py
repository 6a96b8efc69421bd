"""Copies to a device: are a technique's wrappers of `Tensor.to` and `Tensor.cuda` still in place, and what can be pinned for them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

#: What the note of a technique says once calls do not come to its wrapper any more.
LOST = "torch's own Tensor.to is back in place, so copies do not come to the technique any more"


class StandingNote:
    """A note that says `LOST` once `torch.Tensor` has its own method again: what was seen in the first steps holds no longer then."""

    def __init__(self, torch: Any, name: str, wrapper: Any, text: Any):
        self._torch, self._name, self._wrapper, self._text = torch, name, wrapper, text

    def __str__(self) -> str:
        text = str(self._text)
        return LOST if text and not in_place(getattr(self._torch.Tensor, self._name), self._wrapper) else text


def in_place(method: Any, wrapper: Any) -> bool:
    """Whether calls of a method may come to a wrapper: it is that, or wraps it, or is a function that does not say what it wraps."""
    while method is not wrapper:
        inside = getattr(method, "__wrapped__", None)
        if inside is None:
            return isinstance(method, types.FunctionType)
        method = inside
    return True


def pinnable(tensor: Any, torch: Any) -> bool:
    """Whether memory can be pinned for it: of a tensor on a device, or of a sparse one, torch raises."""
    return tensor.device.type == "cpu" and tensor.layout == torch.strided


def let_through(context: Any, pinned: Callable[[Any], None] = lambda tensor: None) -> None:
    """What a loader yields and cannot be pinned goes to the script as it is: a script has other loaders than the one that was looked
    at, for validation say, and did not ask for any of them to pin. `pinned` is told of each tensor that was, in whichever thread, but
    not of those that were pinned already: a collate function may fill a buffer of its own again."""
    torch = context.torch
    module = torch.utils.data._utils.pin_memory
    original = module.pin_memory

    @functools.wraps(original)
    def pin(data: Any, device: Any = None) -> Any:
        if isinstance(data, torch.Tensor):
            if not pinnable(data, torch):
                return data
            found = original(data, device)
            if found is not data:
                pinned(found)
            return found
        if not hasattr(data, "pin_memory"):
            return original(data, device)       # which calls this for what is inside of it
        try:
            return original(data, device)
        except RuntimeError:        # a batch of the script's own kind that holds such a tensor
            return data

    context.set_attribute(module, "pin_memory", pin)
