"""Rules of operations that move, split, join and look up. See `rules`."""

from __future__ import annotations

from math import prod
from typing import Any

from saturate.inference.pruning.labels import FIXED, Label
from saturate.inference.pruning.rules import Dims, Labels, Rules, where
from saturate.inference.pruning.tracing import Call

RULES = Rules()


@RULES.of("view", "_unsafe_view", "_reshape_alias")
def reshape(labels: Labels, call: Call) -> list[Dims] | None:
    """Row-major: every dimension is split at the boundaries that both shapes have between them, and merged again."""
    source, target = call.arguments["self"], call.outputs[0]
    if source.dtype != target.dtype or source.numel() == 0:
        return None
    bounds = sorted({prod(shape[place:]) for shape in (source.shape, target.shape) for place in range(len(shape) + 1)})
    if any(high % low for low, high in zip(bounds, bounds[1:])):
        return None
    factors: list[Label] = []
    for place, label in enumerate(labels.of(source)):
        factors += labels.atoms.split(label, _sizes(bounds, source.shape, place))
    made: Dims = []
    for place in range(target.ndim):
        sizes = _sizes(bounds, target.shape, place)
        made.append(labels.atoms.merge(factors[:len(sizes)], sizes))
        factors = factors[len(sizes):]
    return [made]


def _sizes(bounds: list[int], shape: Any, place: int) -> list[int]:
    """The factors of one dimension, outermost first."""
    low, high = prod(shape[place + 1:]), prod(shape[place:])
    inside = [bound for bound in bounds if low <= bound <= high]
    return [upper // lower for lower, upper in zip(inside, inside[1:])][::-1]


@RULES.of("permute", "transpose", "t", "unsqueeze", "squeeze", "select", "unbind")
def rearrangement(labels: Labels, call: Call) -> list[Dims]:
    source = call.arguments["self"]
    made = list(labels.of(source))
    if call.name == "permute":
        made = [made[dim] for dim in call.arguments["dims"]]
    elif call.name == "transpose":
        one, other = call.arguments["dim0"], call.arguments["dim1"]
        if made:
            made[one], made[other] = made[other], made[one]
    elif call.name == "t":
        made.reverse()
    elif call.name == "unsqueeze":
        made.insert(call.arguments["dim"] % (len(made) + 1), None)
    elif call.name == "squeeze":
        gone = [dim for dim in where(call, source.ndim) if source.shape[dim] == 1]
        made = [label for dim, label in enumerate(made) if dim not in gone]
    else:
        dim = call.arguments["dim"] % len(made)
        labels.fix(source, dim)
        del made[dim]
    return [made] * len(call.outputs)


@RULES.of("slice")
def part(labels: Labels, call: Call) -> list[Dims]:
    made = list(labels.of(call.arguments["self"]))
    dim = call.arguments["dim"] % len(made)
    label = made[dim]
    if label is not None:
        made[dim] = label[call.arguments["start"]:call.arguments["end"]:call.arguments["step"]]
    return [made]


@RULES.of("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")
def pieces(labels: Labels, call: Call) -> list[Dims]:
    whole = labels.of(call.arguments["self"])
    dim = call.arguments["dim"] % len(whole)
    label, found, start = whole[dim], [], 0
    for output in call.outputs:
        end = start + output.shape[dim]
        found.append([*whole[:dim], label and label[start:end], *whole[dim + 1:]])
        start = end
    return found


@RULES.of("expand", "repeat")
def repetition(labels: Labels, call: Call) -> list[Dims]:
    """What one index is repeated to is the same at every place: any number of places is right, so they get atoms."""
    source, target = call.arguments["self"], call.outputs[0]
    made: Dims = []
    for back in range(target.ndim, 0, -1):
        size = target.shape[-back]
        before = source.shape[-back] if source.ndim >= back else 1
        label = labels.of(source)[-back] if source.ndim >= back else None
        if before == 1 and size > 1:
            made.append(labels.atoms.fresh(size))
        else:
            made.append(label and label * (size // before))
    return [made]


@RULES.of("cat", "stack")
def joined(labels: Labels, call: Call) -> list[Dims]:
    sources = [tensor for tensor in call.arguments["tensors"] if tensor.numel() or tensor.ndim > 1]
    dims = [list(labels.of(tensor)) for tensor in sources]
    if call.name == "stack":
        place = call.arguments["dim"] % call.outputs[0].ndim
        for one in dims:
            one.insert(place, None)
        sizes = [1] * len(sources)
    else:
        place = call.arguments["dim"] % call.outputs[0].ndim
        sizes = [tensor.shape[place] for tensor in sources]
    made = list(dims[0])
    for other in dims[1:]:
        made = [None if dim == place else labels.atoms.match(label, other[dim]) for dim, label in enumerate(made)]
    if any(one[place] for one in dims):
        made[place] = [atom for one, size in zip(dims, sizes) for atom in one[place] or [FIXED] * size]
    return [made]


@RULES.of("constant_pad_nd")
def padded(labels: Labels, call: Call) -> list[Dims]:
    """Padding has an index of its own that stays; a ResNet pads channels in some shortcuts."""
    made = list(labels.of(call.arguments["self"]))
    amounts = call.arguments["pad"]
    for back in range(1, len(amounts) // 2 + 1):
        before, after = amounts[2 * back - 2], amounts[2 * back - 1]
        label = made[-back]
        if label is None or not (before or after):
            continue
        if before < 0 or after < 0:     # cut off instead
            labels.atoms.fix_all(label)
            made[-back] = None
        else:
            made[-back] = [FIXED] * before + label + [FIXED] * after
    return [made]


@RULES.of("embedding", "index_select", "index")
def lookup(labels: Labels, call: Call) -> list[Dims] | None:
    if call.name == "embedding":
        source, indices, dim = call.arguments["weight"], call.arguments["indices"], 0
    elif call.name == "index_select":
        source, indices, dim = call.arguments["self"], call.arguments["index"], call.arguments["dim"]
    else:
        given = [(dim, indices) for dim, indices in enumerate(call.arguments["indices"]) if indices is not None]
        if len(given) != 1 or given[0][1].dtype == labels.torch.bool:
            return None
        source, (dim, indices) = call.arguments["self"], given[0]
    made = list(labels.of(source))
    dim %= len(made)
    labels.fix(source, dim)
    return [[*made[:dim], *[None] * indices.ndim, *made[dim + 1:]]]
