"""TCP ports on which a process tree listens: a second run of the same command would ask for the same ones."""

from __future__ import annotations

import os
from collections.abc import Iterable

from saturate.trial import tree

_LISTENS = "0A"                         # TCP_LISTEN, as /proc/net/tcp writes it
_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
_USUAL_RANGE = (32768, 60999)


def asked_for(pid: int) -> list[int]:
    """The ports that descendants of `pid` listen on and that they must have asked for by number, ascending: those outside the
    range from which the kernel chooses where a program leaves it the choice.

    torchrun without --standalone has such a port, so have `init_method="tcp://localhost:23456"` and scripts that set
    MASTER_PORT. One that lies inside the range cannot be told from a chosen one.
    """
    low, high = chosen_from()
    return sorted(port for port in listening(tree.descendants(pid)) if not low <= port <= high)


def listening(processes: Iterable[int]) -> set[int]:
    """The TCP ports on which any of these processes listens. Processes that are gone, or another user's, have none."""
    found: set[int] = set()
    for process in processes:
        sockets = _sockets(process)
        if sockets:
            found.update(port for inode, port in _listeners(process) if inode in sockets)
    return found


def chosen_from() -> tuple[int, int]:
    """First and last port of the kernel's own choice."""
    try:
        with open(_RANGE, encoding="ascii") as file:
            low, high = (int(word) for word in file.read().split())
        return low, high
    except (OSError, ValueError):
        return _USUAL_RANGE


def _sockets(process: int) -> set[str]:
    """Inodes of the sockets that a process has open."""
    try:
        numbers = os.listdir(f"/proc/{process}/fd")
    except OSError:
        return set()
    found = set()
    for number in numbers:
        try:
            target = os.readlink(f"/proc/{process}/fd/{number}")
        except OSError:
            continue            # closed meanwhile
        if target.startswith("socket:["):
            found.add(target[len("socket:["):-1])
    return found


def _listeners(process: int) -> list[tuple[str, int]]:
    """(inode, port) of the listening TCP sockets in the network that a process sees."""
    found = []
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/{process}/net/{table}", encoding="ascii") as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        found += [(row[9], int(row[1].rpartition(":")[2], 16)) for row in rows if len(row) > 9 and row[3] == _LISTENS]
    return found
