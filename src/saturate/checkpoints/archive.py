"""The zip layout of `torch.save`, planned before a byte is written.

Every record lies where torch's own writer (miniz, without compression) would put it: `torch.load(mmap=True)` maps it,
and `torch.utils.serialization.config.load.calculate_storage_offsets` finds it by arithmetic alone. Standard library
only, because a helper process without torch writes archives too.

Sources: PKWARE's APPNOTE 6.3.10 for the structures; torch/serialization.py, `_get_offset`, for the layout that readers
rely on. Byte for byte the same as torch's file but for `.data/serialization_id`, a fingerprint that readers only log:
torch makes it from a hash of the C++ library.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_LIMIT_32 = 0xFFFFFFFF
_FLAGS = 0x0800             # names are UTF-8
_FLAG_DESCRIPTOR = 0x0008   # checksum and sizes follow the data; records without data have none
_ZIP64 = 1                  # id of the extra field for sizes and offsets beyond 32 bits
_PADDING = b"FB"            # id of the extra field that aligns data

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")

IDENTITY = ".data/serialization_id"
IDENTITY_BYTES = 40
ALIGNMENT_RECORD = ".storage_alignment"
DEFAULT_ALIGNMENT = 64


@dataclass(frozen=True)
class Entry:
    """One record: where its local header and its data begin, in bytes from the start of the archive."""

    name: str
    size: int
    header: int
    data: int

    @property
    def wide(self) -> bool:
        """Whether 32 bits do not hold its size or place."""
        return self.size >= _LIMIT_32 or self.header >= _LIMIT_32


def archive_name(path: str) -> str:
    """The folder inside the archive: the file's name without its last extension, as torch chooses it; "archive" for
    names outside ASCII; "" where torch refuses."""
    if not path.isascii():
        return "archive"
    base = path.replace("\\", "/").rpartition("/")[2]
    return base.rpartition(".")[0] if "." in base else base


def plan(folder: str, records: Iterable[tuple[str, int]], alignment: int = DEFAULT_ALIGNMENT) -> tuple[Entry, ...]:
    """Places of `records` (name, bytes) in their order, and of the identity that ends every archive."""
    entries = []
    at = 0
    for name, size in [*records, (IDENTITY, IDENTITY_BYTES)]:
        full = f"{folder}/{name}"
        entry = Entry(full, size, at, 0)
        start = at + _LOCAL.size + len(full.encode()) + len(_wide_field(entry)) + 4
        data = start + -start % alignment
        entries.append(Entry(full, size, at, data))
        at = data + size + (_descriptor_bytes(entry) if size else 0)
    return tuple(entries)


def total_bytes(entries: tuple[Entry, ...]) -> int:
    """Size of the whole file."""
    last = entries[-1]
    directory = sum(_CENTRAL.size + len(entry.name.encode()) + len(_wide_field(entry)) for entry in entries)
    return last.data + last.size + _descriptor_bytes(last) + directory + _END_64.size + _LOCATOR.size + _END.size


def pieces(entries: tuple[Entry, ...], contents: Iterable[Any]) -> Iterator[Any]:
    """The file, buffer by buffer. `contents`: the data of each entry but the last, as buffers of bytes."""
    checksums = []
    for entry, content in zip(entries, contents):
        checksum = zlib.crc32(content)
        checksums.append(checksum)
        yield from _record(entry, content, checksum)
    identity = _identity(entries, checksums)
    checksums.append(zlib.crc32(identity))
    yield from _record(entries[-1], identity, checksums[-1])
    yield _directory(entries, checksums)


def _identity(entries: tuple[Entry, ...], checksums: list[int]) -> bytes:
    names = zlib.crc32("\n".join(entry.name for entry in entries[:-1]).encode())
    contents = zlib.crc32(struct.pack(f"<{len(checksums)}I", *checksums))
    return f"{names:020d}{contents:020d}".encode()


def _record(entry: Entry, content: Any, checksum: int) -> Iterator[Any]:
    name, wide = entry.name.encode(), _wide_field(entry, local=True)
    padding = entry.data - entry.header - _LOCAL.size - len(name) - len(wide) - 4
    flags = _FLAGS | (_FLAG_DESCRIPTOR if entry.size else 0)
    yield b"".join((
        _LOCAL.pack(b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(wide) + 4 + padding),
        name, wide, _PADDING, struct.pack("<H", padding), b"Z" * padding,
    ))
    if entry.size:
        yield content
        yield struct.pack("<4sI2Q" if entry.wide else "<4s3I", b"PK\7\10", checksum, entry.size, entry.size)


def _directory(entries: tuple[Entry, ...], checksums: list[int]) -> bytes:
    last = entries[-1]
    at = last.data + last.size + _descriptor_bytes(last)
    parts = [_central(entry, checksum) for entry, checksum in zip(entries, checksums)]
    size, count = sum(map(len, parts)), len(entries)
    parts.append(_END_64.pack(b"PK\6\6", _END_64.size - 12, 0x031E, 45, 0, 0, count, count, size, at))
    parts.append(_LOCATOR.pack(b"PK\6\7", 0, at + size, 1))
    few = min(count, 0xFFFF)
    parts.append(_END.pack(b"PK\5\6", 0, 0, few, few, min(size, _LIMIT_32), min(at, _LIMIT_32), 0))
    return b"".join(parts)


def _central(entry: Entry, checksum: int) -> bytes:
    name, wide = entry.name.encode(), _wide_field(entry)
    flags = _FLAGS | (_FLAG_DESCRIPTOR if entry.size else 0)
    size = min(entry.size, _LIMIT_32)
    return _CENTRAL.pack(b"PK\1\2", 0, 0, flags, 0, 0, 0, checksum, size, size, len(name), len(wide), 0, 0, 0, 0,
                         min(entry.header, _LIMIT_32)) + name + wide


def _wide_field(entry: Entry, local: bool = False) -> bytes:
    """The extra field for what 32 bits do not hold. A local header does not know the stored size yet and says 0."""
    values = []
    if entry.size >= _LIMIT_32:
        values += [entry.size, 0 if local else entry.size]
    if entry.header >= _LIMIT_32:
        values.append(entry.header)
    return struct.pack(f"<2H{len(values)}Q", _ZIP64, 8 * len(values), *values) if values else b""


def _descriptor_bytes(entry: Entry) -> int:
    return 24 if entry.wide else 16
