"""A few numbers that stand for many: what is read from parameters while training runs."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

from saturate.techniques import _common

_GOLDEN = (math.sqrt(5) - 1) / 2


def few(parameters: list[Any]) -> list[Any]:
    """At most eight of them, spread over the model."""
    return parameters[:: max(1, len(parameters) // 8)][:8]


def strided(parameter: Any, entries: int) -> list[float]:
    """Up to `entries` values of a tensor, spread over it, in its own precision (at least float32), two numbers for each complex
    one; of a sharded tensor, of this rank's shard: no rank may have to wait for another here."""
    return _strided(parameter, entries).tolist()


def all_strided(parameters: Sequence[Any], entries: int) -> list[list[float]]:
    """`strided` of each of them. An accelerator is waited for once, and not once for each tensor: where other programs use it as
    well, each time is a turn of all of them."""
    return _read([_strided(parameter, entries) for parameter in parameters])


def _read(rows: Sequence[Any]) -> list[list[float]]:
    """The numbers of each of these tensors of one dimension, those of one format on one device in one go."""
    import torch

    alike: dict[Any, list[int]] = {}
    for place, row in enumerate(rows):
        alike.setdefault((row.device, row.dtype) if type(row) is torch.Tensor else place, []).append(place)
    found: list[list[float]] = [[] for _ in rows]
    for places in alike.values():
        together = (torch.cat([rows[place] for place in places]) if len(places) > 1 else rows[places[0]]).tolist()
        for place in places:
            count = rows[place].numel()
            found[place], together = together[:count], together[count:]
    return found


def _strided(parameter: Any, entries: int) -> Any:
    """As `strided`, where the tensor is."""
    import torch

    return _common.reals(spread(local(parameter), entries), torch).reshape(-1)


def local(tensor: Any) -> Any:
    """What this rank has of a sharded tensor, in its own memory; any other as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def entries_of(torch: Any, tensor: Any, entries: int) -> list[Any]:
    """Up to `entries` values of a tensor of any class and layout; none of one that cannot be read like that."""
    try:
        plain = local(tensor.detach())
        if plain.layout is torch.sparse_coo:
            plain = plain.coalesce().values()
        elif plain.is_nested or plain.layout is not torch.strided:
            plain = plain.values()
        # A class that only adds functions (a volume with its geometry) may do anything where it is indexed.
        if type(plain) is not torch.Tensor and type(plain).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
            plain = plain.as_subclass(torch.Tensor)
        return list(spread(plain, entries).tolist())
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return []


def spread(tensor: Any, entries: int) -> Any:
    """Up to `entries` values of a tensor, spread over all of its dimensions, in one dimension: each is `stride_of` after the one before."""
    import torch

    whole = tensor.detach()
    step = stride_of(whole.shape, entries)
    if not _is_copied_flat(torch, whole):
        return whole.reshape(-1)[::step][:entries]
    # `reshape` would copy all of it for the sake of a few: of an expanded buffer, many times what it holds in memory.
    rest = torch.arange(0, whole.numel(), step, device=whole.device)[:entries]
    places, last = torch.zeros_like(rest), 0
    for size, stride in zip(reversed(whole.shape), reversed(whole.stride())):
        places += rest % size * stride
        rest = rest // size
        last += (size - 1) * stride
    return whole.as_strided((last + 1,), (1,))[places]


def stride_of(shape: Sequence[int], entries: int) -> int:
    """How far apart entries are read, such that there are at most so many, and that they lie in rows and columns alike.

    An even share of a matrix is mostly whole rows, and would read one column: of each output what comes from one input, which a
    training that mixes its inputs up leaves as they are. So a share is whole rows and the golden ratio of one, which leaves no
    column far from one that is read, and has no divisor in common with any dimension but the first.
    """
    count = math.prod(shape)
    step = max(1, count // entries)
    row = count // shape[0] if shape and count else 1
    if 1 < row <= step:
        step += round(_GOLDEN * row) - step % row
    while any(math.gcd(step, size) > 1 for size in shape[1:]):
        step += 1
    return step


def _is_copied_flat(torch: Any, tensor: Any) -> bool:
    """Whether `reshape(-1)` copies a tensor whose memory can be read by strides."""
    return (type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
            and not tensor.is_contiguous())


def totals(losses: Sequence[Any]) -> list[float]:
    """The sum of each loss, or of what else a backward pass began with, in float64. A device is waited for once."""
    import torch

    sums = [_common.reals(loss, torch).double().sum() for loss in losses]
    # Of another class, such as a sharded one, it may have no list of its numbers.
    known = [one.reshape(1) if type(one) is torch.Tensor else torch.tensor([float(one)], dtype=torch.float64, device="cpu") for one in sums]
    return [total for (total,) in _read(known)]


def double(tensor: Any) -> bool:
    """Whether it holds numbers of 64 bits, complex ones pairs of them."""
    return str(tensor.dtype) in ("torch.float64", "torch.complex128")


def digest(tensor: Any, entries: int = 4096) -> str:
    """Stands for a tensor of any class and layout: its shape, and up to `entries` values spread over it, as far as they can be read."""
    import torch

    parts = [tensor]
    if tensor.layout is torch.sparse_coo:
        whole = tensor.detach().coalesce()
        parts = [whole.indices(), whole.values()]
    shape = None if tensor.is_nested else tuple(tensor.shape)
    seen = [entries_of(torch, part, entries) for part in parts]
    return f"{zlib.crc32(repr((shape, *seen)).encode()):08x}"


def perturb(torch: Any, parameter: Any, relative: float, signs: Any) -> None:
    """Multiply every entry by 1 + relative * its sign. In a format of 16 bits that is so coarse that 1 + relative would be 1, the
    magnitude of each entry goes to the next number up or down instead; zero stays zero, as it does in the product."""
    if not (parameter.is_floating_point() and parameter.element_size() == 2 and relative < torch.finfo(parameter.dtype).eps):
        parameter.mul_(1 + relative * signs.to(parameter.dtype))
        return
    # Read as integers, neighbours of these formats differ by one; the sign is a bit of its own.
    parameter.view(torch.int16).add_(signs.to(torch.int16) * (parameter != 0))
