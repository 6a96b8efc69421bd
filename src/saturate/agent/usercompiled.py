"""What the script itself compiles (torch.compile), found without setting a hook: dynamo guards on hooks, and one more compiles everything again.

A module may be compiled by itself, or run inside of a compiled function of the script, where nothing on it shows that. But a
backward pass hands its gradients from a node of that function's graph, not from nodes of single operators.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from saturate.techniques._autograd import leaf_of
from saturate.techniques._common import is_compiled

#: Nodes of the graph that are looked at.
MOST_NODES = 200_000

#: The node that stands for the backward pass of a compiled graph (AOTAutograd, of which every default backend makes use).
_COMPILED_NODE = "CompiledFunctionBackward"


def anything(modules: Iterable[Any]) -> bool:
    """Whether the script compiles one of these modules, or has compiled anything at all."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.utils.counters["frames"].get("ok", 0):
        return True
    return any(by_itself(m) for m in modules)


def by_itself(module: Any) -> bool:
    """Whether a module's own forward is compiled: wrapped, compiled in place, or a compiled function on it or on its class."""
    return is_compiled(module) or hasattr(getattr(module, "forward", None), "_torchdynamo_orig_callable")


class Graph:
    """Into which parameters compiled code, and into which single operators have handed gradients."""

    def __init__(self) -> None:
        self.compiled: set[int] = set()
        self.eager: set[int] = set()
        self._recognised = False            # a node of compiled code was seen: one of another backend would be taken for an operator

    def saw(self, tensors: Any) -> None:
        """A backward pass began at `tensors`."""
        roots = tensors if isinstance(tensors, tuple) and not hasattr(tensors, "node") else (tensors,)      # an edge is a tuple, too
        waiting = [node for root in roots if (node := getattr(root, "grad_fn", getattr(root, "node", None))) is not None]
        seen = set(waiting)
        while waiting and len(seen) < MOST_NODES:
            node = waiting.pop()
            compiled = type(node).__name__ == _COMPILED_NODE
            self._recognised |= compiled
            for following, _ in node.next_functions:
                leaf = None if following is None else leaf_of(following)
                if leaf is not None:
                    (self.compiled if compiled else self.eager).add(id(leaf))
                elif following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)

    def compiles(self, module: Any) -> bool | None:
        """Whether the script compiles this module's forward, in a process where it compiles anything; None: not known."""
        if any(by_itself(m) for m in module.modules()):
            return True
        own = {id(p) for p in module.parameters()}
        if own & self.compiled:
            return True
        return False if self._recognised and own & self.eager else None
