"""Where cached samples lie: one file per version of a dataset, of fixed layout, shared by workers and ranks.

    0       magic, key, number of slots, limit, share; their checksum; end of the records; dropped or not, and why
    2048    counters: 64 pairs of (samples read, samples stored)
    4096    one word per sample: where its record lies (in units of 64 bytes) and how long it is; 0: not there
    ...     records: length, index and checksum, then the sample's bytes (see `cache_codec`)

All of it is written and read with pwrite and pread: the same pages of the same page cache as a mapping has, at one copy
each, but a full disk, a bad sector, or a file that was cut or is gone from its server is an OSError or too few bytes
there and a SIGBUS in a mapping, which kills the training. A record is published by one aligned eight-byte write of its
word after its data, so a process killed at any byte leaves at most unused space; a word or record that is damaged is a
miss. Where the disk, or what its user may have of it, is full, half of what is stored is given back: the training writes
there as well.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import struct
import threading
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from posix import getpid
from typing import Any

_MAGIC = b"SATDATA2"
_FIXED = struct.Struct("<8s32sQQQ")     # magic, key, slots, limit, share
_CHECK, _END, _DROPPED, _REASON = 64, 72, 80, 88
_MOST_REASON = 1024
_COUNTERS, _COUNTER, _COUNTER_SLOTS = 2048, struct.Struct("<QQ"), 64
_TABLE = 4096
_HEAD = struct.Struct("<QQI4x")         # length, index, checksum
_UNIT = 64
_OFFSET_BITS = 40
_MOST_UNITS = (1 << (64 - _OFFSET_BITS)) - 1
_WORD = struct.Struct("=Q")

#: As many pieces the kernel takes in one write.
_MOST_PIECES = os.sysconf("SC_IOV_MAX")

#: A share of samples to keep is counted in these.
WHOLE = 1 << 32

SUFFIX = ".samples"

_thread = threading.local()
_appending = threading.Lock()


def _renew_lock() -> None:
    global _appending
    _appending = threading.Lock()       # the thread that held it was not forked with us


os.register_at_fork(after_in_child=_renew_lock)


class Unusable(Exception):
    """The store cannot be used; the message is the reason."""


class Dropped(Unusable):
    """An earlier reader found that this version of the dataset changes between reads."""


class Foreign(Unusable):
    """It belongs to another user, who goes on with it."""


class Store:
    """An open store. Use `create` or `attach`."""

    def __init__(self, path: str, descriptor: int, key: bytes, slots: int):
        self.path = path
        self.key = key
        self.slots = slots
        self.full = False
        self._fd = descriptor
        self._salt = zlib.crc32(key)
        self._checked = bytearray(slots)        # read before in this process, and found whole
        _, _, _, self.limit_bytes, self.share = _FIXED.unpack(os.pread(descriptor, _FIXED.size, 0))
        self._before = self._counters()
        self._counting, self._counter, self._counted = 0, 0, (0, 0)     # by which process, and where

    def __reduce__(self) -> Any:
        return attach, (self.path, self.key, self.slots)

    # -- samples ---------------------------------------------------------------------------------------------------

    def wanted(self, index: int) -> bool:
        """Whether this sample is one of those that the store has room for: the same in every process and epoch."""
        return 0 <= index < self.slots and (self.share >= WHOLE or _mixed(index) < self.share)

    def holds(self, index: int) -> bool:
        return 0 <= index < self.slots and self._number(_TABLE + 8 * index) != 0

    def get(self, index: int) -> memoryview | None:
        """The record's bytes, valid until this thread's next `get`; None: not there, or damaged."""
        word = self._number(_TABLE + 8 * index)
        if not word:
            return None
        offset, room = (word & ((1 << _OFFSET_BITS) - 1)) * _UNIT, (word >> _OFFSET_BITS) * _UNIT
        if room < _HEAD.size or offset < _table_end(self.slots):
            return None
        view = _scratch(room)
        try:
            there = os.preadv(self._fd, [view], offset)
        except OSError:
            return None                 # a bad sector, a file server that went away: the source still has it
        if there < _HEAD.size:
            return None
        length, owner, check = _HEAD.unpack_from(view)
        if owner != index or length > there - _HEAD.size:       # cut: what lies behind it was read before, of another sample
            return None
        record = view[_HEAD.size:_HEAD.size + length]
        if not self._checked[index]:
            if self._checksum(length, index, [record]) != check:
                return None
            self._checked[index] = 1
        return record

    def put(self, index: int, parts: list[bytes]) -> bool:
        """Store a sample; False where there is no room for it. Never raises for what the disk does."""
        return self.put_all([(index, parts)]) == 1

    def put_all(self, samples: list[tuple[int, list[bytes]]]) -> int:
        """Store some samples, one behind the other; how many there was room for. As `put`, with one lock and one write for all of
        them: storing a photograph by itself took a fortieth of the time in which it is decoded."""
        samples = [(index, parts) for index, parts in samples if _units(parts) <= _MOST_UNITS]
        if self.full or not samples:
            return 0
        try:
            offset = self._append(_UNIT * sum(_units(parts) for _, parts in samples))
            if offset is None and len(samples) > 1:         # as many as there is room for
                return sum(self.put(index, parts) for index, parts in samples)
            if offset is None or not self._write([part for sample in samples for part in self._record(*sample)], offset):
                self.full = True
                return 0
            for index, parts in samples:
                self._checked[index] = 0
                os.pwrite(self._fd, _WORD.pack(_units(parts) << _OFFSET_BITS | offset // _UNIT), _TABLE + 8 * index)
                offset += _UNIT * _units(parts)
        except OSError as error:
            self.full = True            # no space, no quota, a limit on file sizes
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                with contextlib.suppress(OSError):
                    self._give_back()
            return 0
        return len(samples)

    def _give_back(self) -> None:
        """Cut the file to half of its records, and let nobody store any more: what is free for its user is not told beforehand where there
        are quotas, and others fill a disk as well."""
        with self._alone():
            end = self._number(_END)
            if end >= self.limit_bytes:
                return                  # somebody has done it
            self._note(_WORD.pack(self.limit_bytes), _END)
            words = memoryview(os.pread(self._fd, 8 * self.slots, _TABLE)).cast("Q")
            starts = {index: (word & ((1 << _OFFSET_BITS) - 1)) * _UNIT for index, word in enumerate(words) if word}
            middle = (_table_end(self.slots) + end) // 2
            cut = min((start for start in starts.values() if start >= middle), default=end)
            for index, start in starts.items():
                if start >= cut:
                    self._note(_WORD.pack(0), _TABLE + 8 * index)
            os.ftruncate(self._fd, cut)

    def _record(self, index: int, parts: list[bytes]) -> list[bytes]:
        """A record with its head, in whole units."""
        length = sum(map(len, parts))
        return [_HEAD.pack(length, index, self._checksum(length, index, parts)), *parts, bytes(_UNIT * _units(parts) - length - _HEAD.size)]

    def _write(self, parts: list[bytes], offset: int) -> bool:
        if len(parts) > _MOST_PIECES:
            parts = [b"".join(parts)]
        size, written = sum(map(len, parts)), os.pwritev(self._fd, parts, offset)
        if written < size:              # the rest of it tells why
            written += os.pwrite(self._fd, b"".join(parts)[written:], offset + written)
        return written == size

    def _append(self, size: int) -> int | None:
        """Take `size` bytes at the end of the file: their offset, or None beyond the limit."""
        with self._alone():
            end = self._number(_END)
            if not _table_end(self.slots) <= end <= self.limit_bytes - size:
                return None
            os.pwrite(self._fd, _WORD.pack(end + size), _END)
            return end

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else moves the end of the records meanwhile."""
        with _appending:                # lockf keeps processes apart, not threads
            fcntl.lockf(self._fd, fcntl.LOCK_EX, 8, _END)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 8, _END)

    def _number(self, place: int) -> int:
        """What stands there; 0 where the file was cut, or is gone from its server."""
        try:
            data = os.pread(self._fd, _WORD.size, place)
        except OSError:
            return 0
        return int(_WORD.unpack(data)[0]) if len(data) == _WORD.size else 0

    def _checksum(self, length: int, index: int, parts: list[Any]) -> int:
        value = zlib.crc32(struct.pack("<QQ", length, index), self._salt)
        for part in parts:
            value = zlib.crc32(part, value)
        return value

    # -- what everybody must know ------------------------------------------------------------------------------------

    @property
    def dropped(self) -> bool:
        return self._number(_DROPPED) != 0

    @property
    def reason(self) -> str:
        """Why it was dropped."""
        return os.pread(self._fd, _MOST_REASON, _REASON).rstrip(b"\0").decode("utf-8", "replace")

    def drop(self, reason: str) -> None:
        """Nobody may use it any more."""
        self._note(reason.encode()[:_MOST_REASON], _REASON)
        self._note(_WORD.pack(1), _DROPPED)

    def count(self, read: int, stored: int) -> None:
        """Say that this process has read and stored so many samples more. Roughly, where more processes count than have a pair."""
        if self._counting != getpid():
            self._counting, self._counter = getpid(), self._own_counter()
            self._counted = self._counters()[self._counter]
        self._counted = self._counted[0] + read, self._counted[1] + stored
        self._note(_COUNTER.pack(*self._counted), _COUNTERS + self._counter * _COUNTER.size)

    def _own_counter(self) -> int:
        """A pair that nobody has counted in since this was opened, if there is one."""
        now, first = self._counters(), getpid() % _COUNTER_SLOTS
        order = (*range(first, _COUNTER_SLOTS), *range(first))
        return next((place for place in order if now[place] == self._before[place]), first)

    def _note(self, data: bytes, place: int) -> None:
        try:
            os.pwrite(self._fd, data, place)
        except OSError:
            self.full = True            # a disk that takes nothing any more: no reason to end the training

    def counted(self) -> tuple[int, int]:
        """Samples (read, stored) since it was opened here, by all processes, at least."""
        read, stored = zip(*((max(0, now[0] - then[0]), max(0, now[1] - then[1])) for now, then in zip(self._counters(), self._before)))
        return sum(read), sum(stored)

    def _counters(self) -> list[Any]:
        size = _COUNTER_SLOTS * _COUNTER.size
        try:
            data = os.pread(self._fd, size, _COUNTERS)
        except OSError:
            data = b""
        return list(_COUNTER.iter_unpack(data.ljust(size, b"\0")))

    @property
    def used_bytes(self) -> int:
        return min(self._number(_END), os.fstat(self._fd).st_size)


# -- opening -----------------------------------------------------------------------------------------------------------


def create(folder: Path | None, name: str, key: bytes, slots: int, limit_bytes: int, share: int = WHOLE) -> Store:
    """The store of this key in `folder`, made when it is not there; in memory, as long as a process holds it, without
    a folder. Raises Unusable."""
    fixed = _FIXED.pack(_MAGIC, key, slots, limit_bytes, share)
    if limit_bytes <= _table_end(slots):
        raise Unusable("there is no room for a cache")
    try:
        if folder is None:
            descriptor = os.memfd_create(f"saturate {name}", os.MFD_CLOEXEC)
            _begin(descriptor, fixed, slots)
            return Store(f"/proc/{getpid()}/fd/{descriptor}", descriptor, key, slots)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = path_of(folder, name)
        try:
            return attach(str(path), key, slots)
        except FileNotFoundError:
            return _create_file(path, fixed, key, slots)
        except (Dropped, Foreign):
            raise
        except Unusable:
            path.unlink()               # of another version that happens to have this name, or damaged
            return _create_file(path, fixed, key, slots)
    except OSError as error:
        raise Unusable(f"{error.strerror or error}: {error.filename or folder or 'shared memory'}") from error


def attach(path: str, key: bytes, slots: int) -> Store:
    """Open a store that exists. Raises Unusable (for one of another dataset or version), OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        seen = os.fstat(descriptor)
        if seen.st_uid != os.geteuid():
            raise Foreign(f"{path} belongs to another user")
        head = os.pread(descriptor, _END, 0)
        if len(head) < _END or seen.st_size < _table_end(slots) or zlib.crc32(head[:_CHECK]) != _word32(head, _CHECK):
            raise Unusable(f"{path} is damaged")
        magic, its_key, its_slots, _, _ = _FIXED.unpack_from(head)
        if (magic, its_key, its_slots) != (_MAGIC, key, slots):
            raise Unusable(f"{path} holds another dataset, or another version of it")
        store = Store(path, descriptor, key, slots)
        os.utime(descriptor)            # used just now: see `make_room`
        if store.dropped:
            raise Dropped(f"an earlier run found: {store.reason}")
        return store
    except BaseException:
        os.close(descriptor)
        raise


def _create_file(path: Path, fixed: bytes, key: bytes, slots: int) -> Store:
    """Complete before it has its name; the first of several creators wins."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _begin(descriptor, fixed, slots)
        try:
            os.link(fresh, path)
        except FileExistsError:
            return attach(str(path), key, slots)
        except OSError:                 # a file system without hard links: the last creator wins, the others' is unseen
            os.rename(fresh, path)
        return attach(str(path), key, slots)
    finally:
        os.close(descriptor)
        fresh.unlink(missing_ok=True)


def _begin(descriptor: int, fixed: bytes, slots: int) -> None:
    os.posix_fallocate(descriptor, 0, _table_end(slots))    # writing a word can never need space
    os.pwrite(descriptor, fixed + struct.pack("<I", zlib.crc32(fixed)), 0)
    os.pwrite(descriptor, _WORD.pack(_table_end(slots)), _END)


def path_of(folder: Path, name: str) -> Path:
    """Where the store of this name lies."""
    return folder / (name + SUFFIX)


def make_room(folder: Path, limit_bytes: int, keep: Collection[str] = ()) -> int:
    """Before a store is made: remove those that were used longest ago until the others, but for the paths in `keep`, take at most
    half of the limit; how many went. Processes that have a removed one open keep it. Those of other users stay."""
    stores = []
    for path in folder.glob(f"*{SUFFIX}"):
        if str(path) in keep:
            continue
        try:
            seen = path.stat()
        except FileNotFoundError:
            continue                    # another process makes room as well
        if seen.st_uid != os.geteuid():
            continue                    # of somebody who shares the folder
        stores.append((seen.st_mtime, seen.st_blocks * 512, path))
    total, removed = sum(size for _, size, _ in stores), 0
    for _, size, path in sorted(stores):
        if total <= limit_bytes // 2:
            break
        path.unlink(missing_ok=True)
        total -= size
        removed += 1
    return removed


def _table_end(slots: int) -> int:
    return -(-(_TABLE + 8 * slots) // mmap.PAGESIZE) * mmap.PAGESIZE


def _word32(data: bytes, at: int) -> int:
    return struct.unpack_from("<I", data, at)[0]


def _units(parts: list[bytes]) -> int:
    """That a record of these parts takes, with its head."""
    return -(-(sum(map(len, parts)) + _HEAD.size) // _UNIT)


def _mixed(index: int) -> int:
    """A number below WHOLE that looks random (Knuth's multiplicative hash)."""
    return index * 2654435761 % WHOLE


def _scratch(size: int) -> memoryview:
    """Memory of this thread to read a record into: reused, so that it is in the processor's cache."""
    found = getattr(_thread, "scratch", None)
    if found is None or len(found) < size:
        found = _thread.scratch = memoryview(bytearray(max(size, 1 << 16)))
    return found[:size]
