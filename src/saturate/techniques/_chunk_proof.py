"""Can a module's batch be computed in chunks exactly? Seen on the script's own batch, not on its word.

`prove` runs the module on a few samples of the live batch, whole and in two chunks, with all randomness set aside, and compares every
output and every gradient. What is against it without that is in `_chunk_census`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from saturate.techniques import _autograd, _collectives, _trees
from saturate.techniques._chunk_census import Watch
from saturate.techniques._chunk_modes import (
    Autocast,
    Randomness,
    devices_of,
    drawing_again,
    hooks_set_aside,
    reductions,
    steady,
)
from saturate.techniques._chunk_plan import (
    Joined,
    Layout,
    NoRoom,
    NotSplittable,
    Plan,
    gradient_of_part,
    share_of_loss,
)
from saturate.techniques._chunks import FILLS
from saturate.techniques._interrupts import from_signal_handler
from saturate.techniques._out_of_memory import out_of_memory

#: Samples of the live batch that a proof runs; fewer where memory does not hold them. The two chunks are uneven.
SAMPLES = (8, 4, 2)

#: Largest deviation relative to the tensor's largest entry, by number format; coupled samples deviate by tenths.
_TOLERANCE = {"float64": 1e-9, "float32": 2e-4, "float16": 2e-2, "bfloat16": 8e-2}
#: Matrix products of float32 on a GPU may be computed in TF32, by other algorithms for other shapes.
_TOLERANCE_TF32 = 1e-2
#: What is this small beside the largest of all gradients is rounding noise (the bias of a key in attention).
_NOISE = 1e-3

_OTHER_OUTPUTS = "the outputs of chunks are not those of the whole batch: its samples depend on each other"


def prove(module: Any, inner: Any, skeleton: Any, inputs: list[Any], torch: Any) -> Plan:
    """How this structure of arguments can be cut. Raises NotSplittable with the reason when it cannot, NoRoom when nobody knows."""
    reasons = []
    state = Randomness(torch, devices_of(module))
    try:
        for dim in (0, 1):
            for samples in SAMPLES:
                try:
                    return Proof(module, inner, skeleton, inputs, torch, dim, samples).plan()
                except NotSplittable as reason:
                    reasons.append(str(reason))
                except Exception as error:  # the user's module on a part of its batch may raise anything
                    if from_signal_handler(error):
                        raise
                    text = str(error).splitlines()
                    reasons.append(f"on a part of the batch it raises {type(error).__name__}: {text[0] if text else ''}")
                    if out_of_memory(error, torch):
                        continue        # with fewer samples
                break
            else:
                raise NoRoom(reasons[-1])
    finally:
        state.restore()
    raise NotSplittable(reasons[0])     # the batch is the first dimension nearly always


class Proof:
    """One attempt, with the batch in dimension `dim` of the inputs."""

    def __init__(self, module: Any, inner: Any, skeleton: Any, inputs: list[Any], torch: Any, dim: int, most: int):
        self.module = module
        self.inner = inner
        self.skeleton = skeleton
        self.torch = torch
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        devices = devices_of(module)
        self.autocast = Autocast(torch, devices[0].type if devices else "cpu")
        self.plan_of_inputs = self._inputs(inputs, dim)
        self.all = self.plan_of_inputs.samples(inputs)
        self.samples = min(self.all, most)
        self.first = (self.samples - 1) // 2 or 1
        self.inputs = self.plan_of_inputs.cut(inputs, 0, self.samples)

    def _inputs(self, inputs: list[Any], dim: int) -> Plan:
        sizes = [tensor.shape[dim] for tensor in inputs if tensor.dim() > dim]
        if not sizes or sizes[0] < 2:
            raise NotSplittable("its inputs hold no batch of two samples or more")
        split = frozenset(i for i, tensor in enumerate(inputs) if tensor.dim() > dim and tensor.shape[dim] == sizes[0])
        for position, tensor in enumerate(inputs):
            whole = position not in split and tensor.numel() > 1 and not (tensor.dim() > dim and tensor.shape[dim] == 1)
            if whole and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == self.torch.bool):
                # What it points at may be among the samples that are cut away: on a GPU that ends the process.
                raise NotSplittable(f"one of its inputs holds integers for something else than samples: {tuple(tensor.shape)}")
        if any(tensor.layout != self.torch.strided or tensor.is_nested for tensor in inputs):
            raise NotSplittable("one of its inputs is not a dense tensor")
        return Plan(dim, split)

    def plan(self) -> Plan:
        torch = self.torch
        ranges = [(0, self.samples), (0, self.first), (self.first, self.samples)]
        with torch.enable_grad(), steady(torch), _collectives.refused(NotSplittable):
            watch = Watch(self.module, (), [], torch)       # where memory ran out in the very first call, nobody has watched yet
            try:
                runs = [self._run(start, stop) for start, stop in ranges]
                problem = watch.problem()
            finally:
                watch.around.restore()
            if problem:
                raise NotSplittable(problem)
            self.formats = self._formats(runs[0][2])
            self._same_values(runs)
            choices = self._layouts(runs)
            chosen = next((plan for plan in choices if self._joins(plan, runs, ranges)), None)
            if chosen is None:
                raise NotSplittable(_OTHER_OUTPUTS)
            self._gradients_agree(chosen, runs, ranges)
        return replace(chosen, draws=self._repeats(ranges[1]))

    def _run(self, start: int, stop: int) -> Any:
        """(inputs, output skeleton, output tensors, reductions) of a few samples."""
        inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad)
                  for tensor in self.plan_of_inputs.cut(self.inputs, start, stop)]
        versions = [tensor._version for tensor in inputs]
        args, kwargs = _trees.put_together(self.skeleton, inputs)
        members = _trees.members((args, kwargs))
        with reductions(self.torch) as seen:
            output = self.inner(self.module, *args, **kwargs)
        if filled := _trees.filled(members):
            raise NotSplittable(f"{FILLS} ({filled})")
        if any(tensor._version != version for tensor, version in zip(inputs, versions)):
            raise NotSplittable("its forward changes its input in place")
        return inputs, *_trees.taken_apart(output, self.torch), seen.found

    def _same_values(self, runs: list[Any]) -> None:
        """What is no tensor must be the same for every chunk. Of other objects nobody knows whether the script uses them, but for
        distributions, which hold all that it wants."""
        distributions = (leaf for _, leaf in _trees.leaves(runs[0][1]) if isinstance(leaf, self.torch.distributions.Distribution))
        if (distribution := next(distributions, None)) is not None:
            raise NotSplittable(f"its output holds a distribution ({type(distribution).__name__}), and those of chunks cannot be joined")
        first, *others = ([(path, leaf) for path, leaf in _trees.leaves(run[1]) if isinstance(leaf, _trees.Slot) or _trees.is_plain(leaf)]
                          for run in runs)
        for other in others:
            if first != other:
                raise NotSplittable("its output holds values that depend on the batch and are no tensors")

    def _layouts(self, runs: list[Any]) -> list[Plan]:
        """Plans that the shapes of the outputs allow."""
        whole = runs[0][2]
        if any(len(run[2]) != len(whole) for run in runs):
            raise NotSplittable("how many tensors it returns depends on the batch")
        layouts = [self._layout(index, runs) for index in range(len(whole))]
        found = [Plan(self.plan_of_inputs.dim, self.plan_of_inputs.split, tuple(layouts))]
        if any(layout.kind == "joined" and tensor.shape[layout.dim] > self.samples for layout, tensor in zip(layouts, whole)):
            minor = [replace(layout, minor=layout.kind == "joined" and tensor.shape[layout.dim] > self.samples)
                     for layout, tensor in zip(layouts, whole)]
            found.append(Plan(self.plan_of_inputs.dim, self.plan_of_inputs.split, tuple(minor)))
        return found

    def _layout(self, index: int, runs: list[Any]) -> Layout:
        whole, head, tail = (run[2][index] for run in runs)
        sizes = self.samples, self.first, self.samples - self.first
        if whole.dim() != head.dim() or whole.dim() != tail.dim():
            raise NotSplittable("an output has another number of dimensions for another batch size")
        changing = [d for d in range(whole.dim()) if not whole.shape[d] == head.shape[d] == tail.shape[d]]
        if not changing:
            return self._unchanged(index, runs)
        times = [tensor.shape[changing[0]] / size for tensor, size in zip((whole, head, tail), sizes)]
        if len(changing) > 1 or len(set(times)) > 1:
            raise NotSplittable(f"an output of shape {tuple(whole.shape)} for {self.samples} samples has shape "
                                f"{tuple(head.shape)} for {self.first}: no part of it belongs to each sample")
        return Layout("joined", whole.requires_grad, changing[0])

    def _unchanged(self, index: int, runs: list[Any]) -> Layout:
        whole, head, tail = (run[2][index] for run in runs)
        if self.torch.equal(whole, head) and self.torch.equal(whole, tail):
            return Layout("same", whole.requires_grad)
        if whole.dim():
            raise NotSplittable(f"an output of shape {tuple(whole.shape)} mixes all samples")
        found = [run[3] for run in runs]
        for position in range(len(found[0])):
            if all(len(seen) > position and seen[position].gave(run[2][index]) for seen, run in zip(found, runs)):
                return Layout("loss", whole.requires_grad, weight="mean", reduction=position)
        if self._divided_by_the_step(found):
            return Layout("loss", whole.requires_grad, weight="sum")
        raise NotSplittable("the model returns a loss that it reduced itself, and the weights of the samples in it are not known")

    def _divided_by_the_step(self, found: list[Any]) -> bool:
        """Whether the loss is a sum over what the caller counted, as transformers' Trainer asks for."""
        given = self.skeleton[1].get("num_items_in_batch")
        return given is not None and all(len(seen) == 1 and seen[0].summed for seen in found)

    def _joins(self, plan: Plan, runs: list[Any], ranges: list[Any]) -> bool:
        joined = Joined(plan, self.samples, self.torch)
        with self.torch.no_grad():
            for run, (start, stop) in zip(runs[1:], ranges[1:]):
                joined.add(run[2], start, stop, run[3])
            tensors, self.totals = joined.finish()
            return all(self._agree(ours, theirs) for ours, theirs in zip(tensors, runs[0][2]))

    def _gradients_agree(self, plan: Plan, runs: list[Any], ranges: list[Any]) -> None:
        weights = [self._cotangent(output) for output in runs[0][2]]
        whole = self._gradients(runs[0], weights)
        self._known_leaves(runs)
        self._add_up(plan, whole, ((self._gradients_of_part(plan, run, weights, start, stop), start, stop)
                                   for run, (start, stop) in zip(runs[1:], ranges[1:])))

    def _gradients_of_part(self, plan: Plan, run: Any, weights: list[Any], start: int, stop: int) -> list[Any]:
        """Those of inputs and parameters, for the cotangents of the whole outputs."""
        part = []
        for index, (layout, weight) in enumerate(zip(plan.outputs, weights)):
            if weight is None:
                part.append(None)
            elif layout.kind == "joined":
                part.append(gradient_of_part(layout, weight, self.samples, start, stop))
            elif layout.kind == "same":
                part.append(weight if start == 0 else None)
            else:
                part.append(weight * share_of_loss(layout, run[2][index], run[3], self.totals[index], self.torch))
        return self._gradients(run, part)

    def _add_up(self, plan: Plan, whole: list[Any], parts: Iterable[tuple[list[Any], int, int]]) -> None:
        """Raise NotSplittable unless the parts' gradients are those of the whole: of cut inputs side by side, others added."""
        if _expects_unused(self.torch) and any(gradient is None for gradient in whole[len(self.inputs):]):
            raise NotSplittable("some of its parameters have no gradient, which DistributedDataParallel with a static graph expects, and "
                                "it would be told of all of them")
        pairs = []
        sums: list[Any] = [None] * len(whole)
        for part, start, stop in parts:
            for position, gradient in enumerate(part):
                if position not in plan.split:
                    sums[position] = _sum(sums[position], gradient)
                elif whole[position] is not None and gradient is not None:
                    pairs.append((gradient, whole[position].narrow(plan.dim, start, stop - start)))
        pairs += [(ours, theirs) for position, (ours, theirs) in enumerate(zip(sums, whole)) if position not in plan.split]
        largest = max((float(g.detach().abs().max()) for _, g in pairs if g is not None and g.numel()), default=0.0)
        for ours, theirs in pairs:
            if (ours is None) != (theirs is None):
                raise NotSplittable("which parameters have gradients depends on the batch")
            if ours is not None and not self._agree(ours, theirs, _NOISE * largest):
                raise NotSplittable("the gradients of chunks do not add up to those of the whole batch: its samples depend on each other")

    def _cotangent(self, output: Any) -> Any:
        if not output.requires_grad:
            return None
        # Uneven, and not drawn: everything drawn is a constant here.
        steps = self.torch.arange(output.numel(), dtype=self.torch.float64).reshape(output.shape)
        return (1.0 + 0.5 * (12.9898 * steps).sin()).to(output.device, output.dtype)

    def _gradients(self, run: Any, weights: list[Any]) -> list[Any]:
        inputs, _, outputs, _ = run
        wanted = [*inputs, *self.parameters]
        asked = [tensor for tensor in wanted if tensor.requires_grad]
        pairs = [(o, w) for o, w in zip(outputs, weights) if w is not None and o.requires_grad]
        if not pairs:
            return [None] * len(wanted)
        with hooks_set_aside(self.parameters), self.autocast.entered(on=False):
            # Retained: a graph that the module shares with the script's own forward must survive.
            found = iter(self.torch.autograd.grad([o for o, _ in pairs], asked, [w for _, w in pairs],
                                                  allow_unused=True, retain_graph=True))
        return [next(found) if tensor.requires_grad else None for tensor in wanted]

    def _known_leaves(self, runs: list[Any]) -> None:
        """Raise NotSplittable where gradients flow to a tensor that is neither an input nor a parameter of the module, but to which
        several runs lead. What a forward makes itself is another tensor in each run, and nobody trains it: PEFT has a frozen
        embedding's output ask for gradients, so that checkpoints behind it work."""
        whole, *parts = ({id(leaf): leaf for leaf in _leaves(run[2])} for run in runs)      # the tensors, so that no id is used twice
        if whole.keys() & {one for part in parts for one in part} - {id(parameter) for parameter in self.parameters}:
            raise NotSplittable("its forward uses trained tensors that are not among its parameters")

    def _repeats(self, part: tuple[int, int]) -> bool:
        """Whether a chunk draws random numbers. Raise NotSplittable unless it can be run again with the same ones."""
        state = Randomness(self.torch, devices_of(self.module))
        with self.torch.no_grad():
            once = self._run(*part)[2]
            drew = state.was_drawn_from()
            with drawing_again(state):
                again = self._run(*part)[2]
        if not all(self._agree(a, b) for a, b in zip(once, again)):
            raise NotSplittable("its forward gives something else when it is run again: it draws random numbers of its own")
        return drew

    def _agree(self, ours: Any, theirs: Any, noise: float = 0.0) -> bool:
        if ours.shape != theirs.shape:
            return False
        if ours.is_sparse:
            ours, theirs = ours.to_dense(), theirs.to_dense()
        if not (ours.is_floating_point() or ours.is_complex()):
            return bool(self.torch.equal(ours, theirs))
        if not ours.numel():
            return True
        ours, theirs = ours.detach(), theirs.detach()
        scale = float(theirs.abs().max())
        worst = float((ours - theirs).abs().max())
        return math.isfinite(worst) and worst <= self._tolerance(ours) * (scale + noise)

    def _formats(self, outputs: list[Any]) -> list[str]:
        """Number formats narrower than float32 that the module computes in, wherever that was asked for."""
        torch = self.torch
        found = {tensor.dtype for tensor in (*outputs, *self.parameters)}
        return [str(dtype).removeprefix("torch.") for dtype in (torch.bfloat16, torch.float16)
                if dtype in found or _autograd.computed_in(outputs, dtype, torch)]

    def _tolerance(self, tensor: Any) -> float:
        found = [_TOLERANCE.get(str(tensor.dtype).removeprefix("torch."), _TOLERANCE["float32"]),
                 *(_TOLERANCE[name] for name in self.formats)]
        if tensor.device.type == "cuda" and tensor.dtype != self.torch.float64:
            found.append(_TOLERANCE_TF32)
        return max(found)


def _expects_unused(torch: Any) -> bool:
    """Whether this forward is that of a DistributedDataParallel which ends the training where it hears of other parameters than in the
    first step."""
    wrapper = getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    return wrapper is not None and wrapper.static_graph


def _leaves(outputs: list[Any]) -> Iterator[Any]:
    """The tensors that gradients of `outputs` are collected in."""
    pending, seen = [output.grad_fn for output in outputs if output.grad_fn is not None], set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if (leaf := _autograd.leaf_of(node)) is not None:
            yield leaf
        pending.extend(parent for parent, _ in node.next_functions if parent is not None)


def _sum(left: Any, right: Any) -> Any:
    if left is None or right is None:
        return left if right is None else right
    return left + right
