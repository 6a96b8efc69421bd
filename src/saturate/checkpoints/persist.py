"""Writing a snapshot to an open file: by the thread that calls, or by a helper process that shares the memory.

    saturate.checkpoints.persist.main(descriptor)       what the helper runs

The helper is a fresh interpreter without torch and without `site`, started once: no fork of a process that holds a
GPU, no interpreter lock to share, and a low priority that slows down nobody. It is nobody's child, so that a script which
waits for all its children does not wait for it. It gets descriptors, never paths, so that
wherever the training process may write, it may. It ends when its socket closes. Standard library only.

Request: 8 bytes, the length of a JSON text, with the descriptors of the arena and the file; then the text. Answer: 4
bytes, an errno, 0 for success; and once before all others, the number of its process. Native byte order.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from saturate.checkpoints import archive

_BATCH_BYTES = 16 << 20
_BATCH_BUFFERS = 512            # below IOV_MAX, 1024 on Linux
_NICENESS = 10

#: How long a helper may take to import the standard library and answer.
_START_S = 30.0
#: How long its end is waited for.
_END_S = 5.0


def write(descriptor: int, buffers: Iterable[Any]) -> int:
    """Write all buffers from the start of the file, and sync. Returns the bytes written. Raises OSError.

    What was written is handed to the disk at once, batch by batch: waiting for the sync to begin leaves the disk idle
    while the processor works, and the other way round.
    """
    total = started = 0
    batch: list[Any] = []
    pending = 0
    for buffer in buffers:
        batch.append(buffer)
        pending += len(buffer)
        if pending >= _BATCH_BYTES or len(batch) >= _BATCH_BUFFERS:
            total += _write_all(descriptor, batch)
            batch, pending = [], 0
            _start_writeback(descriptor, started, total - started)
            started = total
    total += _write_all(descriptor, batch)
    os.fsync(descriptor)
    return total


def _start_writeback(descriptor: int, start: int, length: int) -> None:
    """Linux begins to write dirty pages that it is told will not be needed again; elsewhere the sync does all."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)


def _write_all(descriptor: int, batch: list[Any]) -> int:
    total = 0
    views = [memoryview(buffer) for buffer in batch]
    while views:
        written = os.writev(descriptor, views)
        total += written
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]
    return total


class HelperGone(Exception):
    """The helper ended; what it was asked to write must be written again by somebody else."""


class Helper:
    """The helper process, as the training process sees it. One request at a time. Raises `HelperGone` when it does not
    start."""

    def __init__(self) -> None:
        try:
            self._start()
        except OSError as error:
            raise HelperGone from error
        self.pid = self._answer()
        self._socket.settimeout(None)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(_START_S)
        self._socket = ours
        with theirs:
            root = Path(__file__).resolve().parents[2]
            code = f"import os, sys; os.fork() and os._exit(0); sys.path.insert(0, {str(root)!r}); " \
                   f"from saturate.checkpoints import persist; persist.main({theirs.fileno()})"
            environment = {name: value for name, value in os.environ.items()
                           if not name.startswith(("PYTHON", "SATURATE"))}
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", code], pass_fds=[theirs.fileno()], env=environment, cwd="/",
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait()

    def write(self, descriptor: int, arena: int, request: dict[str, Any]) -> None:
        """Write an archive from the arena, and sync. Raises the helper's OSError, or `HelperGone`."""
        text = json.dumps(request).encode()
        try:
            socket.send_fds(self._socket, [struct.pack("=q", len(text))], [arena, descriptor])
            self._socket.sendall(text)
        except OSError as error:
            raise HelperGone from error
        code = self._answer()
        if code:
            raise OSError(code, os.strerror(code))

    def _answer(self) -> int:
        try:
            answer = self._socket.recv(4, socket.MSG_WAITALL)
        except OSError as error:
            self.close()
            raise HelperGone from error
        if len(answer) < 4:
            self.close()
            raise HelperGone
        return struct.unpack("=i", answer)[0]

    def close(self) -> None:
        """It ends by itself when its socket closes, after what it is writing; for a moment that is waited for. A process that
        was forked since may hold the socket too."""
        with contextlib.suppress(OSError):      # it has gone already
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(_END_S)
            while self._socket.recv(4):
                pass
        self._socket.close()

    def leave(self) -> None:
        """In a forked child: it is the parent's."""
        self._socket.close()


def main(descriptor: int) -> None:
    """Serve until the training process is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)       # meant for the training, which flushes first
    os.nice(_NICENESS)
    with socket.socket(fileno=descriptor) as connection:
        connection.sendall(struct.pack("=i", os.getpid()))
        while True:
            try:
                header, descriptors, _, _ = socket.recv_fds(connection, 8, 2)
                if len(header) < 8:
                    return
                request = json.loads(_receive(connection, struct.unpack("=q", header)[0]))
                answer = _serve(request, *descriptors)
                connection.sendall(struct.pack("=i", answer))
            except (ConnectionError, EOFError):
                return          # the training process is gone; what it wanted cannot be finished by its name


def _receive(connection: socket.socket, size: int) -> bytes:
    text = b""
    while len(text) < size:
        part = connection.recv(size - len(text))
        if not part:
            raise EOFError
        text += part
    return text


def _serve(request: dict[str, Any], arena: int, descriptor: int) -> int:
    """Write one archive; the errno of what went wrong, 0 if nothing did."""
    try:
        view = memoryview(mmap.mmap(arena, 0, access=mmap.ACCESS_READ))
        write(descriptor, layout(request, (view[offset:offset + size] for _, size, offset in request["records"])))
    except OSError as error:
        return error.errno or errno.EIO
    finally:
        os.close(arena)
        os.close(descriptor)
    return 0


def layout(request: dict[str, Any], contents: Iterable[Any]) -> Iterable[Any]:
    """The buffers of the file: an archive called `folder`, or the bare content where there is no folder.

    `request`: `records` [name, bytes, offset in the arena], `folder`, `alignment`.
    """
    return archive.pieces(_plan(request), contents) if request["folder"] else contents


def file_bytes(request: dict[str, Any]) -> int:
    """Size of the file that `layout` gives."""
    return archive.total_bytes(_plan(request)) if request["folder"] else sum(size for _, size, _ in request["records"])


def _plan(request: dict[str, Any]) -> tuple[archive.Entry, ...]:
    return archive.plan(request["folder"], [(name, size) for name, size, _ in request["records"]], request["alignment"])
