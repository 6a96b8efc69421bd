"""What makes a batch: the dataset's own method, and the function that puts items together."""

from __future__ import annotations

import functools
import inspect
from typing import Any

#: Datasets around others, by the attribute of the inner one.
_AROUND = {"Subset": "dataset", "ConcatDataset": "datasets", "ChainDataset": "datasets"}


def described(dataset: Any, collate: Any = None) -> dict[str, Any] | None:
    """Where a dataset's items come from: class, and the file and line of the method that a loader calls; and under "collate"
    the user's function that makes a batch of them, None where torch's own does."""
    if dataset is None:
        return None
    inner = _inner(dataset)
    return {"kind": type(inner).__name__, **_place(*_method(inner)), "collate": _collate(collate)}


def _inner(dataset: Any) -> Any:
    """The first dataset that is not torch's wrapper around others."""
    for _ in range(10):
        name = _AROUND.get(type(dataset).__name__) if _of_torch(type(dataset)) else None
        inner = vars(dataset).get(name) if name else None
        if isinstance(inner, (list, tuple)):
            inner = inner[0] if inner else None
        if inner is None:
            break
        dataset = inner
    return dataset


def _method(dataset: Any) -> tuple[str, Any]:
    """Name and code of the method that makes items; a dataset inherits one that only raises an error."""
    for name in ("__getitems__", "__getitem__", "__iter__"):
        owner = next((cls for cls in type(dataset).__mro__ if name in vars(cls)), None)
        code = getattr(getattr(owner, name, None), "__code__", None)
        if code is not None and not (_of_torch(owner) and owner.__name__ in ("Dataset", "IterableDataset")):
            return name, code
    return "", None


def _collate(function: Any) -> dict[str, Any] | None:
    while isinstance(function, functools.partial):
        function = function.func
    if function is None or _of_torch(function):
        return None
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is not None:
        return _place(function.__name__, code)
    kind = type(function)
    code = getattr(kind.__call__, "__code__", None)
    return None if code is None or _of_torch(kind) else _place(kind.__name__, code)


def _place(function: str, code: Any) -> dict[str, Any]:
    return {"file": code.co_filename if code else "", "line": code.co_firstlineno if code else 0, "function": function}


def _of_torch(one: Any) -> bool:
    return str(getattr(one, "__module__", "")).startswith("torch.utils.data")
