"""Read a trace of either kind; which one it is, its first bytes tell, not its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from saturate.trace._json_stream import opened
from saturate.trace.columns import Trace

_SQLITE = b"SQLite format 3\0"


def read(path: Path, progress: Callable[[float], None] | None = None) -> Trace:
    """The trace in `path`: Kineto JSON, plain or gzip, or an Nsight Systems export in SQLite. Raises TraceError.

    `progress` is called with the share of the file that has been read, 0 to 1.
    """
    path = Path(path)
    if _head(path).startswith(_SQLITE):
        from saturate.trace import nsys

        return nsys.read(path, progress)
    from saturate.trace import kineto

    return kineto.read(path, progress)


def _head(path: Path) -> bytes:
    with opened(path) as file:
        return file.read(len(_SQLITE))
