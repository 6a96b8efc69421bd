"""The folder that a study is written to, and the place that the data is read from."""

from __future__ import annotations

import tempfile
from pathlib import Path

from saturate.machine import disk, facts
from saturate.machine.checks import Check

_LEAST_FREE_BYTES = 1 << 28
_GOOD_FREE_BYTES = 4 << 30
#: A training on images reads 1000 files of 100 to 200 kB a second on one current GPU.
_SLOW_BYTES_PER_S = 200e6


def folder(place: Path) -> Check:
    """Whether the study can be written, without leaving anything behind."""
    study = place / ".saturate"
    target = study if study.exists() else place
    try:
        with tempfile.NamedTemporaryFile(dir=target, prefix=".saturate-doctor-") as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return Check("folder", "problem", f"cannot write to {target}: {error.strerror}",
                     "work in a folder of your own, or choose another for the study: saturate tune --dir PATH")
    return Check("folder", "ok", f"{target} is writable")


def space(place: Path) -> Check:
    free = facts.free_bytes(place)
    if free is None:
        return Check("disk", "unknown", f"cannot ask the file system of {place}")
    found, values = f"{facts.gibibytes(free)} free", {"free_bytes": free}
    if free < _LEAST_FREE_BYTES:
        return Check("disk", "problem", found, "free some space: trials keep what they write until they end", values)
    if free < _GOOD_FREE_BYTES:
        return Check("disk", "note", found, "checkpoints that trials write take space until the trial ends", values)
    return Check("disk", "ok", found, values=values)


def read_rate(place: Path, virtual: bool, root: Path) -> Check:
    """How fast the data can be read. `virtual`: a hypervisor is below, and may cache what the guest reads directly."""
    kind = disk.kind_of(place, root)
    try:
        rate = disk.read_rate(place, root=root)
    except OSError as error:
        return Check("read rate", "unknown", f"nothing could be read below {place}: {error.strerror or error}",
                     "name the place of your data: saturate doctor --data PATH")
    values = {"bytes_per_s": rate.bytes_per_s, "bytes": rate.bytes, "seconds": rate.seconds, "cached": rate.cached,
              "direct": rate.direct, "files": rate.files, "file_system": kind or None}
    found = (f"{_rate(rate.bytes_per_s)}: {rate.bytes / 1e6:,.0f} MB of {_what(rate.files)}"
             f"{f' ({kind})' if kind else ''}, {_how(rate, kind, virtual)}")
    if rate.cached is not True and rate.bytes_per_s < _SLOW_BYTES_PER_S:
        return Check("read rate", "note", found, _slow_fix(kind), values)
    return Check("read rate", "ok", found, values=values)


def _what(files: int) -> str:
    return "a temporary file" if files == 0 else "one file" if files == 1 else f"{files} small files, one after the other"


def _how(rate: disk.ReadRate, kind: str, virtual: bool) -> str:
    if rate.cached:
        return "cached: from memory, the device itself was not measured"
    if disk.is_remote(kind):
        return "around this machine's page cache; the server's cache may have answered"
    if rate.cached is None:
        return "may be cached: this file system does not tell"
    return "around the page cache" + ("; the host's cache may have answered" if virtual else "")


def _slow_fix(kind: str) -> str:
    if disk.is_remote(kind):
        return "copy the data to a local disk before the training starts; compare with saturate doctor --data PATH"
    return "move the data to an SSD; pack many small files into few large ones; or keep it in memory (/dev/shm) where it fits"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.0f} MB/s"
