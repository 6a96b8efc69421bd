"""Read what torch.profiler exports (Kineto's Chrome trace, of 2021 or of today, CUDA or HIP) into columns.

Blocks of events are decoded into typed objects natively, turned into columns and forgotten, so memory holds little
more than the columns. A block with anything unexpected in it goes through `event` instead: one by one, exactly,
counting what is left out.

Times: microseconds with up to three decimals become integer nanoseconds, exactly. A float64 tells neighbouring
nanoseconds apart below 2**43 us (its spacing there is at most 2**-10 us, so it lies within 0.49 ns of what the file
says, and so does the fraction, which is split off without error). Larger values with decimals are read from their
digits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from saturate.errors import TraceError
from saturate.trace import _kineto_events as events
from saturate.trace._json_stream import Document, repaired, walk
from saturate.trace._kineto_columns import (
    Index,
    Names,
    Table,
    Threads,
    TooFine,
    floats,
    host_events,
    integers,
    known,
    label,
    launching,
    nanoseconds,
    repeated,
    small,
    volume,
)
from saturate.trace._kineto_facts import FIELDS, facts, signature
from saturate.trace.columns import (
    KERNEL,
    MEMCPY,
    MEMSET,
    Column,
    DeviceInfo,
    GpuEvents,
    HostEvents,
    MemoryEvents,
    Trace,
    devices_told_apart,
)

_GPU_KINDS = {"kernel": KERNEL, "memcpy": MEMCPY, "memset": MEMSET}
_TABLES = {
    "operator": "operators",
    "annotation": "annotations",
    "call": "calls",
    "memory": "memory",
    **dict.fromkeys(_GPU_KINDS, "gpu"),
}
_LEARN_FROM = 50  # events of a category, from which on the decoder learns to skip it
_LEARN_LIMIT = 100  # such categories
_LOST_AT_MOST = 0.01  # events (and device events) that could not be read, of those that could, before nothing follows
_PENDING = 4096  # events that came one by one and wait to become columns
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_LOOSE = msgspec.json.Decoder(events.Loose)
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError)


def read(path: Path, progress: Callable[[float], None] | None = None) -> Trace:
    """The trace in `path`. Raises TraceError; what could not be read is in `left_out` and `problems`."""
    return load(path, FIELDS, progress)[0]


def load(
    path: Path, fields: frozenset[str], progress: Callable[[float], None] | None = None
) -> tuple[Trace, Document]:
    """The trace, and the top-level values `fields` of its file."""
    path = Path(path)
    reader = _Reader()
    document = walk(path, reader, FIELDS | fields, progress)
    if document.truncated and not reader.seen:
        raise TraceError(
            f"{path} ends before its first event",
            evidence=document.problems[0][1],
            remedy="export it again: the program was stopped, or the disk full, while it was written",
        )
    return reader.trace(path, document), document


class _Reader:
    """Consumes events; see `_json_stream.Consumer`."""

    def __init__(self) -> None:
        self.seen = 0
        self.names = Names()
        self.threads = Threads()
        self.signatures = Index({b"\0\0\0": 0})
        self.collectives: list[dict[str, Any]] = []
        self.left_out: Counter[str] = Counter()
        self.lost_of_device = 0  # of what was left out: device events, known by their category
        self.first: dict[str, int] = {}  # what was left out -> offset of the first
        self.repaired: list[int] = []  # offsets of blocks that were not quite JSON
        self.rounded = 0
        self._tables: dict[str, Table] = defaultdict(Table)
        self._pending: dict[str, list[tuple[Any, int, int]]] = defaultdict(list)
        self._skipped, self._time = set(events.SKIPPED), int | float
        self._learn()

    def _learn(self) -> None:
        self._decoder, self._types = events.decoder(self._time, frozenset(self._skipped))

    # blocks of events, as they should be

    def block(self, array: bytes, offset: int) -> bool:
        try:
            self._quickly(array)
        except TooFine:
            if self._time is msgspec.Raw:  # it is a duration: one by one, from its digits
                return self._carefully(array, offset)
            self._time = msgspec.Raw
            self._learn()
            return self.block(array, offset)
        except (*_NOT_JSON, RecursionError, OverflowError, ValueError):  # something in it is not as it should be
            return self._carefully(array, offset)
        return True

    def _quickly(self, array: bytes) -> None:
        """All of the block or, raising, nothing."""
        found = self._decoder.decode(array)
        groups: dict[type, list[Any]] = defaultdict(list)
        for event in found:
            groups[type(event)].append(event)
        made, skipped, rounded = [], {}, 0
        for event_type, rows in groups.items():
            category, kind = self._types[event_type]
            if not kind:
                skipped[category] = len(rows)
                continue
            start, lost = self._times([row.ts for row in rows])
            rounded += lost
            end = start
            if kind != "memory":
                duration, lost = nanoseconds([row.dur for row in rows])
                rounded += lost
                if int(duration.min()) < 0:
                    raise ValueError("a negative duration")
                end = start + duration
            made.append((kind, self._columns(kind, rows, start, end)))
        for kind, columns in made:
            self._add(kind, columns)
        self.left_out.update(skipped)
        self.rounded += rounded
        self.seen += len(found)

    def _times(self, values: list[Any]) -> tuple[Column, int]:
        if self._time is not msgspec.Raw:
            return nanoseconds(values)
        exact = [events.exact_ns(bytes(value)) for value in values]
        return np.fromiter((known(time) for time in exact), "i8", len(exact)), 0

    # events that something is wrong with, one by one

    def _carefully(self, array: bytes, offset: int) -> bool:
        try:
            raws = _RAWS.decode(array)
        except (*_NOT_JSON, RecursionError):
            fixed = repaired(array)
            if fixed == array:
                return False
            done = self.block(fixed, offset)
            if done:
                self.repaired.append(offset)
            return done
        at = 1
        for raw in raws:
            text = bytes(raw)
            at = array.find(text, at)
            if not self.event(text, offset + at - 1):  # its brackets are right, something inside is not JSON
                self._leave_out("malformed", offset + at - 1)
            at += len(text)
        return True

    def event(self, text: bytes, offset: int) -> bool:
        try:
            loose = _LOOSE.decode(text)
        except msgspec.ValidationError:  # JSON, but no object
            return self._leave_out("malformed", offset)
        except RecursionError:
            return self._leave_out("nested too deeply", offset)
        except _NOT_JSON:
            fixed = repaired(text)
            if fixed == text or not self.event(fixed, offset):
                return False
            self.repaired.append(offset)
            return True
        self.seen += 1
        category = loose.cat if isinstance(loose.cat, str) else ""
        kind = events.KINDS.get(category, "")
        if not category and loose.name == "[memory]":
            kind = "memory"
        if not kind:
            reason = category or ("metadata" if loose.ph == "M" else "no category")
            self.left_out[reason] += 1
            if category and self.left_out[category] == _LEARN_FROM and len(self._skipped) < _LEARN_LIMIT:
                self._skipped.add(category)
                self._learn()
            return True
        if kind == "memory" and loose.name != "[memory]":
            self.left_out[f"{category}: {loose.name}"[:100]] += 1
            return True
        return self._take(kind, loose, offset)

    def _take(self, kind: str, loose: events.Loose, offset: int) -> bool:
        start = events.exact_ns(bytes(loose.ts))
        duration = 0 if kind == "memory" else events.exact_ns(bytes(loose.dur))
        if (
            start is None
            or duration is None
            or not isinstance(loose.name, str)
            or (kind != "memory" and loose.ph != "X")
        ):
            self.lost_of_device += kind in _GPU_KINDS
            return self._leave_out("malformed", offset)
        if duration < 0:
            self.lost_of_device += kind in _GPU_KINDS
            return self._leave_out("negative duration", offset)
        loose.pid, loose.tid = label(loose.pid), label(loose.tid)
        loose.args = events.fitted(events.ARGS[kind], bytes(loose.args))
        self.rounded += events.finer(bytes(loose.ts)) + events.finer(bytes(loose.dur))
        self._pending[kind].append((loose, start, start + duration))
        if len(self._pending[kind]) >= _PENDING:
            self._flush(kind)
        return True

    def _flush(self, kind: str) -> None:
        rows = self._pending.pop(kind)
        times = np.array([(start, end) for _, start, end in rows], "i8")
        self._add(kind, self._columns(kind, [row for row, _, _ in rows], times[:, 0], times[:, 1]))

    def _leave_out(self, reason: str, offset: int) -> bool:
        self.left_out[reason] += 1
        self.first.setdefault(reason, offset)
        return True

    # columns

    def _columns(self, kind: str, rows: list[Any], start: Column, end: Column) -> dict[str, Column]:
        names, args = [row.name for row in rows], [row.args for row in rows]
        if kind == "memory":
            if any(name != "[memory]" for name in names):
                raise ValueError("an instant event of another kind")
            device = np.where(integers(args, "device_type") > 0, integers(args, "device"), events.UNKNOWN)
            return {
                "start": start,
                "bytes": integers(args, "bytes"),
                "device": device,
                "allocated": integers(args, "allocated"),
                "reserved": integers(args, "reserved"),
            }
        external = integers(args, "external")
        if (external < 0).any():
            external = np.where(external < 0, integers(args, "external_2021"), external)
        columns = {"start": start, "end": end, "external": external, "name": self.names.all(names)}
        if kind in _GPU_KINDS:
            return columns | self._gpu_columns(_GPU_KINDS[kind], rows, args)
        columns["tid"] = self.threads.all((row.pid, row.tid) for row in rows)
        if kind == "call":
            columns["correlation"] = integers(args, "correlation")
        elif kind == "operator":
            keys = (b"\0".join((a.dims, a.types, a.strides, a.concrete)) for a in args)
            columns["shapes"] = self.signatures.all(keys) - 1  # the first one is of operators without any
        return columns

    def _gpu_columns(self, kind: int, rows: list[Any], args: list[Any]) -> dict[str, Column]:
        collective = np.full(len(rows), -1)
        for row, found in enumerate(args):
            if found.collective is not None:
                collective[row] = len(self.collectives)
                self.collectives.append(
                    {
                        recorded: value
                        for field, recorded in events.COLLECTIVE.items()
                        if (value := getattr(found, field)) is not None
                    }
                )
        device, stream = integers(args, "device"), integers(args, "stream")
        if device.min() < 0:  # the row of the viewer it was put in says the same
            device = np.where(device < 0, [small(row.pid) for row in rows], device)
        if stream.min() < 0:
            stream = np.where(stream < 0, [small(row.tid) for row in rows], stream)
        occupancy = floats(args, "occupancy")
        occupancy = np.where(np.isnan(occupancy), floats(args, "occupancy_2021"), occupancy) / 100
        blocks_per_sm = floats(args, "blocks_per_sm")
        return {
            "kind": np.full(len(rows), kind),
            "device": device,
            "stream": stream,
            "collective": collective,
            "correlation": integers(args, "correlation"),
            "bytes": integers(args, "bytes"),
            "blocks": np.array([volume(a.grid) for a in args], "i8"),
            "threads": np.array([volume(a.block) for a in args], "i8"),
            "blocks_per_sm": np.where((blocks_per_sm >= 0) & (blocks_per_sm < 2**31), blocks_per_sm, np.nan),
            "occupancy": np.where((occupancy >= 0) & (occupancy <= 1), occupancy, np.nan),
            "registers": integers(args, "registers"),
            "shared_bytes": integers(args, "shared_bytes"),
            "graph": (integers(args, "graph") > 0) | (integers(args, "graph_node") > 0),
        }

    def _add(self, kind: str, columns: dict[str, Column]) -> None:
        table = _TABLES[kind]
        if kind == "operator" and self.names.marked:
            noted = self.names.is_annotation(columns["name"])
            if noted.any():
                self._tables["annotations"].add({c: v[noted] for c, v in columns.items() if c != "shapes"})
                columns = {c: v[~noted] for c, v in columns.items()}
        self._tables[table].add(columns)

    # the whole

    def trace(self, path: Path, document: Document) -> Trace:
        for kind in list(self._pending):
            self._flush(kind)
        tables = {name: table.columns() for name, table in self._tables.items()}
        first = min((int(columns["start"][0]) for columns in tables.values() if columns), default=0)
        for columns in tables.values():
            for edge in {"start", "end"} & columns.keys():
                columns[edge] -= first
        threads = self.threads
        host = {
            name: host_events(tables.get(name, {}), threads.pids) for name in ("operators", "calls", "annotations")
        }
        found = tables.get("gpu", {})
        collective = found.pop("collective", np.empty(0, "i4"))
        base, devices, rank, world_size = facts(document)
        if found:
            found["device"] = devices_told_apart(found["device"], devices, document.problems)
        none = np.empty(0, "i8")
        ids = (found.get(name, none) for name in ("correlation", "external", "device"))
        gpu = GpuEvents(**found, pid=launching(*ids, host["calls"]))
        memory = tables.get("memory", {})
        for device in np.unique(gpu.device).tolist():
            devices.setdefault(device, DeviceInfo(id=device))
        return Trace(
            source=str(path),
            kind="kineto",
            names=list(self.names),
            threads=threads.labels,
            signatures=[signature(key) for key in list(self.signatures)[1:]],
            devices=devices,
            origin_ns=base + first,
            rank=rank,
            world_size=world_size,
            gpu=gpu,
            **host,
            memory=MemoryEvents(time=memory.pop("start", np.empty(0, "i8")), **memory),
            collectives={row: self.collectives[collective[row]] for row in np.flatnonzero(collective >= 0).tolist()},
            left_out=dict(self.left_out),
            problems=document.problems + self._problems(host, len(gpu.start), document.damaged),
            read_bytes=document.read_bytes,
        )

    def _problems(self, host: dict[str, HostEvents], of_device: int, damaged: int) -> list[tuple[str, str]]:
        found = []
        for reason, identity, what in (
            ("malformed", "malformed-events", "have no name, no time, or values that no event has"),
            ("nested too deeply", "malformed-events", "are nested too deeply"),
            ("negative duration", "negative-durations", "end before they start"),
        ):
            if reason in self.first:
                found.append(
                    (
                        identity,
                        f"{self.left_out[reason]:,} events {what}: left out, "
                        f"the first at byte {self.first[reason]:,}",
                    )
                )
        if self.repaired:
            found.append(
                (
                    "not-quite-json",
                    f"{len(self.repaired):,} stretches hold numbers (nan, inf), escapes or bytes that JSON "
                    f"does not know: read as unknown, the first at byte {self.repaired[0]:,}",
                )
            )
        if self.rounded:
            found.append(
                ("below-nanoseconds", f"{self.rounded:,} times have more decimals than nanoseconds need: rounded")
            )
        for what, count in (
            ("calls share a correlation id", repeated(host["calls"].correlation, host["calls"].pid)),
            ("operators share an id", repeated(host["operators"].external, host["operators"].pid)),
        ):
            if count:
                found.append(
                    (
                        "duplicate-ids",
                        f"{count:,} {what} with another one of their process: what they launched may be "
                        "credited to the wrong one",
                    )
                )
        lost = damaged + sum(self.left_out[reason] for reason in self.first)
        if lost > _LOST_AT_MOST * self.seen:
            found.append(("lost-records", f"{lost:,} events could not be read, {self.seen:,} could"))
        elif self.lost_of_device > _LOST_AT_MOST * of_device:  # few among all events, but many of those that matter
            found.append(
                ("lost-records", f"{self.lost_of_device:,} device events could not be read, {of_device:,} could")
            )
        if not self._tables:
            others = sum(self.left_out.values())
            found.append(("no-events", "nothing that torch.profiler records is in this file" + (
                f": its {others:,} events are another program's, or of a kind that is not read" if others else "")))
        return found
