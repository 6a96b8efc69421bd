"""The collectives of one trace: when each began and ended on the rank, and what tells it from others, so that `ranks` can match them.

On a CPU the collectives are the annotations of the backend ("gloo:all_reduce").
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from saturate.trace.breakdown import communication
from saturate.trace.columns import Column, HostEvents, Trace
from saturate.trace.launches import launching_calls, named, valid
from saturate.trace.windows import STEP

#: Sends and receives concern two ranks only; they are no collectives.
POINT_TO_POINT = re.compile(r"^(\w+:)?i?(send|recv|sendrecv)$", re.IGNORECASE)

#: NCCL runs sends, receives and all-to-alls as one kernel ("ncclDevKernel_SendRecv", "ncclKernel_SendRecv_RING_..."). Where
#: its arguments were not recorded, what the host calls tells them apart.
SENDRECV = re.compile(r"SendRecv", re.IGNORECASE)
ALL_TO_ALL = re.compile(r"all_?to_?all", re.IGNORECASE)
SENDS = re.compile(r"^(c10d::|nccl:)i?(send|recv)(_any_source)?_?( |$)")

#: What a backend calls its collectives on the host.
ON_THE_HOST = re.compile(r"^(gloo|mpi|ucc):\w+$")

_NUMBER = re.compile(r"(?<!\d)\d{1,18}(?!\d)")      # beyond 64 bits it numbers nothing


class Kind(NamedTuple):
    """What one collective is, apart from its position among its like."""

    group: str
    name: str
    size: str       # elements and dtype


class Key(NamedTuple):
    kind: Kind
    counted: Literal["sequence", "step"]
    number: int     # of the sequence or of the step; -1: in no numbered step


@dataclass(frozen=True)
class Seen:
    """The collectives of one rank: all that is kept of its trace. Times in ns of its clock since the epoch."""

    rank: int | None                                                # as the file says it
    source: str
    devices: frozenset[int] | None = None                           # that ran them; None: those of its file
    starts: dict[Key, Column] = field(default_factory=dict)         # in order of start
    ends: dict[Key, Column] = field(default_factory=dict)
    members: dict[str, frozenset[int]] = field(default_factory=dict)    # process group -> its ranks, where recorded
    point_to_point: int = 0
    world_size: int | None = None


def observe(trace: Trace) -> list[Seen]:
    """The ranks of one trace: one, or one for each process where a file holds several (Nsight Systems), in the order of
    their devices."""
    launches = launching_calls(trace)
    rows = np.flatnonzero(communication(trace, launches) & valid(trace.gpu))
    if not len(rows):
        return _on_the_host(trace)
    gpu, calls = trace.gpu, trace.calls
    launched = launches[rows]
    time = np.where(launched >= 0, calls.start[launched], gpu.start[rows]) if len(calls.start) else gpu.start[rows]
    steps = _steps(trace, time)
    names = [trace.names[index].partition("(")[0] for index in gpu.name[rows].tolist()]
    if not _only_all_to_alls(trace.names):
        names = ["sendrecv" if SENDRECV.search(name) else name for name in names]
    recorded = [trace.collectives.get(row, {}) for row in rows.tolist()]

    def seen(mask: Column, rank: int | None, devices: frozenset[int] | None = None) -> Seen:
        own = np.flatnonzero(mask)
        return _seen(trace, rank, gpu.start[rows[own]], gpu.end[rows[own]], [names[i] for i in own.tolist()],
                     [recorded[i] for i in own.tolist()], steps[own], devices)

    pids = gpu.pid[rows]
    processes = np.unique(pids).tolist()
    if len(processes) == 1:
        return [seen(pids == processes[0], trace.rank)]
    devices = {pid: np.unique(gpu.device[rows[pids == pid]]).tolist() for pid in processes}
    return [seen(pids == pid, None, frozenset(devices[pid])) for pid in sorted(processes, key=devices.__getitem__)]


def _only_all_to_alls(names: list[str]) -> bool:
    """Whether kernels that send and receive are all-to-alls: the trace speaks of those, and of no sends."""
    return any(map(ALL_TO_ALL.search, names)) and not any(map(SENDS.match, names))


def _on_the_host(trace: Trace) -> list[Seen]:
    for table in (trace.annotations, trace.operators):
        rows = np.flatnonzero(named(trace, table.name, ON_THE_HOST))
        if len(rows):
            names = [trace.names[index] for index in table.name[rows].tolist()]
            return [_seen(trace, trace.rank, table.start[rows], table.end[rows], names, [{}] * len(rows),
                          _steps(trace, table.start[rows]))]
    return []


def _seen(trace: Trace, rank: int | None, start: Column, end: Column, names: list[str],
          recorded: list[dict[str, Any]], steps: Column, devices: frozenset[int] | None = None) -> Seen:
    rows: dict[Key, list[int]] = defaultdict(list)
    members: dict[str, frozenset[int]] = {}
    point_to_point = 0
    for row, (name, facts, step) in enumerate(zip(names, recorded, steps.tolist())):    # in order of start
        name = str(facts.get("Collective name") or name)
        if POINT_TO_POINT.match(name):
            point_to_point += 1
            continue
        group = str(facts.get("Process Group Ranks", facts.get("Process Group Name", "")))
        members[group] = _members(group)
        size = " ".join(str(facts[fact]) for fact in ("In msg nelems", "Out msg nelems", "dtype") if fact in facts)
        kind, sequence = Kind(group, name, size), facts.get("Seq")
        rows[Key(kind, "sequence", sequence) if isinstance(sequence, int) else Key(kind, "step", step)].append(row)
    return Seen(rank=rank, source=trace.source, devices=devices, members=members, point_to_point=point_to_point,
                world_size=trace.world_size,
                starts={key: start[own] + trace.origin_ns for key, own in rows.items()},
                ends={key: end[own] + trace.origin_ns for key, own in rows.items()})


def _members(group: str) -> frozenset[int]:
    """Ranks of a process group as Kineto writes them, "[0, 1, 2, 3]"; none of a name, or a list cut by "..."."""
    listed = group.startswith("[") and "..." not in group
    return frozenset(map(int, _NUMBER.findall(group))) if listed else frozenset()


def _steps(trace: Trace, time: Column) -> Column:
    """Number of the step in which each moment lies, -1 outside of numbered steps."""
    annotations: HostEvents = trace.annotations
    numbered = {index: int(found[0]) for index, name in enumerate(trace.names)
                if STEP.match(name) and (found := _NUMBER.findall(name))}
    marks = np.flatnonzero(np.isin(annotations.name, list(numbered)))
    if not len(marks):
        return np.full(len(time), -1, np.int64)
    place = np.searchsorted(annotations.start[marks], time, "right") - 1
    mark = marks[np.maximum(place, 0)]
    inside = (place >= 0) & (time < annotations.end[mark])
    return np.where(inside, np.array([numbered[name] for name in annotations.name[mark].tolist()], np.int64), -1)
