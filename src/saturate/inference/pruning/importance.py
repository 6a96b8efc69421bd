"""How much each class of indices matters to the model's outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

from saturate.inference.batches import tensors
from saturate.inference.pruning import attention
from saturate.inference.pruning.groups import Group, Slot
from saturate.inference.pruning.tracing import Leaf
from saturate.inference.pruning.values import answered, samples

#: Backward passes: until so many samples were seen, but not fewer nor more passes than these.
SAMPLES, LEAST, MOST = 256, 4, 32


class _Sums:
    """Sums of numbers per index to numbers per class, for one group."""

    def __init__(self, torch: Any, leaves: Sequence[Leaf], group: Group) -> None:
        self._torch, self.count = torch, len(group.classes)
        self._where: dict[Slot, tuple[Any, Any]] = {}
        for slot in group.slots:
            if any(is_buffer for _, _, is_buffer in leaves[slot[0]].owners):
                continue        # statistics have no weight of their own
            pairs = [(index, place) for place, indices in enumerate(group.classes) for index in indices[slot]]
            found = torch.tensor(pairs, device=leaves[slot[0]].tensor.device)
            self._where[slot] = found[:, 0], found[:, 1]

    def of(self, slot: Slot, values: Any) -> Any:
        """(..., indices of the slot) -> (..., classes)"""
        index, owner = self._where[slot]
        return self._torch.zeros(*values.shape[:-1], self.count, device=values.device).index_add_(-1, owner, values[..., index])

    def total(self, by_index: Callable[[Slot], Any], change: Callable[[Any], Any]) -> Any:
        """Over the slots, of `change(sums per class)`."""
        return sum((change(self.of(slot, by_index(slot))).cpu() for slot in self._where), self._torch.zeros(self.count, device="cpu"))


def magnitude(torch: Any, leaves: Sequence[Leaf], groups: Sequence[Group]) -> list[Any]:
    """One tensor of scores per group, one number per class: the sum of squares of its weights without
    biases, each parameter scaled to the mean over its indices so that a large one does not outvote the others."""
    def energies(slot: Slot) -> Any:
        tensor = leaves[slot[0]].tensor
        if leaves[slot[0]].name.endswith("bias"):
            return torch.zeros(tensor.shape[slot[1]], device=tensor.device)
        found = _per_index(tensor.detach().float() ** 2, slot[1])
        return found / found.mean().clamp_min(1e-30)

    return [_Sums(torch, leaves, group).total(energies, lambda value: value) for group in groups]


def taylor(torch: Any, model: Any, leaves: Sequence[Leaf], groups: Sequence[Group], summed: Set[Slot],
           batches: Sequence[tuple[Any, ...]], seed: int) -> list[Any] | None:
    """One tensor of scores per group: how much the outputs move when a class is removed, to first order.

    Without input channel c of the layers that sum over it, output f changes by about the sum of x_c df/dx_c over these
    layers (Molchanov et al. 2017). With random signs v, the square of the same sum for v.f is an unbiased estimate of the
    squared change of all outputs (Hutchinson 1990), so labels and a loss are not needed; every sample is an estimate of its
    own. `summed`: slots of such layers. Where none is seen at work (a parameter that no module of its own multiplies
    with), sums of w df/dw over the weights of a class take its place, one estimate per batch.
    None where no output has a gradient.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = list(model.parameters())
    flags = [parameter.requires_grad for parameter in parameters]
    sums = [_Sums(torch, leaves, group) for group in groups]
    by_input: list[Any] = [0.0] * len(groups)
    by_weight: list[Any] = [0.0] * len(groups)
    listeners = [_Listener(torch, place, slot, sums[place]) for place, group in enumerate(groups) for slot in group.slots if slot in summed]

    def moves(slot: Slot) -> Any:
        tensor = leaves[slot[0]].tensor
        if tensor.grad is None:     # the outputs do not reach it
            return torch.zeros(tensor.shape[slot[1]], device=tensor.device)
        return _per_index(tensor.detach().float() * tensor.grad.float(), slot[1])

    seen = 0
    with _listening(torch, model, leaves, listeners):
        try:
            for parameter in parameters:
                parameter.requires_grad_(parameter.is_floating_point())
            for probe in range(MOST):
                batch = batches[probe % len(batches)]
                model.zero_grad(set_to_none=True)
                with torch.inference_mode(False), torch.enable_grad():
                    outputs = [tensor for tensor in tensors(torch, answered(model, batch)) if tensor.requires_grad and tensor.is_floating_point()]
                    if not outputs:
                        return None
                    sum((_signs(torch, tensor, generator) * tensor.float()).sum() for tensor in outputs).backward()
                for place, heard in _heard(listeners).items():
                    by_input[place] = by_input[place] + heard
                by_weight = [before + one.total(moves, lambda value: value**2) for before, one in zip(by_weight, sums)]
                seen += samples(torch, batch) or 1
                if probe + 1 >= LEAST and seen >= SAMPLES:
                    break
        finally:
            model.zero_grad(set_to_none=True)
            for parameter, flag in zip(parameters, flags):
                parameter.requires_grad_(flag)
    return [weight if isinstance(one, float) else one for one, weight in zip(by_input, by_weight)]


class _Listener:
    """Hears at the input of layers how much each class contributes to a change of the outputs, sample by sample."""

    def __init__(self, torch: Any, place: int, slot: Slot, sums: _Sums) -> None:
        self._torch, self.place, self.slot, self._sums = torch, place, slot, sums
        self.heard: list[Any] = []

    def attach(self, module: Any, size: int) -> Any:
        spatial = len(module.kernel_size) if isinstance(module, self._torch.nn.modules.conv._ConvNd) else 0

        def listen(module: Any, args: tuple[Any, ...]) -> Any:
            if not args or not isinstance(args[0], self._torch.Tensor) or not args[0].requires_grad:
                return None
            given = args[0].view_as(args[0])        # so that the gradient is what comes through this layer alone
            dim = given.ndim - 1 - spatial
            if given.shape[dim] == size:
                given.register_hook(lambda gradient: self._hear(given, gradient, dim))
            return (given, *args[1:])

        return module.register_forward_pre_hook(listen)

    def _hear(self, given: Any, gradient: Any, dim: int) -> None:
        moved = (given.detach().float() * gradient.float()).movedim(dim, -1)
        rows = moved.shape[0] if moved.ndim > 1 else 1
        self.heard.append(self._sums.of(self.slot, moved.reshape(rows, -1, moved.shape[-1]).sum(1)))


@contextlib.contextmanager
def _listening(torch: Any, model: Any, leaves: Sequence[Leaf], listeners: Sequence[_Listener]) -> Iterator[None]:
    """nn.MultiheadAttention never calls its last layer, so it is its twin that does meanwhile."""
    handles = []
    concerned = {id(module) for one in listeners for module, _, _ in leaves[one.slot[0]].owners}
    swapped = [(module, type(module)) for module in model.modules()
               if type(module) is torch.nn.MultiheadAttention and id(module.out_proj) in concerned and not attention.why_not(torch, module)]
    try:
        for module, _ in swapped:
            module.__class__ = attention.PrunedMultiheadAttention
        for one in listeners:
            place, dim = one.slot
            handles += [one.attach(module, leaves[place].tensor.shape[dim]) for module, _, _ in leaves[place].owners]
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, before in swapped:
            module.__class__ = before


def _heard(listeners: Sequence[_Listener]) -> dict[int, Any]:
    """By group: squares of what all layers contribute together, summed over samples; what was heard is forgotten."""
    together: dict[tuple[int, int], Any] = {}
    for one in listeners:
        for found in one.heard:
            key = one.place, len(found)     # layers that see windows or tokens as samples are counted apart
            together[key] = together.get(key, 0.0) + found
        one.heard.clear()
    scores: dict[int, Any] = {}
    for (place, _), found in together.items():
        scores[place] = scores.get(place, 0.0) + found.square().sum(0).cpu()
    return scores


def _signs(torch: Any, tensor: Any, generator: Any) -> Any:
    drawn = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8, device="cpu")
    return (drawn * 2 - 1).to(tensor.device)


def _per_index(values: Any, dim: int) -> Any:
    return values.sum(dim=[other for other in range(values.ndim) if other != dim]) if values.ndim > 1 else values
