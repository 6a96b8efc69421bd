"""Read a trace of either kind; which one it is, its first bytes tell, not its name."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from saturate.trace._json_stream import opened
from saturate.trace._sqlite import MAGIC
from saturate.trace.columns import Trace

_M_MMAP_THRESHOLD = -3


def read(path: Path, progress: Callable[[float], None] | None = None) -> Trace:
    """The trace in `path`: Kineto JSON, plain or gzip, or an Nsight Systems export in SQLite. Raises TraceError.

    `progress` is called with the share of the file that has been read, 0 to 1.
    """
    path = Path(path)
    _give_back_freed_columns()
    if _head(path).startswith(MAGIC):
        from saturate.trace import nsys

        return nsys.read(path, progress)
    from saturate.trace import kineto

    return kineto.read(path, progress)


def _give_back_freed_columns() -> None:
    """Have the C library hand a column back to the system as soon as it is freed. glibc otherwise learns from what is freed
    to keep up to 32 MB at a time (mallopt(3), M_MMAP_THRESHOLD): a quarter of the peak of a large trace."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)      # not in every C library
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def _head(path: Path) -> bytes:
    with opened(path) as file:
        return file.read(len(MAGIC))
