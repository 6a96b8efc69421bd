"""Reader of Nsight Systems exports: the SQLite that `nsys export --type sqlite` writes.

Which tables and columns there are depends on the version of nsys and on what was recorded, so the schema is looked
at, never assumed (schemas 3.16 to 3.25 were seen). Times are the file's: nanoseconds since the recording began. The
tables with the machine's environment, command lines and host names are never read. What becomes what:

- Kernels, copies and memsets: `Trace.gpu`. With `--cuda-graph-trace=graph` (nsys's default) a launched CUDA graph
  is one record without its kernels: one row "CUDA graph" with `graph` = 1, and a problem that says so.
- CUDA runtime and driver calls: `Trace.calls`. A correlation id is unique within a process only; in a report of
  several processes they are renumbered, so that they are unique in the Trace.
- NVTX ranges: `Trace.annotations`; those that PyTorch writes for its operators: `Trace.operators`, with their shapes
  where recorded (NVTX has no dtypes).
- Devices are numbered as the machine numbers them (TARGET_INFO_CUDA_DEVICE), not as each process does.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from saturate.errors import TraceError
from saturate.trace import _nsys_tables as tables
from saturate.trace import _sqlite
from saturate.trace._growing import Growing
from saturate.trace._nsys_devices import DeviceNumbers, devices
from saturate.trace._nsys_names import CopyNames, Labels, Names, Strings, call_name, kernel_name
from saturate.trace._sqlite import MISSING, Database
from saturate.trace.columns import KERNEL, MEMCPY, Column, GpuEvents, HostEvents, Trace, devices_told_apart

RECORD = "nsys profile -t cuda,nvtx,osrt -o report COMMAND, then nsys export --type sqlite report.nsys-rep"

#: Of a 64-bit "global" id: 24 bits of thread, above them 24 bits of process, above them the machine.
THREAD_BITS = 24
LOW_BITS = (1 << THREAD_BITS) - 1

#: Records without a possible time, of all of their kind, before nothing follows from the rest.
LOST_AT_MOST = 0.01

#: What nsys says when records of the device were lost, and when it cannot tell: all of these, anywhere in a text.
LOST = re.compile(r"\b(CUDA|CUPTI|kernel|activity)\b", re.IGNORECASE), re.compile(r"\b(dropped|lost)\b", re.IGNORECASE)
MAYBE_LOST = (re.compile(r"\bnot all (CUDA|NVTX) events\b", re.IGNORECASE),)


def read(path: Path, progress: Callable[[float], None] | None = None) -> Trace:
    """The trace in `path`. `progress` gets the finished share, 0 to 1.

    Memory is bounded by the columns: at most 110 bytes for each kernel or copy and 56 for each call or range, mostly
    half of that. Raises TraceError where the file is not a whole Nsight Systems export with CUDA activity.
    """
    path = Path(path)
    size = _sqlite.check(path)
    try:
        with Database(path) as database:
            return _Reader(path, database, size, progress or (lambda share: None)).read()
    except (sqlite3.Error, UnicodeDecodeError) as error:    # the latter: SQLite's message quotes a damaged schema
        raise TraceError(f"{path} is damaged", cause=str(error),
                         remedy="export it again: nsys export --type sqlite REPORT.nsys-rep") from error


class _Reader:
    def __init__(self, path: Path, database: Database, size: int, progress: Callable[[float], None]):
        self.path = path
        self.database = database
        self.size = size
        self.names = Names()
        self.threads = Names()
        self.left_out: dict[str, int] = {}
        self.timeless: dict[str, int] = {}      # table -> rows whose times are none, or impossible
        self.problems: list[tuple[str, str]] = []
        self.nvtx = database.find("NVTX_EVENTS")
        wanted = (*tables.GPU_TABLES, *tables.CALL_TABLES, self.nvtx)
        self.timed = [name for name in wanted if {"start", "end"} <= database.tables.get(name, frozenset())]
        self._progress = progress
        self._rows_read = 0
        self._rows = max(1, sum(database.rows(name) for name in self.timed))

    def read(self) -> Trace:
        self._refuse()
        gpu = Growing(GpuEvents, self._most(*tables.GPU_TABLES))
        calls = Growing(HostEvents, self._most(*tables.CALL_TABLES))
        operators, annotations = (Growing(HostEvents, self._most(self.nvtx)) for _ in range(2))
        labels = Labels(self.names)
        for table in self.timed:
            if table in tables.GPU_TABLES:
                self._gpu(gpu, table)
            elif table == self.nvtx:
                self._ranges(operators, annotations, labels)
            else:
                self._calls(calls, table)
        if not len(gpu):
            raise self._nothing("its CUDA tables hold no complete record")
        self._notice()
        self._notice_timeless(tables.GPU_TABLES, len(gpu), "device events", "lost-records")
        self._notice_timeless(tables.CALL_TABLES, len(calls), "CUDA calls", "lost-calls")
        device_table, call_table = gpu.sorted(), calls.sorted()
        _complete_processes(device_table, call_table)
        _renumber(self.path, device_table, call_table)
        physical = DeviceNumbers(self.database, self.problems).physical(device_table["pid"], device_table["device"])
        described = [row["id"] for row in self.database.all("TARGET_INFO_GPU", ["id"])]
        device_table["device"] = devices_told_apart(physical, described, self.problems)
        self._progress(1.0)
        return Trace(
            source=str(self.path), kind="nsys", origin_ns=self._origin(device_table["start"]),
            names=self.names.all, threads=self.threads.all, signatures=labels.signatures,
            devices=devices(self.database, np.unique(device_table["device"]).tolist()),
            gpu=GpuEvents(**device_table), calls=HostEvents(**call_table),
            operators=HostEvents(**_public(operators.sorted())),
            annotations=HostEvents(**_public(annotations.sorted())),
            left_out=self.left_out, problems=self.problems, read_bytes=self.size,
        )

    def _most(self, *names: str) -> int:
        return sum(self.database.rows(name) for name in names if name in self.timed)

    def _refuse(self) -> None:
        """Raise where this is no export of nsys, or one without anything that ran on a GPU."""
        there = self.database.tables
        if not tables.OWN_TABLES & there.keys() and not self.timed:
            raise TraceError(f"{self.path} is a SQLite database, but no export of Nsight Systems", remedy=RECORD,
                             cause=f"it has none of the tables of one; it has {_some(there)}")
        if not tables.GPU_TABLES.keys() & set(self.timed):
            raise self._nothing(f"it has none of the tables {', '.join(tables.GPU_TABLES)}; it has {_some(there)}")

    def _nothing(self, cause: str) -> TraceError:
        said = [f"nsys says: {text}" for text in self._diagnostics() if "CUDA events" in text]
        return TraceError(f"{self.path} holds nothing that ran on a GPU", cause=cause, remedy=RECORD,
                          evidence="; ".join(said)[:300])

    def _diagnostics(self) -> list[str]:
        said = self.database.all("DIAGNOSTIC_EVENT", ["text"])
        return [row["text"].strip() for row in said if isinstance(row["text"], str)]

    def _chunks(self, table: str, expressions: dict[str, str]) -> Iterator[dict[str, Column]]:
        """Columns of the rows whose times are possible, chunk after chunk; the others are counted in `left_out`."""
        wanted = {"start": tables.time("start"), "end": tables.time("end")} | expressions
        for rows in self.database.select(table, list(wanted.values())):
            block = _sqlite.whole_numbers(rows)
            possible = _possible(block[:, 0]) & _possible(block[:, 1])
            timeless = np.count_nonzero(~possible)
            self.timeless[table] = self.timeless.get(table, 0) + timeless
            self._leave_out(f"{table}: no time, or an impossible one", timeless)
            self._advance(len(rows))
            if possible.any():
                yield dict(zip(wanted, block[possible].T))

    def _advance(self, rows: int) -> None:
        self._rows_read += rows
        self._progress(min(1.0, self._rows_read / self._rows))

    def _leave_out(self, what: str, count: int) -> None:
        if count > 0:
            self.left_out[what] = self.left_out.get(what, 0) + int(count)

    def _gpu(self, target: Growing, table: str) -> None:
        kind, before = tables.GPU_TABLES[table], len(target)
        copies, kernels = CopyNames(self.database, self.names), Strings(self.database, self.names, kernel_name)
        for chunk in self._chunks(table, tables.gpu(kind, self.database.tables[table])):
            parts = [chunk.pop(name) for name in [name for name in chunk if name.startswith("_")]]
            count = len(chunk["start"])
            chunk["pid"] = _pids(chunk["process"])
            chunk["process"] = _processes(chunk["process"])
            if table == tables.GRAPH:
                chunk["name"] = np.full(count, self.names.intern("CUDA graph"))
                chunk["graph"] = np.ones(count, np.int8)
            elif kind == KERNEL:
                chunk["name"] = kernels.translate(*parts)
            else:
                chunk["name"] = copies.copies(*parts) if kind == MEMCPY else copies.memsets(*parts)
            target.add(count, kind=np.full(count, kind), **chunk)
        if table == tables.GRAPH and len(target) > before:
            self.problems.append(("whole-graphs", f"{len(target) - before:,} launches of a CUDA graph are recorded "
                                  "as a whole, without their kernels: all of each counts as computation; record with --cuda-graph-trace=node"))

    def _calls(self, target: Growing, table: str) -> None:
        columns = self.database.tables[table]
        strings = Strings(self.database, self.names, call_name)
        wanted = {"thread": "globalTid", "name": "nameId", "correlation": "correlationId"}
        for chunk in self._chunks(table, {name: tables.number(columns, column) for name, column in wanted.items()}):
            chunk["name"] = strings.translate(chunk["name"])
            self._add(target, chunk.pop("thread"), **chunk)

    def _ranges(self, operators: Growing, annotations: Growing, labels: Labels) -> None:
        columns = self.database.tables[self.nvtx]
        wanted = [tables.time("start"), tables.time("end"), tables.number(columns, "globalTid"),
                  tables.number(columns, "textId"), tables.number(columns, "eventType"),
                  '"text"' if "text" in columns else "NULL"]
        registered: dict[int, tuple[int, int, bool] | None] = {}

        def label(number: int, text: Any) -> tuple[int, int, bool] | None:
            if isinstance(text, str):
                return labels.read(text)
            if number not in registered:
                found = self.database.string(number)
                registered[number] = None if found is None else labels.read(found)
            return registered[number]

        for rows in self.database.select(self.nvtx, wanted):
            self._advance(len(rows))
            if "eventType" in columns:
                ranges = [row for row in rows if row[4] in tables.RANGES]
                self._leave_out("NVTX events that are no ranges", len(rows) - len(ranges))
                rows = ranges
            if not rows:
                continue
            start, end, thread, number = _sqlite.whole_numbers([row[:4] for row in rows]).T
            read = [label(*item) for item in zip(number.tolist(), [row[5] for row in rows])]
            named = np.array([item is not None for item in read])
            name, shapes, operator = np.array([item or (-1, -1, False) for item in read], np.int64).T
            closed = _possible(start) & _possible(end)
            self._leave_out("NVTX ranges without a name", np.count_nonzero(~named))
            self._leave_out("NVTX ranges without an end", np.count_nonzero(named & ~closed))
            for target, rows_of in ((operators, operator == 1), (annotations, operator == 0)):
                mask = named & closed & rows_of
                self._add(target, thread[mask], start=start[mask], end=end[mask], name=name[mask],
                          shapes=shapes[mask])

    def _add(self, target: Growing, thread: Column, **columns: Column) -> None:
        """Rows of a host table; those that end before they start are left out."""
        forward = columns["end"] >= columns["start"]
        self._leave_out("host events that end before they start", np.count_nonzero(~forward))
        thread = thread[forward]
        unique, inverse = np.unique(thread, return_inverse=True)
        texts = [f"{pid}/{number & LOW_BITS}" if number >= 0 else "?"
                 for pid, number in zip(_pids(unique).tolist(), unique.tolist())]
        known = np.array([self.threads.intern(text) for text in texts], np.int64)
        target.add(len(thread), tid=known[inverse], pid=_pids(thread), process=_processes(thread),
                   **{name: column[forward] for name, column in columns.items()})

    def _notice(self) -> None:
        """What nsys itself says it lost, and how much of the file was not asked for."""
        for text in self._diagnostics():
            for id, patterns in (("lost-records", LOST), ("maybe-lost-records", MAYBE_LOST)):
                if all(pattern.search(text) for pattern in patterns):
                    self.problems.append((id, f"nsys says: {text[:200]}"))
        wal = self.path.with_name(self.path.name + "-wal")
        if wal.exists() and wal.stat().st_size:
            self.problems.append(("unfinished-write", f"{wal.name} lies beside the file: another program has it "
                                  "open, and what it has not yet written back was not read"))
        for table, columns in self.database.tables.items():
            if "start" in columns and table not in self.timed:
                self._leave_out(table, self.database.rows(table))

    def _notice_timeless(self, of: Iterable[str], kept: int, what: str, id: str) -> None:
        """Rows whose times are no integers were left out; more than a few of them are lost records."""
        lost = sum(self.timeless.get(table, 0) for table in of)
        if lost:
            few = lost <= LOST_AT_MOST * (lost + kept)
            self.problems.append(("malformed-events" if few else id, (
                f"{lost:,} of {lost + kept:,} {what} have no time, or an impossible one: left out")))

    def _origin(self, start: Column) -> int:
        """Unix time of the file's time 0, ns; 0 where it does not say, or where its times are Unix times already."""
        if start[0] > 10**18:       # exported with --time-normalize
            return 0
        said = [row["utcEpochNs"] for row in self.database.all("TARGET_INFO_SESSION_START_TIME", ["utcEpochNs"])]
        return said[0] if said and isinstance(said[0], int) and 0 < said[0] < -MISSING else 0


def _complete_processes(gpu: dict[str, Column], calls: dict[str, Column]) -> None:
    """Early exports do not name the process of a kernel; where only one made calls, it is that one."""
    made = np.unique(calls["process"])
    nameless = gpu["process"] < 0
    if len(made) == 1 and nameless.any():
        gpu["process"] = np.where(nameless, made[0], gpu["process"])
        gpu["pid"] = np.where(nameless, _pids(made)[0], gpu["pid"])


def _renumber(path: Path, gpu: dict[str, Column], calls: dict[str, Column]) -> None:
    """Make correlation ids unique across processes, exactly; takes the column `process` away."""
    processes = np.union1d(gpu["process"], calls["process"])
    stride = max(int(gpu["correlation"].max(initial=0)), int(calls["correlation"].max(initial=0))) + 1
    if stride * len(processes) >= -MISSING:
        raise TraceError(f"{path} holds correlation ids that no recording has", cause=f"up to {stride - 1:,}",
                         remedy="export it again")
    for table in (gpu, calls):
        offset = np.searchsorted(processes, table.pop("process")) * stride
        table["correlation"] = np.where(table["correlation"] > 0, table["correlation"] + offset, -1)


def _public(columns: dict[str, Column]) -> dict[str, Column]:
    return {name: column for name, column in columns.items() if name != "process"}


def _pids(ids: Column) -> Column:
    """The operating system's process ids in serialized ids of processes or threads."""
    return np.where(ids >= 0, (ids >> THREAD_BITS) & LOW_BITS, -1)


def _processes(ids: Column) -> Column:
    return np.where(ids >= 0, ids & ~LOW_BITS, -1)


def _possible(times: Column) -> Column:
    """Far enough from the ends of int64 that no difference overflows, and not MISSING."""
    return (times > MISSING) & (times < -MISSING)


def _some(names: dict[str, Any]) -> str:
    named = sorted(name for name in names if not name.startswith(("ENUM_", "sqlite_")))
    return (", ".join(named[:6]) + (f" and {len(named) - 6} more" if len(named) > 6 else "")) if named else "no table"
