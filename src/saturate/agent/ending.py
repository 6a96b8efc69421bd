"""What is to be done when a process that trains ends by itself.

A child that `multiprocessing` has forked leaves by `os._exit`, which calls nothing that was registered with `atexit`: what Lightning's
`ddp_fork` and launchers for notebooks train in. `multiprocessing` calls finalizers of its own there.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing.process
import multiprocessing.util
import sys
from collections.abc import Callable
from posix import getpid
from typing import Any

#: Behind all that joins the script's threads and queues there: the higher, the sooner.
_LAST = -1000


class Ending:
    """Calls what it is given at the end of a process, once in each: newest first, as `atexit` does."""

    def __init__(self, leave: Callable[[], Any]):
        """`leave`: what is called last of all where `sitecustomize` cannot."""
        self._leave = leave
        self._functions: list[Callable[[], Any]] = []
        self._known_in = self._ended_in = 0         # processes: where `multiprocessing` knows of it, and where it was called

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        if not self._functions:
            atexit.register(self._end)
        self._functions.append(functools.partial(function, *args))
        self.listen()

    def listen(self) -> None:
        """In a child that was forked since, which has forgotten what its parent had told `multiprocessing`."""
        forked = multiprocessing.process.parent_process() is not None and multiprocessing.get_start_method(allow_none=True) != "spawn"
        if forked and self._known_in != getpid():
            self._known_in = getpid()
            multiprocessing.util.Finalize(None, self._end, exitpriority=0)
            multiprocessing.util.Finalize(None, self._end_process, exitpriority=_LAST)

    def _end(self) -> None:
        if self._ended_in != getpid():
            self._ended_in = getpid()
            for function in reversed(self._functions):
                function()

    def _end_process(self) -> None:
        if uncaught() is None:          # else it is shown once this has returned, and ends the process with a code that is none of success
            self._leave()


def uncaught() -> BaseException | None:
    """The exception that ended the script, which the interpreter keeps for debuggers; a child of `multiprocessing` ends while it passes,
    and torch's own make an exit of it."""
    error = getattr(sys, "last_value", None) or sys.exc_info()[1]
    return error.__context__ if isinstance(error, SystemExit) else error
