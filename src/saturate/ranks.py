"""Which rank of how many this process is, and how many of them share this machine. Standard library only.

Ask when it matters and not before: ranks that no torchrun has started (`mp.spawn`, Lightning's launcher) have no variable that
says so, and know it from when their process group exists.
"""

from __future__ import annotations

import os
import sys
from typing import Any

#: What launchers set for each of the processes that they start.
VARIABLES = ("RANK", "WORLD_SIZE")


def declared() -> tuple[int, int]:
    """(rank, number of ranks), as a launcher says. Other programs use these names for other things: what is no rank is rank 0 of 1."""
    try:
        rank, size = int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
    except ValueError:
        return 0, 1
    return (rank, size) if 0 <= rank < size else (0, 1)


def group() -> Any:
    """`torch.distributed` once a process group exists; None before, and where torch was not imported."""
    distributed = sys.modules.get("torch.distributed")
    return distributed if distributed is not None and distributed.is_available() and distributed.is_initialized() else None


def rank() -> int:
    """This process's: what torch.distributed says, else the launcher's variable, else 0."""
    found = group()
    return int(found.get_rank()) if found is not None else declared()[0]


def here() -> int:
    """How many ranks share the memory and the cores of this machine, at least 1: as torchrun says; else all of the process group are
    taken as local; 1 before there is one."""
    try:
        told = int(os.environ.get("LOCAL_WORLD_SIZE") or 0)
    except ValueError:
        told = 0            # some other program's variable
    found = group()
    return told if told > 0 else int(found.get_world_size()) if found is not None else 1
