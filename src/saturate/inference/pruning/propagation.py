"""The label of each dimension of each tensor of one recorded forward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from saturate.inference.pruning import channels, shapes
from saturate.inference.pruning.labels import Atoms, Label
from saturate.inference.pruning.rules import Dims
from saturate.inference.pruning.tracing import Call, Trace, storage

RULES = channels.RULES | shapes.RULES

#: A model's parameters have some hundred thousand indices; a vocabulary alone may have as many.
MAX_ATOMS = 5_000_000

#: Operations in which code says how long a dimension is, with numbers that it may keep in attributes of its module.
SIZED = frozenset({"view", "_unsafe_view", "_reshape_alias", "expand", "repeat", "split", "split_with_sizes", "unsafe_split",
                   "unsafe_split_with_sizes", "slice"})

#: A module, and for each index of a dimension the classes that take it along.
Site = tuple[Any, tuple[tuple[int, ...], ...]]


class Labels:
    """The label of each dimension of each tensor of a trace. Raises `TooLarge` beyond MAX_ATOMS."""

    def __init__(self, torch: Any, trace: Trace) -> None:
        self.torch = torch
        self.atoms = Atoms(MAX_ATOMS)
        self.heads: set[int] = set()                # atoms of batched products: attention heads
        self.summed: set[tuple[int, int]] = set()   # (place among the leaves, dimension): what sums over a width
        self._sites: list[tuple[Any, Label]] = []   # (module, dimension) of calls in SIZED
        self._leaves = {id(leaf.tensor) for leaf in trace.leaves}
        self._places = {storage(leaf.tensor): (place, leaf.tensor) for place, leaf in enumerate(trace.leaves)}
        self._known: dict[int, Dims] = {}
        for call in trace.calls:
            self._apply(call)
        self.atoms.reason = "the model's outputs"
        for tensor in trace.outputs:
            self.fix(tensor)
        self._sites_by_part = self._indexed()

    def sites_of(self, parts: Iterable[int]) -> list[Site]:
        """Where code says the length of a dimension that these classes are part of."""
        found = {id(site): site for part in parts for site in self._sites_by_part.get(part, ())}
        return list(found.values())

    def _indexed(self) -> dict[int, list[Site]]:
        found: dict[int, list[Site]] = {}
        seen: set[tuple[int, tuple[tuple[int, ...], ...]]] = set()
        for module, label in self._sites:
            parts = tuple(self.atoms.parts(atom) for atom in label or ())
            if (id(module), parts) in seen:
                continue
            seen.add((id(module), parts))
            site = (module, parts)
            for part in {part for each in parts for part in each}:
                found.setdefault(part, []).append(site)
        return found

    def _apply(self, call: Call) -> None:
        self.atoms.reason = call.name
        function = RULES.get(call.name, channels.pointwise if call.pointwise else None) if call.known else None
        made = function(self, call) if function is not None else None
        if made is None:
            for tensor in call.inputs(self.torch):
                self.fix(tensor)
        for tensor, dims in zip(call.outputs, made or ()):
            self._known[id(tensor)] = _checked(dims, tensor, call.name)
        if call.name in SIZED and call.module is not None:
            self._sites += [(call.module, label) for tensor in (*call.inputs(self.torch), *call.outputs)
                           for label in self.of(tensor) if label]

    def of(self, tensor: Any) -> Dims:
        """One label per dimension. A parameter gets its atoms when it is first seen; any other tensor that no rule made
        (inputs, constants) is fixed."""
        if id(tensor) not in self._known:
            free = id(tensor) in self._leaves and tensor.is_floating_point()
            self._known[id(tensor)] = [self.atoms.fresh(size) if free and size > 1 else None for size in tensor.shape]
        return self._known[id(tensor)]

    def used(self, tensor: Any) -> Dims | None:
        """The labels of a parameter or buffer, None for one that the outputs do not depend on."""
        return self._known.get(id(tensor))

    def fix(self, tensor: Any, *dims: int) -> None:
        """All dimensions, or some."""
        labels = self.of(tensor)
        for dim in dims or range(len(labels)):
            self.atoms.fix_all(labels[dim])

    def sums(self, tensor: Any, dim: int) -> None:
        """An operation sums over this dimension. A parameter mostly comes as a transposed view, so the dimension is known
        by its stride."""
        place, leaf = self._places.get(storage(tensor), (0, None))
        for own in range(leaf.ndim if leaf is not None else 0):
            if leaf.shape[own] == tensor.shape[dim] and leaf.stride(own) == tensor.stride(dim):
                self.summed.add((place, own))

    def tie(self, tensor: Any, label: Label) -> None:
        """A vector of one number per channel (None: there is none)."""
        if tensor is not None:
            self.atoms.match(label, self.of(tensor)[0])


def _checked(dims: Dims, tensor: Any, name: str) -> Dims:
    """A dimension of one index has nothing to cut. A label of another length than its dimension is a rule gone wrong."""
    dims = [label if size > 1 else None for label, size in zip(dims, tensor.shape, strict=True)]
    assert all(label is None or len(label) == size for label, size in zip(dims, tensor.shape)), f"the rule of {name} is wrong"
    return dims
