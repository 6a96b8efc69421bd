"""An operator's recorded arguments, read with suspicion: a trace may hold anything, and old ones hold little.

Whatever is missing or makes no sense raises `Unknown`, which `flops.cost` turns into None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:        # the agent reads with this module too, where numpy may be missing
    from saturate.trace.columns import Signature

#: How the profiler spells the formats of tensors (C++ names) -> (torch's name, bytes per element).
DTYPES: dict[str, tuple[str, int]] = {
    "float": ("float32", 4), "double": ("float64", 8), "c10::Half": ("float16", 2), "c10::BFloat16": ("bfloat16", 2),
    "long int": ("int64", 8), "long": ("int64", 8), "long long": ("int64", 8), "int": ("int32", 4),
    "short int": ("int16", 2), "short": ("int16", 2), "signed char": ("int8", 1), "char": ("int8", 1),
    "unsigned char": ("uint8", 1), "bool": ("bool", 1),
    "c10::complex<float>": ("complex64", 8), "c10::complex<double>": ("complex128", 16),
    "c10::Float8_e4m3fn": ("float8_e4m3fn", 1), "c10::Float8_e5m2": ("float8_e5m2", 1),
    "c10::Float8_e4m3fnuz": ("float8_e4m3fnuz", 1), "c10::Float8_e5m2fnuz": ("float8_e5m2fnuz", 1),
    "c10::Float8_e8m0fnu": ("float8_e8m0fnu", 1),
    "unsigned short": ("uint16", 2), "unsigned int": ("uint32", 4), "unsigned long": ("uint64", 8),
}
ITEM_BYTES = dict(DTYPES.values()) | {"bits8": 1, "bits16": 2, "bits32": 4, "bits64": 8, "bits128": 16}

#: `c10::ScalarType`, as a `dtype` argument is recorded.
SCALAR_TYPES = {0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32", 7: "float64",
                11: "bool", 15: "bfloat16", 23: "float8_e5m2", 24: "float8_e4m3fn"}

#: Why a product has no cost: with a sparse tensor it does as much as that has elements, and those were not counted.
SPARSE = "the sizes of a sparse tensor do not tell its work"

_LISTS = {"TensorList", "GenericList"}
_LONGEST_VALUE = 10_000
_MOST_DIMS, _MOST_ELEMENTS = 64, 1 << 48


Kind = Literal["matrix", "convolution", "attention", "memory"]


class Unknown(Exception):
    """The trace does not hold what a formula needs."""


@dataclass(frozen=True)
class Cost:
    """What one call of an operator must do: floating-point operations, and the bytes that it cannot avoid moving
    (each distinct input read once, each output written once)."""

    flops: int
    bytes: int
    kind: Kind
    dtype: str              # of the arithmetic: the first tensor's, or of the widest

    @property
    def multiplies(self) -> bool:
        """Whether matrix units (tensor cores) do this."""
        return self.kind != "memory"


@dataclass(frozen=True)
class Tensor:
    """As a profiler records one: sizes, the name of its dtype, and strides in elements (None: not recorded). `strided`: False where
    it has none although others of the call do, as a sparse one."""

    dims: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    strided: bool = True

    @property
    def numel(self) -> int:
        return prod(self.dims)

    @property
    def bytes(self) -> int:
        """Of the memory behind it. An expanded tensor (stride 0) repeats one value, and overlapping windows share
        them."""
        count = self.numel
        if count and self.strides is not None:
            reach = 1 + sum((size - 1) * stride for size, stride in zip(self.dims, self.strides))
            count = min(count, reach)
        return count * ITEM_BYTES[self.dtype]

    def like(self, dims: tuple[int, ...], dtype: str = "") -> Tensor:
        return Tensor(dims, dtype or self.dtype)


class Arguments:
    """Arguments of one operator, by position in its schema. `hint`: the format of tensors in lists, which the
    profiler does not record."""

    def __init__(self, signature: Signature, hint: str = ""):
        self._signature = signature
        self._hint = hint

    def tensor(self, position: int) -> Tensor:
        """Raises `Unknown` where the argument is no tensor."""
        found = self.optional(position)
        if found is None:
            raise Unknown(f"argument {position} is no tensor")
        return found

    def optional(self, position: int) -> Tensor | None:
        known = DTYPES.get(self._type(position))
        if known is None:
            return None
        dims = _sizes(_at(self._signature.dims, position))
        strides = _at(self._signature.strides, position)
        usable = (isinstance(strides, (tuple, list)) and len(strides) == len(dims)
                  and all(type(stride) is int and stride >= 0 for stride in strides))
        return Tensor(dims, known[0], tuple(strides) if usable else None, not dims or bool(strides) or not any(self._signature.strides))

    def tensors(self, count: int) -> list[Tensor]:
        """Those of the first `count` arguments that are tensors."""
        return [found for position in range(count) if (found := self.optional(position)) is not None]

    def is_list(self, position: int) -> bool:
        return self._type(position) in _LISTS

    def list(self, position: int) -> list[Tensor]:
        """The tensors of a list. Raises `Unknown` where their format is not known; an absent list is empty."""
        if not self.is_list(position):
            if self._type(position):
                raise Unknown(f"argument {position} is no list of tensors")
            return []
        members = _at(self._signature.dims, position)
        if not isinstance(members, (tuple, list)) or not all(isinstance(member, (tuple, list)) for member in members):
            raise Unknown(f"sizes of the list {position} were not recorded")
        if members and self._hint not in ITEM_BYTES:
            raise Unknown("the format of tensors in lists is not recorded")
        return [Tensor(_sizes(member), self._hint) for member in members]

    def integer(self, position: int) -> int:
        text = self.text(position)
        if not re.fullmatch(r"-?\d{1,18}", text):
            raise Unknown(f"argument {position} is no recorded integer")
        return int(text)

    def integers(self, position: int, count: int | None = None) -> tuple[int, ...]:
        """A list of integers; a single one stands for `count` equal ones, as in torch."""
        text = self.text(position)
        if not re.fullmatch(r"\[[-\d,\s]*\]|-?\d{1,18}", text):
            raise Unknown(f"argument {position} is no recorded list of integers")
        values = tuple(int(word) for word in re.findall(r"-?\d{1,18}", text))
        if count is not None and len(values) == 1:
            values *= count
        if count is not None and len(values) != count:
            raise Unknown(f"argument {position} has another length")
        return values

    def boolean(self, position: int) -> bool:
        return self.booleans(position)[0]

    def booleans(self, position: int) -> list[bool]:
        words = re.findall(r"True|False", self.text(position))
        if not words:
            raise Unknown(f"argument {position} is no recorded truth value")
        return [word == "True" for word in words]

    def text(self, position: int) -> str:
        """A scalar argument as it was recorded; "" where it was not."""
        value = _at(self._signature.concrete, position)
        return value if isinstance(value, str) and len(value) <= _LONGEST_VALUE else ""

    def dtype(self, position: int, default: str) -> str:
        """A `dtype` argument by torch's name."""
        text = self.text(position)
        if not text:
            return default
        name = SCALAR_TYPES.get(int(text)) if re.fullmatch(r"\d{1,3}", text) else None
        if name is None:
            raise Unknown(f"argument {position} is no known format")
        return name

    def _type(self, position: int) -> str:
        kind = _at(self._signature.types, position)
        return kind if isinstance(kind, str) else ""


def _at(values: Any, position: int) -> Any:
    return values[position] if position < len(values) else ()


def _sizes(dims: Any) -> tuple[int, ...]:
    if not isinstance(dims, (tuple, list)) or len(dims) > _MOST_DIMS \
            or not all(type(size) is int and 0 <= size < _MOST_ELEMENTS for size in dims) \
            or prod(dims) >= _MOST_ELEMENTS:
        raise Unknown("sizes make no sense")
    return tuple(dims)


def broadcast(tensors: list[Tensor]) -> tuple[int, ...]:
    """The sizes of the result of an elementwise operation."""
    sizes: list[int] = []
    for tensor in tensors:
        for place, size in enumerate(reversed(tensor.dims)):
            if place == len(sizes):
                sizes.append(size)
            elif sizes[place] == 1:
                sizes[place] = size
            elif size not in (1, sizes[place]):
                raise Unknown("sizes do not fit each other")
    return tuple(reversed(sizes))
