"""A source of rows in a fixed order.

It is read again from the start, or from any row, with the same rows in the same order: that is what lets an interrupted pack go
on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Rows of one record batch at most: what a reader decodes at once when it asks for a single row of text or table.
ROWS = {"images": 100, "text": 1000, "csv": 1000, "parquet": 1000}


@dataclass(frozen=True)
class File:
    path: Path
    name: str               # below the source, with forward slashes
    bytes: int
    changed_ns: int


@dataclass(frozen=True)
class Batch:
    """A record batch, and how many bytes of the source it was made from."""

    rows: Any
    read_bytes: int


@dataclass(frozen=True)
class Source:
    """`batches(skip)` yields everything behind the first `skip` rows."""

    kind: str
    files: tuple[File, ...]
    schema: Any                                         # pyarrow.Schema
    batches: Callable[[int], Iterator[Batch]]
    features: dict[str, Any] = field(default_factory=dict)     # as Hugging Face datasets write them; {}: from the schema
    left_out: tuple[str, ...] = ()                      # files of other kinds, by their names below the source
    again: Callable[[], Iterable[File]] | None = None   # looks for the files anew; None: nobody changes them

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def changed(self) -> str:
        """The first file by name that changed, came or went since the source was opened; "" where none did."""
        if self.again is None:
            return ""
        before = {file.name: file for file in self.files}
        try:
            now = {file.name: file for file in self.again()}
        except OSError as error:
            return str(error.filename)
        return min((name for name in before.keys() | now.keys() if before.get(name) != now.get(name)), default="")

    def fingerprint(self) -> str:
        """Changes when a file of the source changes, comes or goes."""
        seen = [self.kind, [[file.name, file.bytes, file.changed_ns] for file in self.files]]
        return hashlib.blake2b(json.dumps(seen).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
