"""How fast the data can be read from where it lies, without the page cache: bounded, read-only, in about a second.

Files are read in order, around the page cache (O_DIRECT) where the file system can, or after dropping their pages from
it (posix_fadvise). Whether pages were still in memory is asked (preadv2 with RWF_NOWAIT), and what came from a cache is
called so. Caches below the operating system (of a drive, a host, a file server) cannot be avoided.

Sources: open(2) O_DIRECT, posix_fadvise(2), preadv2(2) RWF_NOWAIT, proc_pid_mountinfo(5).
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from saturate.machine import facts

_BLOCK_BYTES = 4 << 20              # as much as a loader reads ahead; a multiple of every sector size
_READ_SECONDS = 0.7
_MOST_BYTES = 8 << 30
_LARGE_BYTES = 32 << 20             # a smaller file alone is read before the clock has settled
_ENOUGH_BYTES = 1 << 30
_TEMPORARY_BYTES = 64 << 20
_LEAST_FREE_BYTES = 1 << 30         # a temporary file must not be what fills a disk
_WRITE_SECONDS = 0.4
_SEARCH_ENTRIES = 5000
_SEARCH_SECONDS = 0.2
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "rootfs"}
#: Served by another machine or program, whose caches O_DIRECT does not reach.
_REMOTE = re.compile(r"nfs\d?|cifs|smb3?|9p|virtiofs|lustre|gpfs|ceph|beegfs|glusterfs|afs|fuse(\..*)?|zfs")


@dataclass(frozen=True)
class ReadRate:
    """Bytes per second of files read one after the other. `cached`: True, they came from memory; None: it cannot be told."""

    bytes_per_s: float
    bytes: int
    seconds: float
    cached: bool | None
    direct: bool                    # around the page cache
    files: int                      # read; 0: a temporary file, because what lies there is too small to be timed


def read_rate(place: Path, *, seconds: float = _READ_SECONDS, root: Path = Path("/")) -> ReadRate:
    """The read rate of `place`: of that file; of the largest file found below that folder; of many small ones where there
    is no large one; or of a temporary file that is written there. Raises OSError where nothing can be read or written."""
    place.stat()                    # a place that is not there is said so, and nothing else
    paths = [place] if place.is_file() else sample_files(place)
    if paths:
        return _measure((open(path, "rb", buffering=0) for path in paths), kind_of(place, root), seconds)
    if (facts.free_bytes(place) or 0) < _LEAST_FREE_BYTES:
        raise OSError(errno.ENOSPC, "nothing to read there, and too little space for a temporary file")
    with tempfile.TemporaryFile(dir=place, prefix=".saturate-doctor-", buffering=0) as file:
        block = os.urandom(1 << 20) * (_BLOCK_BYTES >> 20)      # random: some file systems and drives compress
        end = time.perf_counter() + _WRITE_SECONDS
        written = 0
        while written < _TEMPORARY_BYTES and (not written or time.perf_counter() < end):
            written += os.write(file.fileno(), block)
        os.fsync(file.fileno())     # dirty pages can be neither dropped nor read around
        rate = _measure([file], kind_of(place, root), seconds)
    return ReadRate(rate.bytes_per_s, rate.bytes, rate.seconds, rate.cached, rate.direct, files=0)


def sample_files(folder: Path, *, entries: int = _SEARCH_ENTRIES, seconds: float = _SEARCH_SECONDS) -> list[Path]:
    """What a short search below `folder` finds worth reading: the largest regular file alone, or all of them where none is
    large but they are many; else nothing. Sparse files do not count: reading a hole reads nothing."""
    end = time.perf_counter() + seconds
    found: list[tuple[int, Path]] = []
    pending = deque([os.fspath(folder)])
    while pending and entries > 0 and time.perf_counter() < end:
        try:
            with os.scandir(pending.popleft()) as listing:
                for entry in listing:
                    entries -= 1
                    if entries < 0 or time.perf_counter() > end:
                        break
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                        continue
                    status = entry.stat(follow_symlinks=False)
                    whole = stat.S_ISREG(status.st_mode) and 0 < status.st_size * 0.9 <= status.st_blocks * 512
                    if whole and os.access(entry.path, os.R_OK):
                        found.append((status.st_size, Path(entry.path)))
        except OSError:             # not ours to look into, or gone meanwhile: others will do
            continue
        if found and max(found)[0] >= _ENOUGH_BYTES:
            break
    largest = max(found, default=(0, folder))
    if largest[0] >= _LARGE_BYTES:
        return [largest[1]]
    return [path for _, path in found] if sum(size for size, _ in found) >= _LARGE_BYTES else []


def kind_of(path: Path, root: Path = Path("/")) -> str:
    """The type of the file system that holds `path`, "ext4"; empty where it is not told."""
    real = os.path.realpath(path)
    best, kind = -1, ""
    try:
        mounts = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:                 # not Linux
        return ""
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        # Blanks and backslashes in a mount point are written as octal numbers.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, kind = len(point), right.split()[0]
    return kind


def is_remote(kind: str) -> bool:
    """Whether a file system is served by another machine or program."""
    return _REMOTE.fullmatch(kind) is not None


def _measure(files: Iterable[BinaryIO], kind: str, seconds: float) -> ReadRate:
    """Reads the files one after the other until they or the seconds end. Closes them."""
    total, took, count = 0, 0.0, 0
    direct, cached = True, None
    with mmap.mmap(-1, _BLOCK_BYTES) as buffer:     # page-aligned, as O_DIRECT demands
        buffer[:] = bytes(_BLOCK_BYTES)             # touched before the clock starts
        for file in files:
            with file:
                size, elapsed, around, in_memory = _read_one(file.fileno(), buffer, seconds - took, _MOST_BYTES - total)
            total, took, count = total + size, took + elapsed, count + 1
            direct = direct and around
            cached = in_memory if count == 1 else _both(cached, in_memory)
            if took >= seconds or total >= _MOST_BYTES:
                break
    if not total:
        raise OSError(errno.ENODATA, "there is nothing in it")
    if kind in _IN_MEMORY:
        cached = True
    elif is_remote(kind) and not cached:
        cached = None
    return ReadRate(total / took, total, took, cached, direct, count)


def _both(first: bool | None, second: bool | None) -> bool | None:
    """Whether either was cached: one is enough to distrust the rate of both. None: neither is known to be, and one does
    not tell."""
    if first or second:
        return True
    return None if None in (first, second) else False


def _read_one(descriptor: int, buffer: mmap.mmap, seconds: float, most: int) -> tuple[int, float, bool, bool | None]:
    """One file: bytes, seconds, whether it was read around the page cache, and whether it was in memory."""
    began = time.perf_counter()
    around = _directly(descriptor)
    if around is not None:
        try:
            return _read(around, buffer, seconds, most), time.perf_counter() - began, True, False
        except OSError as error:
            if error.errno != errno.EINVAL:         # opened, and refused at the first read: some file systems say it so late
                raise
        finally:
            os.close(around)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)      # the kernel may decline
    in_memory = _in_page_cache(descriptor)
    began = time.perf_counter()
    return _read(descriptor, buffer, seconds, most), time.perf_counter() - began, False, in_memory


def _directly(descriptor: int) -> int | None:
    """The same file opened around the page cache; None where the file system cannot."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT)
    except OSError:                 # EINVAL: it cannot; ENOENT: no /proc
        return None


def _read(descriptor: int, buffer: mmap.mmap, seconds: float, most: int) -> int:
    """Reads in order for `seconds`, or to the end, or `most` bytes: how many there were."""
    total = 0
    end = time.perf_counter() + seconds
    while True:
        count = os.preadv(descriptor, [buffer], total)
        total += count
        if count < _BLOCK_BYTES or time.perf_counter() >= end or total >= most:
            return total


def _in_page_cache(descriptor: int) -> bool | None:
    """Whether any of a few pages across the file can be read without waiting for the device; None: not told."""
    size = os.fstat(descriptor).st_size
    buffer = bytearray(4096)
    try:
        for eighth in range(8):
            try:
                os.preadv(descriptor, [buffer], size * eighth // 8 // 4096 * 4096, os.RWF_NOWAIT)
            except BlockingIOError:             # it would have to wait: not in memory
                continue
            return True
    except (OSError, AttributeError):           # the file system, or this system, does not know the flag
        return None
    return False
