"""A loss computed outside of the model that runs out of memory: once more, without what the model keeps for its backward.

Activations are most of what is held at that time, and the model can give them again, in chunks. So they are let go of, the loss
runs again, and the backward meets a model that ran out of memory, as `_chunk_rescue` and `_chunks` know it. In the loss's own
backward that needs a loss which can be differentiated twice, since autograd releases what a graph saved as it goes: that of a
guarded batch is one node of ours, which keeps its graph until it has succeeded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from saturate.techniques import _trees
from saturate.techniques._chunk_rescue import Batch, Rescue, leads_to, node_key, release_graph
from saturate.techniques._chunks import Call
from saturate.techniques._interrupts import from_signal_handler
from saturate.techniques._out_of_memory import free, out_of_memory, without_frames

#: What the losses of torch.nn.functional and of torch.nn end in, wherever a script has those from, beside all that is called `..._loss`.
_ALSO = frozenset({"nll_loss_nd", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"})

#: Nodes that are looked at between a loss and the model: a view, a cast, a shift by one token.
_FAR = 64


def install(context: Any, rescue: Rescue) -> None:
    torch = context.torch
    known = torch.jit._builtins._get_builtin_table()    # TorchScript tells them by identity
    for home in (torch, torch._C._nn):
        for name in dir(home):
            if name in _ALSO or (name.endswith("_loss") and not name.startswith("_")):
                loss = _watched(getattr(home, name), torch, rescue)
                context.set_attribute(home, name, loss)
                context.set_item(known, id(loss), f"aten::{name}")


def _watched(original: Any, torch: Any, rescue: Rescue) -> Any:
    compiling = torch.compiler.is_compiling

    @functools.wraps(original)
    def loss(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return original(*args, **kwargs)
        try:
            return _as_node(original, args, kwargs, torch, rescue) if rescue.guarded else original(*args, **kwargs)
        except Exception as error:
            if not out_of_memory(error, torch) or not (kept := _behind(_trees.tensors((*args, *kwargs.values()), torch.Tensor), rescue)):
                raise
            failure = without_frames(error)
        return _once_more(kept, lambda: original(*args, **kwargs), failure, torch)

    return loss


def _once_more(kept: list[Any], run: Callable[[], Any], failure: Exception, torch: Any) -> Any:
    """Without what is kept. Raises the failure where that cannot be given again, before any of it is gone, or is not enough."""
    for one in kept:
        if problem := one.unfit():
            text = f"the loss ran out of memory, and what the model keeps is still needed: {problem}"
            one.say(text)
            failure.add_note(f"saturate: {text}")
            raise failure
    for one in kept:
        one.let_go(failure)
    free(torch)
    try:
        return run()
    except Exception as error:
        if not out_of_memory(error, torch):
            raise
    failure.add_note("saturate: the loss did not fit without what the model keeps for its backward either")
    raise failure


# -- what could be let go of -----------------------------------------------------------------------------------------


def _behind(tensors: list[Any], rescue: Rescue) -> list[Any]:
    """What has computed these tensors and keeps something for its backward: guarded batches, or one that ran as it was written."""
    marked = {key: batch for batch in rescue.batches for key in batch.nodes}
    calls: list[Any] = []
    nodes: dict[Batch, list[Any]] = {}
    pending, seen = [tensor.grad_fn for tensor in tensors], set()
    while pending and len(seen) < _FAR:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(call := getattr(node, "call", None), Call):
            calls += [call] if call.graph is not None else []
        elif (batch := marked.get(node_key(node))) is not None:
            nodes.setdefault(batch, []).append(node)
        else:
            pending.extend(parent for parent, _ in node.next_functions)
    return calls or [Whole(rescue, batch, found, tensors) for batch, found in nodes.items()]


@dataclass(frozen=True)
class Whole:
    """A batch that ran as the script wrote it, and the nodes that gave some of its outputs to the loss of `tensors`."""

    rescue: Rescue
    batch: Batch
    nodes: list[Any]
    tensors: list[Any]

    def say(self, text: str) -> None:
        self.batch.say(text)

    def unfit(self) -> str:
        if len(self.rescue.batches) > 1:
            return "several forwards wait for their backward"
        if leads_to([tensor.grad_fn for tensor in self.tensors], self.batch.nodes)[1]:
            return "the loss depends on trained tensors in another way than through the model's output"
        return self.rescue.unfit(self.batch) or self.batch.foreseen()

    def let_go(self, failure: Exception) -> None:
        release_graph(self.nodes, failure)


# -- a loss whose backward can be repeated ---------------------------------------------------------------------------


def _as_node(original: Any, args: Any, kwargs: Any, torch: Any, rescue: Rescue) -> Any:
    """The loss as one node of ours where guarded batches have computed its arguments; whatever is wrong with us, as it is."""
    try:
        skeleton, tensors = _trees.taken_apart((args, kwargs), torch)
        kept = [one for one in _behind(tensors, rescue) if isinstance(one, Call)] if torch.is_grad_enabled() else []
        if kept and all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors):
            return _repeatable(torch).apply(Loss(torch, original, skeleton, kept), *tensors)
    except Exception as error:
        if out_of_memory(error, torch) or from_signal_handler(error):
            raise
    return original(*args, **kwargs)        # the script's own error is raised by its own loss


@dataclass(frozen=True)
class Loss:
    """One call of a loss function, with the guarded batches behind it. Its graph is the script's own, connected to the
    script's tensors, up to `edges`: views of ours, so that a hook on a tensor is called by the script's backward alone."""

    torch: Any
    original: Any
    skeleton: Any
    kept: list[Any]

    def compute(self, tensors: list[Any]) -> tuple[Any, list[Any]]:
        edge = self.torch.autograd.graph.get_gradient_edge
        with self.torch.enable_grad():
            views = [tensor.view_as(tensor) if tensor.requires_grad else tensor for tensor in tensors]
            args, kwargs = _trees.put_together(self.skeleton, views)
            value = self.original(*args, **kwargs)
        return value, [edge(view) if view.requires_grad else None for view in views]

    def gradients(self, value: Any, edges: list[Any], gradient: Any) -> list[Any]:
        grad, differentiable = self.torch.autograd.grad, self.torch.is_grad_enabled()

        def run() -> Any:
            return grad(value, [edge for edge in edges if edge is not None], gradient,
                        retain_graph=True, create_graph=differentiable, allow_unused=True)

        try:
            found = run()
        except Exception as error:
            kept = [call for call in self.kept if call.graph is not None]
            if not out_of_memory(error, self.torch) or not kept:
                raise
            failure = without_frames(error)
        else:
            failure = None
        if failure is not None:
            found = _once_more(kept, run, failure, self.torch)
        given = iter(found)
        return [None if edge is None else next(given) for edge in edges]


@functools.cache
def _repeatable(torch: Any) -> Any:
    """The autograd function: `apply(loss, *tensors)`."""

    class GuardedLoss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: Loss, *tensors: Any) -> Any:
            value, ctx.edges = loss.compute(list(tensors))
            ctx.loss = loss
            ctx.save_for_backward(value)        # with its graph, which autograd lets go of as it does of the script's own
            return value.detach().clone()     # what the script does to it in place is done to its own

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            value, = ctx.saved_tensors
            return None, *ctx.loss.gradients(value, ctx.edges, gradient)

    return GuardedLoss
