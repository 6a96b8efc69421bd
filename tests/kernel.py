"""What this kernel allows, found without the code under test: a skip which that code decides would hide its own failure."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_OVERLAY = """
cd "$1"; mkdir upper work at
mount -t overlay -o "lowerdir=$2,upperdir=upper,workdir=work$3" none at
touch at/file; umount at; rm -rf work
"""

# The smallest filter that hands calls to another process: it hands over none.
_LISTENER = """
import ctypes, os, struct
number = {"x86_64": 317, "aarch64": 277}[os.uname().machine]
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, *map(ctypes.c_ulong, (1, 0, 0, 0)))
code = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000), 8)
program = ctypes.create_string_buffer(struct.pack("@HP", 1, ctypes.addressof(code)))
if libc.syscall(ctypes.c_long(number), ctypes.c_ulong(1), ctypes.c_ulong(8), program) < 0:
    raise SystemExit(os.strerror(ctypes.get_errno()))
"""


@functools.cache
def mounts_refused(user: int | None = None) -> str:
    """Why commands of the system cannot make a mount namespace; empty: they can. `user`: asked as that user, by root."""
    return _refused("true", user)


@functools.cache
def overlays_refused(user: int | None = None) -> str:
    """The same of an overlay in one, on what the product covers: all of `/` for root, a folder for anybody else."""
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (5, 12):
        return f"Linux {os.uname().release} cannot make a tree of mounts read-only"
    top = Path(tempfile.mkdtemp())
    try:
        (top / "lower").mkdir()
        if user is not None:
            os.chown(top, user, user)
            os.chown(top / "lower", user, user)
        as_root = (os.geteuid() if user is None else user) == 0
        return _refused(_OVERLAY, user, str(top), "/" if as_root else "lower", "" if as_root else ",userxattr")
    finally:
        shutil.rmtree(top, ignore_errors=True)


@functools.cache
def landlock_abi() -> int:
    """The version of Landlock, 0 for none."""
    return max(0, ctypes.CDLL(None).syscall(ctypes.c_long(444), None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


@functools.cache
def listener_refused() -> str:
    """Why no seccomp filter can ask another process; empty: one can."""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", _LISTENER], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"


def _refused(commands: str, user: int | None, *arguments: str) -> str:
    unshare = shutil.which("unshare")
    if unshare is None:
        return "there is no command unshare"
    options = "-m" if (os.geteuid() if user is None else user) == 0 else "-mr"
    other = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    done = subprocess.run([unshare, options, "sh", "-ec", commands, "sh", *arguments],
                          cwd="/", capture_output=True, text=True, check=False, **other)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"
