"""Cutting indices out of a model's parameters, buffers and the attributes that describe them; all can be taken back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, islice
from typing import Any

from saturate.inference.pruning import attention
from saturate.inference.pruning.groups import Slot
from saturate.inference.pruning.tracing import Leaf

#: How many combinations of attributes are tried for one group.
MAX_ATTEMPTS = 16


class Refused(Exception):
    """A module that cannot lose these indices; the message says why."""


class Undo:
    """What was changed, to be put back in reverse order."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        self._steps.append(lambda: setattr(owner, name, before))
        setattr(owner, name, value)

    def put(self, mapping: Any, key: Any, value: Any) -> None:
        before = mapping[key]
        self._steps.append(lambda: mapping.__setitem__(key, before))
        mapping[key] = value

    def back(self) -> None:
        while self._steps:
            self._steps.pop()()


class Surgery:
    """A model under the knife. Indices are always those of the original dimensions; `_left` knows where they are now."""

    def __init__(self, torch: Any, leaves: list[Leaf]) -> None:
        self.torch = torch
        self._leaves = leaves
        self._left: dict[Slot, list[int]] = {}
        self._places: dict[int, list[int]] = {}     # of each module's own tensors among the leaves
        for place, leaf in enumerate(leaves):
            for module, _, _ in leaf.owners:
                self._places.setdefault(id(module), []).append(place)

    def _positions(self, slot: Slot, gone: set[int]) -> tuple[list[int], list[int]]:
        """Present places of the indices that go, and of those that stay."""
        left = self._left.get(slot) or list(range(self._leaves[slot[0]].tensor.shape[slot[1]]))
        going = [place for place, index in enumerate(left) if index in gone]
        return going, [place for place, index in enumerate(left) if index not in gone]

    @contextlib.contextmanager
    def zeroed(self, removal: Mapping[Slot, set[int]]) -> Iterator[None]:
        """With zeros in the place of what is to go: what the model without it has to compute."""
        saved = {place: self._leaves[place].tensor.detach().clone() for place, _ in removal}
        try:
            with self.torch.no_grad():
                for slot, gone in removal.items():
                    tensor = self._leaves[slot[0]].tensor
                    where = self.torch.tensor(self._positions(slot, gone)[0], dtype=self.torch.long, device=tensor.device)
                    tensor.index_fill_(slot[1], where, 0)
            yield
        finally:
            with self.torch.no_grad():
                for place, before in saved.items():
                    self._leaves[place].tensor.copy_(before)

    def cut(self, removal: Mapping[Slot, set[int]], undo: Undo) -> None:
        """Smaller parameters and buffers in the place of the present ones. Raises `Refused`."""
        for slot, gone in removal.items():
            leaf = self._leaves[slot[0]]
            going, staying = self._positions(slot, gone)
            if not going:
                continue
            if not staying:
                raise Refused(f"nothing would be left of {leaf.name}")
            left = self._left.get(slot) or list(range(leaf.tensor.shape[slot[1]]))
            if slot not in self._left:
                self._left[slot] = left
            undo.put(self._left, slot, [left[place] for place in staying])
            where = self.torch.tensor(staying, device=leaf.tensor.device)
            smaller = leaf.tensor.detach().index_select(slot[1], where).contiguous()
            if isinstance(leaf.tensor, self.torch.nn.Parameter):
                smaller = self.torch.nn.Parameter(smaller, requires_grad=leaf.tensor.requires_grad)
            undo.set(leaf, "tensor", smaller)
        for place in dict.fromkeys(place for place, _ in removal):
            for module, name, is_buffer in self._leaves[place].owners:
                undo.put(module._buffers if is_buffer else module._parameters, name, self._leaves[place].tensor)
        for module in self.owners(removal):
            _refit(self.torch, module, undo)

    def sizes(self, module: Any, removal: Mapping[Slot, set[int]]) -> tuple[dict[int, int], set[int]]:
        """Widths of the module's own tensors that change (before to after), and those that do not."""
        changed: dict[int, int] = {}
        unchanged: set[int] = set()
        for place in self._places[id(module)]:
            for dim, size in enumerate(self._leaves[place].tensor.shape):
                going, staying = self._positions((place, dim), removal.get((place, dim), set()))
                if going:
                    changed[size] = len(staying)
                else:
                    unchanged.add(size)
        return changed, unchanged

    def owners(self, removal: Mapping[Slot, set[int]]) -> list[Any]:
        found = {id(module): module for place, _ in removal for module, _, _ in self._leaves[place].owners}
        return list(found.values())


def _refit(torch: Any, module: Any, undo: Undo) -> None:
    """Attributes of torch's own layers, from the shapes of their parameters."""
    nn = torch.nn
    if isinstance(module, nn.MultiheadAttention):
        _refit_attention(torch, module, undo)
    elif isinstance(module, nn.Linear):
        undo.set(module, "out_features", module.weight.shape[0])
        undo.set(module, "in_features", module.weight.shape[1])
    elif isinstance(module, nn.modules.conv._ConvNd):
        first, second = module.weight.shape[:2]
        before = module.in_channels if module.transposed else module.out_channels
        groups = 1 if module.groups == 1 else module.groups * first // before      # of several, whole ones were cut
        undo.set(module, "groups", groups)
        undo.set(module, "in_channels", first if module.transposed else second * groups)
        undo.set(module, "out_channels", second * groups if module.transposed else first)
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        known = module.weight if module.weight is not None else module.running_mean
        undo.set(module, "num_features", known.shape[0])
    elif isinstance(module, nn.GroupNorm):
        undo.set(module, "num_groups", module.num_groups * module.weight.shape[0] // module.num_channels)
        undo.set(module, "num_channels", module.weight.shape[0])
    elif isinstance(module, nn.Embedding):
        undo.set(module, "embedding_dim", module.weight.shape[1])
    elif isinstance(module, nn.PReLU):
        undo.set(module, "num_parameters", module.weight.shape[0])


def _refit_attention(torch: Any, module: Any, undo: Undo) -> None:
    reason = attention.why_not(torch, module)
    if reason:
        raise Refused(f"an attention module cannot lose heads: {reason}")
    width = module.out_proj.weight.shape[1]
    packed = module.in_proj_weight
    rows = [packed.shape[0] / 3] if packed is not None else [
        weight.shape[0] for weight in (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)]
    inputs = packed.shape[1] if packed is not None else module.q_proj_weight.shape[1]
    if width % module.head_dim or any(count != width for count in rows) or inputs != module.embed_dim:
        raise Refused("an attention module can lose whole heads and nothing else")
    undo.set(module, "num_heads", width // module.head_dim)
    undo.set(module, "_qkv_same_embed_dim", False)      # keeps layers around it from the fused forward, which knows one width
    undo.set(module, "__class__", attention.PrunedMultiheadAttention)


def without_nested_tensors(torch: Any, model: Any, undo: Undo) -> None:
    """torch's encoders of default settings hand a padded batch to their layers as nested tensors, which only its own attention takes."""
    for encoder in model.modules():
        if isinstance(encoder, torch.nn.TransformerEncoder) and getattr(encoder, "use_nested_tensor", False) and any(
                type(part) is attention.PrunedMultiheadAttention for part in encoder.modules()):
            undo.set(encoder, "use_nested_tensor", False)


def described(torch: Any, module: Any) -> bool:
    """Whether `_refit` knows the module's attributes."""
    nn = torch.nn
    return isinstance(module, (nn.MultiheadAttention, nn.Linear, nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm,
                               nn.Embedding, nn.PReLU))


#: (module, attribute, new value)
Change = tuple[Any, str, int]


def attributes(module: Any, sizes: Mapping[int, int]) -> list[Change]:
    """Whole numbers that say one of the sizes before."""
    return [(module, name, sizes[value]) for name, value in vars(module).items() if type(value) is int and value in sizes]


def attempts(certain: list[Change], possible: list[Change]) -> Iterator[list[Change]]:
    """Which attributes to change: those that are certain with few of the others, then more; none at all in the end. An
    attribute of several modules of one class (whose heads share a position bias, for one) changes in all of them."""
    alike: dict[tuple[type, str], list[Change]] = {}
    for change in possible:
        alike.setdefault((type(change[0]), change[1]), []).append(change)
    choices = (chosen for count in range(len(alike) + 1) for chosen in combinations(alike.values(), count))
    for chosen in islice(choices, MAX_ATTEMPTS):
        yield certain + [change for changes in chosen for change in changes]
    if certain:
        yield []
