"""A guard that makes writes outside a list of folders fail with EACCES, for this process and all it starts.

Landlock (Linux 5.13) needs no privilege and no namespace, so it also works where overlays are forbidden. It covers
creating, writing, truncating, renaming and removing, by any library in any language; it does not cover changes of
mode, owner, times or extended attributes (`trial/metadata.py` does). Flags: `include/uapi/linux/landlock.h`.
"""

from __future__ import annotations

import ctypes
import os

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture but alpha
_PR_SET_NO_NEW_PRIVS = 38

_WRITE_FILE = 1 << 1
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))    # REMOVE_DIR, REMOVE_FILE, MAKE_CHAR ... MAKE_SYM
_REFER = 1 << 13                                            # ABI 2: rename or link between directories
_TRUNCATE = 1 << 14                                         # ABI 3

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = [("handled_access_fs", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = [("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


def _call(number: int, *arguments: object) -> int:
    result = _libc.syscall(ctypes.c_long(number), *arguments)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"landlock: {os.strerror(code)}")
    return result


def abi() -> int:
    """The version of the kernel's Landlock; 0: there is none, or it is switched off or filtered."""
    try:
        return _call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    except OSError:
        return 0  # ENOSYS: too old; EOPNOTSUPP: disabled at boot; EPERM: a seccomp filter


def restrict(folders: list[str], files: list[str]) -> None:
    """From now on only what lies in `folders` can be created, changed or removed, and existing files in `files` (also
    folders: device nodes in /dev) can be written. Paths that do not exist are left out. It cannot be undone.

    Raises OSError when the kernel has no Landlock.
    """
    version = abi()
    if not version:
        raise OSError("this kernel has no Landlock")
    write = _WRITE_FILE | (_TRUNCATE if version >= 3 else 0)
    everything = write | _REMOVE_AND_MAKE | (_REFER if version >= 2 else 0)
    ruleset = _call(
        _CREATE_RULESET, ctypes.byref(_Ruleset(everything)), ctypes.c_size_t(ctypes.sizeof(_Ruleset)), ctypes.c_uint32(0)
    )
    try:
        for access, paths in ((everything, folders), (write, files)):
            for path in paths:
                _allow(ruleset, path, access)
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
        _call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            access &= _WRITE_FILE | _TRUNCATE  # the kernel refuses the rights of folders on a file
        rule = _PathBeneath(access, parent)
        _call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint32(0))
    finally:
        os.close(parent)
