"""Which rank of how many a launcher says that this process is."""

from __future__ import annotations

import os

#: What launchers set for each of the processes that they start.
VARIABLES = ("RANK", "WORLD_SIZE")


def declared() -> tuple[int, int]:
    """(rank, number of ranks). Other programs use these names for other things: what is no rank is rank 0 of 1."""
    try:
        rank, size = int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
    except ValueError:
        return 0, 1
    return (rank, size) if 0 <= rank < size else (0, 1)
