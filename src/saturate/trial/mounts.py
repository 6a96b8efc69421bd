"""System calls for mounts and namespaces, and the table of mounts. Standard library only; Linux.

Every function raises `OSError` with the operation and the path in its text. Numbers and flags are those of the kernel's
`include/uapi/linux/mount.h`; `mount_setattr` exists since Linux 5.12, overlays in a user namespace since 5.11.
"""

from __future__ import annotations

import ctypes
import os

NEWNS, NEWUSER = 0x00020000, 0x10000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2

_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY = 0x1
_SYS_MOUNT_SETATTR = 442  # the same on every architecture but alpha

#: How mountinfo writes characters that would break its lines; the backslash comes last.
_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))

_libc = ctypes.CDLL(None, use_errno=True)


class Mount:
    """One line of `/proc/self/mountinfo`."""

    def __init__(self, number: int, at: str, kind: str, read_only: bool):
        self.number = number
        self.at = at
        self.kind = kind
        self.read_only = read_only


def _done(result: int, what: str) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _done(_libc.unshare(flags), "unshare")


def mount(source: str, at: str, kind: str | None, flags: int = 0, options: str | None = None) -> None:
    def encoded(text: str | None) -> bytes | None:
        return None if text is None else os.fsencode(text)

    result = _libc.mount(encoded(source), encoded(at), encoded(kind), ctypes.c_ulong(flags), encoded(options))
    _done(result, f"mount {kind or 'bind'} on {at}")


def bind(source: str, at: str, recursive: bool = False) -> None:
    mount(source, at, None, MS_BIND | (MS_REC if recursive else 0))


def detach(at: str) -> None:
    _done(_libc.umount2(os.fsencode(at), MNT_DETACH), f"umount {at}")


def set_read_only(at: str, value: bool, recursive: bool = False) -> None:
    """Make the mount whose root is `at` (and all below it) read-only, or writable again. All or nothing."""
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY if value else 0, 0 if value else _ATTR_RDONLY, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR), ctypes.c_int(_AT_FDCWD), os.fsencode(at),
        ctypes.c_uint(flags), attributes, ctypes.c_size_t(32),
    )
    _done(result, f"mount_setattr on {at}")


def pivot(new_root: str) -> None:
    """Make the mount at `new_root` the root of this process and forget the old root."""
    os.chdir(new_root)
    _done(_libc.pivot_root(b".", b"."), f"pivot_root to {new_root}")  # the old root is stacked on the new one
    detach(".")
    os.chdir("/")


def map_own_ids(uid: int, gid: int) -> None:
    """In a fresh user namespace, keep this process's own ids. Other ids show as 65534."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def initial_user_namespace() -> bool:
    """Whether this process's ids are those of the machine itself (extended attributes `trusted.*` need that)."""
    with open("/proc/self/uid_map") as file:
        return file.read().split() == ["0", "0", "4294967295"]


def parse(text: str) -> list[Mount]:
    """Every mount in `/proc/self/mountinfo`, in the order in which they were made."""
    found = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        at = fields[4]
        for code, character in _ESCAPES:
            at = at.replace(code, character)
        super_options = rest[2].split(",") if len(rest) > 2 else []
        read_only = "ro" in fields[5].split(",") or "ro" in super_options
        found.append(Mount(int(fields[0]), at, rest[0], read_only))
    return found


def all_mounts() -> list[Mount]:
    with open("/proc/self/mountinfo", "rb") as file:
        return parse(os.fsdecode(file.read()))


def visible() -> list[Mount]:
    """The mounts that a path really reaches (not those hidden under a later one), parents before children."""
    by_number = {mount.number: mount for mount in all_mounts()}
    found = {}
    for mount in by_number.values():
        try:
            number = _number_at(mount.at)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue  # covered by another mount, or in a directory that this user may not enter
        if number == mount.number:
            found[mount.at] = mount
    return [found[at] for at in sorted(found, key=lambda at: (at.count("/") if at != "/" else 0, at))]


def _number_at(path: str) -> int:
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        with open(f"/proc/self/fdinfo/{handle}") as file:
            for line in file:
                if line.startswith("mnt_id:"):
                    return int(line.split()[1])
    finally:
        os.close(handle)
    raise OSError(f"the kernel does not say which mount {path} is on")
