"""What saturate says on standard error from inside of the user's process.

It is for the user to know, and nothing may come of it that would not have come without saturate: not where nobody reads any
more (`2>&1 | head`), where the disk below is full, or where there is no standard error at all (`2>&-`: then the number 2 may be
a file of the script's own). Standard library only.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any


def tell(text: str) -> None:
    """Write whole lines. A script may have put anything in the place of the stream, which raises anything: then the
    interpreter's own is tried."""
    for stream in (sys.stderr, sys.__stderr__):
        try:
            _write(stream, text)
        except Exception as error:  # noqa: BLE001 - see above
            _pass_on(error)
        else:
            return


@functools.cache
def tell_once(text: str) -> None:
    """The same, but never twice in a process: a training may make a loader for every epoch, or copies of its model again and again,
    each left alone for the same reason."""
    tell(text)


def _write(stream: Any, text: str) -> None:
    """Into the interpreter's own stream not by way of its buffer: what could not be written would stay there, and the interpreter,
    which tries again at its end, would make it the exit code (120)."""
    if stream is not sys.__stderr__:
        stream.write(text)
        return
    stream.flush()
    os.write(stream.fileno(), text.encode(stream.encoding, "backslashreplace"))


def flush() -> None:
    """What was written so far, before the process is left without the interpreter's own end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception as error:  # noqa: BLE001 - as above
            _pass_on(error)


def _pass_on(error: Exception) -> None:
    """Raise what a signal handler of the script raised meanwhile: a time limit is the script's to catch."""
    from saturate.techniques._interrupts import from_signal_handler

    if from_signal_handler(error):
        raise error
