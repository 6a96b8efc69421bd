"""How much host memory is left: what the machine has available, or the tightest control group around this process.

A group counts cached files as used, and gives them back when somebody asks for memory. A training that reads its data fills
its limit with them, and there is room all the same. What is left at a time is no promise; nothing is reserved.
"""

from __future__ import annotations

import functools
import os
import sys

#: Where a group says its limit, what it uses, and what of that the kernel can drop; by the version of control groups.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def available_bytes(root: str = "/") -> int | None:
    """Bytes that this process can still take. None where nothing tells (no /proc, or no descriptor left to read it by)."""
    if not sys.platform.startswith("linux"):
        return None
    found = [_field(f"{root}proc/meminfo", "MemAvailable:"), *(_left(folder, version) for folder, version in _groups(root))]
    return min((bytes_left for bytes_left in found if bytes_left is not None), default=None)


def _field(path: str, name: str) -> int | None:
    """A number of a table with one name and one number per line, in bytes."""
    for line in _read(path).splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1]) * (1024 if words[2:] == ["kB"] else 1)
    return None


def _left(folder: str, version: int) -> int | None:
    """What a group leaves; None where it has no limit (version 1 says a number that no machine has)."""
    limit_name, used_name, cache_name = _FILES[version]
    limit, used = _read(f"{folder}/{limit_name}").strip(), _read(f"{folder}/{used_name}").strip()
    if not limit.isdecimal() or not used.isdecimal():
        return None
    return max(0, int(limit) - int(used) + (_field(f"{folder}/memory.stat", cache_name) or 0))


def _groups(root: str) -> tuple[tuple[str, int], ...]:
    """Folders of the groups that this process is in, innermost first, each with its version. In a container the path may be one of
    the host, where nothing stands; the limit is then that of the topmost folder."""
    lines = _read(f"{root}proc/self/cgroup").splitlines() or ["0::/"]       # not told: that of the topmost folder, if it has one
    return _folders(root, tuple(lines))


@functools.lru_cache(maxsize=8)
def _folders(root: str, lines: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    found = []
    for line in lines:
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        path = "/" + path.strip("/")
        if controllers and "memory" not in controllers.split(","):
            continue
        top, version = (f"{root}sys/fs/cgroup/memory", 1) if controllers else (f"{root}sys/fs/cgroup", 2)
        while True:
            folder = top + path.rstrip("/")
            if os.path.isdir(folder):
                found.append((folder, version))
            if path == "/":
                break
            path = os.path.dirname(path)
    return tuple(found)


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
