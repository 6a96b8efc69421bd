"""The user's own functions, where they run in this process: what they raise has a name, and a process that they fork
ends where they do. It never goes on as saturate: there would be two searches in one folder, and two answers."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from saturate.errors import SaturateError, WorkloadFailed
from saturate.report import tracebacks

#: What their code may raise, without what a user at the keyboard raises.
RAISED = (Exception, SystemExit, GeneratorExit)

_LAST_LINES = 12  # of a traceback

#: For each piece of their code that runs, one within the other: whether it was interrupted.
_running: list[bool] = []


@contextmanager
def running(what: str) -> Iterator[None]:
    """Whatever the code in here raises is WorkloadFailed, with the end of its traceback as evidence; our own errors pass."""
    try:
        with forks_end():
            yield
    except SaturateError:
        raise
    except RAISED as error:
        lines = tracebacks.of_user(error).rstrip().splitlines()[-_LAST_LINES:]
        raise WorkloadFailed(f"{what} failed", cause=last_words(error),
                             evidence="\n".join(["", *(f"    {line}" for line in lines)]), remedy=_remedy(error)) from error


@contextmanager
def forks_end() -> Iterator[None]:
    """A process that is forked in here ends when it leaves, as its own program would: it has neither our cleaning up to do
    nor an answer to print. Raises KeyboardInterrupt where their code has swallowed one that `interrupt` raised."""
    process = os.getpid()
    _running.append(False)
    try:
        yield
    except BaseException as error:
        if os.getpid() != process:
            _end(error)
        if _running[-1] and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
    else:
        if os.getpid() != process:
            os._exit(0)
        if _running[-1]:
            raise KeyboardInterrupt
    finally:
        _running.pop()


def interrupted() -> bool:
    """For a handler of signals that raises KeyboardInterrupt: whether it is the user's code that runs, which may swallow that. It is
    raised again where their code ends, if it does not end by it."""
    _running[:] = [True] * len(_running)
    return bool(_running)


def items(given: Iterable[Any], what: str) -> Iterator[Any]:
    """What the user's own iterable gives. Raises WorkloadFailed where it raises."""
    reading = f"reading {what}"
    with running(reading):
        iterator = iter(given)
    nothing = object()
    while True:
        with running(reading):
            item = next(iterator, nothing)
        if item is nothing:
            return
        yield item


def last_words(error: BaseException) -> str:
    """The error in one line."""
    if isinstance(error, SystemExit):
        return f"it ends the process (exit code {error.code})"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _end(error: BaseException) -> NoReturn:
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        os._exit(1)
    os._exit(error.code if isinstance(error.code, int) else int(error.code is not None))


def _remedy(error: BaseException) -> str:
    text = str(error)
    if re.search(r"CUDA|NVIDIA driver|cuda", text):
        return "it needs a GPU, and torch finds none that works: build the model on the CPU, or run this where one is"
    if isinstance(error, ModuleNotFoundError):
        return f"install what it imports: {error.name}"
    if isinstance(error, SystemExit):
        return "put what only the script itself should do under: if __name__ == '__main__':"
    return "call it by itself in Python: it must work there first"
