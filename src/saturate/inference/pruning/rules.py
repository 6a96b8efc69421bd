"""How an operation ties the dimensions of the tensors that it reads and writes: the register of such rules.

The rules say when an index may be absent from a dimension without any other number changing: sums over channels
(products of matrices, convolutions) and everything that treats channels one by one. What mixes a dimension in another
way (normalization over it, softmax, a mean, an operation without a rule) fixes it, and the model keeps that width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from saturate.inference.pruning.labels import Atoms, Label
from saturate.inference.pruning.tracing import Call

#: The labels of one tensor.
Dims = list[Label]


class Labels(Protocol):
    """What a rule asks of the labels that are known so far; `propagation` has them."""

    torch: Any
    atoms: Atoms
    heads: set[int]                     # atoms of batched products: attention heads

    def of(self, tensor: Any) -> Dims:
        """One label per dimension."""

    def fix(self, tensor: Any, *dims: int) -> None:
        """All dimensions, or some, stay as they are."""

    def sums(self, tensor: Any, dim: int) -> None:
        """The operation sums over this dimension."""

    def tie(self, tensor: Any, label: Label) -> None:
        """A vector of one number per channel (None: there is none)."""


#: Returns the labels of the outputs, as many as are known. None: not understood, so all dimensions of all inputs are fixed.
Rule = Callable[[Labels, Call], "list[Dims] | None"]


class Rules(dict[str, Rule]):
    """By the name of the operation, without namespace and trailing underscore."""

    def of(self, *names: str) -> Callable[[Rule], Rule]:
        def register(function: Rule) -> Rule:
            self.update(dict.fromkeys(names, function))
            return function

        return register


def where(call: Call, ndim: int) -> list[int]:
    """The dimensions that an operation is about: a number, a list, or absent (all of them)."""
    given = call.arguments.get("dim", call.arguments.get("dims"))
    chosen = [given] if isinstance(given, int) else list(given or range(ndim))
    return [dim % max(ndim, 1) for dim in chosen]
