"""Which indices of which dimensions must go together.

Every index of every dimension of a parameter is an atom. Operations tie atoms: an addition says that index 5 here and
index 5 there are the same, a model's output says that an index has to stay (`FIXED`). What is tied in the end is one
class, and a class is cut as a whole or not at all.

Where code reshapes a dimension (768 channels as 12 heads of 64), an index of the long dimension is a *product* of an
atom of each short one: it goes when any of its factors goes, so a head takes its 64 channels along.
"""

from __future__ import annotations

from collections import Counter
from itertools import product as combinations
from math import prod

FIXED = 0

#: The atoms of one dimension, None where all of them are FIXED.
Label = list[int] | None


class TooLarge(Exception):
    """More atoms than the analysis may use."""


class Atoms:
    """Union-find with products. Work is close to linear in the number of atoms, which `limit` bounds."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parent = [FIXED]
        self._axis = [0]                                        # of an atom: the dimension that it was made for
        self._axis_parent = [0]
        self._factors: dict[int, tuple[int, ...]] = {}          # of products
        self._products: dict[tuple[int, ...], int] = {}
        self.reason = ""                                        # why atoms become FIXED right now
        self.fixed_by: Counter[str] = Counter()

    def fresh(self, count: int) -> list[int]:
        """Atoms for a new dimension."""
        start = len(self._parent)
        if start + count > self._limit:
            raise TooLarge(f"more than {self._limit} indices to keep apart")
        self._axis_parent.append(len(self._axis_parent))
        self._parent.extend(range(start, start + count))
        self._axis.extend([self._axis_parent[-1]] * count)
        return list(range(start, start + count))

    def root(self, atom: int) -> int:
        parent = self._parent
        while parent[atom] != atom:
            parent[atom] = parent[parent[atom]]
            atom = parent[atom]
        return atom

    def parts(self, atom: int) -> tuple[int, ...]:
        """The classes of which any takes this index along; empty where it has to stay."""
        root = self.root(atom)
        if root == FIXED:
            return ()
        factors = self._factors.get(root)
        if factors is None:
            return (root,)
        return tuple(dict.fromkeys(part for factor in factors for part in self.parts(factor)))

    def axis(self, part: int) -> int:
        """Identifies the dimensions that the class was made for, where they are tied."""
        return _root(self._axis_parent, self._axis[part])

    def product(self, *atoms: int) -> int:
        parts = tuple(dict.fromkeys(part for atom in atoms for part in self.parts(atom)))
        if len(parts) < 2:
            return parts[0] if parts else FIXED
        if parts not in self._products:
            self._products[parts] = self.fresh(1)[0]
            self._factors[self._products[parts]] = parts
        return self._products[parts]

    def fix(self, atom: int) -> None:
        for part in self.parts(atom):
            self._parent[part] = FIXED
            self.fixed_by[self.reason] += 1

    def unify(self, first: int, second: int) -> None:
        pending = [(first, second)]
        while pending:
            one, other = map(self.parts, pending.pop())
            if set(one) == set(other):
                continue
            if not one or not other:
                for part in one or other:
                    self.fix(part)
            elif len(one) == len(other) == 1:
                self._parent[one[0]] = other[0]
                self._axis_parent[self.axis(one[0])] = self.axis(other[0])
            elif len(one) == len(other):
                pending += zip(one, other)
            elif min(len(one), len(other)) == 1:
                single, many = sorted((one, other), key=len)
                if single[0] in many:       # it goes alone in one place and with either factor in the other: they must stay
                    for part in many:
                        if part != single[0]:
                            self.fix(part)
                else:
                    self._parent[single[0]] = self.product(*many)
            else:
                for part in (*one, *other):
                    self.fix(part)

    # -- whole dimensions

    def fix_all(self, label: Label) -> None:
        for atom in label or ():
            self.fix(atom)

    def match(self, first: Label, second: Label) -> Label:
        """Index i of one is index i of the other."""
        if first is None or second is None:
            self.fix_all(first)
            self.fix_all(second)
            return None
        for one, other in zip(first, second, strict=True):
            self.unify(one, other)
        return first

    def split(self, label: Label, sizes: list[int]) -> list[Label]:
        """The labels of a dimension's row-major factors."""
        if label is None or len(sizes) == 1:
            return [label] * len(sizes)
        keys = [self.parts(atom) for atom in label]
        strides = [prod(sizes[place + 1:]) for place in range(len(sizes))]
        varying = [place for place, (size, stride) in enumerate(zip(sizes, strides))
                   if any(key != keys[index - (index // stride) % size * stride] for index, key in enumerate(keys))]
        found: list[Label] = [None] * len(sizes)
        if not varying:
            self.fix_all(label)
        elif len(varying) == 1:
            place = varying[0]
            found[place] = [label[index * strides[place]] for index in range(sizes[place])]
        else:
            for place in varying:
                found[place] = self.fresh(sizes[place])
            for index, atom in enumerate(label):
                self.unify(atom, self.product(*(
                    found[place][index // strides[place] % sizes[place]] for place in varying)))    # type: ignore[index]
        return found

    def merge(self, labels: list[Label], sizes: list[int]) -> Label:
        """The label of the row-major product of dimensions."""
        if all(label is None for label in labels):
            return None
        if len(labels) == 1:
            return labels[0]
        return [self.product(*atoms) for atoms in combinations(*(label or [FIXED] * size for label, size in zip(labels, sizes)))]


def _root(parent: list[int], node: int) -> int:
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node
