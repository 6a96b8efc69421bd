"""Several collated batches as one, with the same samples in the same order."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

#: What a loss leaves out.
_IGNORED = -100


class NotMergeable(Exception):
    """Batches, or the micro-steps that they are for, cannot be one; the message is the reason."""


def samples(batch: Any, torch: Any) -> int:
    """How many samples a batch holds: the first dimension of all of its tensors. Raises NotMergeable."""
    if not isinstance(batch, MutableMapping):
        raise NotMergeable(f"a batch is a {type(batch).__name__}, no mapping of names to tensors")
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    sizes = {value.shape[0] if value.dim() else 0 for value in tensors}
    if len(sizes) != 1 or 0 in sizes:
        raise NotMergeable("the tensors of a batch do not all have one entry for each sample")
    return int(sizes.pop())


def weights(batch: Mapping[str, Any], names: Sequence[str], torch: Any) -> tuple[int, ...]:
    """What a mean over a batch may be the mean of: its samples, and of labels those that count; of labels for each token with the
    first ones and without (causal models shift them)."""
    found = [samples(batch, torch)]
    for name in names:
        labels = batch.get(name)
        if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
            counted = labels != _IGNORED
            found += torch.stack([counted.sum(), counted[..., 1:].sum()]).tolist() if labels.dim() > 1 else [int(counted.sum())]
    return tuple(found)


def merge(batches: Sequence[Any], paddings: Mapping[str, int], left: bool, torch: Any) -> tuple[Any, bool]:
    """One batch with all their samples, and whether shorter ones got more padding for it. Raises NotMergeable."""
    sizes = [samples(batch, torch) for batch in batches]
    first = batches[0]
    if any(type(batch) is not type(first) or list(batch) != list(first) for batch in batches):
        raise NotMergeable("batches have other entries in turn")
    merged, padded = copy.copy(first), False
    for name in first:
        values = [batch[name] for batch in batches]
        longest = _differing_lengths(values, torch)
        if longest:
            if name not in paddings or "attention_mask" not in first:
                raise NotMergeable(f"{name} has another length in each batch, and how it is padded is not known")
            values, padded = [_lengthened(value, longest, paddings[name], left, torch) for value in values], True
        merged[name] = _joined(name, values, sizes, torch)
    return merged, padded


def _differing_lengths(values: Sequence[Any], torch: Any) -> int:
    """The longest, of tensors of two dimensions whose second differs; 0 of others."""
    if not all(isinstance(value, torch.Tensor) and value.dim() == 2 for value in values):
        return 0
    lengths = {value.shape[1] for value in values}
    return max(lengths) if len(lengths) > 1 else 0


def _lengthened(value: Any, length: int, padding: int, left: bool, torch: Any) -> Any:
    more = length - value.shape[1]
    return torch.nn.functional.pad(value, (more, 0) if left else (0, more), value=padding)


def _joined(name: str, values: Sequence[Any], sizes: Sequence[int], torch: Any) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        kinds = {(type(value), value.dtype, value.device, value.shape[1:], value.layout, value.is_nested, value.requires_grad)
                 for value in values if isinstance(value, torch.Tensor)}
        if len(kinds) > 1 or not all(isinstance(value, torch.Tensor) for value in values):
            raise NotMergeable(f"{name} has another shape or kind in each batch")
        if first.layout is not torch.strided or first.is_nested or first.requires_grad:
            raise NotMergeable(f"{name} is no plain tensor")
        return torch.cat(list(values))
    if isinstance(first, list) and all(isinstance(value, list) and len(value) == size for value, size in zip(values, sizes)):
        return [item for value in values for item in value]
    if isinstance(first, (bool, str, type(None))) and all(value == first for value in values):
        return first
    raise NotMergeable(f"{name} is a {type(first).__name__}, and what it is for several batches is not known")
