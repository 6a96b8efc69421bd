"""Whether several files can be the ranks of one run, by what each says about itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from saturate.trace.columns import Trace

#: Clocks that count since 1970 are kept in step by the network, far closer than this. What lies further apart was not
#: recorded together. Other clocks count from a start of their own and tell nothing.
SINCE_1970_NS, APART_NS = 10**18, 60 * 10**9


class Member(NamedTuple):
    """What a file says about its place in a run."""

    source: str
    rank: int | None
    world_size: int | None
    first_ns: int = 0               # of its clock since the epoch
    last_ns: int = 0


def member(trace: Trace) -> Member:
    tables = [table for table in (trace.gpu, trace.calls, trace.operators, trace.annotations) if len(table.start)]
    first = min((int(table.start[0]) for table in tables), default=0)
    last = max((int(table.end.max()) for table in tables), default=0)
    return Member(trace.source, trace.rank, trace.world_size, trace.origin_ns + first, trace.origin_ns + last)


def not_one_run(files: Sequence[Member]) -> str:
    """Why files cannot be the ranks of one run; empty where nothing speaks against it."""
    by_rank: dict[int, Member] = {}
    for file in files:
        if file.rank is None:
            if any(other.rank is not None for other in files):
                return f"{file.source} does not say its rank, and others do"
            continue
        other = by_rank.setdefault(file.rank, file)
        if other.source != file.source:
            return f"two files are of rank {file.rank} ({other.source}, {file.source})"
    sized = [file for file in files if file.world_size is not None]
    other = next((file for file in sized if file.world_size != sized[0].world_size), None)
    if other is not None:
        return (f"{sized[0].source} is of a run of {sized[0].world_size:,} ranks and {other.source} of one of "
                f"{other.world_size:,}")
    in_order = sorted(files, key=lambda file: file.first_ns)
    for earlier, later in zip(in_order, in_order[1:]):
        apart = later.first_ns - earlier.last_ns
        if earlier.last_ns > SINCE_1970_NS and apart > APART_NS:
            return f"{later.source} was recorded {apart / 1e9:,.0f} s after {earlier.source}"
    return ""
