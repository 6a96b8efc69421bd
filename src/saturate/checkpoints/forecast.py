"""What keeping a job's checkpoints incrementally would save, estimated from two of its own plain checkpoints.

Both files are cut as the store would cut them; chunks at regular distances are compared and coded as the store would
do it. So the forecast needs no run, no tensors and no torch, and reads only a part of large files.
"""

from __future__ import annotations

import json
import math
import struct
import time
import zipfile
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from saturate.checkpoints import deltas
from saturate.checkpoints.manifests import SEGMENT_BYTES, chunk_bytes
from saturate.checkpoints.recorder import plan_of

#: Chunks that are looked at over the whole file, and their bytes: they are kept in memory until the next save.
SAMPLED_CHUNKS, SAMPLED_BYTES = 256, 1 << 25

#: Share of the bytes that a save must still write for incremental saving not to be worth it.
NOT_WORTH = 0.8

#: Files smaller than this are saved in full faster than they are compared.
SMALLEST_BYTES = 1 << 20

_LOCAL_HEADER = struct.Struct("<4s22xHH")       # magic, length of the name, length of the extra field
_HEADER_BYTES = 30


@dataclass(frozen=True)
class Piece:
    """A tensor's bytes in a file."""

    offset: int
    size: int


@dataclass(frozen=True)
class Sample:
    """Chunks of one checkpoint. `pieces` are those of at least SEGMENT_BYTES; `chunks` are by place in `pieces`."""

    file_bytes: int
    pieces: tuple[Piece, ...]
    chunks: dict[tuple[int, int], bytes]        # (piece, number of the chunk in it) -> bytes


@dataclass(frozen=True)
class Forecast:
    """Bytes of one save as shares of the whole file. `sampled_share` is the part of the file that was compared."""

    file_bytes: int
    whole_share: float              # writing every tensor that changed
    blocks_share: float             # writing every block that changed
    deltas_share: float             # writing each changed block as a delta, where that pays: what the technique does
    compressed_share: float         # writing the whole file, each block compressed by itself
    sampled_share: float
    coding_s: float                 # of one save, coding only
    helps: bool
    reason: str


# -- the parts of a plain file ---------------------------------------------------------------------------------------


def pieces_of(stream: BinaryIO, size: int) -> list[Piece]:
    """Where the tensors are in a file of torch's zip format or of safetensors. Raises ValueError for other files."""
    start = stream.read(8)
    stream.seek(0)
    if start.startswith(b"PK\x03\x04"):
        return list(_zip_members(stream, size))
    header = safetensors_header(stream, size)
    base = 8 + struct.unpack("<Q", start)[0]
    spans = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
    return [Piece(base + begin, end - begin) for begin, end in spans]


def _zip_members(stream: BinaryIO, size: int) -> Iterator[Piece]:
    try:
        members = zipfile.ZipFile(stream).infolist()
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise ValueError(str(error)) from error
    for member in sorted(members, key=lambda member: member.header_offset):
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{member.filename} is compressed; torch.save does not do that")
        stream.seek(member.header_offset)
        header = stream.read(_HEADER_BYTES)
        if len(header) < _HEADER_BYTES:
            raise ValueError("it ends too early")
        _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        offset = member.header_offset + _HEADER_BYTES + name_bytes + extra_bytes
        if offset + member.file_size > size:
            raise ValueError(f"{member.filename} ends behind the file")
        yield Piece(offset, member.file_size)


class OtherFormat(ValueError):
    """A file is none that is known here."""


def safetensors_header(stream: BinaryIO, size: int) -> dict[str, dict]:
    """The header of a safetensors file, checked: its tensors fill the file without gaps. Raises ValueError; `OtherFormat` where
    the file has no such header."""
    start = stream.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= min(size - 8, 100_000_000):           # the limit of the format's own reader
        raise OtherFormat("neither torch's zip format nor safetensors")
    try:
        header = json.loads(stream.read(length))
        spans = sorted((entry["data_offsets"][0], entry["data_offsets"][1])
                       for name, entry in header.items() if name != "__metadata__")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise OtherFormat("neither torch's zip format nor safetensors") from error
    end = 0
    for begin, behind in spans:
        if not isinstance(begin, int) or not isinstance(behind, int) or begin != end or behind < begin:
            raise ValueError("its tensors overlap or leave gaps")
        end = behind
    if 8 + length + end != size:
        raise ValueError(f"its tensors end at byte {8 + length + end}, the file has {size}")
    return header


# -- two of them -----------------------------------------------------------------------------------------------------


def sample(path: Path, most_chunks: int = SAMPLED_CHUNKS, most_bytes: int = SAMPLED_BYTES) -> Sample:
    """Chunks of one file at regular distances, at most so many and of so many bytes. Raises OSError or ValueError."""
    with open(path, "rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        pieces = tuple(piece for piece in pieces_of(stream, size) if piece.size >= SEGMENT_BYTES)
        places = [(piece, number) for piece, one in enumerate(pieces)
                  for number in range(-(-one.size // chunk_bytes(one.size)))]
        stride = max(1, math.ceil(len(places) / most_chunks), math.ceil(sum(piece.size for piece in pieces) / most_bytes))
        chunks = {}
        for piece, number in places[stride // 2 :: stride]:
            step = chunk_bytes(pieces[piece].size)
            stream.seek(pieces[piece].offset + number * step)
            chunks[piece, number] = stream.read(min(step, pieces[piece].size - number * step))
    return Sample(size, pieces, chunks)


def compare(old: Sample, new: Sample) -> Forecast:
    """What saving `new` would have cost with `old` in the store."""
    began = time.perf_counter()
    before: dict[int, deque[int]] = defaultdict(deque)
    for place, piece in enumerate(old.pieces):
        before[piece.size].append(place)
    known = set(old.chunks.values())
    by_piece: dict[int, list[tuple[bytes, bytes | None]]] = defaultdict(list)
    partner = {place: before[piece.size].popleft() for place, piece in enumerate(new.pieces) if before[piece.size]}
    for (piece, number), raw in sorted(new.chunks.items()):
        by_piece[piece].append((raw, old.chunks.get((partner.get(piece, -1), number))))
    seen = whole = blocks = coded = compressed = 0.0
    for piece, chunks in by_piece.items():
        taken = sum(len(raw) for raw, _ in chunks)
        changed = [(raw, base) for raw, base in chunks if raw not in known]
        scale = new.pieces[piece].size / taken          # of a piece that was looked at in parts
        seen += taken
        whole += bool(changed) * new.pieces[piece].size
        blocks += scale * sum(len(raw) for raw, _ in changed)
        coded += scale * _coded_bytes(changed)
        compressed += scale * _coded_bytes([(raw, None) for raw, _ in chunks])
    covered = sum(new.pieces[piece].size for piece in by_piece)
    if not covered:
        return Forecast(new.file_bytes, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, False, "it holds no tensor of 64 KiB or more")
    weight = (new.file_bytes - sum(piece.size for piece in new.pieces)) / new.file_bytes    # headers and small tensors: new
    shares = [weight + (1 - weight) * part / covered for part in (whole, blocks, coded, compressed)]
    spent = (time.perf_counter() - began) * new.file_bytes / max(seen, 1.0) / 2             # coded twice here
    helps = shares[2] <= NOT_WORTH
    saved = f"{shares[2]:.1%} of its bytes per save (whole tensors that changed {shares[0]:.1%}, blocks {shares[1]:.1%})"
    reason = f"incremental saving would write {saved}"
    if not helps:
        reason = f"incremental saving will not help this job: it would still write {saved}"
    return Forecast(new.file_bytes, *shares, min(1.0, seen / new.file_bytes), spent, helps, reason)


def _coded_bytes(chunks: list[tuple[bytes, bytes | None]]) -> int:
    """Bytes that chunks of one piece take, coded as the store would code them."""
    if not chunks:
        return 0
    plan = plan_of(chunks)
    total = 0
    for raw, base in chunks:
        if plan.delta is not None and base is not None and len(base) == len(raw):
            payload = deltas.encode(deltas.xor(raw, base), plan.delta)
        else:
            payload = deltas.encode(raw, plan.alone)
        total += min(len(payload), len(raw))
    return total
