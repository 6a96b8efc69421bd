"""Dimensions that can be cut: groups of classes of indices that stand for the same thing everywhere."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import gcd

from saturate.inference.pruning.propagation import Labels
from saturate.inference.pruning.tracing import Trace

#: A dimension of a parameter or buffer: (place in `Trace.leaves`, dimension).
Slot = tuple[int, int]

#: What one class takes along: indices by slot.
Indices = dict[Slot, list[int]]


@dataclass(frozen=True)
class Group:
    """Classes that occur in the same slots in the same way: the channels between two layers, the heads of an attention.

    `roots` identify the classes among the atoms. `rivals` are atoms that cut the same parameters along another axis: of
    heads and the channels inside of each, one is cut. `heads`: the classes are attention heads.
    """

    roots: tuple[int, ...]
    classes: tuple[Indices, ...]
    rivals: frozenset[int]
    heads: bool

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(self.classes[0])

    @property
    def unit(self) -> int:
        """Every layer becomes narrower by a multiple of this with each class. Of heads, tables with one number per head
        (position biases) do not count: their width costs nothing."""
        widths = [len(indices) for indices in self.classes[0].values()]
        return gcd(*([width for width in widths if width > 1] or widths) if self.heads else widths)

    @property
    def weight(self) -> int:
        return sum(len(indices) for indices in self.classes[0].values())

    def width(self, ratio: float, multiple: int) -> int:
        """How many classes to keep for about `1 - ratio` of them, such that every width stays a multiple of `multiple`;
        all of them where that leaves nothing to cut."""
        step = multiple // gcd(self.unit, multiple)
        nearest = int(len(self.classes) * (1.0 - ratio) / step + 0.5) * step
        return min(max(nearest, step), len(self.classes))


def groups(trace: Trace, labels: Labels) -> list[Group]:
    """Everything that can be cut. Of axes that cut the same parameters, the one that concerns most of them comes first, then
    the coarsest: heads before the channels inside of them."""
    atoms = labels.atoms
    found: dict[int, Indices] = defaultdict(lambda: defaultdict(list))
    rivals: dict[int, set[int]] = defaultdict(set)
    for place, leaf in enumerate(trace.leaves):
        for dim, label in enumerate(labels.used(leaf.tensor) or ()):
            for index, atom in enumerate(label or ()):
                parts = atoms.parts(atom)
                for part in parts:
                    found[part][place, dim].append(index)
                    rivals[part].update(parts)
    heads = {part for atom in labels.heads for part in atoms.parts(atom)}
    alike: dict[tuple[int, bool, frozenset[tuple[Slot, int]]], list[int]] = defaultdict(list)
    for part, indices in found.items():
        alike[atoms.axis(part), part in heads, frozenset((slot, len(which)) for slot, which in indices.items())].append(part)
    made = [Group(tuple(parts), tuple(dict(found[part]) for part in parts),
                  frozenset(rival for part in parts for rival in rivals[part]) - frozenset(parts), of_heads)
            for (_, of_heads, _), parts in alike.items() if len(parts) > 1]
    return sorted(made, key=lambda group: (-len(group.slots), -group.weight, group.slots))
