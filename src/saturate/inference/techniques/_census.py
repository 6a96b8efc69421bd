"""Which operators a model really runs, and on what: what several techniques show as proof."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from saturate.inference import batches
from saturate.inference.techniques import _wrap
from saturate.inference.techniques._api import Context

#: What the names of operators that multiply hold.
CONVOLUTIONS = ("conv",)
PRODUCTS = ("conv", "linear", "matmul", "mm", "bmm", "attention", "lstm", "gru", "rnn")


def count(context: Context, words: tuple[str, ...], holds: Callable[[Any], bool]) -> tuple[int, int]:
    """Of the operators with one of `words` in their names that one forward of the first input dispatches: how many have an
    output for which `holds(tensor)`, and how many there are. Below layers and functions, so it sees both."""
    from torch.utils._python_dispatch import TorchDispatchMode

    torch = context.torch
    found = [0, 0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = function(*args, **(kwargs or {}))
            name = str(function).partition(".")[2]
            if any(word in name for word in words):
                found[0] += any(holds(tensor) for tensor in batches.tensors(torch, output))
                found[1] += 1
            return output

    with Watch():
        _wrap.answer(context, context.inputs[0])
    return found[0], found[1]
