"""A process that has imported what every candidate needs, and forks one of them whenever a candidate starts.

A fresh interpreter imports torch, its exporter and the libraries of the user's model anew for each candidate: seconds, of which a search for a
small model mostly consists. Here they are imported once. A fork begins with its environment, descriptors, random numbers and memory as a fresh
interpreter that had just imported the same would (`_become`), below a supervisor of its own, as every candidate.

Where forking is not safe there is no such process, and candidates start afresh: other systems than Linux, GPUs (CUDA does not survive a
fork), libraries that have started threads (nor do locks that those hold) or processes, a model that cannot be loaded. What is claimed in the end is measured
in fresh processes in any case.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import json
import mmap
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from saturate.errors import EnvironmentProblem
from saturate.inference import launching
from saturate.inference.source import Source
from saturate.trial import supervise, supervised, tree

#: What `torch.export` imports, mostly when it is used first.
_MODULES = ("torch", "torch._dynamo", "torch.export", "torch.export._trace")

#: Importing may take so long, from a slow disk, and a fork so long. Whoever waits longer starts afresh.
_IMPORT_S, _FORK_S = 120.0, 20.0

#: Linux's numbers: include/uapi/asm-generic/mman-common.h (since 5.14), and the bits of /proc/PID/pagemap (Documentation/admin-guide/mm/pagemap.rst).
_POPULATE_READ, _POPULATE_WRITE = 22, 23
_PRESENT, _SWAPPED, _OF_A_FILE = 1 << 63, 1 << 62, 1 << 61

_PAGE = mmap.PAGESIZE


# -- the search's end --------------------------------------------------------------------------------------------------


class Supervisor:
    """A forked supervisor, with what `supervised` uses of `subprocess.Popen`. It is not this process's child: the fork server
    collects it, once it is told to, so that until then its number is nobody else's."""

    def __init__(self, pid: int, stdin: int, stdout: int, collect: Callable[[int], None]):
        self.pid = pid
        self.returncode: int | None = None
        self._collect = collect
        self._ended = os.pidfd_open(pid)
        self.stdin, self.stdout = os.fdopen(stdin, "wb", buffering=0), os.fdopen(stdout, "rb")

    def poll(self) -> int | None:
        """0 once it has ended, however that was."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            ended = select.poll()
            ended.register(self._ended, select.POLLIN)
            if not ended.poll(None if timeout is None else 1000.0 * timeout):
                raise subprocess.TimeoutExpired("supervise.py", timeout or 0.0)
            self.returncode = 0
            os.close(self._ended)
            self._collect(self.pid)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._ended, signal.SIGKILL)


class ForkServer:
    """Starts at construction, and imports while others go on. `threads`: that its candidates may use. `folder`: where it gets a
    private one of its own. Raises OSError and EnvironmentProblem where no process can be started."""

    def __init__(self, source: Source, *, folder: Path, threads: int):
        self.threads = threads
        self.closed = False
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self.saves_s = 0.0                  # what it has imported, a process that starts afresh needs so long for
        self._imported = False
        self._token = secrets.token_hex(12)
        self.folder = launching.private(Path(folder).absolute())
        launching.make_temporary(source, self.folder)
        self._channel, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = launching.python(f"from saturate.inference.forkserver import main; "
                                 f"main({there.fileno()}, {str(source.folder.absolute())!r}, {self._token!r})")
        with there, open(self.folder / "output.log", "wb") as log:
            self._process = subprocess.Popen(
                command, env=launching.environment(source, self.folder, threads, self._token), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                pass_fds=[there.fileno()], start_new_session=True)

    def wait(self) -> None:
        """Until it has imported all, and stands still; or never will."""
        with self._lock:
            if self._imported or self.closed:
                return
            try:
                self._channel.settimeout(_IMPORT_S)
                if answer := self._channel.recv(4096):
                    self.saves_s, self._imported = json.loads(answer)["imported_s"], True
            except OSError:
                pass                    # it takes too long, or has ended: its log says why
            finally:
                if not self._imported:
                    self._give_up()

    def start(self, folder: Path, order: dict[str, Any], descriptor: int) -> Supervisor | None:
        """As `supervised.start`; `order` has "path", the candidate's `sys.path`, too, and `descriptor` is its end of a socket. None: it
        cannot be forked."""
        if os.getpid() != self._owner:
            return None
        self.wait()
        with self._lock:
            if self.closed:
                return None
            path = supervised.write(folder, order)
            try:
                forked = self._fork(path, descriptor)
            except BaseException as error:
                self._give_up()                 # an answer that comes later would be taken for the next one's
                path.unlink(missing_ok=True)
                if not isinstance(error, OSError):
                    raise
                return None
            if forked is None:
                path.unlink(missing_ok=True)
            return forked

    def _fork(self, path: Path, descriptor: int) -> Supervisor | None:
        (reader, stdin), (stdout, writer) = os.pipe(), os.pipe()
        forked = None
        try:
            self._channel.settimeout(_FORK_S)
            socket.send_fds(self._channel, [json.dumps({"order": str(path)}).encode()], [reader, writer, descriptor])
            answer = self._channel.recv(4096)
            if not answer:
                raise ConnectionError("it has ended: its log says why")
            if pid := json.loads(answer)["pid"]:
                forked = Supervisor(pid, stdin, stdout, self._collect)
            self.closed = forked is None
            return forked
        finally:
            for end in (reader, writer, *((stdin, stdout) if forked is None else ())):
                os.close(end)

    def _give_up(self) -> None:
        """No more forks. Those that live go on: each has a supervisor of its own."""
        self.closed = True
        self._process.kill()

    def _collect(self, pid: int) -> None:
        with contextlib.suppress(OSError):      # it is gone itself: whoever has adopted them collects
            self._channel.send(json.dumps({"collect": pid}).encode())

    def close(self) -> None:
        """End it. Its log stays."""
        if os.getpid() != self._owner:
            return                      # a fork of the user's process: not its to end
        self.closed = True
        self._channel.close()
        tree.kill(self._process.pid)        # what the user's modules have started
        self._process.kill()
        self._process.wait()
        tree.kill_marked(f"{launching.MARK}={self._token}".encode())
        launching.discard(self.folder)


def possible() -> bool:
    """Whether this system has what it takes: Linux 5.14, and a /proc that tells a process of its own pages."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.open("/proc/self/pagemap", os.O_RDONLY))
    except (OSError, AttributeError):
        return False
    return not _populate(_POPULATE_WRITE, [_page_of(ctypes.create_string_buffer(1))])


@contextlib.contextmanager
def running(source: Source, folder: Path, threads: int) -> Iterator[ForkServer | None]:
    """One for the candidates of a search; None where they must start afresh."""
    server = None
    if source.device == "cpu" and possible():
        with contextlib.suppress(OSError, EnvironmentProblem):      # no room, no process more: whatever starts next says what is wrong
            server = ForkServer(source, folder=folder, threads=threads)
    try:
        yield server
    finally:
        if server is not None:
            server.close()


# -- the process itself ------------------------------------------------------------------------------------------------


def main(descriptor: int, source: str, token: str) -> None:
    """Import, then fork what is asked for until the other end is closed."""
    ctypes.CDLL(None).prctl(supervise.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    began = time.monotonic()
    channel = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    for name in _MODULES:
        importlib.import_module(name)
    opened = Source.open(Path(source))
    if opened.kind:
        opened.model(sys.modules["torch"])      # imports the user's modules
    from saturate.inference import worker  # noqa: F401 - as they do

    if (pid := os.fork()) == 0:     # libraries whose threads may be forked beside end them now, and start them again when they need any: OpenBLAS
        os._exit(0)
    os.waitpid(pid, 0)
    if tree.children(os.getpid()):
        sys.exit("no forks: a library has started a process, which only one process can talk to")
    own = _descriptors() - {channel.fileno()}
    gc.collect()
    gc.freeze()
    channel.send(json.dumps({"imported_s": time.monotonic() - began}).encode())
    while True:
        data, descriptors, *_ = socket.recv_fds(channel, 1 << 16, 3)
        if not data:
            return
        request = json.loads(data)
        if "collect" in request:
            os.waitpid(request["collect"], 0)
            continue
        channel.send(json.dumps({"pid": _fork(channel, request["order"], descriptors, own, token)}).encode())
        for one in descriptors:
            os.close(one)


def _fork(channel: socket.socket, order: str, descriptors: list[int], own: set[int], token: str) -> int:
    """The number of a forked supervisor; 0: this process has threads, whose locks would be held for ever."""
    if len(os.listdir("/proc/self/task")) > 1:
        print("no more forks: a library has started threads", flush=True)
        return 0
    resident = _resident()
    pid = os.fork()
    if pid:
        return pid
    try:
        channel.close()
        os.setsid()
        stdin, stdout, connection = descriptors
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.close(stdin)
        os.close(stdout)
        supervise.main(order, lambda spec: _become(spec, connection, own, token, resident))
    finally:
        os._exit(0)                     # whatever was raised: the search finds no report


def _become(spec: dict[str, Any], connection: int, own: set[int], token: str, resident: tuple[list[tuple[int, int]], list[tuple[int, int]]]) -> NoReturn:
    """In the candidate's process: be as a fresh interpreter that has imported the same, then `worker.main`."""
    code = 1
    try:
        for descriptor in _descriptors() - own - {0, 1, 2, connection}:
            os.close(descriptor)
        environment = spec["environment"]
        os.environ.clear()
        os.environ.update(environment)
        _show(token, environment[launching.MARK])
        sys.path[:] = spec["path"]
        tempfile.tempdir = None         # TMPDIR is another one
        if "numpy" in sys.modules:      # Python's own `random` does so by itself
            sys.modules["numpy"].random.seed()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        read, written = resident
        _populate(_POPULATE_READ, read)
        _populate(_POPULATE_WRITE, written)
        from saturate.inference import worker

        worker.main(connection)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _descriptors() -> set[int]:
    found = {int(name) for name in os.listdir("/proc/self/fd")}
    return {one for one in found if os.path.exists(f"/proc/self/fd/{one}")}      # but for that of the list itself


def _show(token: str, mark: str) -> None:
    """Have /proc/self/environ, by which `tree.kill_marked` finds a process, hold the candidate's mark in place of the fork server's."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        begins, ends = (int(word) for word in file.read().rpartition(")")[2].split()[47:49])
    place = ctypes.string_at(begins, ends - begins).index(token.encode())
    ctypes.memmove(begins + place, mark.encode(), len(mark))


# -- memory ------------------------------------------------------------------------------------------------------------
#
# A fork shares its pages with the fork server until it writes to them, and maps none of its files' until it touches them. Both would be paid for
# while calls are timed, and what a process has resident would not be what it needs by itself.


def _resident() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Runs of pages (address, bytes) that this process has: of files, and of its own that it may write to."""
    read: list[tuple[int, int]] = []
    written: list[tuple[int, int]] = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps, open("/proc/self/pagemap", "rb", buffering=0) as pages:
        for line in maps.readlines():
            where, access, _, _, inode, *_ = line.split(maxsplit=5)
            begins, ends = (int(word, 16) for word in where.split("-"))
            if access[0] != "r" or access[3] != "p":
                continue
            pages.seek(begins // _PAGE * 8)
            entries = array.array("Q", pages.read((ends - begins) // _PAGE * 8))
            if access[1] == "w":
                written += _runs(begins, [entry & (_PRESENT | _SWAPPED) and not entry & _OF_A_FILE for entry in entries])
            if inode != "0":
                read += _runs(begins, [entry & _PRESENT for entry in entries])
    return read, written


def _runs(begins: int, wanted: Sequence[int]) -> list[tuple[int, int]]:
    """Of the pages from `begins` on, neighbours together.

    >>> _runs(0, [False, True, True, False, True])
    [(4096, 8192), (16384, 4096)]
    """
    found: list[tuple[int, int]] = []
    for number, one in enumerate(wanted):
        address = begins + number * _PAGE
        if not one:
            continue
        if found and sum(found[-1]) == address:
            found[-1] = found[-1][0], found[-1][1] + _PAGE
        else:
            found.append((address, _PAGE))
    return found


def _page_of(buffer: Any) -> tuple[int, int]:
    return ctypes.addressof(buffer) // _PAGE * _PAGE, _PAGE


def _populate(how: int, runs: Sequence[tuple[int, int]]) -> int:
    """Have the kernel map these pages now. For how many runs it would not: they are mapped when they are touched."""
    madvise = ctypes.CDLL(None).madvise
    return sum(madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), how) != 0 for address, size in runs)
