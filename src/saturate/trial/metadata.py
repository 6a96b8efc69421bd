"""A guard over mode, owner, times and extended attributes, which Landlock does not cover.

A seccomp filter hands every call that changes them to the supervisor, which looks where the file lies: inside the folders
that a trial may write the call goes on, anywhere else it fails with EPERM. A filter alone cannot see paths, and to refuse
all such calls would break `cp -p`, `tar` and git in the run folder. Needs no privilege (Linux 5.5). It is a guard against
accidents, as Landlock's is: a program that changes a path while it is looked at gets through. Numbers and structures:
`include/uapi/linux/seccomp.h`, `man 2 seccomp_unotify`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import struct
from collections.abc import Callable
from typing import Any

_SYSCALL_SECCOMP = {"x86_64": 317, "aarch64": 277}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SET_MODE_FILTER, _NEW_LISTENER = 1, 1 << 3
_ALLOW, _ASK = 0x7FFF0000, 0x7FC00000
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_PR_SET_NO_NEW_PRIVS = 38
_AT_FDCWD, _NOFOLLOW = -100, 0x100
_PATH_BYTES = 4096

#: How a call names its file: "path", "link" (the last link is not followed), "fd", or the position of its flags after a folder
#: and a path (None: it has none).
_NEW = {452: 3, 463: 2, 466: 2}         # fchmodat2, setxattrat, removexattrat: the same everywhere
_CALLS: dict[str, dict[int, str | int | None]] = {
    "x86_64": {
        90: "path", 91: "fd", 92: "path", 93: "fd", 94: "link",         # chmod, fchmod, chown, fchown, lchown
        132: "path", 235: "path", 261: None, 280: 3,                    # utime, utimes, futimesat, utimensat
        188: "path", 189: "link", 190: "fd", 197: "path", 198: "link", 199: "fd",      # {,l,f}{set,remove}xattr
        260: 4, 268: None, **_NEW,                                      # fchownat, fchmodat
    },
    "aarch64": {
        5: "path", 6: "link", 7: "fd", 14: "path", 15: "link", 16: "fd",
        52: "fd", 53: None, 54: 4, 55: "fd", 88: 3, **_NEW,
    },
}


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def install() -> int:
    """Put the filter on this process and all it starts; returns the descriptor on which the calls are to be answered by
    another process. Raises OSError where the kernel or a container's own filter does not allow it."""
    machine = os.uname().machine
    if machine not in _CALLS:
        raise OSError(errno.ENOSYS, f"no table of calls for {machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    text = _filter(_AUDIT_ARCH[machine], sorted(_CALLS[machine]))
    code = ctypes.create_string_buffer(text, len(text))
    program = _Program(len(text) // 8, ctypes.addressof(code))
    libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
    listener = libc.syscall(ctypes.c_long(_SYSCALL_SECCOMP[machine]), ctypes.c_ulong(_SET_MODE_FILTER),
                            ctypes.c_ulong(_NEW_LISTENER), ctypes.byref(program))
    if listener < 0:
        code_ = ctypes.get_errno()
        raise OSError(code_, f"seccomp: {os.strerror(code_)}")
    return listener


def _filter(arch: int, numbers: list[int]) -> bytes:
    """BPF: calls of another architecture pass, those of `numbers` are asked about, the rest passes."""
    load, equal, answer = 0x20, 0x15, 0x06
    lines = [(load, 0, 0, 4), (equal, 0, len(numbers) + 1, arch), (load, 0, 0, 0)]
    lines += [(equal, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    lines += [(answer, 0, 0, _ALLOW), (answer, 0, 0, _ASK)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def channel(allowed: Callable[[str], bool]) -> tuple[Callable[[], None], Answers]:
    """For a fork: what the child calls last before it becomes another program, and what its parent answers with."""
    import socket

    ours, theirs = socket.socketpair()

    def ask() -> None:
        socket.send_fds(theirs, [b"!"], [install()])

    return ask, Answers(ours, theirs, allowed)


class Answers:
    """The parent's end. `source` is readable whenever `serve` has something to do."""

    def __init__(self, ours: Any, theirs: Any, allowed: Callable[[str], bool]):
        self.allowed = allowed
        self._ours, self._theirs = ours, theirs
        self._listener = -1
        self.source: int = ours.fileno()

    def begin(self) -> None:
        """After the fork."""
        self._theirs.close()

    def serve(self) -> bool:
        """False: nobody is left who could ask."""
        import socket

        if self._listener >= 0:
            return answer(self._listener, self.allowed)
        _, handles, _, _ = socket.recv_fds(self._ours, 1, 1)
        self._ours.close()
        if handles:
            self._listener = self.source = handles[0]
        return bool(handles)


def answer(listener: int, allowed: Callable[[str], bool]) -> bool:
    """Answer the call that waits at `listener`, if one does; False: nobody is left who could call. Does not wait.

    `allowed` is asked with the absolute path of an existing file, links resolved."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    events = poll.poll(0)
    if not events:
        return True
    if not events[0][1] & select.POLLIN:
        return False
    call = bytearray(80)
    try:
        fcntl.ioctl(listener, _RECEIVE, call)
        number, pid = struct.unpack_from("=QI", call)
        kind = _CALLS[os.uname().machine][struct.unpack_from("=i", call, 16)[0]]
        path = _file_of(pid, kind, struct.unpack_from("=6Q", call, 32))
        refused = path is not None and not allowed(path)
        fcntl.ioctl(listener, _SEND, struct.pack("=QqiI", number, 0, -errno.EPERM if refused else 0, 0 if refused else _CONTINUE))
    except FileNotFoundError:
        pass        # the caller was killed while we looked
    return True


def _file_of(pid: int, kind: str | int | None, arguments: tuple[int, ...]) -> str | None:
    """The existing file that a call of process `pid` changes; None: there is none, or none that outlives the process."""
    try:
        if kind == "fd":
            return _lasting(os.readlink(f"/proc/{pid}/fd/{_signed(arguments[0])}"))
        folder, pointer, follow = _AT_FDCWD, arguments[0], kind != "link"
        if not isinstance(kind, str):
            folder, pointer = _signed(arguments[0]), arguments[1]
            follow = kind is None or not arguments[kind] & _NOFOLLOW
        elif not pointer:
            return None
        name = _text(pid, pointer) if pointer else ""
        if not name.startswith("/"):
            base = os.readlink(f"/proc/{pid}/cwd" if folder == _AT_FDCWD else f"/proc/{pid}/fd/{folder}")
            if not name:
                return _lasting(base)
            name = f"{base}/{name}"
    except (OSError, OverflowError):
        return None     # a bad address or descriptor: the kernel says so itself
    for alias in ("/proc/self/", "/proc/thread-self/", "/dev/fd/"):
        if name.startswith(alias):
            name = f"/proc/{pid}/{'fd/' if alias == '/dev/fd/' else ''}{name[len(alias):]}"
    above, _, last = name.rstrip("/").rpartition("/")
    path = os.path.realpath(name) if follow or last in (".", "..") else os.path.join(os.path.realpath(above or "/"), last)
    return _lasting(path)


def _lasting(path: str) -> str | None:
    return path if path.startswith("/") and os.path.lexists(path) else None


def _signed(value: int) -> int:
    return ctypes.c_int(value & 0xFFFFFFFF).value


def _text(pid: int, address: int) -> str:
    """The zero-terminated string at `address` of a process. It may end just before memory that is not there."""
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = b""
        while b"\0" not in found and len(found) < _PATH_BYTES:
            at = address + len(found)
            found += os.pread(memory, 256 - at % 256, at)
        return os.fsdecode(found.partition(b"\0")[0])
    finally:
        os.close(memory)
