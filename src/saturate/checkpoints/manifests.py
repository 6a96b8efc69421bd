"""One manifest per checkpoint: it names everything that the checkpoint needs, and is written when all of that is
durable.

A checkpoint is a file, cut into *segments* (long writes of `torch.save`, which are the tensors' storages) and the
*glue* between them (headers, the pickle, small tensors), which is kept as one segment of its own. A segment is cut
into chunks of `chunk_bytes(size)`; its address is the chunk's digest where it is one chunk, else that of the list of
digests, which is a chunk itself: a tensor that did not change costs one line.

A manifest file is one line of JSON and a line with the digest of the first. Its `path` is what the script called the
file; nothing is ever opened by it for writing.
"""

from __future__ import annotations

import calendar
import json
import re
import secrets
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from io import BufferedReader, RawIOBase
from itertools import accumulate
from pathlib import Path
from typing import Any

from saturate.checkpoints import durable
from saturate.checkpoints.chunks import LARGEST_BYTES, SCHEMA, Store, digest_of
from saturate.errors import CheckpointDamaged

#: Writes of at least this many bytes are segments, shorter ones glue.
SEGMENT_BYTES = 1 << 16

SMALLEST_CHUNK, LARGEST_CHUNK = 1 << 16, 1 << 20

#: A list of digests is a chunk too, so this bounds a segment: 512 Ki chunks of 1 MiB.
_MOST_CHUNKS = LARGEST_BYTES // 32

_ID = re.compile(r"\d{8}T\d{6}\.\d{6}-[0-9a-f]{8}")
_ADDRESS = re.compile(r"[0-9a-f]{64}")


def chunk_bytes(size: int) -> int:
    """Chunk length for a segment of `size` bytes: 64 KiB, and more from 64 MiB on, so that a segment of 1 GiB has
    1,024.
    """
    length = SMALLEST_CHUNK
    while length < LARGEST_CHUNK and size > 1024 * length:
        length *= 2
    return length


@dataclass(frozen=True)
class Segment:
    """`gap` bytes of glue, then `size` bytes whose address is `address` (hexadecimal)."""

    gap: int
    size: int
    address: str


@dataclass(frozen=True)
class Manifest:
    """One checkpoint. `glue` holds all gaps and the tail behind the last segment, one after the other."""

    id: str
    saved: str                          # UTC, ISO 8601
    path: str                           # absolute, what the script saved to
    series: str                         # the path with its numbers blanked: what replaces or follows what
    number: int                         # of the save within its series, from 1
    file_bytes: int
    new_bytes: int                      # that this save wrote: pack and manifest
    save_s: float                       # seconds that it held the training
    segments: tuple[Segment, ...]
    glue: Segment

    def parts(self) -> tuple[Segment, ...]:
        """Everything that has an address."""
        return (*self.segments, self.glue)


def new_id(after: str = "") -> str:
    """Sorts by time, and behind the id `after`, also where the clock was set back since or is another machine's: what counts as the
    newest must be what was saved last."""
    now = max(time.time_ns() // 1000, _microseconds(after) + 1)
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now // 10**6))}.{now % 10**6:06d}-{secrets.token_hex(4)}"


def _microseconds(name: str) -> int:
    """The time in an id; 0 where there is none."""
    try:
        seconds = calendar.timegm(time.strptime(name[:15], "%Y%m%dT%H%M%S"))
    except ValueError:
        return 0
    return 10**6 * seconds + int(name[16:22])


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def series_of(path: str) -> str:
    """`runs/7/ckpt_100.pt` -> `runs/#/ckpt_#.pt`."""
    return re.sub(r"\d+", "#", path)


# -- files -----------------------------------------------------------------------------------------------------------


def encoded(manifest: Manifest) -> bytes:
    fields = asdict(manifest)
    fields["segments"] = [[s.gap, s.size, s.address] for s in manifest.segments]
    fields["glue"] = [manifest.glue.gap, manifest.glue.size, manifest.glue.address]
    line = json.dumps({"schema": SCHEMA, **fields}, separators=(",", ":")).encode()
    return line + b"\n" + digest_of(line).hex().encode() + b"\n"


def write(store: Store, manifest: Manifest) -> int:
    """Publish a checkpoint; the bytes of its manifest. Everything that it names must be durable already."""
    text = encoded(manifest)
    durable.replace(store.manifests / f"{manifest.id}.json", lambda stream: stream.write(text))
    return len(text)


def read(store: Store, name: str) -> Manifest:
    """The manifest of one checkpoint. Raises CheckpointDamaged, also for an id that is none."""
    if not is_id(name):
        raise CheckpointDamaged(f"{name[:80]!r} is not the id of a checkpoint")
    path = store.manifests / f"{name}.json"
    try:
        manifest = decoded(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointDamaged(f"checkpoint {name} is not in {store.folder}",
                                cause="it was removed by gc, or the store is not the one it was saved to") from None
    except (OSError, ValueError) as error:
        raise CheckpointDamaged(f"{path} is damaged", cause=str(error)) from error
    if manifest.id != name:
        raise CheckpointDamaged(f"{path} is damaged", cause=f"it is the manifest of {manifest.id}")
    return manifest


def decoded(text: bytes) -> Manifest:
    """Raises ValueError for anything that `encoded` did not make."""
    line, _, rest = text.partition(b"\n")
    if rest.strip().decode("ascii", "replace") != digest_of(line).hex():
        raise ValueError("its digest is not that of its text")
    try:
        fields = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(fields, dict) or fields.pop("schema", None) != SCHEMA:
        raise ValueError(f"it is not of format {SCHEMA}; another version of saturate wrote it")
    try:
        segments = tuple(_segment(part) for part in fields.pop("segments"))
        manifest = Manifest(**{**fields, "segments": segments, "glue": _segment(fields.pop("glue"))})
    except (TypeError, KeyError) as error:
        raise ValueError(f"a field is missing or of another kind: {error}") from error
    texts = (manifest.id, manifest.saved, manifest.path, manifest.series)
    counts = (manifest.number, manifest.file_bytes, manifest.new_bytes)
    if not all(isinstance(text, str) for text in texts) or not all(_is_count(count) for count in counts):
        raise ValueError("a field is of another kind")
    if not isinstance(manifest.save_s, int | float) or not is_id(manifest.id):
        raise ValueError("a field is of another kind")
    if sum(s.size for s in manifest.parts()) != manifest.file_bytes or sum(s.gap for s in segments) > manifest.glue.size:
        raise ValueError("its lengths do not add up")
    return manifest


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _segment(part: Any) -> Segment:
    gap, size, address = part
    if not _is_count(gap) or not _is_count(size) or size > _MOST_CHUNKS * LARGEST_CHUNK or not isinstance(address, str):
        raise ValueError("a segment is not one")
    if not _ADDRESS.fullmatch(address):
        raise ValueError("an address is not one")
    return Segment(gap, size, address)


def all_of(store: Store) -> tuple[list[Manifest], dict[str, str]]:
    """Every manifest, oldest first, and what is wrong with those that cannot be read (by id)."""
    found, problems = [], {}
    for path in sorted(store.manifests.glob("*.json")):
        try:
            found.append(read(store, path.stem))
        except CheckpointDamaged as error:
            problems[path.stem] = error.cause or error.message
    return found, problems


# -- content ---------------------------------------------------------------------------------------------------------


def chunks_of(store: Store, segment: Segment) -> list[bytes]:
    """Digests of a segment's chunks, in order. Raises CheckpointDamaged."""
    if segment.size == 0:
        return []
    count = -(-segment.size // chunk_bytes(segment.size))
    address = bytes.fromhex(segment.address)
    if count == 1:
        return [address]
    listed = store.read(address)
    if len(listed) != 32 * count:
        raise CheckpointDamaged(f"the list of chunks {segment.address[:12]} has another length", evidence=str(store.folder))
    return [listed[start : start + 32] for start in range(0, len(listed), 32)]


def addresses(store: Store, manifest: Manifest) -> Iterator[bytes]:
    """Digests of everything that a checkpoint names: lists and chunks."""
    for segment in manifest.parts():
        chunks = chunks_of(store, segment)
        if len(chunks) > 1:
            yield bytes.fromhex(segment.address)
        yield from chunks


class StoredFile(RawIOBase):
    """A checkpoint as the file that it was: readable and seekable, each chunk checked as it is read."""

    def __init__(self, store: Store, manifest: Manifest):
        super().__init__()
        self.store = store
        self.manifest = manifest
        self.problem: Exception | None = None           # what the last read raised: torch's reader makes another error of it
        pieces: list[tuple[int, Segment, int]] = []     # bytes, segment, offset of the piece in it
        used = 0
        for segment in manifest.segments:
            pieces += [(segment.gap, manifest.glue, used), (segment.size, segment, 0)]
            used += segment.gap
        pieces.append((manifest.glue.size - used, manifest.glue, used))
        self._pieces = [piece for piece in pieces if piece[0]]
        self._starts = [0, *accumulate(piece[0] for piece in self._pieces)]
        self._place = 0
        self._chunks = lru_cache(maxsize=2)(lambda segment: chunks_of(store, segment))
        self._chunk = lru_cache(maxsize=2)(store.read)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        origin = (0, self._place, self.manifest.file_bytes)[whence]
        self._place = max(0, origin + offset)
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        """At most to the end of a chunk, as files may."""
        try:
            return self._read(buffer)
        except Exception as error:
            self.problem = error
            raise

    def _read(self, buffer: Any) -> int:
        if self._place >= self.manifest.file_bytes:
            return 0
        which = bisect_right(self._starts, self._place) - 1
        length, segment, offset = self._pieces[which]
        within = self._place - self._starts[which]
        at = offset + within
        step = chunk_bytes(segment.size)
        data = self._chunk(self._chunks(segment)[at // step])
        if len(data) != min(step, segment.size - at // step * step):
            raise CheckpointDamaged(f"a chunk of checkpoint {self.manifest.id} has another length", evidence=str(self.store.folder))
        view = memoryview(buffer).cast("B")
        part = memoryview(data)[at % step :][: min(length - within, len(view))]
        view[: len(part)] = part
        self._place += len(part)
        return len(part)


def opened(store: Store, manifest: Manifest) -> BufferedReader:
    """The checkpoint's bytes as a binary stream."""
    return BufferedReader(StoredFile(store, manifest), LARGEST_CHUNK)


def copy(store: Store, manifest: Manifest, path: Path) -> None:
    """Write the checkpoint as the plain file that it was, whole or not at all."""
    def fill(stream: Any) -> None:
        source = StoredFile(store, manifest)
        buffer = bytearray(LARGEST_CHUNK)
        while count := source.readinto(buffer):
            stream.write(memoryview(buffer)[:count])

    durable.replace(path, fill)
