"""Which samples went through a model: names for them, to find the same sample again in other batches.

A sample's name is a hash of its values. Calibration data that the check scores as well is found this way.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

#: Calibration samples that the check uses too are refused from more than this share on: some are what a data set
#: repeats by itself.
MOST_SHARED = 0.01


@dataclass(frozen=True)
class Overlap:
    """Calibration samples that the check uses too."""

    shared: int
    calibration: int

    @property
    def refused(self) -> bool:
        return self.shared > MOST_SHARED * self.calibration

    def words(self, what: str = "calibration") -> str:
        return (f"{self.shared} of {self.calibration} {what} samples are among those that the check scores: what is "
                "fitted to them looks better than it is")


def overlap(calibration: Iterable[tuple[Any, ...]], used: frozenset[str]) -> Overlap:
    """How many samples of the calibration batches are among those `used` (names, as from `names`)."""
    found = [any(name in used for name in sample) for inputs in calibration for sample in names(inputs)]
    return Overlap(sum(found), len(found))


def names(inputs: tuple[Any, ...]) -> list[tuple[str, ...]]:
    """For each sample of a batch the names that it goes by: its rows in all tensors that are as long as the largest one;
    without tensors, each text, or the whole call.

    Rows of integers have a second name without what their ends repeat: padding differs with the batch that a text
    happens to be in.
    """
    found = list(leaves(inputs))
    arrays = [dense(leaf) for leaf in found if len(getattr(leaf, "shape", ()))]
    if not arrays:
        texts = [leaf for leaf in found if isinstance(leaf, (str, bytes))] or [found]
        return [(_name(repr(text).encode()),) for text in texts]
    arrays.sort(key=lambda array: -prod(array.shape))
    if len(arrays) == 1 and len(arrays[0].shape) == 1:      # no batch: its numbers are no samples
        return [(_name(raw(arrays[0])),)]
    batch = arrays[0].shape[0]
    together = [array for array in arrays if array.shape[0] == batch]
    return [_names([array[row] for array in together]) for row in range(batch)]


def _names(rows: list[Any]) -> tuple[str, ...]:
    whole = _name(b"".join(map(raw, rows)))
    if len(rows[0].shape) != 1 or "int" not in str(rows[0].dtype):
        return (whole,)
    begin, end = _without_padding(rows[0].tolist())
    if end - begin in (0, len(rows[0])):
        return (whole,)
    cut = [row[begin:end] if row.shape == rows[0].shape else row for row in rows]
    return whole, _name(b"".join(map(raw, cut)))


def _without_padding(values: list[int]) -> tuple[int, int]:
    """Where a row begins and ends without the numbers that its ends repeat; one number is no padding."""
    begin, end = 0, len(values)
    while end and values[end - 1] == values[-1]:
        end -= 1
    while begin < end and values[begin] == values[0]:
        begin += 1
    return begin if begin > 1 else 0, end if len(values) - end > 1 else len(values)


class Digest:
    """Of all values that were fed to it, in order: equal where every bit is."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def feed(self, value: Any) -> None:
        for leaf in leaves(value):
            if hasattr(leaf, "shape"):
                self._hash.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
                self._hash.update(raw(leaf))
            else:
                self._hash.update(repr(leaf).encode())

    def hex(self) -> str:
        return self._hash.hexdigest()


def leaves(value: Any) -> Iterator[Any]:
    """What is inside tuples, lists, dictionaries and dataclasses, in order."""
    if isinstance(value, Mapping):
        items: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        yield value
        return
    for item in items:
        yield from leaves(item)


def tensors(value: Any) -> list[Any]:
    """The torch tensors among the leaves."""
    return [leaf for leaf in leaves(value) if is_tensor(leaf)]


def dense(array: Any) -> Any:
    """A tensor on the CPU, strided; anything else as it is."""
    if not is_tensor(array):
        return array
    array = array.detach().cpu()
    return array if str(array.layout) == "torch.strided" else array.to_dense()


def raw(array: Any) -> bytes:
    """The bytes of a tensor or an array."""
    if not is_tensor(array):
        return array.tobytes()
    plain = dense(array).resolve_conj().resolve_neg().contiguous()
    size_bytes = plain.numel() * plain.element_size()
    return ctypes.string_at(plain.data_ptr(), size_bytes) if size_bytes else b""    # numpy has no bfloat16


def is_tensor(value: Any) -> bool:
    """Whether it is a torch tensor; torch need not be imported for the question."""
    return hasattr(value, "untyped_storage")


def _name(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
