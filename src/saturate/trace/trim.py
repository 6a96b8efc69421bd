"""Cut a few steps out of a Kineto trace: a small file in the same format, for Perfetto, a bug report or a test.

Without steps the whole of a small trace is kept, and of a large one the stretch that is most like it. What is kept:
every event that overlaps the chosen steps; the calls that launched the device events among them; flows with both ends
in what is kept; the names of processes and threads; and of the top level the facts that a reader needs. Nothing else of
the top level is: `metadata` and the like carry environment variables, host names and command lines.
"""

from __future__ import annotations

import contextlib
import gzip
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np

from saturate.checkpoints import durable
from saturate.errors import EnvironmentProblem, TraceError, UsageError
from saturate.trace import kineto
from saturate.trace._json_stream import repaired, walk
from saturate.trace._kineto_events import KINDS, NOT_JSON, exact_ns
from saturate.trace._kineto_facts import base_ns
from saturate.trace.columns import Column, GpuEvents, HostEvents, Trace
from saturate.trace.integrity import READING
from saturate.trace.intervals import covered, length, union
from saturate.trace.launches import launching_calls
from saturate.trace.windows import CPU, devices, launched_within, window

#: Without steps, this much of the device's activity (or the host's); and nothing is cut off a trace of so few bytes.
SPAN_NS = 100_000_000
SMALL_BYTES = 4 << 20

#: Steps that are looked at, from the middle outwards, for some in which anything ran.
MOST_LOOKED_AT = 100

_STEP = "ProfilerStep#"
_FIELDS = frozenset(
    {
        "schemaVersion",
        "deviceProperties",
        "distributedInfo",
        "displayTimeUnit",
        "baseTimeNanoseconds",
        "record_shapes",
        "profile_memory",
        "with_stack",
        "with_flops",
        "with_modules",
        "cupti_version",
        "cuda_runtime_version",
        "cuda_driver_version",
        "hip_runtime_version",
        "hip_driver_version",
        "roctracer_version",
    }
)
_GROUP = frozenset({"backend", "rank", "world_size", "pg_count", "pg_config", "nccl_version"})
_NAMING = frozenset({"process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index"})
_FLOW = frozenset("stf")
_EMPTY = msgspec.Raw(b"")


@dataclass(frozen=True)
class Trimmed:
    """What was written."""

    steps: list[str]  # names of the steps kept; empty: the trace has none, a stretch of activity was kept
    window_ns: int
    events: int
    of_steps: int = 0  # that the trace has
    of_ns: int = 0  # from its first event to its last
    of_events: int = 0


class _Args(msgspec.Struct, gc=False):
    correlation: Any = None


class _Event(msgspec.Struct, gc=False):
    ph: Any = ""
    cat: Any = ""
    name: Any = ""
    ts: msgspec.Raw = _EMPTY
    dur: msgspec.Raw = _EMPTY
    id: Any = None
    args: msgspec.Raw = _EMPTY


_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_EVENTS = msgspec.json.Decoder(list[_Event])
_ARGS = msgspec.json.Decoder(_Args)


def trim(path: Path, out: Path, steps: int = 3) -> Trimmed:
    """Write `steps` steps from the middle of the trace in `path` to `out`, compressed where its name ends in .gz.

    Without steps: all of a small trace, else 100 ms of the device's activity, or of the host's where there is none,
    with the same kinds of events and as busy as the whole, as nearly as there is one. Raises TraceError where `path` is
    no Kineto trace, has no events or has lost some, UsageError where `out` is the input, a folder, or `steps` is none,
    EnvironmentProblem where it cannot be written; then `out` is what it was before.
    """
    path, out = Path(path), Path(out)
    if steps < 1:
        raise UsageError(f"{steps} steps cannot be kept", remedy="ask for at least one")
    with contextlib.suppress(OSError):  # one that cannot be seen: who opens it says why
        if out.exists() and (not out.is_file() or (path.exists() and out.samefile(path))):
            raise UsageError(
                f"{out} is {'the trace itself' if out.is_file() else 'no file'}", remedy="write to another file"
            )
    trace, document = kineto.load(path, _FIELDS)
    for problem, message in trace.problems:
        if problem in READING:  # a part of it would be analysed as if nothing had been lost
            raise TraceError(
                f"{path} is not whole, and no part of it would say so", cause=message, remedy="record or export it again"
            )
    chosen = _window(trace, steps, path)
    names, first, last = chosen.steps, chosen.first, _until_it_ran(trace, chosen)
    origin = trace.origin_ns - base_ns(document)
    keep = _Keep(names, first + origin, last + origin, _launched(trace, first, last))

    def fill(file: BinaryIO) -> None:
        with _compressed(file, out) as sink:
            sink.write(
                b"{" + b"".join(b'"%s":%s,\n' % (name.encode(), value) for name, value in _facts(document.fields))
            )
            sink.write(b'"traceEvents":[')
            keep.sink = sink
            walk(path, keep)
            keep.flows_with_both_ends()
            sink.write(b"\n]}\n")

    try:
        durable.replace(out, fill)
    except OSError as error:
        raise EnvironmentProblem(
            f"{out} cannot be written",
            cause=error.strerror or str(error),
            remedy="free some space there, or write to another folder",
        ) from error
    whole = _extent(trace)
    return Trimmed(steps=names, window_ns=last - first, events=keep.written, of_steps=chosen.of_steps,
                   of_ns=whole[1] - whole[0], of_events=keep.read)  # fmt: skip


class _Window(NamedTuple):
    steps: list[str]
    first: int
    last: int  # behind the last nanosecond
    of_steps: int


def _window(trace: Trace, steps: int, path: Path) -> _Window:
    """Steps from the middle of the trace in which something ran; without steps a stretch that is like the whole."""
    notes = trace.annotations
    of_step = np.array([name.startswith(_STEP) for name in trace.names], bool)
    rows = np.flatnonzero(of_step[notes.name]) if len(notes.name) else np.empty(0, "i8")
    names = list(dict.fromkeys(trace.names[name] for name in notes.name[rows].tolist()))  # by their first start
    if not names:
        return _Window([], *_stretch(trace, path), 0)
    last_of_all = max(0, len(names) - steps)
    windows = []
    for at in sorted(range(last_of_all + 1), key=lambda at: abs(at - last_of_all // 2))[:MOST_LOOKED_AT]:
        chosen = names[at : at + steps]
        ids = np.isin(notes.name[rows], [trace.names.index(name) for name in chosen])
        window = _Window(chosen, int(notes.start[rows][ids].min()), int(notes.end[rows][ids].max()), len(names))
        if _says_what_ran(trace, window.first, window.last):
            return window
        windows.append(window)
    # No steps hold what the analysis is about: the middle ones, and all around them to where there is some.
    window, ran = windows[0], _ran(trace)
    away = np.maximum(np.maximum(window.first - ran.end, ran.start - window.last), 0)
    nearest = int(np.argmin(away))
    return window._replace(
        first=min(window.first, int(ran.start[nearest])), last=max(window.last, int(ran.end[nearest]) + 1)
    )


def _until_it_ran(trace: Trace, chosen: _Window) -> int:
    """Behind the last of the chosen steps; where the host was far ahead of a device, behind what that did of them. Else the part
    would hold the host's steps with other work in them, and say nothing of it."""
    launches = launching_calls(trace)
    late = [launched_within(trace, device, launches, chosen.first, chosen.last) for device in devices(trace)
            if device != CPU and window(trace, device, launches).ahead is not None]
    return max([chosen.last, *(int(trace.gpu.end[rows].max()) + 1 for rows in late if len(rows))])


def _ran(trace: Trace) -> GpuEvents | HostEvents:
    """What an analysis is about: the device's events, or the operators where there are none."""
    return trace.gpu if len(trace.gpu.start) else trace.operators


def _says_what_ran(trace: Trace, first: int, last: int) -> bool:
    ran = _ran(trace)
    return not len(ran.start) or bool(((ran.start < last) & (ran.end > first)).any())


def _tables(trace: Trace) -> list[GpuEvents | HostEvents]:
    return [table for table in (trace.gpu, trace.operators, trace.calls, trace.annotations) if len(table.start)]


def _extent(trace: Trace) -> tuple[int, int]:
    tables = _tables(trace)
    return min((int(t.start[0]) for t in tables), default=0), max((int(t.end.max()) + 1 for t in tables), default=0)


def _stretch(trace: Trace, path: Path) -> tuple[int, int]:
    """The first nanosecond and the one behind the last: of stretches that begin half a stretch apart, one with as
    many kinds of events as any; of those the one that is busy for a share of its span most like the whole's."""
    tables = _tables(trace)
    if not tables:
        raise TraceError(f"{path} holds nothing to keep", cause="it has neither device events nor host events")
    if trace.read_bytes <= SMALL_BYTES:
        return _extent(trace)
    ran = tables[0]  # of the device; else operators, calls, labels
    start, end = int(ran.start[0]), int(ran.end.max()) + 1
    first = np.arange(start, max(start + 1, end - SPAN_NS // 2), SPAN_NS // 2)
    last = np.minimum(first + SPAN_NS, end)
    kinds = sum((_inside(table, first, last) > 0).astype("i8") for table in tables)
    busy = union(ran.start, ran.end)
    latest = np.maximum.accumulate(ran.end)
    begun, before = np.searchsorted(ran.start, first), np.searchsorted(ran.start, last)
    begins = np.maximum(ran.start[np.minimum(begun, len(ran.start) - 1)], first)
    ends = np.minimum(latest[np.maximum(before - 1, 0)], last)
    share = covered(busy, begins, ends) / np.maximum(ends - begins, 1)
    unlike = np.abs(share - length(busy) / (end - start))
    best = int(np.lexsort((np.arange(len(first)), unlike, -kinds))[0])
    return int(first[best]), int(last[best])


def _inside(table: GpuEvents | HostEvents, first: Column, last: Column) -> Column:
    """How many events of a table start in each stretch."""
    return np.searchsorted(table.start, last) - np.searchsorted(table.start, first)


def _launched(trace: Trace, first: int, last: int) -> set[int]:
    """Correlations of the device events of the window and of the calls in it: their flows belong."""
    found: set[int] = set()
    for table in (trace.gpu, trace.calls):
        inside = (table.start < last) & (table.end > first)
        found.update(table.correlation[inside].tolist())
    return found - {-1, 0}


def _facts(fields: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    for name, text in sorted(fields.items()):
        try:
            value = msgspec.json.decode(text)
        except NOT_JSON:  # read() said so; a damaged fact is not passed on
            continue
        if name == "distributedInfo" and isinstance(value, dict):
            value = {key: part for key, part in value.items() if key in _GROUP}
        yield name, msgspec.json.encode(value)


class _Keep:
    """Writes the events that belong; see `_json_stream.Consumer`."""

    sink: Any

    def __init__(self, steps: list[str], first: int, last: int, correlations: set[int]):
        self.steps, self.first, self.last, self.correlations = frozenset(steps), first, last, correlations
        self.written = 0
        self.read = 0
        self.flows: dict[tuple[str, str], list[bytes]] = defaultdict(list)

    def block(self, array: bytes, offset: int) -> bool:
        try:
            raws = _RAWS.decode(array)
            found = _EVENTS.decode(array)
        except msgspec.ValidationError:  # something in it is no object
            return all([self.event(bytes(raw), offset) for raw in raws])
        except NOT_JSON:
            fixed = repaired(array)
            return fixed != array and self.block(fixed, offset)
        self.read += len(found)
        for event, raw in zip(found, raws, strict=True):
            if self._belongs(event):
                self._write(event, bytes(raw))
        return True

    def event(self, text: bytes, offset: int) -> bool:
        try:
            value = msgspec.json.decode(text)
        except RecursionError:  # nested too deeply for any reader
            return True
        except NOT_JSON:
            fixed = repaired(text)
            return fixed != text and self.event(fixed, offset)
        return not isinstance(value, dict) or self.block(b"[" + text + b"]", offset)

    def _belongs(self, event: _Event) -> bool:
        if event.ph == "M":
            return isinstance(event.name, str) and event.name in _NAMING
        if _is_flow(event) and isinstance(event.id, int | str) and event.id in self.correlations:
            return True
        start = exact_ns(bytes(event.ts))
        if start is None:
            return False
        end = start + max(exact_ns(bytes(event.dur)) or 0, 0)
        if isinstance(event.name, str) and event.name.startswith(_STEP):
            return event.name in self.steps
        if start < self.last and (end > self.first or start >= self.first):
            return True
        if isinstance(event.cat, str) and KINDS.get(event.cat) == "call":
            try:
                return _ARGS.decode(event.args).correlation in self.correlations
            except (*NOT_JSON, TypeError):  # no arguments, or a correlation that is no number
                return False
        return False

    def _write(self, event: _Event, text: bytes) -> None:
        try:
            msgspec.json.decode(text)  # what is skipped while decoding is not checked
        except UnicodeDecodeError:
            text = repaired(text)
        except NOT_JSON:
            return
        if _is_flow(event):
            self.flows[str(event.cat), str(event.id)].append(text)
        else:
            self._out(text)

    def _out(self, text: bytes) -> None:
        self.sink.write((b",\n" if self.written else b"\n") + text)
        self.written += 1

    def flows_with_both_ends(self) -> None:
        for ends in self.flows.values():
            if len(ends) > 1:
                for text in ends:
                    self._out(text)


def _is_flow(event: _Event) -> bool:
    return isinstance(event.ph, str) and event.ph in _FLOW


def _compressed(file: BinaryIO, out: Path) -> Any:
    """`file` itself, or a gzip stream into it that tells neither a name nor a time."""
    return gzip.GzipFile("", "wb", 6, file, mtime=0) if out.name.endswith(".gz") else contextlib.nullcontext(file)
