"""How a batch is cut into chunks, and how what the chunks give becomes what the whole batch would have given.

A plan belongs to one structure of arguments. It is inferred from shapes and proved by `_chunk_proof`; nothing here decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class NotSplittable(RuntimeError):
    """A batch cannot be computed in chunks exactly; the message says why."""


class NoRoom(NotSplittable):
    """Memory did not hold even the smallest of the runs that would have shown whether it can."""


@dataclass(frozen=True)
class Layout:
    """How one output tensor depends on the batch.

    `kind`: "joined", its dimension `dim` holds one or several entries for each sample (`minor`: the samples vary fastest);
    "same", every chunk gives the same; "loss", a scalar that the model reduced itself: the chunks' are added ("sum" as
    `weight`) or averaged by how many entries the reduction number `reduction` of their forward is the mean of ("mean").
    """

    kind: str
    differentiable: bool = True
    dim: int = 0
    minor: bool = False
    weight: str = ""
    reduction: int = -1


@dataclass(frozen=True)
class Plan:
    """`split`: which input tensors (by position) are cut along their dimension `dim`; `draws`: the forward drew random numbers
    when it was proved."""

    dim: int
    split: frozenset[int]
    outputs: tuple[Layout, ...] = ()
    draws: bool = False

    @property
    def has_losses(self) -> bool:
        return any(layout.kind == "loss" for layout in self.outputs)

    def samples(self, inputs: list[Any]) -> int:
        """The batch size of these inputs. Raises NotSplittable where they disagree."""
        sizes = {inputs[position].shape[self.dim] for position in self.split}
        if len(sizes) != 1:
            raise NotSplittable(f"the inputs disagree on the batch size: {sorted(sizes)}")
        return sizes.pop()

    def cut(self, inputs: list[Any], start: int, stop: int) -> list[Any]:
        """The inputs of samples `start` to `stop`. Contiguous where the whole input is: models call `view`."""
        return [self._cut(tensor, start, stop) if position in self.split else tensor for position, tensor in enumerate(inputs)]

    def _cut(self, tensor: Any, start: int, stop: int) -> Any:
        part = tensor.narrow(self.dim, start, stop - start)
        return part.contiguous() if tensor.is_contiguous() else part


def bounds(samples: int, chunks: int) -> list[tuple[int, int]]:
    """`chunks` consecutive ranges of samples whose sizes differ by at most one.

    >>> bounds(7, 3)
    [(0, 3), (3, 5), (5, 7)]
    """
    chunks = max(1, min(chunks, samples))
    small, larger = divmod(samples, chunks)
    found, start = [], 0
    for index in range(chunks):
        stop = start + small + (index < larger)
        found.append((start, stop))
        start = stop
    return found


def place(layout: Layout, tensor: Any, samples: int, start: int, stop: int) -> Any:
    """The part of a joined output (or of its gradient) that samples `start` to `stop` have, as a view."""
    times = tensor.shape[layout.dim] // samples
    if layout.minor:
        whole = tensor.unflatten(layout.dim, (times, samples))
        return whole.narrow(layout.dim + 1, start, stop - start)
    return tensor.narrow(layout.dim, times * start, times * (stop - start))


def gradient_of_part(layout: Layout, gradient: Any, samples: int, start: int, stop: int) -> Any:
    """The gradient of a joined output, for the output of one chunk, in that output's shape."""
    part = place(layout, gradient, samples, start, stop)
    return part.flatten(layout.dim, layout.dim + 1) if layout.minor else part


class Joined:
    """The outputs of all chunks of one forward, put together one by one: no two copies of the whole are ever held."""

    def __init__(self, plan: Plan, samples: int, torch: Any):
        self.plan = plan
        self.samples = samples
        self.torch = torch
        self.tensors: list[Any] = []
        self.losses: dict[int, list[tuple[Any, Any]]] = {}      # by output: (value, weight) of each chunk

    def add(self, outputs: list[Any], start: int, stop: int, reductions: list[Any]) -> None:
        """The outputs of samples `start` to `stop`, in order. Raises NotSplittable where they are not what was proved."""
        layouts = self.plan.outputs
        if len(outputs) != len(layouts):
            raise NotSplittable(f"the model gave {len(outputs)} tensors where {len(layouts)} were expected")
        if start == 0:
            self.tensors = [self._first(layout, part, stop) for layout, part in zip(layouts, outputs)]
        for position, (layout, part) in enumerate(zip(layouts, outputs)):
            if layout.kind == "joined":
                self._fill(layout, self.tensors[position], part, start, stop)
            elif layout.kind == "loss":
                weight = weight_of(layout, part, reductions, self.torch)
                self.losses.setdefault(position, []).append((part, weight))
            elif start and not (part.shape == self.tensors[position].shape and bool(self.torch.equal(part, self.tensors[position]))):
                raise NotSplittable("an output that was the same for every sample is not the same any more")

    def _first(self, layout: Layout, part: Any, samples: int) -> Any:
        if layout.kind != "joined":
            return part.clone()
        shape = list(part.shape)
        shape[layout.dim] = shape[layout.dim] * self.samples // samples
        return part.new_empty(shape)

    def _fill(self, layout: Layout, whole: Any, part: Any, start: int, stop: int) -> None:
        target = place(layout, whole, self.samples, start, stop)
        wanted = list(target.shape)
        if layout.minor:
            wanted[layout.dim: layout.dim + 2] = [wanted[layout.dim] * wanted[layout.dim + 1]]
        if list(part.shape) != wanted:
            raise NotSplittable(f"an output of {stop - start} samples has shape {tuple(part.shape)}, "
                                f"which is no part of {tuple(whole.shape)}")
        target.copy_(part.unflatten(layout.dim, (-1, stop - start)) if layout.minor else part)

    def finish(self) -> tuple[list[Any], dict[int, Any]]:
        """The whole outputs, and by loss the sum of its chunks' weights."""
        totals = {}
        for position, parts in self.losses.items():
            by_sum = self.plan.outputs[position].weight == "sum"
            total = self.torch.ones_like(parts[0][1]) if by_sum else sum(weight for _, weight in parts)
            # A chunk without anything to average has a loss of nan, and no weight.
            terms = [self.torch.where(weight > 0, value * (weight / total).to(value.dtype), self.torch.zeros_like(value))
                     for value, weight in parts]
            whole = sum(terms[1:], terms[0])
            totals[position] = total
            self.tensors[position] = self.torch.where(total > 0, whole, self.torch.full_like(whole, float("nan")))
        return self.tensors, totals


def weight_of(layout: Layout, value: Any, reductions: list[Any], torch: Any) -> Any:
    """What one chunk's loss weighs, a 0-d float64 tensor; divided by the total of `Joined.finish` it is the derivative of
    the whole loss with respect to the chunk's."""
    if layout.weight == "mean":
        if layout.reduction >= len(reductions) or not reductions[layout.reduction].gave(value):
            raise NotSplittable("the loss that the model returns is not the mean that it was before")
        return reductions[layout.reduction].weight.to(value.device)
    return torch.ones((), dtype=torch.float64, device=value.device)


def share_of_loss(layout: Layout, value: Any, reductions: list[Any], total: Any, torch: Any) -> Any:
    """The derivative of the whole loss with respect to that of one chunk, a 0-d tensor of the loss's type."""
    return (weight_of(layout, value, reductions, torch) / total).to(value.dtype)
