"""A store of chunks, addressed by the BLAKE2b-256 digest of their bytes.

    STORE/store.json         format version
    STORE/lock               held shared while something is saved or read, alone while something is removed
    STORE/packs/*.pack       chunks, all that one save added in one file
    STORE/manifests/*.json   one per checkpoint, written last: see `manifests`

A pack is payloads, then an index of fixed-size entries, then a footer with the digest of the index. It gets its name
when it is complete and durable, so a crash leaves a whole pack or a temporary file. One pack for each save and not
one file for each chunk: a durable file costs an fsync. Nothing that is read is ever unpickled or used as a path.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import struct
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from saturate.checkpoints import deltas, durable
from saturate.errors import CheckpointDamaged, EnvironmentProblem

SCHEMA = 1
MAGIC = b"SATPACK1"
ENTRY = struct.Struct("<32s32sQIIBBBx")     # digest, base, offset, stored bytes, raw bytes, width, lanes, depth
FOOTER = struct.Struct("<Q32s8s")           # entries, digest of the index, magic
NO_BASE = bytes(32)

#: Largest chunk, and largest list of digests, that a reader believes in.
LARGEST_BYTES = 1 << 24

#: Longest chain of deltas that a reader follows.
LONGEST_CHAIN = 255

_OPEN_PACKS = 32


def digest_of(data: bytes | memoryview) -> bytes:
    return blake2b(data, digest_size=32).digest()


@dataclass(frozen=True, slots=True)
class Entry:
    """Where and how one chunk is stored. `depth` is the number of deltas on the way to it; 0 stands by itself."""

    pack: str
    base: bytes | None
    offset: int
    stored_bytes: int
    raw_bytes: int
    coding: deltas.Coding
    depth: int


def _unreadable(folder: Path, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(f"the checkpoint store in {folder} cannot be read", cause=str(error),
                              remedy="it needs store.json and the folder packs, and leave to read them")


class Store:
    """One store folder. Not thread-safe: its user holds a lock of its own."""

    def __init__(self, folder: Path, remember_bytes: int = 0):
        self.folder = folder
        self.packs = folder / "packs"
        self.manifests = folder / "manifests"
        self.index: dict[bytes, Entry] = {}
        self.problems: dict[str, str] = {}              # packs that cannot be read -> why
        self._known: set[str] = set()
        self._open: OrderedDict[str, int] = OrderedDict()
        self._memory: OrderedDict[bytes, bytes] = OrderedDict()
        self._memory_bytes = 0
        self.remember_bytes = remember_bytes            # raw bytes of chunks kept in memory, the latest used

    # -- life ------------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, folder: Path, remember_bytes: int = 0) -> Store:
        """Open the store in `folder`, made where there is none."""
        store = cls(folder, remember_bytes)
        if not (folder / "store.json").exists():
            for made in (store.packs, store.manifests):
                made.mkdir(parents=True, exist_ok=True)
            (folder / "lock").touch()
            text = json.dumps({"schema": SCHEMA, "kind": "saturate-checkpoints"})
            durable.replace(folder / "store.json", lambda stream: stream.write(text.encode()))
            for made in (folder.parent, folder):
                durable.sync_folder(made)
        return cls.open(folder, remember_bytes)

    @classmethod
    def open(cls, folder: Path, remember_bytes: int = 0) -> Store:
        """Open an existing store. Raises EnvironmentProblem where there is none, it cannot be read or is of another version."""
        try:
            with open(folder / "store.json", "rb") as stream:
                found = json.loads(stream.read(4096))
            if found["kind"] != "saturate-checkpoints":
                raise ValueError("another kind of file")
            schema = found["schema"]
        except (FileNotFoundError, NotADirectoryError):
            raise EnvironmentProblem(f"there is no checkpoint store in {folder}",
                                     remedy="name its folder with --store") from None
        except OSError as error:
            raise _unreadable(folder, error) from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointDamaged(f"{folder / 'store.json'} is not that of a checkpoint store", cause=str(error)) from error
        if schema != SCHEMA:
            raise CheckpointDamaged(f"the checkpoint store in {folder} has format {schema!r}, this saturate reads {SCHEMA}",
                                    remedy="use the version of saturate that wrote it")
        store = cls(folder, remember_bytes)
        try:
            store.refresh()
        except OSError as error:
            raise _unreadable(folder, error) from error
        return store

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextlib.contextmanager
    def locked(self, alone: bool, wait_s: float = 30.0) -> Iterator[None]:
        """Hold the store, `alone` to remove something. Raises EnvironmentProblem when others hold it longer than
        `wait_s`. A store on a medium that cannot be written, or that knows no locks, can still be read.
        """
        import fcntl

        try:
            descriptor = os.open(self.folder / "lock", os.O_RDWR if alone else os.O_RDONLY)
        except OSError as error:
            if alone:
                raise EnvironmentProblem(f"the checkpoint store {self.folder} cannot be changed", cause=str(error)) from error
            yield               # a copy on a medium that nobody can change
            return
        try:
            wanted = (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB
            end = time.monotonic() + wait_s
            while True:
                try:
                    fcntl.flock(descriptor, wanted)
                    break
                except OSError as error:
                    if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP) and not alone:
                        break           # nobody can take it alone here either
                    if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                        raise
                if time.monotonic() > end:
                    raise EnvironmentProblem(f"the checkpoint store {self.folder} is in use", remedy="try again later")
                time.sleep(0.02)
            yield
        finally:
            os.close(descriptor)

    # -- packs -----------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """See packs that others added or removed. Call it under the lock before relying on what is there."""
        present = {name for name in os.listdir(self.packs) if name.endswith(".pack")}
        if self._known - present:
            self.index.clear()
            self._known.clear()
            self.problems.clear()
            self.close()
        added = sorted(present - self._known)
        for name in added:
            try:
                self._merge(read_index(self.packs / name))
            except (OSError, ValueError) as error:
                self.problems[name] = str(error)
            self._known.add(name)
        if added:
            self._drop_what_leans_on_nothing()

    def _drop_what_leans_on_nothing(self) -> None:
        """Where a pack is missing or damaged, deltas against its chunks cannot be read: they are stored again when
        they come again.
        """
        for digest, entry in sorted(self.index.items(), key=lambda item: item[1].depth):
            if entry.base is not None and entry.base not in self.index:
                del self.index[digest]

    def committed(self, pack: str, entries: dict[bytes, Entry]) -> None:
        """A writer of this process has added a pack."""
        self._merge(entries)
        self._known.add(pack)

    def _merge(self, entries: dict[bytes, Entry]) -> None:
        """Of a chunk that two writers stored, the one with fewer deltas counts: two that lean on each other cannot
        occur.
        """
        for digest, entry in entries.items():
            known = self.index.get(digest)
            if known is None or entry.depth < known.depth:
                self.index[digest] = entry

    def pack_bytes(self) -> int:
        """Bytes of all packs."""
        return sum(entry.stat().st_size for entry in os.scandir(self.packs) if entry.name.endswith(".pack"))

    def _descriptor(self, pack: str) -> int:
        if pack in self._open:
            self._open.move_to_end(pack)
        else:
            self._open[pack] = os.open(self.packs / pack, os.O_RDONLY)
            if len(self._open) > _OPEN_PACKS:
                os.close(self._open.popitem(last=False)[1])
        return self._open[pack]

    # -- chunks ----------------------------------------------------------------------------------------------------

    def read(self, digest: bytes) -> bytes:
        """The chunk with this digest, checked. Raises CheckpointDamaged."""
        found = self._memory.get(digest)
        if found is not None:
            self._memory.move_to_end(digest)
            return found
        links, wanted, below = [], digest, None
        while wanted is not None and below is None:
            entry = self.index.get(wanted)
            if entry is None:
                raise CheckpointDamaged(f"chunk {wanted.hex()[:12]} is missing from {self.folder}")
            if links and entry.depth >= links[-1].depth:
                raise self._damaged(wanted, entry, "its chain of deltas does not end")
            links.append(entry)
            wanted = entry.base
            below = self._memory.get(wanted) if wanted is not None else None
        parts = [self._part(digest, entry) for entry in links]
        data = self._joined(digest, links[0], parts if below is None else [*parts, below])
        if digest_of(data) != digest:
            raise self._damaged(digest, links[0], "its bytes are not those that were saved")
        self.remember(digest, data)
        return data

    def decoded(self, digest: bytes, entry: Entry, base: bytes) -> bytes:
        """The bytes behind one entry, given those of its base; not checked against the digest."""
        part = self._part(digest, entry)
        return part if entry.base is None else self._joined(digest, entry, [part, base])

    def _part(self, digest: bytes, entry: Entry) -> bytes:
        """What one entry holds: a chunk, or its difference from the base."""
        try:
            return deltas.decode(self.payload(entry), entry.coding, entry.raw_bytes)
        except (OSError, ValueError) as error:
            raise self._damaged(digest, entry, str(error)) from error

    def _joined(self, digest: bytes, entry: Entry, parts: list[bytes]) -> bytes:
        try:
            return parts[0] if len(parts) == 1 else deltas.xor(*parts)
        except ValueError as error:
            raise self._damaged(digest, entry, str(error)) from error

    def payload(self, entry: Entry) -> bytes:
        """A chunk as it is coded."""
        return os.pread(self._descriptor(entry.pack), entry.stored_bytes, entry.offset)

    def _damaged(self, digest: bytes, entry: Entry, cause: str) -> CheckpointDamaged:
        return CheckpointDamaged(f"chunk {digest.hex()[:12]} in {self.packs / entry.pack} is damaged", cause=cause,
                                 remedy=f"saturate checkpoint verify --store {self.folder}")

    def remember(self, digest: bytes, data: bytes) -> None:
        """Keep a chunk in memory, for the next delta against it."""
        if digest in self._memory or len(data) > self.remember_bytes:
            return
        self._memory[digest] = data
        self._memory_bytes += len(data)
        while self._memory_bytes > self.remember_bytes:
            self._memory_bytes -= len(self._memory.popitem(last=False)[1])

    def forget(self) -> None:
        """Give the memory of chunks back."""
        self._memory.clear()
        self._memory_bytes = 0

    def bases_of(self, digests: Iterable[bytes]) -> set[bytes]:
        """The chunks and everything that their deltas lean on. What is missing is in it all the same."""
        needed: set[bytes] = set()
        for digest in digests:
            wanted: bytes | None = digest
            while wanted is not None and wanted not in needed:
                needed.add(wanted)
                entry = self.index.get(wanted)
                wanted = entry.base if entry else None
        return needed


class PackWriter:
    """Adds chunks to a store, in one new pack. Nothing is visible before `commit`; hold the lock (shared) until
    then.
    """

    def __init__(self, store: Store):
        self.store = store
        self.entries: dict[bytes, Entry] = {}
        self.name = f"{secrets.token_hex(16)}.pack"
        path, descriptor = durable.open_locked(str(store.packs))
        self._path = Path(path)
        self._stream = open(descriptor, "wb")           # noqa: SIM115 - closed by commit or abandon
        self._stream.write(MAGIC)
        self._offset = len(MAGIC)

    def has(self, digest: bytes) -> bool:
        return digest in self.entries or digest in self.store.index

    def entry(self, digest: bytes) -> Entry | None:
        return self.entries.get(digest) or self.store.index.get(digest)

    def add(self, digest: bytes, payload: bytes, coding: deltas.Coding, raw_bytes: int, base: bytes | None, depth: int) -> None:
        """Store a coded chunk. `base` is the digest that a delta was made against."""
        self._stream.write(payload)
        self.entries[digest] = Entry(self.name, base, self._offset, len(payload), raw_bytes, coding, depth)
        self._offset += len(payload)

    def commit(self) -> int:
        """Make the pack durable and visible; its bytes. A pack without chunks is not kept."""
        if not self.entries:
            self.abandon()
            return 0
        index = b"".join(
            ENTRY.pack(digest, entry.base or NO_BASE, entry.offset, entry.stored_bytes, entry.raw_bytes,
                       entry.coding.width, entry.coding.lanes, entry.depth)
            for digest, entry in self.entries.items())
        self._stream.write(index + FOOTER.pack(len(self.entries), digest_of(index), MAGIC))
        size = self._stream.tell()
        with self._stream:
            durable.publish(self._path, self._stream, self.store.packs / self.name)
        self.store.committed(self.name, self.entries)
        return size

    def abandon(self) -> None:
        """Throw away what was added."""
        try:
            self._stream.close()
        except OSError:
            pass            # the disk is full and the last bytes cannot be flushed: they are not wanted
        self._path.unlink(missing_ok=True)


def read_index(path: Path) -> dict[bytes, Entry]:
    """The index of one pack. Raises ValueError when it is damaged."""
    with open(path, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size < len(MAGIC) + FOOTER.size or stream.read(len(MAGIC)) != MAGIC:
            raise ValueError("it is not a pack of chunks")
        stream.seek(size - FOOTER.size)
        count, digest, magic = FOOTER.unpack(stream.read(FOOTER.size))
        start = size - FOOTER.size - count * ENTRY.size
        if magic != MAGIC or start < len(MAGIC):
            raise ValueError("its footer is damaged")
        stream.seek(start)
        index = stream.read(count * ENTRY.size)
    if digest_of(index) != digest:
        raise ValueError("its index is damaged")
    found = {}
    for name, base, offset, stored, raw, width, lanes, depth in ENTRY.iter_unpack(index):
        coding = deltas.Coding(width, lanes)
        if not coding.valid() or offset < len(MAGIC) or offset + stored > start or raw > LARGEST_BYTES:
            raise ValueError("its index holds what no index can hold")
        found[name] = Entry(path.name, None if base == NO_BASE else base, offset, stored, raw, coding, depth)
    return found
