"""Tensors in a file of the safetensors format: 8 bytes of length, a JSON header with names, dtypes, shapes and places,
and raw little-endian bytes (https://github.com/huggingface/safetensors#format). Reading it executes nothing.

Written here, so that no library is needed for it; any reader of the format opens the files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saturate.inference import pickles

_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}
_HEADER_BYTES = 64 * 2**20      # no header is larger


class Unstorable(ValueError):
    """A value that the format has no place for; the message says which."""


def write(torch: Any, path: Path, state: Mapping[str, Any]) -> None:
    """Store a state dict. What several names share (tied weights) is stored once. Raises Unstorable, OSError."""
    header: dict[str, Any] = {}
    tied: dict[str, str] = {}
    known: dict[tuple[Any, ...], str] = {}
    pieces, end = [], 0
    for name, value in state.items():
        kind = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
        if not plain or kind not in _NAMES or value.device.type == "meta":
            raise Unstorable(f"{name} is a {type(value).__name__} of {kind}")
        place = (value.data_ptr(), tuple(value.shape), value.stride(), kind)
        if value.numel() and place in known:
            tied[name] = known[place]
            continue
        known[place] = name
        tensor = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[kind], "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        pieces.append(tensor)
        end += size
    if tied:
        header["__metadata__"] = {"tied": json.dumps(tied)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in pieces:
            file.write(pickles.memory_of(tensor))


def read(torch: Any, path: Path) -> dict[str, Any]:
    """The tensors by name, on the CPU. Raises ValueError for what is no such file, OSError."""
    dtypes = {short: getattr(torch, long) for long, short in _NAMES.items()}
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(_HEADER_BYTES, len(data) - 8):
        raise ValueError("its header is longer than the file")
    header = json.loads(bytes(data[8:8 + length]))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    more = header.pop("__metadata__", {})
    found, taken = {}, 0
    for name, entry in header.items():
        try:
            dtype, shape, (start, end) = dtypes[entry["dtype"]], entry["shape"], entry["data_offsets"]
            sizes = all(type(size) is int and size >= 0 for size in (*shape, start, end))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{name!r} is not described") from error
        if not sizes or end - start != math.prod(shape) * dtype.itemsize or 8 + length + end > len(data):
            raise ValueError(f"{name!r} does not lie inside of the file")
        taken += end - start
        if taken > len(data):           # each is a copy: a small file could ask for any amount of memory
            raise ValueError("its tensors lie on top of each other")
        raw = data[8 + length + start:8 + length + end]         # a copy: aligned for its dtype
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype, device="cpu")
        found[name] = flat.reshape(shape)
    for name, other in json.loads(more.get("tied", "{}")).items():
        found[name] = found[other]
    return found
