"""A module's training forward over chunks of its batch, with the gradients of the whole batch.

`ChunkedForward` is one node of the user's autograd graph. Its forward runs the module chunk by chunk, keeps no graph, and
joins the outputs, so that the user's own loss sees the whole batch. Its backward runs each chunk again, with a graph and the
same random numbers, and adds up the gradients of inputs and parameters, which it hands to autograd only when all chunks
have succeeded: an out-of-memory error in between leaves no trace. With one chunk the graph is kept, and nothing is run
twice; when memory runs out in that backward, it is dropped, and the samples are run again in smaller chunks.

Gradients go through the node's parameter inputs, so whatever listens to a parameter's gradient (the reducer of
DistributedDataParallel, the script's hooks) hears of it once.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from saturate.techniques import _trees
from saturate.techniques._chunk_modes import (
    Autocast,
    Held,
    Randomness,
    agrees,
    deaf_to_none,
    devices_of,
    drawing_again,
    glimpse,
    hooks_set_aside,
    reductions,
)
from saturate.techniques._chunk_plan import Joined, NotSplittable, Plan, bounds, gradient_of_part, weight_of
from saturate.techniques._out_of_memory import free, out_of_memory, without_frames

DRAWS = "it draws random numbers, so its samples cannot be run again by parts"
FILLS = "its forward changes what a container among its arguments holds"

#: How far a chunk that runs again may be from its forward, relative to its largest entry: on a GPU sums may add up in any order.
_APART, _APART_GPU, _APART_NARROW = 1e-4, 1e-2, 8e-2


@dataclass
class Piece:
    """Samples `start` to `stop`, computed with the random numbers from `state` on (`drew`: it draws any)."""

    start: int
    stop: int
    state: Randomness
    drew: bool = False
    offload: bool = False           # keep what the backward needs in host memory
    seen: list[Any] | None = None   # some entries of its outputs


@dataclass
class Listener:
    """Who is told how a call went. `smaller`: the samples that did not fit in a backward, how many should run at
    once from there on, and the error (it may raise it: where they must not be cut); `done`: a backward has succeeded; `twice`: the
    script differentiates gradients; `say`: to the user."""

    smaller: Callable[[int, int, Exception], None] = lambda samples, now, failure: None
    done: Callable[[], None] = lambda: None
    twice: Callable[[], None] = lambda: None
    say: Callable[[str], None] = lambda text: None


class Call:
    """One forward of a module, and its backward. Holds no tensor of the batch: those are saved by autograd."""

    def __init__(self, torch: Any, module: Any, inner: Any, skeleton: Any, plan: Plan, samples: int, chunks: int,
                 listener: Listener | None = None):
        self.torch = torch
        self.module = module
        self.inner = inner
        self.skeleton = skeleton
        self.plan = plan
        self.samples = samples
        self.bounds = bounds(samples, chunks)
        self.listener = listener or Listener()
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.devices = devices_of(module)
        self.autocast = Autocast(torch, self.devices[0].type if self.devices else "cpu")
        self.held = Held(module, torch)
        self.pieces: list[Piece] = []
        self.graph: tuple[list[Any], list[Any], list[Any]] | None = None   # one chunk: outputs, inputs, reductions
        self.output: Any = None             # skeleton of what the module returned
        self.totals: dict[int, Any] = {}

    def run(self, inputs: list[Any]) -> Any:
        """What the module returns for these inputs, connected to the user's graph."""
        outputs = chunked_forward(self.torch).apply(self, len(inputs), *inputs, *self.parameters)
        return _trees.put_together(self.output, list(outputs))

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(self, inputs: list[Any]) -> list[Any]:
        """The joined outputs. Without a graph, but for a single chunk."""
        with self.autocast.entered():
            return self._whole(inputs) if len(self.bounds) == 1 else self._in_chunks(inputs)

    def _whole(self, inputs: list[Any]) -> list[Any]:
        piece = Piece(0, self.samples, Randomness(self.torch, self.devices))
        with self.torch.enable_grad():
            live = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
            self.output, outputs, found = self._call(live)
        self._as_proved(outputs)
        piece.drew = piece.state.was_drawn_from()
        self.pieces = [piece]
        joined = Joined(self.plan, self.samples, self.torch)
        if self.plan.has_losses:
            joined.losses = {position: [(outputs[position], weight_of(layout, outputs[position], found, self.torch))]
                             for position, layout in enumerate(self.plan.outputs) if layout.kind == "loss"}
            joined.tensors = list(outputs)
            self.totals = joined.finish()[1]
        self.graph = outputs, live, found
        return [output.detach() for output in outputs]

    def _in_chunks(self, inputs: list[Any]) -> list[Any]:
        joined = Joined(self.plan, self.samples, self.torch)
        for start, stop in self.bounds:
            piece = Piece(start, stop, Randomness(self.torch, self.devices))
            output, outputs, found = self._call(self.plan.cut(inputs, start, stop))
            piece.drew = piece.state.was_drawn_from()
            piece.seen = [glimpse(tensor) for tensor in outputs]
            self.pieces.append(piece)
            joined.add(outputs, start, stop, found)
            self.output = self._same_structure(output)
        tensors, self.totals = joined.finish()
        return tensors

    def _as_proved(self, outputs: list[Any]) -> None:
        """Raise NotSplittable where outputs that were made with a graph are not those of the plan."""
        layouts = self.plan.outputs
        if len(outputs) != len(layouts) or any(
                output.requires_grad and not layout.differentiable for output, layout in zip(outputs, layouts)):
            raise NotSplittable("the model gives other outputs than when it was looked at")

    def _as_before(self, piece: Piece, outputs: list[Any]) -> None:
        """Raise NotSplittable where a chunk that runs again gives something else: its gradient would be of another function."""
        for tensor, seen in zip(outputs, piece.seen or ()):
            allowed = _APART if tensor.device.type == "cpu" else _APART_NARROW if tensor.dtype.itemsize <= 2 else _APART_GPU
            if not agrees(glimpse(tensor), seen, allowed):
                raise NotSplittable("a chunk gave something else in its backward than in its forward: what the model reads was changed "
                                    "in between. Change it after the backward, or leave this technique out")

    def _call(self, inputs: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """The output's skeleton and tensors, and the reductions that were seen (where any matters)."""
        args, kwargs = _trees.put_together(self.skeleton, inputs)
        members = _trees.members((args, kwargs))
        with reductions(self.torch) if self.plan.has_losses else contextlib.nullcontext() as seen:
            output = self.inner(self.module, *args, **kwargs)
        if filled := _trees.filled(members):
            raise NotSplittable(f"{FILLS} ({filled})")
        return (*_trees.taken_apart(output, self.torch), seen.found if seen else [])

    def _same_structure(self, output: Any) -> Any:
        """The skeleton of the whole output: that of every chunk. Values that are no tensors must agree."""
        if self.output is None:
            return _trees.copied(output, lambda path, leaf: leaf if isinstance(leaf, _trees.Slot) or _trees.is_plain(leaf)
                                 else NotJoined(leaf))
        for (path, first), (_, other) in zip(_trees.leaves(self.output), _trees.leaves(output)):
            if _trees.is_plain(other) and first != other:
                raise NotSplittable(f"the output's {path or 'value'} is {other!r} for one chunk and {first!r} for another")
        return self.output

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(self, saved: Callable[[], list[Any]], gradients: list[Any]) -> list[Any]:
        """Gradients of inputs and parameters, None where there is none. `saved` gives the inputs."""
        if self.torch.is_grad_enabled():
            return self._differentiable(saved(), gradients)
        found = self._from_graph(gradients) if self.graph is not None else None
        if found is None:
            with self.held.as_it_was():
                found = self._from_chunks(saved(), gradients)
        self.listener.done()
        return found

    def unfit(self) -> str:
        """Why the graph of the single chunk cannot be done without; empty when it can."""
        if not self.devices and self.pieces[0].drew:
            return DRAWS
        return "" if self.devices or self.samples > 1 else "there is nothing smaller than one sample to try"

    def let_go(self, failure: Exception) -> None:
        """Without that graph, as if memory had run out in its backward."""
        self.graph, self._failed = None, failure

    def say(self, text: str) -> None:
        self.listener.say(text)

    def _from_graph(self, gradients: list[Any]) -> list[Any] | None:
        """From the graph of the single chunk; None when memory ran out on the way."""
        outputs, live, _ = self.graph
        self.graph = None
        try:
            with hooks_set_aside(self.parameters):
                return _gradients(self.torch, outputs, gradients, [*live, *self.parameters])
        except Exception as error:
            if not out_of_memory(error, self.torch):
                raise
            self._failed = without_frames(error)
        return None

    def _from_chunks(self, inputs: list[Any], gradients: list[Any]) -> list[Any]:
        now = [p for p in self.module.parameters() if p.requires_grad]
        if len(now) != len(self.parameters) or any(a is not b for a, b in zip(now, self.parameters)):
            raise NotSplittable("the trainable parameters are not those of the forward any more")
        sums = Sums(self.plan, inputs, self.torch)
        pending = deque(self.pieces)
        if len(self.bounds) == 1 and self._failed is not None:
            pending = deque(self._smaller(self.pieces[0], self._failed))
        while pending:
            piece = pending.popleft()
            failure = None
            try:
                found = self._of_piece(piece, inputs, gradients)
            except Exception as error:
                if not out_of_memory(error, self.torch):
                    raise
                failure = without_frames(error)
            if failure is None:
                sums.add(piece, found)
            else:
                pending.extendleft(reversed(self._smaller(piece, failure)))
        return sums.finish()

    _failed: Exception | None = None

    def _smaller(self, piece: Piece, failure: Exception) -> list[Piece]:
        """What to try instead of a piece that did not fit. Random numbers are drawn for whole pieces, so one that draws
        any cannot be cut: on a GPU, what its backward needs waits in host memory instead."""
        free(self.torch)
        samples = piece.stop - piece.start
        if samples > 1 and not piece.drew:
            self.listener.smaller(samples, -(-samples // 2), failure)
            return [Piece(piece.start + start, piece.start + stop, piece.state) for start, stop in bounds(samples, 2)]
        if self.devices and not piece.offload:
            self.listener.smaller(samples, -(-samples // 2), failure)
            return [replace(piece, offload=True)]
        failure.add_note(f"saturate: a backward pass over {samples} sample(s) did not fit, and "
                         + ("it drew random numbers, so its samples cannot be run one by one" if samples > 1
                            else "there is nothing smaller to try"))
        raise failure

    def _of_piece(self, piece: Piece, inputs: list[Any], gradients: list[Any]) -> list[Any]:
        torch = self.torch
        parts = self.plan.cut(inputs, piece.start, piece.stop)
        with contextlib.ExitStack() as stack:
            stack.enter_context(hooks_set_aside(self.parameters))
            stack.enter_context(drawing_again(piece.state))
            stack.enter_context(torch.enable_grad())
            if piece.offload:
                stack.enter_context(torch.autograd.graph.save_on_cpu())
            live = [x.detach().requires_grad_(x.requires_grad) for x in parts]
            with self.autocast.entered():       # not around the backward: its products would be cast as well
                _, outputs, found = self._call(live)
            self._as_proved(outputs)
            self._as_before(piece, outputs)
            wanted = [self._gradient_of(position, output, gradients[position], piece, found)
                      for position, output in enumerate(outputs)]
            return _gradients(torch, outputs, wanted, [*live, *self.parameters])

    def _gradient_of(self, position: int, output: Any, gradient: Any, piece: Piece, found: list[Any]) -> Any:
        layout = self.plan.outputs[position]
        if gradient is None or not output.requires_grad:
            return None
        if layout.kind == "joined":
            return gradient_of_part(layout, gradient, self.samples, piece.start, piece.stop)
        if layout.kind == "same":
            return gradient if piece.start == 0 else None
        share = weight_of(layout, output, found, self.torch) / self.totals[position]
        return gradient * share.to(gradient.dtype)

    def _differentiable(self, inputs: list[Any], gradients: list[Any]) -> list[Any]:
        """For `create_graph=True`: all chunks again, connected to the script's own inputs, so that the gradients can
        be differentiated. It saves no memory, so such a script is left alone from here on."""
        self.listener.twice()
        self.graph = None
        outputs, wanted = [], []
        with hooks_set_aside(self.parameters), self.held.as_it_was():
            for piece in self.pieces:
                with drawing_again(piece.state), self.autocast.entered():
                    _, made, found = self._call(self.plan.cut(inputs, piece.start, piece.stop))
                wanted += [self._gradient_of(position, output, gradients[position], piece, found) for position, output in enumerate(made)]
                outputs += made
            return _gradients(self.torch, outputs, wanted, [*inputs, *self.parameters], create_graph=True)


class NotThere(NotSplittable, AttributeError):
    """Raised by `NotJoined`; an AttributeError, so that `hasattr` can be asked."""


class NotJoined:
    """In place of an object in the output that cannot be put together from those of the chunks (a key-value cache)."""

    def __init__(self, original: Any):
        object.__setattr__(self, "_kind", type(original).__name__)

    def _refuse(self, *args: Any) -> Any:
        raise NotThere(f"the batch ran in chunks, and the {self._kind} in the model's output cannot be joined")

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __call__ = _refuse


class Sums:
    """Gradients of all pieces: those of cut inputs side by side, all others added."""

    def __init__(self, plan: Plan, inputs: list[Any], torch: Any):
        self.plan = plan
        self.inputs = inputs
        self.torch = torch
        self.parts: dict[int, list[Any]] = {}
        self.sums: dict[int, Any] = {}
        self.owned: set[int] = set()
        self.length = 0

    def add(self, piece: Piece, found: list[Any]) -> None:
        self.length = len(found)
        for position, gradient in enumerate(found):
            if position in self.plan.split:
                self.parts.setdefault(position, []).append((piece, gradient))
            elif gradient is None:
                continue
            elif position not in self.sums:
                self.sums[position] = gradient      # may share its memory with another one: not ours to change
            elif position in self.owned and not gradient.is_sparse:
                self.sums[position].add_(gradient)
            else:
                self.sums[position] = self.sums[position] + gradient
                self.owned.add(position)

    def finish(self) -> list[Any]:
        return [self._side_by_side(position) if position in self.parts else self.sums.get(position)
                for position in range(self.length)]

    def _side_by_side(self, position: int) -> Any:
        parts = self.parts[position]
        if all(gradient is None for _, gradient in parts):
            return None
        cut, dim = self.inputs[position], self.plan.dim
        return self.torch.cat([
            self.torch.zeros_like(cut.narrow(dim, piece.start, piece.stop - piece.start)) if gradient is None else gradient
            for piece, gradient in parts], dim)


def _gradients(torch: Any, outputs: list[Any], gradients: list[Any], wanted: list[Any], create_graph: bool = False) -> list[Any]:
    """`torch.autograd.grad` for the outputs that have a gradient and the tensors that want one; None for the others."""
    pairs = [(output, gradient) for output, gradient in zip(outputs, gradients)
             if gradient is not None and output.requires_grad]
    asked = [tensor for tensor in wanted if tensor.requires_grad]
    if not pairs or not asked:
        return [None] * len(wanted)
    found = iter(torch.autograd.grad([output for output, _ in pairs], asked, [gradient for _, gradient in pairs],
                                     create_graph=create_graph, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in wanted]


@functools.cache
def chunked_forward(torch: Any) -> Any:
    """The autograd function: `apply(call, number of inputs, *inputs, *parameters)`."""

    class ChunkedForward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: Call, count: int, *tensors: Any) -> Any:
            outputs = call.forward(list(tensors[:count]))
            ctx.call, ctx.count = call, count
            ctx.save_for_backward(*tensors)
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*(output for output, layout in zip(outputs, call.plan.outputs)
                                          if not layout.differentiable))
            return tuple(outputs)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            found = ctx.call.backward(lambda: list(ctx.saved_tensors[:ctx.count]), list(gradients))
            deaf_to_none(ctx.call.parameters, found[ctx.count:], torch)
            return None, None, *found

    return ChunkedForward
