"""A backward that runs out of memory, of a batch that ran as the script wrote it: once more, in chunks.

Nothing of ours is in such a batch's graph, so that it costs next to nothing. Its outputs are marked, and their gradients are
noted as they arrive. When an allocation fails further down, every parameter has been given its gradient completely or not
at all, since autograd adds all that a backward has for a parameter in one go; those that have theirs keep it. What the failed graph
still holds is released, the batch runs again in chunks, and its backward goes to the other parameters only.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from saturate.techniques import _autograd, _trees
from saturate.techniques._chunk_modes import Autocast, Randomness, agrees, devices_of, glimpse
from saturate.techniques._chunks import DRAWS
from saturate.techniques._out_of_memory import free, out_of_memory, without_frames
from saturate.techniques._weakly import held_weakly

#: How far outputs in chunks may be from those of the whole, relative to the largest entry; where numbers may be narrow.
_APART, _APART_NARROW = 2e-4, 8e-2


class Batch:
    """One forward that ran whole. `again(failure)`: its outputs once more, in chunks; raises where that cannot be. `foreseen()`: why it
    cannot be, as far as that is known without a try; "" otherwise."""

    def __init__(self, rescue: Rescue, module: Any, tensors: list[Any], again: Callable[[Exception], Any], foreseen: Callable[[], str],
                 say: Callable[[str], None]):
        self.rescue = rescue
        self.module = module
        self.tensors = tensors
        self.versions = [tensor._version for tensor in tensors]
        self.again: Callable[[Exception], Any] | None = again
        self.foreseen = foreseen
        self.say = say
        self.gradients: dict[int, Any] = {}
        self.nodes: dict[tuple[int, str], int] = {}     # output by the number and name of the node that computed it: holds none
        self.seen: dict[int, Any] = {}                  # some entries of each output
        self.autocast = Autocast(rescue.torch, rescue.device)

    def arrived(self, position: int, number: int, gradients: tuple[Any, ...]) -> None:
        """At the node that computed an output as its result `number`: what the script's hooks on the output have made of its gradient."""
        if not self.gradients:
            self.rescue.arrived.append(self)
        self.gradients[position] = gradients[number]

    def forget(self) -> None:
        """It lives as long as the script's graph; what it holds need not."""
        self.again, self.foreseen, self.tensors, self.gradients, self.seen = None, str, [], {}, {}
        self.rescue.batches.discard(self)

    def gave(self, outputs: list[Any]) -> bool:
        """Whether these are its outputs, computed in other shapes."""
        narrow = any(enabled for _, enabled, _ in self.autocast.settings)
        return all(agrees(glimpse(outputs[position]), seen,
                          _APART if not narrow and seen.device.type == "cpu" and seen.dtype.itemsize > 2 else _APART_NARROW)
                   for position, seen in self.seen.items())


class Rescue:
    """One per process: around `torch.autograd.backward`, which every backward of a script goes through."""

    def __init__(self, context: Any):
        torch = self.torch = context.torch
        self.device = context.device
        self.batches: weakref.WeakSet[Batch] = weakref.WeakSet()    # those that ran whole and wait for their backward
        self.guarded: weakref.WeakSet[Any] = weakref.WeakSet()      # each `_chunks.Call` of one chunk, while there is a graph of it
        self.arrived: list[Batch] = []          # in this backward
        groups = [group["params"] for optimizer in context.optimizers for group in optimizer.param_groups]
        leaves = {id(p): p for params in [*groups, *(m.parameters() for m in context.modules)] for p in params}
        self.leaves = held_weakly(leaves.values())       # torch's backward holds us, and the script may drop its model
        self.original = torch.autograd.backward

    def install(self, context: Any) -> None:
        torch = self.torch

        @functools.wraps(self.original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.batches:
                return self.original(tensors, *args, **kwargs)
            tensors = _autograd.roots(tensors, torch)
            before = [(p, (gradient := p.grad) is not None and (gradient, gradient._version)) for p in self.leaves()]
            try:
                result = self.original(tensors, *args, **kwargs)
            except Exception as error:
                if not out_of_memory(error, torch):
                    raise
                failure = without_frames(error)
            else:
                self._succeeded(args, kwargs)
                return result
            try:
                self._again(tensors, args, kwargs, before, failure)
            finally:
                self._succeeded((), {})

        context.set_attribute(torch.autograd, "backward", torch._disable_dynamo(backward))

    def _succeeded(self, args: Any, kwargs: Any) -> None:
        kept = kwargs.get("retain_graph") or (len(args) > 1 and args[1])
        for batch in self.arrived:
            if kept:
                batch.gradients = {}
            else:
                batch.forget()
        self.arrived = []

    # -- while all goes well -----------------------------------------------------------------------------------------

    def follow(self, output: Any, batch: Batch) -> Any:
        """What a module returned, for the script, with its tensors marked."""
        self.batches.add(batch)
        if isinstance(output, self.torch.Tensor):
            self._mark(output, batch, 0)
            return output
        skeleton, tensors = _trees.taken_apart(output, self.torch)
        trained = [position for position, tensor in enumerate(tensors) if tensor.grad_fn is not None]
        if len(trained) > 1:        # one may be computed from another: what arrives for an alias came from outside of the model
            for position in trained:
                tensors[position] = tensors[position].view_as(tensors[position])
            output = _trees.put_together(skeleton, tensors)
        for position in trained:
            self._mark(tensors[position], batch, position)
        return output

    def _mark(self, tensor: Any, batch: Batch, position: int) -> None:
        if tensor.grad_fn is not None:
            batch.nodes[node_key(tensor.grad_fn)] = position
            batch.seen[position] = glimpse(tensor)
            tensor.grad_fn.register_prehook(functools.partial(batch.arrived, position, tensor.output_nr))

    # -- when memory has run out -------------------------------------------------------------------------------------

    def _again(self, roots: tuple[Any, ...], args: Any, kwargs: Any, before: list[Any], failure: Exception) -> None:
        torch = self.torch
        raw = inspect.unwrap(self.original)
        given = inspect.signature(raw).bind(roots, *args, **kwargs)
        without = [id(p) for p, (gradient, version) in ((p, entry or (None, 0)) for p, entry in before)
                   if p.grad is gradient and (gradient is None or gradient._version == version)]
        problem = self._problem(roots, given.arguments, set(without))
        if problem:
            _refuse(self.arrived or list(self.batches), problem, failure)
        batch = self.arrived[0]
        release_graph([root.grad_fn for root in roots])
        free(torch)
        state = Randomness(torch, devices_of(batch.module))
        with torch.enable_grad(), batch.autocast.entered():
            outputs = _trees.taken_apart(batch.again(failure), torch)[1]
        if state.was_drawn_from():
            state.restore()
            _refuse([batch], DRAWS, failure)
        if not batch.gave(outputs):
            _refuse([batch], "it gives something else now than in its forward: what it reads was changed in between", failure)
        pairs = [(outputs[position], gradient) for position, gradient in batch.gradients.items() if outputs[position].requires_grad]
        wanted = [p for p in batch.module.parameters() if p.requires_grad and id(p) in set(without)]
        if wanted and pairs:
            raw([output for output, _ in pairs], [gradient for _, gradient in pairs], inputs=wanted)
        # Whoever listens to backward passes hears of this one, and of its loss.
        loss = roots[0].detach().requires_grad_()
        self.original(loss, torch.ones_like(loss))

    def _problem(self, roots: tuple[Any, ...], given: dict[str, Any], without: set[int]) -> str:
        """Why this backward cannot be made up for; empty when it can."""
        if given.get("create_graph") or given.get("retain_graph") or given.get("inputs") is not None:
            return "the script asked for more of this backward than gradients (create_graph, retain_graph or inputs)"
        if not all(isinstance(root, self.torch.Tensor) for root in roots):
            return "it begins at an edge of the graph, not at a loss"
        if not self.arrived:
            return "memory ran out in the loss, outside of the model"
        if len(self.arrived) > 1:
            return "one backward goes through several forwards"
        batch = self.arrived[0]
        if problem := self.unfit(batch):
            return problem
        reached, leaves = leads_to([root.grad_fn for root in roots], batch.nodes)
        if any(position not in batch.gradients for position in reached):
            return "memory ran out before all of the loss was differentiated"
        known = {id(p) for p in self.leaves()}
        if any(id(leaf) in without or id(leaf) not in known for leaf in leaves):
            return "the loss depends on trained tensors in another way than through this output (a second forward, a penalty on weights)"
        return ""

    def unfit(self, batch: Batch) -> str:
        """Why no backward of this batch can be made up for; empty when one can."""
        if batch.again is None or [tensor._version for tensor in batch.tensors] != batch.versions:
            return "its input was changed meanwhile"
        if any(tensor.requires_grad for tensor in batch.tensors):
            return "its input is differentiated as well"
        if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in self.leaves()):
            return "hooks on gradients change the training while the backward goes on"
        if len({p.device for p in batch.module.parameters()}) > 1:
            return "the model lives on several devices"
        return ""


def _refuse(batches: list[Batch], problem: str, failure: Exception) -> None:
    text = f"a backward pass ran out of memory and cannot be run again in chunks: {problem}"
    for batch in batches[:1]:
        batch.say(text)
    failure.add_note(f"saturate: {text}")
    raise failure


def node_key(node: Any) -> tuple[int, str]:
    """Of a node in the graph of one thread, without holding it: a mark on the node itself costs 25 microseconds in its backward."""
    return node._sequence_nr(), _autograd.node_name(node)


def leads_to(pending: list[Any], nodes: dict[tuple[int, str], int]) -> tuple[list[int], list[Any]]:
    """(outputs, leaves) that a graph leads to; what lies behind an output is not looked at."""
    outputs, leaves, seen = [], [], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node_key(node) in nodes:
            outputs.append(nodes[node_key(node)])
        elif (leaf := _autograd.leaf_of(node)) is not None:
            leaves.append(leaf)
        else:
            pending.extend(parent for parent, _ in node.next_functions)
    return outputs, leaves


def release_graph(pending: list[Any], failure: Exception | None = None) -> None:
    """Let go of what a graph saved that no backward will use any more, though the script may still hold its tensors. A backward that
    needs it all the same raises the failure."""

    def unpack(nothing: Any) -> Any:
        if failure is not None:
            raise failure

    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                _release_one(node, name, unpack)
        pending.extend(parent for parent, _ in node.next_functions)


def _release_one(node: Any, name: str, unpack: Callable[[Any], Any]) -> None:
    try:
        saved = getattr(node, name)
        for one in saved if isinstance(saved, (tuple, list)) else [saved]:
            one.register_hooks(lambda tensor: None, unpack)
    except (RuntimeError, AttributeError):
        pass            # released by the backward already, or the script's own hooks look after it
