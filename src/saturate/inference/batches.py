"""The user's inputs as batches: taking a few of them, and splitting them into those that are measured and those that
quantization is calibrated with.

A batch is a tuple of positional inputs. Its samples lie along the first dimension of its tensors, where these agree.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from saturate.errors import UsageError
from saturate.inference import users_code
from saturate.inference.samples import images
from saturate.techniques._trees import copied, taken_apart

#: No more than so many batches, and after the first no more than so many bytes, are taken of an iterable.
MOST = 64
MOST_BYTES = 256 * 2**20

#: Inputs beside tensors that are the same for every sample; inside of containers a number may belong to one of them.
_SHARED = (type(None), bool, int, float, str)
_NESTED = (type(None), bool)


def take(torch: Any, given: Any, what: str = "inputs", devices: set[str] | None = None) -> list[tuple[Any, ...]]:
    """The first batches of an iterable, copied to the CPU; an endless one is not exhausted. One tensor is one batch. `devices`: is
    given those that their tensors came from.

    Raises UsageError, which calls the iterable `what`, where it holds nothing or anything else than batches, and
    WorkloadFailed where reading it fails.
    """
    batches: list[tuple[Any, ...]] = []
    size_bytes = 0
    for item in _items(torch, given, what):
        batch = _batch(torch, item, what)
        if any(tensor.is_nested for tensor in tensors(torch, batch)):
            raise UsageError(f"`{what}` yields a nested tensor", cause="its sizes differ from sample to sample, so it has no shape that could be measured",
                             remedy="pad it to a dense tensor, with a mask beside it, in a small torch.nn.Module around the model")
        if samples(torch, batch) == 0:
            raise UsageError(f"`{what}` yields a batch without samples", cause="the first dimension of its tensors is 0",
                             remedy="leave empty batches out: nothing can be measured or compared with them")
        if devices is not None:
            devices.update(str(tensor.device) for tensor in tensors(torch, batch))
        size_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors(torch, batch))
        if batches and size_bytes > MOST_BYTES:
            break
        # A copy, because a batch may be a view of a data set, all of which would be written with it.
        batches.append(copied(batch, lambda path, leaf: _own(torch, leaf)))
        if len(batches) == MOST:
            break
    if not batches:
        raise UsageError(f"`{what}` holds no batch",
                         remedy="give an iterable of tuples of positional inputs; an iterator can be used up")
    return batches


def _items(torch: Any, given: Any, what: str) -> Iterable[Any]:
    if isinstance(given, torch.Tensor):
        yield given             # iterating over it would take the batch apart
        return
    if isinstance(given, torch.utils.data.Dataset) and not isinstance(given, torch.utils.data.IterableDataset):
        raise UsageError(f"`{what}` is a data set", cause="its items are samples, and the model is measured on batches of them",
                         remedy=f"{what}=torch.utils.data.DataLoader(dataset, batch_size=32); batch_size=None where an item is a batch")
    if isinstance(given, (Mapping, str, bytes)):
        raise UsageError(f"`{what}` is a {type(given).__name__}",
                         remedy=f"{what}=[(first, second, ...)], one tuple for each batch")
    if not isinstance(given, Iterable) and not hasattr(type(given), "__getitem__"):
        raise UsageError(f"`{what}` is a {type(given).__name__}", cause="it cannot be iterated over",
                         remedy="give an iterable of tuples of positional inputs: a DataLoader, a list")
    yield from users_code.items(given, f"`{what}`")


def _batch(torch: Any, item: Any, what: str) -> tuple[Any, ...]:
    if isinstance(item, torch.Tensor):
        return (item,)
    if isinstance(item, (list, tuple)):
        return tuple(item)
    remedy = f"{what}=((item,) for item in ...), one tuple of positional inputs for each batch"
    if type(item).__name__ == "ndarray":
        remedy = f"{what}=(torch.from_numpy(item) for item in ...)"
    if isinstance(item, Mapping):
        remedy = f"{what}=((batch['input_ids'], batch['attention_mask']) for batch in loader), in the forward's order"
    raise UsageError(f"`{what}` yields {type(item).__name__}, not tuples of positional inputs", remedy=remedy)


def _own(torch: Any, leaf: Any) -> Any:
    return apart(leaf.to("cpu", copy=True), leaf) if isinstance(leaf, torch.Tensor) else copy.copy(leaf)


def apart(tensor: Any, given: Any) -> Any:
    """What was made of the tensor `given`, on its own, that asks for gradients where that does: models may differentiate by their inputs."""
    return tensor.detach().requires_grad_(given.requires_grad)


def signature_of(call: Callable[..., Any]) -> inspect.Signature | None:
    """None where it has none: compiled code."""
    try:
        return inspect.signature(call)
    except (TypeError, ValueError):
        return None


def call_of(module: Any) -> Callable[..., Any]:
    """What takes the inputs where the module is called: its forward, or a `__call__` of its class with parameters of its own.
    One that takes anything (*inputs, **named) hands it on to the forward."""
    signature = signature_of(module.__call__)
    kinds = {one.kind for one in signature.parameters.values()} if signature is not None else set()
    own = kinds & {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return module.__call__ if own else module.forward


def by_place(signature: inspect.Signature | None, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """A call with keywords as positional inputs, up to the last one that is given; defaults fill what lies between.

    Raises TypeError as the call itself would, and for a keyword that has no place.
    """
    if not named:
        return inputs
    if signature is None:
        raise TypeError(f"the model's parameters are not known: give {', '.join(named)} by place")
    bound = signature.bind(*inputs, **named)
    kinds = {name: one.kind for name, one in signature.parameters.items() if name in bound.arguments}
    alone = [name for name, kind in kinds.items() if kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)]
    if alone:
        raise TypeError(f"{', '.join(alone)} can be given by keyword only, and candidates take their inputs by place")
    last = max((place for place, name in enumerate(signature.parameters) if name in kinds), default=-1)
    bound.apply_defaults()
    # *inputs is one parameter and any number of places; nothing that can be given by place comes after it.
    return bound.args if len(bound.args) > len(signature.parameters) else bound.args[:max(last + 1, len(inputs))]


def check_call(call: Callable[..., Any], batch: tuple[Any, ...], what: str = "inputs") -> None:
    """Raises UsageError, which names `what`, where `call` cannot take that many positional inputs: a loader's batch often holds the
    target too."""
    signature = signature_of(call)
    if signature is None:
        return                  # the first call will tell
    try:
        signature.bind(*batch)
    except TypeError as error:
        raise UsageError(f"the model does not take a batch of `{what}`: {len(batch)} positional inputs",
                         cause=str(error), remedy=_fitting(signature, batch, what)) from None


def _fitting(signature: inspect.Signature, batch: tuple[Any, ...], what: str) -> str:
    """What the user can do about a batch that does not go into the call."""
    parameters = signature.parameters.values()
    if any(one.kind is one.KEYWORD_ONLY and one.default is one.empty for one in parameters):
        return ("inputs are given by place: wrap the model in a small torch.nn.Module whose forward(x, ...) calls it with "
                "its keywords")
    places = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = sum(one.default is one.empty for one in places)
    if len(batch) < needed:
        return f"each batch is a tuple of all {needed} inputs: {', '.join(one.name for one in places[:needed])}"
    if len(batch) == 1 + len(places):
        return f"leave the targets out: {what}=(batch[:-1] for batch in loader)"
    return f"each batch is a tuple of what the forward takes: {', '.join(one.name for one in places) or 'nothing'}"


def split(torch: Any, batches: list[tuple[Any, ...]]) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]],
                                                               list[str]]:
    """(measured, for calibration, what the user should know). No sample is in both, unless a sentence says so.

    Batches of one shape alternate, so that both see every shape that occurs twice. A single batch is cut in two, and the
    measured half is repeated to the size that the user gave: a call costs what the user's call costs.
    """
    full, rest = without_last(torch, batches)
    if len(batches) > 1:
        places: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for place, one in enumerate(full):
            places.setdefault(signature(torch, one), []).append(place)
        grouped = list(itertools.chain.from_iterable(places.values()))
        measured, calibration = ([full[place] for place in sorted(grouped[first::2])] for first in (0, 1))
        return measured, calibration + rest, []
    batch = batches[0]
    rows = samples(torch, batch)
    if rows is None or rows < 2 or not _divisible(torch, batch):
        return batches, batches, ["inputs is a single batch that cannot be divided: quantization is calibrated with "
                                  "the very inputs that are measured; give calibration= or more batches"]
    half = (rows + 1) // 2
    repeated = torch.arange(rows, device="cpu") % half
    return [_rows(torch, batch, repeated)], [_rows(torch, batch, torch.arange(half, rows, device="cpu"))], [
        f"inputs is a single batch: {rows - half} of its {rows} samples are kept for calibration, and the others are "
        "repeated to fill the measured batch"]


def of_other_sizes(torch: Any, batches: list[tuple[Any, ...]], measured: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Those of `batches` with a size that is smaller or larger than in all measured ones, and in those before it. They, too,
    say which sizes vary."""
    seen: dict[tuple[int, int, int], tuple[float, float]] = {}

    def widens(batch: tuple[Any, ...]) -> bool:
        before = dict(seen)
        for place, shape in enumerate(signature(torch, batch)):
            for dimension, size in enumerate(shape):
                where = place, len(shape), dimension
                least, most = seen.get(where, (size, size))
                seen[where] = min(least, size), max(most, size)
        return seen != before

    for batch in measured:
        widens(batch)
    return [batch for batch in batches if widens(batch)]


def without_last(torch: Any, batches: list[tuple[Any, ...]]) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """(batches, the last one where it is only the smaller rest of a data set): measured calls are all of one size
    then."""
    if len(batches) > 1:
        sizes = [samples(torch, batch) for batch in batches[-2:]]
        if None not in sizes and sizes[1] < sizes[0]:
            return batches[:-1], batches[-1:]
    return batches, []


def samples(torch: Any, batch: tuple[Any, ...]) -> int | None:
    """Samples in a batch; None where its tensors do not agree on a first dimension, or have channels there (`images`)."""
    sizes = {tensor.shape[0] for tensor in tensors(torch, batch) if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 and not images(batch) else None


def total_samples(torch: Any, batches: list[tuple[Any, ...]]) -> int:
    """Samples in all batches; a batch without a first dimension counts as one."""
    return sum(samples(torch, batch) or 1 for batch in batches)


def signature(torch: Any, batch: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
    """Shapes of all tensors of a batch."""
    return tuple(tuple(tensor.shape) for tensor in tensors(torch, batch))


def tensors(torch: Any, value: Any) -> list[Any]:
    """The tensors in nested tuples, lists, mappings and dataclasses, in order, as often as they occur."""
    return taken_apart(value, torch)[1]


def size_bytes(torch: Any, value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(torch, value))


def _divisible(torch: Any, batch: tuple[Any, ...]) -> bool:
    """Whether all that belongs to single samples is in dense tensors: a list of texts beside them would keep its length,
    and others cannot be cut."""
    found: list[bool] = []

    def add(path: tuple[Any, ...], leaf: Any) -> Any:
        dense = not isinstance(leaf, torch.Tensor) or leaf.layout == torch.strided
        found.append(dense and isinstance(leaf, (torch.Tensor, *(_SHARED if len(path) == 1 else _NESTED))))
        return leaf

    copied(batch, add)
    return all(found)


def _rows(torch: Any, batch: tuple[Any, ...], index: Any) -> tuple[Any, ...]:
    return copied(batch, lambda path, leaf: apart(leaf[index], leaf) if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf)
