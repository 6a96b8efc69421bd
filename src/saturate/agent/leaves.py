"""Trained tensors that neither a module nor an optimizer holds: they are the leaves of the loss's autograd graph."""

from __future__ import annotations

import weakref
from typing import Any

from saturate.techniques import _autograd

#: Nodes of the graph that are looked at. A loop that updates plain tensors by hand has a small one.
MOST_NODES = 20_000


def reached(tensors: Any) -> list[weakref.ref[Any]]:
    """The tensors whose `.grad` a backward pass from `tensors` adds to, in the order of the walk from the loss."""
    roots = tensors if isinstance(tensors, tuple) and not hasattr(tensors, "node") else (tensors,)      # an edge is a tuple, too
    waiting = [node for root in roots if (node := getattr(root, "grad_fn", getattr(root, "node", None))) is not None]
    seen, found = set(waiting), []
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        leaf = _autograd.leaf_of(node)
        if leaf is not None:
            found.append(weakref.ref(leaf))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found
