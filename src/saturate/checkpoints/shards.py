"""Are the files of a distributed checkpoint (torch.distributed.checkpoint) whole? Each tensor in them is a file of `torch.save` of its
own, one behind the other; `.metadata`, which is written last, is a pickle that names them. It is read without being unpickled."""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

ENDING, METADATA = ".distcp", ".metadata"

#: How the record begins that ends a zip, and how long it is: torch writes no comment behind it.
_END, _END_BYTES = b"PK\5\6", 22


def problem_of_shard(stream: BinaryIO, size: int) -> str:
    """What is wrong with a file of tensors that begins with a zip; "" where nothing is."""
    end = size
    while end:
        stream.seek(max(0, end - _END_BYTES))
        if stream.read(len(_END)) != _END:      # zipfile would go back to an end of a tensor before it
            return f"what ends at byte {end} is no whole tensor that torch saved"
        try:
            with zipfile.ZipFile(_Until(stream, end)) as archive:       # the last one before `end`
                if archive.testzip() is not None:
                    return "a tensor of it has another checksum (or was saved with torch.serialization.set_crc32_options(False))"
                end = min(entry.header_offset for entry in archive.infolist())
        except Exception as error:  # noqa: BLE001 - what damage does to each way of packing
            return f"what ends at byte {end} is no whole tensor that torch saved ({type(error).__name__}: {error})"
    return ""


def problem_of_folder(folder: Path, present: Iterable[str]) -> str:
    """What a folder of such files, `present` by name, lacks to be loaded; "" where it lacks nothing."""
    if not (folder / METADATA).exists():
        return "it is written last: that save did not end"
    try:
        missing = sorted(_names(folder) - set(present))
    except (ValueError, OSError) as error:
        return f"it is no pickle: {error}"
    return f"{missing[0]} is missing" + (f" and {len(missing) - 1} more" if missing[1:] else "") if missing else ""


def named(folder: Path) -> set[str]:
    """The shards of the checkpoint in a folder, by name; none where it cannot be read."""
    try:
        return _names(folder)
    except (ValueError, OSError):
        return set()


def _names(folder: Path) -> set[str]:
    words = (word for _, word, _ in pickletools.genops((folder / METADATA).read_bytes()) if isinstance(word, str))
    return {word for word in words if word.endswith(ENDING)}


class _Until(io.RawIOBase):
    """The beginning of a file, as a file."""

    def __init__(self, stream: BinaryIO, end: int):
        self._stream, self._end, self._at = stream, end, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._end}[whence]
        if self._at < 0:
            raise OSError("before the beginning")
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: bytearray) -> int:
        self._stream.seek(self._at)
        data = self._stream.read(max(0, min(len(buffer), self._end - self._at)))
        buffer[:len(data)] = data
        self._at += len(data)
        return len(data)
