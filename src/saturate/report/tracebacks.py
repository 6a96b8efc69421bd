"""Tracebacks of the user's own code: its frames, not ours nor those of what is installed."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from traceback import FrameSummary, StackSummary, TracebackException

_OURS = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
_STDLIB = os.path.dirname(os.path.realpath(os.__file__)) + os.sep


def of_user(error: BaseException) -> str:
    """The traceback with the user's frames only; with all of them where none is the user's."""
    found = TracebackException.from_exception(error)
    chain = list(_chain(found))
    if any(_users(frame) for one in chain for frame in one.stack):
        for one in chain:
            one.stack = StackSummary.from_list([frame for frame in one.stack if _users(frame)])
    return "".join(found.format())


def place(error: BaseException) -> str:
    """"file.py:12" of the user's last frame, else of the last one that is not ours; "" without any."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not os.path.realpath(frame.filename).startswith(_OURS)]
    last = next(filter(_users, reversed(frames)), frames[-1] if frames else None)
    return "" if last is None else f"{last.filename}:{last.lineno}"


def _chain(found: TracebackException | None) -> Iterator[TracebackException]:
    """The exception, and what it was raised from or while."""
    if found is not None:
        yield found
        yield from _chain(found.__cause__)
        yield from _chain(found.__context__)


def _users(frame: FrameSummary) -> bool:
    real = os.path.realpath(frame.filename)
    return os.path.isfile(real) and not real.startswith((_OURS, _STDLIB)) and "site-packages" not in real and "dist-packages" not in real
