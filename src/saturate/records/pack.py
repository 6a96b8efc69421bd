"""What `saturate pack --json` prints."""

from __future__ import annotations

import msgspec


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    """A packed dataset. `bytes` are those of its shards; `resumed_rows` stood there before this run; `left_out` counts files of other
    kinds in the source, by the ending of their names."""

    schema: int = 1
    source: str
    destination: str
    kind: str
    rows: int
    bytes: int
    shards: int
    resumed_rows: int
    seconds: float
    loader: list[str]
    left_out: dict[str, int] = {}
    dali_loader: list[str] = []     # decodes images on a GPU; empty for what is no image, or without DALI
