"""Tables in a captured program: which inputs are looked up in one, and how long what is counted through one may be."""

from __future__ import annotations

from typing import Any

#: Operators that pass numbers on as they are.
_PASSES_ON = ("view", "reshape", "unsqueeze", "squeeze", "flatten", "permute", "transpose", "t", "expand", "clone", "contiguous", "alias",
              "detach", "to", "_to_copy", "lift_fresh_copy")


def looked_up(exported: Any) -> list[list[int]]:
    """Of the inputs whose numbers are looked up in a table as they are: place, and the rows of the smallest one; the least number too,
    where torch counts negative ones from the end. It raises an error for others; programs of other runtimes count from the end, read
    zeros, or end the process."""
    names = list(exported.graph_signature.user_inputs)
    found: dict[int, tuple[int, int]] = {}
    for node in exported.graph.nodes:
        for numbers, size, from_end in _lookups(node):
            while _passes_on(numbers):
                numbers = numbers.args[0]
            if numbers.op == "placeholder" and numbers.name in names and type(size) is int:
                place = names.index(numbers.name)
                rows, least = found.get(place, (size, -size))
                found[place] = min(size, rows), max(-size if from_end else 0, least)
    return [[place, rows, least] if least else [place, rows] for place, (rows, least) in sorted(found.items())]


def keep_within(exported: Any, ranges: dict[str, list[int | None]]) -> None:
    """Lower the limits of sizes that are counted through, and the numbers looked up in a table (learned positions), to what the table
    holds. The model raises an error beyond it; torch.export knows nothing of that, and some runtimes answer."""
    for node in exported.graph.nodes:
        for numbers, rows, _ in _lookups(node):
            count, first = _counted(numbers)
            if count is None or type(rows) is not int:
                continue
            for symbol in count.free_symbols:
                slope, constant = count.coeff(symbol), count.subs(symbol, 0)
                if str(symbol) in ranges and slope.is_positive and slope.is_Integer and constant.is_Integer and count == slope * symbol + constant:
                    limits, most = ranges[str(symbol)], int((rows - first - constant) // slope)
                    limits[1] = most if limits[1] is None else min(limits[1], most)


def _counted(numbers: Any) -> tuple[Any, int]:
    """How many numbers a node counts, as an expression of sizes (None: it does not count), and from which on."""
    first = 0
    while numbers.op == "call_function":
        name, arguments = str(numbers.target), numbers.args
        if name.startswith("aten.arange.") and arguments[2:3] in ((), (1,)):
            start = 0 if name == "aten.arange.default" else arguments[0]
            count = getattr(numbers.meta["val"].shape[0], "node", None)         # None: a number, and no size
            return (None, 0) if count is None or type(start) is not int else (count.expr, first + start)
        if name in ("aten.add.Tensor", "aten.sub.Tensor") and type(arguments[1]) is int and not numbers.kwargs:
            first += arguments[1] if "add" in name else -arguments[1]
        elif not _passes_on(numbers):
            break
        numbers = arguments[0]
    return None, 0


def _passes_on(node: Any) -> bool:
    return node.op == "call_function" and str(node.target).split(".")[1:2] in [[name] for name in _PASSES_ON]


def _lookups(node: Any) -> list[tuple[Any, Any, bool]]:
    """(the numbers, among how many entries they choose, whether negative ones count from the end) of a node of a graph."""
    kind, arguments = str(node.target), node.args
    if kind == "aten.embedding.default" or kind.startswith("aten.embedding_bag."):
        return [(arguments[1], arguments[0].meta["val"].shape[0], False)]
    if kind in ("aten.index_select.default", "aten.gather.default"):
        return [(arguments[2], _size(arguments[0], arguments[1]), False)]
    if kind == "aten.one_hot.default" and len(arguments) > 1 and arguments[1] != -1:        # -1: as many as there are
        return [(arguments[0], arguments[1], False)]
    if kind == "aten.index.Tensor":
        chosen = [(one, dimension) for dimension, one in enumerate(arguments[1]) if one is not None]
        if all(str(one.meta["val"].dtype) in ("torch.int64", "torch.int32") for one, _ in chosen):      # a mask has no numbers
            return [(one, _size(arguments[0], dimension), True) for one, dimension in chosen]
    return []


def _size(node: Any, dimension: int) -> Any:
    shape = node.meta["val"].shape
    return shape[dimension] if shape else 1
