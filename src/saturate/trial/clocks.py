"""Whether the clock inside a workload is believed."""

from __future__ import annotations

from collections.abc import Iterator

#: How much slower than ours the agent's clock may run over most blocks before it is not believed. Blocks are taken together up to
#: a length, the shortest say nothing, and in each a workload may be late: it is woken, and it reports. An accelerator that other
#: programs use too is given to each in turns, and a block waits for one at its beginning and at its end: on a GPU with a dozen of
#: them, 24 to 71 ms.
TOLERANCE = 0.10
LEAST_NS = 150_000_000
SHORTEST_NS = 50_000_000
LATE_NS = 5_000_000
LATE_ON_DEVICES_NS = 80_000_000
BLOCKS = 4


def problem(began: int, stamps: list[int], ended: int) -> str | None:
    """Why the agent's stamps of one block are not believed; None when they are. All are nanoseconds of CLOCK_MONOTONIC,
    which all processes of a machine share: `began` and `ended` were read here before and after the block."""
    if stamps != sorted(stamps) or stamps[0] < began or stamps[-1] > ended:
        return "stamps of the workload's clock lie outside the time in which the block ran"
    return None


def drift(lags: list[tuple[int, int]], late_ns: int = LATE_NS) -> str | None:
    """Why the agent's clock is not believed: over most blocks it runs slower than ours. None when it does not.

    A block's (time here without what this process waited for a core, time inside), nanoseconds. One says nothing: on a busy
    machine the workload reports late as well, and more blocks than one are late for that. Three of four are not. `late_ns`: what each
    may be late in any case.
    """
    long = sorted(((wall - late - inside) / wall, wall, inside) for wall, late, inside in _long_enough(lags, late_ns))
    if len(long) < BLOCKS or long[len(long) // 4][0] <= TOLERANCE:
        return None
    _, wall, inside = long[len(long) // 4]
    return f"blocks took {wall / 1e6:.0f} ms here and {inside / 1e6:.0f} ms by the clock inside the workload"


def _long_enough(lags: list[tuple[int, int]], late_ns: int) -> Iterator[tuple[int, int, int]]:
    """Blocks, short ones taken together: time here, how much of it lateness explains, time inside."""
    wall = late = inside = 0
    for block_wall, block_inside in lags:
        if block_wall < SHORTEST_NS:
            continue
        wall, late, inside = wall + block_wall, late + late_ns, inside + block_inside
        if wall > LEAST_NS:
            yield wall, late, inside
            wall = late = inside = 0
