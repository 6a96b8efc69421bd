"""While a checkpoint is still being written, whatever looks at its file waits for it, and so does what could announce or outlive it.

`install` replaces the functions of `os`, `builtins.open` and a few ways to start or end processes by ones that ask first, also where a module
took them by name (`from os import replace`). An audit hook would see more callers, but cannot be removed, runs at every event of the
interpreter, and there is no event for `os.stat`. With nothing pending the price is one look at an empty dictionary.

    reads (open, stat, listdir...)      wait for that very file, or the files of that folder
    creations (open for writing, link)  wait for all files in the folder of the new name and below: a pointer such as
                                        `latest` stands beside its checkpoint or above it; a link also for those in
                                        the folder that it names
    removals (unlink, rename, rmdir)    wait for everything: the last good one must not go before the next is there
    barriers, programs, exits           wait for everything

After a save that failed, reads of that very file, creations near it by the thread that saved, removals and programs raise
its error, until the next save has.

A forked child does not delay its parent (loader workers are forked all the time): it waits by itself when it looks,
removes or starts a program, and does not when it ends. So does what it forks in turn.
"""

from __future__ import annotations

import builtins
import functools
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from posix import getpid
from types import ModuleType
from typing import Any

from saturate import classheld
from saturate.checkpoints.own_calls import inside, quiet
from saturate.checkpoints.writer import Failure, Job, Writer

_READS = ("stat", "lstat", "access", "readlink", "chmod", "chown", "lchown", "utime", "getxattr", "setxattr",
          "listxattr", "removexattr")
_LISTS = ("listdir", "scandir")
_REMOVALS = ("unlink", "remove", "rmdir", "rename", "replace", "truncate")
_CREATIONS = ("link", "symlink")
_PROGRAMS = ("system", "posix_spawn", "posix_spawnp", "execv", "execve")
_SETS = ("supports_dir_fd", "supports_fd", "supports_follow_symlinks", "supports_effective_ids")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

#: Python's own for output that could not be written at the end.
_EXIT_CODE = 120

#: Modules that keep the functions that they hold: the import system asks these often, and never for checkpoints; who
#: of our own took a name wants what it was then.
_LEFT_ALONE = ("posix", "_io", "saturate")

#: Modules of Python's own that pass on what one of those makes.
_PUBLIC = {"posix": "os", "_io": "io"}

#: Signals whose default is to end the process at once.
_DEADLY = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


class Guards:
    """For one writer. `signals_held` are the deadly ones that flush first while something is pending."""

    def __init__(self, writer: Writer):
        self.writer = writer
        self.signals_held: set[int] = set()
        self._functions: dict[int, Any] = {}        # what stands for the original with this id
        self._undo: list[Callable[[], None]] = []

    # -- files -----------------------------------------------------------------------------------------------------

    def install(self) -> None:
        for names, before in ((_READS, self._read), (_LISTS, self._list), (_REMOVALS, self._remove),
                              (_CREATIONS, self._create), (_PROGRAMS, self._everything)):
            for name in names:
                if hasattr(os, name):
                    self._replace_os(name, before)
        self._replace_os("open", self._os_open)
        self._replace_os("kill", self._kill)
        self._replace_os("killpg", self._kill_group)
        self._replace_os("abort", self.writer.flush)
        self._functions[id(os._exit)] = self._exiting(os._exit)
        for original in (io.open, builtins.open):       # the same, unless somebody replaced one of them
            self._functions[id(original)] = self._asking(original, self._open)
        for module, name, original in holders(self._functions):
            self._set(module, name, self._functions[id(original)])
        for kind, name, original in classheld.functions(self._functions):
            self._set(kind, name, staticmethod(self._functions[id(original)]))
        self._set(subprocess.Popen, "_execute_child", self._asking(subprocess.Popen._execute_child, self._everything))
        self._set(multiprocessing.process.BaseProcess, "start",
                  self._asking(multiprocessing.process.BaseProcess.start, self._process))

    def _replace_os(self, name: str, before: Any) -> None:
        original = getattr(os, name)
        function = self._asking(original, before)
        for group in _SETS:             # callers look up there what a function can do
            members = getattr(os, group)
            if original in members:
                members.add(function)
                self._undo.append(functools.partial(members.discard, function))
        self._functions[id(original)] = function

    def _asking(self, original: Any, before: Any) -> Any:
        """`original`, but while something is pending `before` is called first with the same arguments."""
        pending = self.writer.pending
        failures = self.writer.failures

        @standing_for(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if (pending or failures) and not inside():
                with quiet():
                    before(*args, **kwargs)
            return original(*args, **kwargs)

        return function

    def _set(self, owner: Any, name: str, value: Any) -> None:
        original = vars(owner)[name]

        def undo() -> None:
            if vars(owner).get(name) is value:          # somebody may have wrapped ours, which then only passes on
                setattr(owner, name, original)

        setattr(owner, name, value)
        self._undo.append(undo)

    def _read(self, path: Any = None, *_: Any, dir_fd: int | None = None, **__: Any) -> None:
        place = _canonical(path, dir_fd)
        self._wait(lambda job: _is_of(job, place))

    def _list(self, path: Any = ".", *_: Any) -> None:
        place = _canonical("." if path is None else path, None, of_descriptor=True)
        self._wait(lambda job: place is not None and (place in (job.folder, os.path.dirname(job.path)) or _is_of(job, place)))

    def _create(self, src: Any = None, dst: Any = None, *_: Any, dst_dir_fd: int | None = None,
                dir_fd: int | None = None, **__: Any) -> None:
        place = _canonical(dst, dst_dir_fd if dst_dir_fd is not None else dir_fd)
        linked = [_canonical(src, None)]
        if place is not None and isinstance(src, (str, bytes, os.PathLike)):        # a symbolic link counts from its folder
            linked.append(_canonical(os.path.join(os.path.dirname(place), os.fsdecode(src)), None))

        def concerns(job: Job | Failure) -> bool:
            return (place is not None and _below(job, os.path.dirname(place))) or any(
                one is not None and (_is_of(job, one) or _below(job, one)) for one in linked)

        self._wait(concerns)
        self.writer.refuse(lambda failure: _is_mine(failure) and concerns(failure))

    def _open(self, file: Any = None, mode: Any = "r", *_: Any, **__: Any) -> None:
        self._opens(_canonical(file, None), isinstance(mode, str) and bool(set(mode) & set("wax+")))

    def _os_open(self, path: Any = None, flags: int = 0, *_: Any, dir_fd: int | None = None, **__: Any) -> None:
        self._opens(_canonical(path, dir_fd), bool(flags & _WRITES))

    def _opens(self, place: str | None, writes: bool) -> None:
        if place is None:
            return
        # A folder is opened to be listed, synced or removed with all that it holds.
        if writes:
            self._wait(lambda job: _below(job, os.path.dirname(place)))
            self.writer.refuse(lambda failure: _is_mine(failure) and _below(failure, os.path.dirname(place)))
        else:
            self._wait(lambda job: _is_of(job, place) or _below(job, place))
            self.writer.refuse(lambda failure: _is_mine(failure) and _is_of(failure, place))

    def _remove(self, path: Any = None, *_: Any, dir_fd: int | None = None, src_dir_fd: int | None = None, **__: Any) -> None:
        """The last good one may be what goes: whichever thread removes it, where it lies near."""
        place = _canonical(path, dir_fd if dir_fd is not None else src_dir_fd)
        self._wait(lambda job: True)
        self.writer.refuse(lambda failure: _is_mine(failure) or place is None or place.startswith(os.path.dirname(failure.folder).rstrip("/") + "/"))

    def _wait(self, concerns: Callable[[Job], bool]) -> None:
        """Wait for the jobs that it concerns."""
        self.writer.wait_for([job.number for job in list(self.writer.pending.values()) if concerns(job)])

    # -- processes -------------------------------------------------------------------------------------------------

    def _everything(self, *_: Any, **__: Any) -> None:
        self._wait(lambda job: True)
        self.writer.refuse(_is_mine)

    def _kill(self, pid: int, number: int) -> None:
        if pid in (0, getpid(), -os.getpgrp()) and number:
            self.writer.flush()

    def _kill_group(self, group: int, number: int) -> None:
        self._kill(-group, number)

    def _exiting(self, original: Any) -> Any:
        @standing_for(original)
        def _exit(status: int) -> None:
            with quiet():
                self.writer.flush()
            original(_EXIT_CODE if self.writer.failures and not status else status)

        return _exit

    def _process(self, process: Any) -> None:
        method = getattr(process, "_start_method", None) or multiprocessing.get_start_method(allow_none=True)
        if method != "fork":
            self._everything()

    def looking(self, original: Any) -> Any:
        """A reader of files that opens them without Python; it names the file first, or `filename`."""
        return self._asking(original, lambda filename=None, *_, **__: self._open(filename))

    def waiting(self, original: Any) -> Any:
        """A barrier that is not passed before this rank's files are durable."""
        return self._asking(original, self._everything)

    # -- signals ---------------------------------------------------------------------------------------------------

    def hold_signals(self) -> None:
        """Something is pending: deadly signals that nobody handles flush first. Only the main thread may do this; a
        handler that stayed longer than needed would hide from libraries that the signal is free."""
        if not self.writer.pending or threading.current_thread() is not threading.main_thread():
            return
        caught = _caught_signals()
        for number in _DEADLY:
            if signal.getsignal(number) == signal.SIG_DFL and not caught >> (number - 1) & 1:
                signal.signal(number, self._dies)
                self.signals_held.add(number)

    def release_signals(self) -> None:
        """Nothing is pending any more."""
        if not self.signals_held or threading.current_thread() is not threading.main_thread():
            return
        for number in self.signals_held:
            if signal.getsignal(number) == self._dies:
                signal.signal(number, signal.SIG_DFL)
        self.signals_held.clear()

    def _dies(self, number: int, frame: Any) -> None:
        with quiet():
            self.writer.flush()
            signal.signal(number, signal.SIG_DFL)
            os.kill(getpid(), number)

    # -- the end ---------------------------------------------------------------------------------------------------

    def at_exit(self) -> None:
        """Flush; a failure that nobody was told of becomes the exit code. All other exit handlers still run."""
        if self.writer.foreign:
            return
        with quiet():
            self.writer.close()
        ended_by_one = hasattr(sys, "last_value")       # an exception that nobody caught was shown
        failures = [failure for failure in self.writer.failures if not (failure.told and ended_by_one)]
        if failures:
            sys.stdout = _Failing(sys.stdout, failures[0].error)

    def undo(self) -> None:
        with quiet():
            self.writer.close()
        self.release_signals()
        while self._undo:
            self._undo.pop()()


class _Failing:
    """Standard output whose flush at the end of the process says that a checkpoint is missing."""

    closed = False

    def __init__(self, stream: Any, error: OSError):
        self._stream = stream
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        raise self._error


def standing_for(original: Any) -> Callable[[Any], Any]:
    """As `functools.wraps`, for a function that takes the place of one of Python's own, also where another process is sent it
    by name: what `os.remove` calls its module is one that keeps the original."""
    def wrap(function: Any) -> Any:
        function = functools.wraps(original)(function)
        function.__module__ = _PUBLIC.get(function.__module__, function.__module__)
        return function

    return wrap


def holders(ids: Iterable[int]) -> list[tuple[ModuleType, str, Any]]:
    """Modules of others that hold one of these objects by a name, each with the name and the object."""
    wanted = frozenset(ids)
    return [(module, name, value) for module in list(sys.modules.values())
            if isinstance(module, ModuleType) and module.__name__.partition(".")[0] not in _LEFT_ALONE
            for name, value in list(vars(module).items()) if id(value) in wanted]


def _caught_signals() -> int:
    """The mask of signals that anybody handles. `signal.getsignal` knows only those of its own: not `faulthandler`'s."""
    try:
        with quiet(), open("/proc/self/status", encoding="ascii") as file:
            return next((int(line.split()[1], 16) for line in file if line.startswith("SigCgt:")), 0)
    except FileNotFoundError:
        return 0                    # not Linux: what Python knows must do


def _canonical(path: Any, dir_fd: int | None, of_descriptor: bool = False) -> str | None:
    """The absolute path without links; None where a call names no path."""
    if isinstance(path, int):
        return os.path.realpath(f"/proc/self/fd/{path}") if of_descriptor else None
    if not isinstance(path, (str, bytes, os.PathLike)):
        return None
    text = os.fsdecode(path)
    if dir_fd is not None:
        text = os.path.join(f"/proc/self/fd/{dir_fd}", text)
    try:
        return os.path.realpath(text)
    except (OSError, ValueError):       # too many links, a null byte: the call itself will say so
        return None


def _is_mine(failure: Failure) -> bool:
    """Whether this thread saved it: others would not have heard of it from a plain save either."""
    return failure.thread == threading.get_ident()


def _below(job: Job | Failure, folder: str) -> bool:
    """Whether what is pending, or failed, lies in `folder`, at any depth."""
    return job.folder == folder or job.folder.startswith(folder.rstrip("/") + "/")


def _is_of(job: Job | Failure, place: str | None) -> bool:
    """Whether `place` is what is pending, or failed, or a part of it."""
    return place is not None and (job.path == place or (job.path == job.folder and place.startswith(job.path + "/")))
