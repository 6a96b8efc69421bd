"""One sample as bytes, and back: a small self-describing binary format. Reading it never runs code.

Stored are None, bool, int, float, str, bytes, tuples, lists, dictionaries, CPU tensors, numpy arrays and scalars, and
decoded PIL images, of exactly these types. A value is one tag byte and its fields, little-endian; arrays are their
bytes. Everything that a collate function could see comes back: types, dtypes, shapes, strides (a batch stacked from
permuted images is laid out otherwise than one stacked from contiguous ones). What cannot come back alike is
`Unstorable`.
"""

from __future__ import annotations

import ctypes
import pickle
import struct
import sys
from typing import Any

#: Types that are stored by value, by their tag.
_PLAIN = {type(None): b"N", bool: b"?", int: b"I", float: b"D", str: b"S", bytes: b"B", tuple: b"t", list: b"l", dict: b"d"}

_TENSOR_DTYPES = frozenset((
    "float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool",
    "complex64", "complex128", "uint16", "uint32", "uint64",
))
_ARRAY_KINDS = "biufcUSMm"
_IMAGE_MODES = frozenset(("1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16"))

#: A tensor that is a view with holes is stored with the holes, up to this many times its own size.
_MOST_HOLES = 4
_DEEPEST = 32

_U8, _U32, _U64, _F64 = struct.Struct("<B"), struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<d")


class Unstorable(Exception):
    """The message says what about the value cannot be stored."""


class Damaged(Exception):
    """The bytes are no value of this format."""


def encode(value: Any) -> list[bytes]:
    """The parts of which the record of `value` consists, in order. Raises Unstorable."""
    parts: list[bytes] = []
    _put(value, parts, 0)
    return parts


def _put(value: Any, out: list[bytes], depth: int) -> None:
    if depth > _DEEPEST:
        raise Unstorable("containers are nested too deeply")
    kind = type(value)
    tag = _PLAIN.get(kind)
    if tag is None:
        _put_array(value, kind, out)
        return
    out.append(tag)
    if kind is bool:
        out.append(_U8.pack(value))
    elif kind is int:
        _sized(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), out)
    elif kind is float:
        out.append(_F64.pack(value))
    elif kind is str:
        _sized(value.encode("utf-8", "surrogatepass"), out)
    elif kind is bytes:
        _sized(value, out)
    elif kind is dict:
        out.append(_U32.pack(len(value)))
        for key, item in value.items():
            if type(key) not in (str, int):
                raise Unstorable(f"a dictionary has a key of type {type(key).__name__}")
            _put(key, out, depth + 1)
            _put(item, out, depth + 1)
    elif value is not None:
        out.append(_U32.pack(len(value)))
        for item in value:
            _put(item, out, depth + 1)


def _sized(data: bytes, out: list[bytes]) -> None:
    out.append(_U64.pack(len(data)))
    out.append(data)


def _named(text: str, out: list[bytes]) -> None:
    data = text.encode("ascii")
    out.append(_U8.pack(len(data)))
    out.append(data)


def _numbers(values: Any, out: list[bytes]) -> None:
    out.append(_U8.pack(len(values)))
    out.append(struct.pack(f"<{len(values)}Q", *values))


def _put_array(value: Any, kind: type, out: list[bytes]) -> None:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and kind is torch.Tensor:
        _put_tensor(value, out)
    elif numpy is not None and kind is numpy.ndarray:
        _put_ndarray(value, out)
    elif numpy is not None and isinstance(value, numpy.generic) and kind is value.dtype.type:
        if value.dtype.kind not in _ARRAY_KINDS:
            raise Unstorable(f"it holds a numpy scalar of dtype {value.dtype}")
        out.append(b"G")
        _named(value.dtype.str, out)
        _sized(value.tobytes(), out)
    elif kind.__module__ == "PIL.Image" and kind.__qualname__ == "Image":
        _put_image(value, out)
    else:
        raise Unstorable(f"it holds an object of type {kind.__module__}.{kind.__qualname__}")


def _put_tensor(value: Any, out: list[bytes]) -> None:
    dtype = str(value.dtype).removeprefix("torch.")
    if value.device.type != "cpu" or str(value.layout) != "torch.strided" or dtype not in _TENSOR_DTYPES:
        raise Unstorable(f"it holds a {dtype} tensor on {value.device} of layout {value.layout}")
    if value.requires_grad or value.is_conj() or value.is_neg():
        raise Unstorable("it holds a tensor with a gradient, or one that is a lazy conjugate")
    if value.__dict__:
        raise Unstorable(f"it holds a tensor that was given attributes ({', '.join(value.__dict__)})")
    span = _span(value.shape, value.stride())
    if span > _MOST_HOLES * max(1, value.numel()):
        raise Unstorable("it holds a tensor that is a sparse view of a larger one")
    out.append(b"X")
    _named(dtype, out)
    _numbers(value.shape, out)
    _numbers(value.stride(), out)
    if span > value.numel() and 0 not in value.stride():
        value = _with_clean_holes(value, span)
    _sized(ctypes.string_at(value.data_ptr(), span * value.element_size()) if span else b"", out)


def _with_clean_holes(value: Any, span: int) -> Any:
    """The same entries in the same places, and nothing between them: what lies there is no part of the sample, and need not be the
    same each time."""
    whole = value.new_zeros(span)
    whole.as_strided(value.shape, value.stride()).copy_(value)
    return whole


def _span(shape: Any, strides: Any) -> int:
    """Elements from the first to the last one that a view with these strides touches."""
    if any(size == 0 for size in shape):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))


def _put_ndarray(value: Any, out: list[bytes]) -> None:
    if value.dtype.kind not in _ARRAY_KINDS:
        raise Unstorable(f"it holds a numpy array of dtype {value.dtype}")
    span = _span_bytes(value.shape, value.strides, value.itemsize)
    if min(value.strides, default=0) < 0 or span > _MOST_HOLES * max(value.itemsize, value.nbytes):
        value = value.copy("K")         # the axes lie in memory in the same order, without the holes
        span = _span_bytes(value.shape, value.strides, value.itemsize)
    out.append(b"A")
    _named(value.dtype.str, out)
    _numbers(value.shape, out)
    _numbers(value.strides, out)
    _sized(_array_bytes(value, span), out)


def _array_bytes(value: Any, span: int) -> bytes:
    if span > value.nbytes:             # what lies in the holes is no part of the sample, and need not be the same each time
        whole = bytearray(span)
        type(value)(value.shape, value.dtype, buffer=whole, strides=value.strides)[...] = value
        return bytes(whole)
    return ctypes.string_at(value.ctypes.data, span) if span else b""


def _span_bytes(shape: Any, strides: Any, itemsize: int) -> int:
    """From the first byte of an array with these strides (in bytes) to behind its last one."""
    if any(size == 0 for size in shape):
        return 0
    return itemsize + sum((size - 1) * stride for size, stride in zip(shape, strides))


def _put_image(value: Any, out: list[bytes]) -> None:
    if value.mode not in _IMAGE_MODES:
        raise Unstorable(f"it holds a PIL image of mode {value.mode}")
    out.append(b"P")
    _named(value.mode, out)
    _numbers(value.size, out)
    info: list[bytes] = []
    _put({key: item for key, item in value.info.items() if _storable(key) and _storable(item)}, info, 0)
    out.extend(info)
    _sized(value.tobytes(), out)


def _storable(value: Any) -> bool:
    try:
        encode(value)
    except Unstorable:
        return False        # notes of a file format, such as a resolution as a fraction: they go, the picture stays
    return True


# -- reading -----------------------------------------------------------------------------------------------------------


def decode(data: Any) -> Any:
    """The value of a record; arrays are copies, so that they may be written to and `data` reused. Raises Damaged."""
    try:
        value, end = _Reader(memoryview(data).cast("B")).value(0, 0)
    except (struct.error, ValueError, TypeError, KeyError, OverflowError, RuntimeError, MemoryError,
            ImportError) as error:
        raise Damaged(str(error)) from error
    if end != len(data):
        raise Damaged("bytes are left over")
    return value


class _Reader:
    """Each method takes the position of what it reads, and returns it with the position behind it."""

    def __init__(self, data: memoryview):
        self.data = data

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        if depth > _DEEPEST + 1:
            raise Damaged("containers are nested too deeply")
        tag = bytes(self.data[at:at + 1])
        at += 1
        if tag == b"N":
            return None, at
        if tag == b"?":
            return bool(_U8.unpack_from(self.data, at)[0]), at + 1
        if tag == b"D":
            return _F64.unpack_from(self.data, at)[0], at + 8
        if tag in (b"I", b"S", b"B"):
            raw, at = self.sized(at)
            if tag == b"I":
                return int.from_bytes(raw, "little", signed=True), at
            return (str(raw, "utf-8", "surrogatepass") if tag == b"S" else bytes(raw)), at
        if tag in (b"t", b"l", b"d"):
            return self.container(tag, at, depth)
        if tag in (b"X", b"A", b"G", b"P"):
            return {b"X": self.tensor, b"A": self.array, b"G": self.scalar, b"P": self.image}[tag](at)
        raise Damaged(f"unknown tag {tag!r}")

    def sized(self, at: int) -> tuple[memoryview, int]:
        (size,) = _U64.unpack_from(self.data, at)
        at += 8
        if size > len(self.data) - at:
            raise Damaged("it ends too early")
        return self.data[at:at + size], at + size

    def named(self, at: int) -> tuple[str, int]:
        (size,) = _U8.unpack_from(self.data, at)
        return str(self.data[at + 1:at + 1 + size], "ascii"), at + 1 + size

    def numbers(self, at: int) -> tuple[tuple[int, ...], int]:
        (count,) = _U8.unpack_from(self.data, at)
        return struct.unpack_from(f"<{count}Q", self.data, at + 1), at + 1 + 8 * count

    def container(self, tag: bytes, at: int, depth: int) -> tuple[Any, int]:
        (count,) = _U32.unpack_from(self.data, at)
        at += 4
        if count > len(self.data) - at:
            raise Damaged("it ends too early")
        items = []
        for _ in range(2 * count if tag == b"d" else count):
            item, at = self.value(at, depth + 1)
            items.append(item)
        if tag == b"d":
            return dict(zip(items[::2], items[1::2])), at
        return (tuple(items) if tag == b"t" else items), at

    def tensor(self, at: int) -> tuple[Any, int]:
        import torch

        name, at = self.named(at)
        if name not in _TENSOR_DTYPES:
            raise Damaged(f"unknown dtype {name!r}")
        shape, at = self.numbers(at)
        strides, at = self.numbers(at)
        raw, at = self.sized(at)
        dtype = getattr(torch, name)
        span = _span(shape, strides)
        if len(shape) != len(strides) or span * dtype.itemsize != len(raw):
            raise Damaged("a tensor's size does not fit its shape")
        # A clone lies where torch puts any tensor: aligned, and in memory of its own.
        flat = torch.frombuffer(raw, dtype=dtype).clone() if span else torch.empty(0, dtype=dtype, device="cpu")
        return flat.as_strided(shape, strides), at

    def array(self, at: int) -> tuple[Any, int]:
        import numpy

        dtype, at = self.dtype(at)
        shape, at = self.numbers(at)
        strides, at = self.numbers(at)
        raw, at = self.sized(at)
        if len(shape) != len(strides) or _span_bytes(shape, strides, dtype.itemsize) != len(raw):
            raise Damaged("an array's size does not fit its shape")
        if not raw:
            return numpy.empty(shape, dtype), at
        array = numpy.ndarray(shape, dtype, buffer=raw, strides=strides)
        again = array.copy("K")
        if again.strides != strides:    # it has holes, which a copy closes, or axes of one entry
            again = numpy.ndarray(shape, dtype, buffer=bytearray(raw), strides=strides)
        return again, at

    def scalar(self, at: int) -> tuple[Any, int]:
        import numpy

        dtype, at = self.dtype(at)
        raw, at = self.sized(at)
        return numpy.ndarray((), dtype, buffer=raw)[()], at

    def dtype(self, at: int) -> tuple[Any, int]:
        import numpy

        name, at = self.named(at)
        dtype = numpy.dtype(name)
        if dtype.kind not in _ARRAY_KINDS:
            raise Damaged(f"unknown dtype {name!r}")
        return dtype, at

    def image(self, at: int) -> tuple[Any, int]:
        from PIL import Image

        mode, at = self.named(at)
        size, at = self.numbers(at)
        info, at = self.value(at, 0)
        raw, at = self.sized(at)
        if mode not in _IMAGE_MODES or len(size) != 2 or size[0] * size[1] > 8 * max(1, len(raw)):
            raise Damaged("an image's size does not fit its mode")
        image = Image.frombytes(mode, size, raw) if raw else Image.new(mode, size)
        image.info.update(info)
        return image, at


def fingerprint(value: Any) -> bytes:
    """Bytes that are equal for equal values. Only compared within this process; never read back."""
    try:
        return b"".join(encode(value))
    except Unstorable:
        return _fingerprint(value)


def _fingerprint(value: Any) -> bytes:
    """Of what a cache would not store. A pickled tensor is not the same bytes each time."""
    kind = f"{type(value).__module__}.{type(value).__qualname__} ".encode()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and type(value) is not torch.Tensor:
        return kind + fingerprint(value.detach().as_subclass(torch.Tensor))
    if isinstance(value, (tuple, list)):
        return kind + b"".join(map(fingerprint, value))
    if isinstance(value, dict):
        return kind + b"".join(fingerprint(part) for item in value.items() for part in item)
    return kind + pickle.dumps(value)
