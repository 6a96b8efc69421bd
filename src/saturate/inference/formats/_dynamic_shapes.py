"""Dynamic shapes: which sizes of a model's inputs stay open when it is captured, and within which limits.

    plans                   which sizes to leave open, the most general plan first
    example                 the tensors that a plan is captured with
    with_rows, with_one     tensors of other sizes, to try what was captured
    check_open              are the sizes of the plan open in what was captured?
    shapes_and_ranges       the limits of the open sizes, which follow from the guards that torch.export recorded
    kept_open               are they still open in what was made of the program?
    one_size_only           a guard that failed, in words

Nothing is captured or run here: `_program` does both. Whether a guard holds for all sizes is computed in `_sizes`.
"""

from __future__ import annotations

import bisect
import contextlib
import re
from collections.abc import Iterator
from typing import Any

from saturate.inference.formats import _sizes

#: What torch.export says of a size that was to stay open, and that it fixed.
_GUARD = re.compile(r"Guard failed: (.*)")
_SIZE = r"tensors_(\d+)\.size\(\)\[(\d+)\]"
_OF_ONE_SIZE = re.compile(rf"{_SIZE} (==|!=|<=?|>=?) (\d+)\s*")

#: So many sizes are looked at for one that goes another way.
_NEXT = 256

#: {dimension: name of its size} of every input tensor.
Sizes = list[dict[int, str]]


#: What makes a number of a size: Python asks for one.
_NUMBERS = "by len(x), where x.shape[0] stays open, by int(), or in a loop or recurrent layer, which is unrolled"


class Decided(ValueError):
    """The model makes a number of a size that was left open, branches on it, or may do so: what is captured is known to hold for some of the sizes only."""


def plans(batches: list[list[Any]], batch_size: int | None, open_sizes: bool) -> Iterator[Sizes]:
    """Which sizes to leave open, the most general first: what varies must stay open, the batch size should."""
    varying: Sizes = []
    for tensors in zip(*batches):
        sizes: dict[int, str] = {}
        for dimension in range(tensors[0].dim() if len({tensor.dim() for tensor in tensors}) == 1 else 0):
            seen = tuple(tensor.shape[dimension] for tensor in tensors)
            if len(set(seen)) > 1:
                sizes[dimension] = f"size {seen}"
        varying.append(sizes)
    batch = [{0: "batch"} if tensor.dim() and tensor.shape[0] == batch_size else {} for tensor in batches[0]]
    general = [{**first, **second} for first, second in zip(batch, varying)]
    if open_sizes and general != varying:
        yield general
    if open_sizes or not any(varying):
        yield varying


def example(torch: Any, batches: list[list[Any]], sizes: Sizes) -> list[Any]:
    """The largest batch; what has one row gets a second, because torch.export takes a size of one for a constant."""
    largest = max(batches, key=lambda tensors: sum(tensor.numel() for tensor in tensors))
    if not any(0 in open_sizes and tensor.shape[0] == 1 for tensor, open_sizes in zip(largest, sizes)):
        return largest
    return with_rows(torch, largest, sizes, 2)


def with_rows(torch: Any, tensors: list[Any], sizes: Sizes, rows: int) -> list[Any]:
    """The tensors with another number of rows: the first ones, or some of them again."""
    found = []
    for tensor, open_sizes in zip(tensors, sizes):
        if 0 in open_sizes and tensor.shape[0]:
            index = torch.arange(rows, device=tensor.device) % tensor.shape[0]
            tensor = tensor.index_select(0, index)
        found.append(tensor)
    return found


def with_one(tensors: list[Any], shapes: list[dict[str, Any]], name: str) -> list[Any]:
    """The tensors with one element in every dimension whose size has this name."""
    found = []
    for tensor, one in zip(tensors, shapes):
        for dimension, size in enumerate(one["shape"]):
            tensor = tensor.narrow(dimension, 0, 1).contiguous() if size == name else tensor
        found.append(tensor)
    return found


def check_open(exported: Any, sizes: Sizes) -> None:
    """Raises Decided where torch.export made a number of a size that was to stay open."""
    for index, (tensor, open_sizes) in enumerate(zip(_input_values(exported), sizes)):
        for dimension in open_sizes:
            size = tensor.shape[dimension]
            number = size if isinstance(size, int) else size.node.maybe_as_int()     # torch has numbers in the guise of open sizes, too
            if number is not None:
                raise Decided(f"the model makes a number of the size {number} in dimension {dimension} of input tensor "
                              f"{index}: {_NUMBERS}")


def shapes_and_ranges(torch: Any, exported: Any, batches: list[list[Any]], sizes: Sizes) -> dict[str, Any]:
    """`tensors` and `ranges` of a signature, as far as they follow from the program. Raises Decided as `_guarded` does."""
    return _as_one(_shapes(exported, _guarded(torch, exported, batches)), sizes)


@contextlib.contextmanager
def kept_open(torch: Any, exported: Any, ranges: dict[str, list[int | None]]) -> Iterator[None]:
    """Around what takes a captured program apart for another runtime. It may fix sizes by that (pooling to a given size is written out
    for the size at hand), which torch keeps as guards that nobody looks at. Raises Decided.

    Other guards than equalities are mostly a compiler's reasons for one kernel or another, each of which is right.
    """
    sizes = (size for value in _input_values(exported) for size in value.shape if isinstance(size, torch.SymInt))
    guards = next((size.node.shape_env.guards for size in sizes), [])
    before = len(guards)
    yield
    for guard in guards[before:]:
        expression = guard.expr     # what it fixes is replaced in what follows, so as it was
        if type(expression).__name__ != "Equality" or not expression.free_symbols:
            continue
        if not _sizes.always(expression, {symbol: (ranges.get(str(symbol)) or [0])[0] for symbol in expression.free_symbols}):
            raise Decided(f"sizes are open, and what is made of the program is right where {_in_words(expression, _places(exported))} only")


def _guarded(torch: Any, exported: Any, batches: list[list[Any]]) -> dict[Any, Any]:
    """Within which limits the open sizes may vary: those that torch.export gives are of each size alone, and a branch (on a rest,
    on one size) may have gone the other way between them. Raises Decided where no limits around the sizes of the batches help."""
    limits = dict(exported.range_constraints)
    seen: dict[Any, int] = {}
    guards: list[Any] = []
    for value, *tensors in zip(_input_values(exported), *batches):
        for dimension, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt):
                environment = size.node.shape_env       # one for all sizes
                guards = [environment.replace(guard.expr) for guard in environment.guards]
                symbol, least = size.node.expr, min(tensor.shape[dimension] for tensor in tensors)
                seen[symbol] = min(least, seen.get(symbol, least))
    for guard in guards:
        limits |= _narrowed(guard, limits, seen, _places(exported))
    return limits


def _places(exported: Any) -> dict[str, str]:
    """Where the size of each name is found first: {"s85": "input_0.shape[1]"}."""
    found: dict[str, str] = {}
    for index, value in enumerate(_input_values(exported)):
        for dimension, size in enumerate(value.shape):
            found.setdefault(str(size), f"input_{index}.shape[{dimension}]")
    return found


def _in_words(guard: Any, places: dict[str, str]) -> str:
    return re.sub(r"\b[a-z]\d+\b", lambda name: places.get(name[0], name[0]), str(guard))


def _narrowed(guard: Any, limits: dict[Any, Any], seen: dict[Any, int], places: dict[str, str]) -> dict[Any, Any]:
    """The limits of the sizes in a guard, from as low as it is known to hold in all of them; they keep what was seen."""
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    def from_(least: dict[Any, int]) -> dict[Any, Any]:
        return {symbol: ValueRanges(size, limits[symbol].upper) for symbol, size in least.items()}

    def holds(least: dict[Any, int]) -> bool:
        return bool(bound_sympy(guard, limits | from_(least)).lower) or _sizes.always(guard, least)

    lowest = {symbol: int(limits[symbol].lower) for symbol in seen if symbol in limits and symbol in guard.free_symbols}
    if holds(lowest):
        return from_(lowest)
    least = {symbol: max(seen[symbol], size) for symbol, size in lowest.items()}
    if not holds(least):
        why = "the model branches on sizes" if _fails_somewhere(guard, least) else "the model computes with sizes"
        raise Decided(f"{why}, and what is captured is known to hold where {_in_words(guard, places)} only")
    for symbol in least:                # what is known of a range is known of each part of it
        first = int(limits[symbol].lower)
        least[symbol] = first + bisect.bisect_left(range(first, least[symbol]), True, key=lambda size: holds({**least, symbol: size}))
    return from_(least)


def _fails_somewhere(guard: Any, least: dict[Any, int]) -> bool:
    """Whether a guard is false for one of the next sizes above `least`."""
    false = "BooleanFalse"
    return any(type(guard.subs({**least, symbol: size + more})).__name__ == false for symbol, size in least.items() for more in range(_NEXT))


def _shapes(exported: Any, within: dict[Any, Any]) -> dict[str, Any]:
    """`tensors` and `ranges` of a signature."""
    tensors = []
    ranges: dict[str, list[int | None]] = {}
    limits = {str(symbol): limit for symbol, limit in within.items()}
    for value in _input_values(exported):
        shape = [size if isinstance(size, int) else str(size) for size in value.shape]
        tensors.append({"dtype": str(value.dtype).removeprefix("torch."), "shape": shape})
        for name in shape:
            if name in limits:
                ranges[name] = [_finite(limits[name].lower) or 0, _finite(limits[name].upper)]
    return {"tensors": tensors, "ranges": ranges}


def _as_one(shapes: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """The same where first dimensions that were one size in the inputs have one name: ids and their mask make one batch, though
    torch.export may find nothing in the program that says so. Tried with one row alone, each would fail for the other's sake."""
    names: dict[str, str] = {}      # in the plan: in the program
    renamed: dict[str, str] = {}
    ranges = dict(shapes["ranges"])
    for open_sizes, one in zip(sizes, shapes["tensors"]):
        name = one["shape"][0] if 0 in open_sizes else None
        if name not in ranges:
            continue
        first = names.setdefault(open_sizes[0], name)
        if first != name:
            renamed[name] = first
            (least, most), (other, another) = ranges[first], ranges.pop(name)
            ranges[first] = [max(least, other), min((limit for limit in (most, another) if limit is not None), default=None)]
    tensors = [{**one, "shape": [renamed.get(size, size) for size in one["shape"]]} for one in shapes["tensors"]]
    return {**shapes, "tensors": tensors, "ranges": ranges}


def _finite(bound: Any) -> int | None:
    """A bound as a number; torch writes "no limit" as infinity or as a huge integer."""
    try:
        number = int(bound)
    except (TypeError, ValueError, OverflowError, AttributeError):      # sympy's infinities raise one or the other
        return None
    return number if abs(number) < 2**62 else None


def _input_values(exported: Any) -> list[Any]:
    """The (fake) tensors that stand for the user's inputs in the graph, in order."""
    names = set(exported.graph_signature.user_inputs)
    return [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder" and node.name in names]


def one_size_only(problem: Exception | None) -> str:
    """What a size that could not stay open, or a guard on it, means; "" for another problem."""
    if isinstance(problem, Decided):
        return f"{problem}; inputs that are padded to one size would do"
    must = _guarded_by(problem)
    if not must:
        return ""
    return (f"sizes vary in the inputs, and what is captured holds where {must}: "
            "recurrent layers and loops are unrolled, branches on a size are decided, and len(x) is a number (x.shape[0] stays open); "
            "else pad the inputs to one size")


def why_fixed(problem: Exception | None) -> str:
    """Why the batch size is not open; "" where nothing is known to say."""
    if isinstance(problem, Decided):
        return str(problem)
    must = _guarded_by(problem)
    return f"the model branches on sizes, and what is captured holds where {must}" if must else ""


def _guarded_by(problem: Exception | None) -> str:
    """What a guard that failed demands of sizes, in words; "" for another problem."""
    found = _GUARD.search(str(problem))
    if found is None or not re.search(_SIZE, found[1]):
        return ""
    if simple := _OF_ONE_SIZE.fullmatch(found[1]):
        tensor, dimension, relation, number = simple.groups()
        return f"dimension {dimension} of input tensor {tensor} is {number if relation == '==' else f'{relation} {number}'}"
    return re.sub(_SIZE, r"input_\1.shape[\2]", found[1].strip())
