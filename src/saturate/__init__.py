"""saturate makes an unmodified AI workload use its hardware fully, and proves it.

Importing this package imports neither torch nor any third-party library: it is also loaded inside the user's own
process, next to whatever lives there (see `saturate.agent`). What a Python program calls is loaded when it is used:

    saturate.optimize(model, inputs=loader)     the fastest inference within an accuracy budget
    saturate.load("artifact/")                  what it found, in another process
    saturate.Budget(max_drop=0.01)              how much accuracy may be lost, and how surely
    saturate.Train(loader, loss)                what unlocks recovery, quantisation-aware training and distillation
    saturate.generation                         the same for causal language models: decoding, drafts
"""

from typing import Any

__version__ = "0.1.0"

_LAZY = {"optimize": "saturate.inference.api", "load": "saturate.inference.api", "Result": "saturate.inference.api",
         "Budget": "saturate.inference.accuracy", "Train": "saturate.inference.techniques._api"}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "generation":
        return importlib.import_module("saturate.inference.generation")
    if name not in _LAZY:
        raise AttributeError(f"module 'saturate' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_LAZY, "generation"]
