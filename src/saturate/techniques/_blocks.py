"""The blocks of a model: the parts that repeat, or where nothing does, its children."""

from __future__ import annotations

from collections import Counter
from typing import Any

#: With fewer blocks than this, each is looked into for finer ones (stages that hold layers).
FEWEST = 6

#: Finer blocks must hold this share of a block's parameters, or what lies between them would be lost.
SHARE = 0.8

_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")


def blocks(root: Any) -> list[Any]:
    """Disjoint modules inside `root`, in the order of their registration: the outermost instances of composite classes
    that repeat; without any, the children of `root`, containers unpacked."""
    return repeated(root) or _children(root)


def repeated(root: Any) -> list[Any]:
    """The outermost repeated modules; looked into while there are fewer than `FEWEST`. May be empty."""
    found = _outermost(root)
    while len(found) < FEWEST:
        finer = [part for block in found for part in _finer(block)]
        if len(finer) == len(found):
            break
        found = finer
    return found


def _outermost(root: Any) -> list[Any]:
    kinds = Counter(type(module) for module in root.modules() if module is not root and _composite(module))
    found: dict[int, Any] = {}      # by identity: a module may be registered at two places

    def descend(module: Any) -> None:
        for child in module.children():
            if _composite(child) and kinds[type(child)] > 1:
                found.setdefault(id(child), child)
            else:
                descend(child)

    descend(root)
    return list(found.values())


def _finer(block: Any) -> list[Any]:
    inside = _outermost(block)
    return inside if _size(*inside) >= SHARE * _size(block) > 0 else [block]


def _children(module: Any) -> list[Any]:
    found = []
    for child in module.children():
        found += _children(child) if type(child).__name__ in _CONTAINERS else [child]
    # A module that only forwards to another one is that one.
    return _children(found[0]) or found if len(found) == 1 else found


def _composite(module: Any) -> bool:
    return type(module).__name__ not in _CONTAINERS and next(module.children(), None) is not None


def _size(*modules: Any) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
