"""How an operation ties the dimensions of the tensors that it reads and writes: the register of such rules.

The rules say when an index may be absent from a dimension without any other number changing: sums over channels
(products of matrices, convolutions) and everything that treats channels one by one. What mixes a dimension in another
way (normalization over it, softmax, a mean, an operation without a rule) fixes it, and the model keeps that width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from saturate.inference.pruning.labels import Label
from saturate.inference.pruning.tracing import Call

if TYPE_CHECKING:
    from saturate.inference.pruning.propagation import Labels

#: The labels of one tensor.
Dims = list[Label]

#: Returns the labels of the outputs, as many as are known. None: not understood, so all dimensions of all inputs are fixed.
Rule = Callable[["Labels", Call], "list[Dims] | None"]


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
