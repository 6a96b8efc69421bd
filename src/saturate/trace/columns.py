"""One recorded trace as columns: what every reader produces and every analysis takes.

Times are integer nanoseconds since `Trace.origin_ns`; nothing was rounded. Names are interned: a column of `name` holds
indices into `Trace.names`. Row i of every column of a table belongs to the same event; tables are sorted by start. Ids and sizes
(name, tid, shapes, device, stream, correlation, external; bytes, blocks, shared_bytes) may be narrower than declared
where all of them fit.

A reader is a function `read(path, progress=None) -> Trace`. It raises errors.TraceError with the file, the byte offset where
one is known, the cause and what to do. A file that ends too early is read as far as it goes, and `Trace.problems` says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Column = np.ndarray[Any, np.dtype[Any]]

#: Values of `GpuEvents.kind`.
KERNEL, MEMCPY, MEMSET = 0, 1, 2


def _none(dtype: str) -> Any:
    return field(default_factory=lambda: np.empty(0, dtype))


@dataclass(frozen=True)
class GpuEvents:
    """What ran on an accelerator. Unknown integers are -1, unknown floats NaN."""

    start: Column = _none("i8")
    end: Column = _none("i8")
    kind: Column = _none("i1")
    name: Column = _none("i4")
    device: Column = _none("i4")
    stream: Column = _none("i8")
    correlation: Column = _none("i8")   # of the launching call, unique within one process
    external: Column = _none("i8")      # id of the operator that launched it
    bytes: Column = _none("i8")         # copies and memsets
    blocks: Column = _none("i8")        # product of the grid
    threads: Column = _none("i4")       # per block
    blocks_per_sm: Column = _none("f4") # launched blocks / SMs, as recorded
    occupancy: Column = _none("f4")     # theoretical or estimated achieved, 0 to 1
    registers: Column = _none("i4")     # per thread
    shared_bytes: Column = _none("i8")  # per block
    graph: Column = _none("i1")         # 1: replayed from a captured graph
    pid: Column = _none("i8")           # of the process that launched it


@dataclass(frozen=True)
class HostEvents:
    """Spans on host threads: operators, runtime calls or annotations."""

    start: Column = _none("i8")
    end: Column = _none("i8")
    name: Column = _none("i4")
    pid: Column = _none("i8")
    tid: Column = _none("i8")           # interned: index into `Trace.threads`
    correlation: Column = _none("i8")   # runtime calls: joins `GpuEvents.correlation`
    external: Column = _none("i8")      # operators: their own id; runtime calls: the operator around them
    shapes: Column = _none("i4")        # operators: index into `Trace.signatures`, -1 where not recorded


@dataclass(frozen=True)
class MemoryEvents:
    """Allocator events ("[memory]")."""

    time: Column = _none("i8")
    bytes: Column = _none("i8")         # negative: freed
    allocated: Column = _none("i8")     # total after the event
    reserved: Column = _none("i8")
    device: Column = _none("i4")        # -1: CPU


def devices_told_apart(device: Column, known: Iterable[int], problems: list[tuple[str, str]]) -> Column:
    """Device numbers, with one of its own for the device of events that name none: -1 is the CPU's in an analysis. `known`:
    devices that the file speaks of elsewhere."""
    unknown = device < 0
    count = int(unknown.sum())
    if not count:
        return device
    taken = {*np.unique(device).tolist(), *known}
    number = next(number for number in itertools.count() if number not in taken)
    problems.append(("unknown-device", (
        f"{count:,} of {len(device):,} device events do not say which device they ran on: shown as a device of their own, {number}")))
    return np.where(unknown, np.int32(number), device.astype("i4"))


def row_type(table: Column) -> Any:
    """The integers that number the rows of a table: small ones, because there are as many of them as rows."""
    return np.dtype("i4" if len(table) < 2**31 else "i8")


def rows_where(wanted: Column) -> Column:
    """Numbers of the rows that are wanted, in order."""
    return np.flatnonzero(wanted).astype(row_type(wanted))


@dataclass(frozen=True)
class Signature:
    """Inputs of an operator. `dims[i]` and `types[i]` describe argument i; scalars have empty dims."""

    dims: tuple[Any, ...] = ()          # nested tuples for lists of tensors
    types: tuple[str, ...] = ()         # "float", "c10::BFloat16", "long int", "" ...
    strides: tuple[Any, ...] = ()
    concrete: tuple[str, ...] = ()      # values of scalar arguments, as text


@dataclass(frozen=True)
class DeviceInfo:
    """Facts that the trace states about a device; None where it does not."""

    id: int
    name: str = ""
    sms: int | None = None
    threads_per_sm: int | None = None
    memory_bytes: int | None = None
    capability: tuple[int, int] | None = None
    shared_bytes_per_sm: int | None = None
    registers_per_sm: int | None = None


@dataclass(frozen=True)
class Trace:
    """Tables of events in columns, and what was recorded beside them; times are nanoseconds since `origin_ns`."""

    source: str                         # path of the file, as it was given
    kind: str                           # "kineto" or "nsys"
    names: list[str]
    threads: list[str]                  # "pid/tid" as text
    signatures: list[Signature]
    devices: dict[int, DeviceInfo]
    origin_ns: int = 0
    rank: int | None = None
    world_size: int | None = None
    gpu: GpuEvents = field(default_factory=GpuEvents)
    operators: HostEvents = field(default_factory=HostEvents)
    calls: HostEvents = field(default_factory=HostEvents)       # CUDA/HIP runtime and driver
    annotations: HostEvents = field(default_factory=HostEvents) # user annotations, NVTX, ProfilerStep#n, loader __next__
    memory: MemoryEvents = field(default_factory=MemoryEvents)
    collectives: dict[int, dict[str, Any]] = field(default_factory=dict)    # row of `gpu` -> recorded arguments
    left_out: dict[str, int] = field(default_factory=dict)      # category or reason -> events that were not read
    problems: list[tuple[str, str]] = field(default_factory=list)   # (id, message) found while reading
    read_bytes: int = 0                 # uncompressed
