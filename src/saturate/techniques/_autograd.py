"""Looking into an autograd graph: where it begins, its nodes, and which format they computed in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from saturate.techniques._common import tensors


def roots(given: Any, torch: Any) -> tuple[Any, ...]:
    """What `torch.autograd.backward` is to begin with, tensors and edges of the graph. Whoever looks at it passes this on:
    a generator gives its losses only once."""
    if torch.overrides.is_tensor_like(given) or isinstance(given, torch.autograd.graph.GradientEdge):
        return (given,)
    return tuple(given)


def graph_nodes(output: Any, torch: Any, limit: int = 4000) -> Iterator[Any]:
    """Nodes of the autograd graph that produced `output`, breadth first."""
    pending = [tensor.grad_fn for tensor in tensors(output, torch) if tensor.grad_fn is not None]
    seen = set()
    while pending and len(seen) < limit:
        node = pending.pop(0)
        if node in seen:
            continue
        seen.add(node)
        yield node
        pending.extend(parent for parent, _ in node.next_functions if parent is not None)


def node_name(node: Any) -> str:
    """The name of an autograd node. Of a function of the script's own, the node has the attributes that its author gave `ctx`, `name`
    too, which hide the node's."""
    return str(type(node).name(node))


def leaf_of(node: Any) -> Any:
    """The tensor that an autograd node adds to the gradient of; None of other nodes, whatever their authors call `variable`."""
    return node.variable if type(node).__name__ == "AccumulateGrad" else None


def computed_in(output: Any, dtype: Any, torch: Any) -> str:
    """The name of an autograd node behind `output` that worked in `dtype`, or "" when there is none.

    Eager nodes tell by the dtype of their results, without unpacking what they saved: unpacking under activation
    checkpointing would run the forward again. A compiled region is one node whose results may be float32 while its
    inside is not, so there the saved tensors are looked at; nothing inside a compiled region is checkpointed by hooks.
    """
    for node in graph_nodes(output, torch):
        if node_name(node).startswith("ToCopy"):
            continue        # a cast proves nothing about the arithmetic
        results = [metadata.dtype for metadata in getattr(node, "_input_metadata", ())]
        if "CompiledFunction" in node_name(node):
            results += [saved.dtype for saved in _saved_tensors(node)]
        if dtype in results:
            return node_name(node)
    return ""


def _saved_tensors(node: Any) -> tuple[Any, ...]:
    """None once a backward pass has used and freed them."""
    try:
        return tuple(getattr(node, "saved_tensors", ()))
    except RuntimeError:
        return ()
