"""Tells our own calls of file functions from the script's: the functions are wrapped so that the script waits for our writes, and we must not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_inside = threading.local()

#: Modules between our own code and the functions of `os` that it means.
_BETWEEN = ("posixpath", "genericpath", "saturate.agent")


@contextmanager
def quiet() -> Iterator[None]:
    """What our code does to files in here, on this thread, is its own: nothing waits for it, or makes it wait. A handler of
    the script for a signal may run in here too: that is no code of ours."""
    before = getattr(_inside, "depth", 0)
    _inside.depth = before + 1
    try:
        yield
    finally:
        _inside.depth = before


def inside() -> bool:
    """Whether the function that asks was called by our own code. Within two of them nobody looks at callers: somebody may
    have wrapped what our code calls, and must not be asked about without end."""
    depth = getattr(_inside, "depth", 0)
    if depth != 1:
        return depth > 1
    frame = sys._getframe(2)
    while frame.f_back is not None and _module(frame).startswith(_BETWEEN):
        frame = frame.f_back
    return _module(frame).startswith("saturate.checkpoints")


def own_thread() -> None:
    """Whatever runs on this thread from now on, our own code has called."""
    _inside.depth = 2


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
