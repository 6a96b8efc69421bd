"""Cut a few steps out of a Kineto trace: a small file in the same format, for Perfetto, a bug report or a test.

What is kept: every event that overlaps the chosen steps; the calls that launched the device events among them;
flows with both ends in what is kept; the names of processes and threads; and of the top level the facts that a
reader needs. Nothing else of the top level is: `metadata` and the like carry environment variables, host names and
command lines.
"""

from __future__ import annotations

import contextlib
import gzip
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from saturate.errors import EnvironmentProblem, TraceError, UsageError
from saturate.trace import kineto
from saturate.trace._json_stream import repaired, walk
from saturate.trace._kineto_events import KINDS, exact_ns
from saturate.trace._kineto_facts import base_ns
from saturate.trace.columns import Trace

#: Without steps, this much of the device's activity.
SPAN_NS = 100_000_000

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
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True)
class Trimmed:
    """What was written."""

    steps: list[str]  # names of the steps kept; empty: the trace has none, a stretch of activity was kept
    window_ns: int
    events: int


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

    Without steps: the first 100 ms of the device's activity, or of the host's where there is none. Raises
    TraceError where `path` is no Kineto trace or has no events, UsageError where `out` is the input, a folder, or
    `steps` is none, EnvironmentProblem where it cannot be written; then `out` is what it was before.
    """
    path, out = Path(path), Path(out)
    if steps < 1:
        raise UsageError(f"{steps} steps cannot be kept", remedy="ask for at least one")
    if out.exists() and (not out.is_file() or (path.exists() and out.samefile(path))):
        raise UsageError(
            f"{out} is {'the trace itself' if out.is_file() else 'no file'}", remedy="write to another file"
        )
    trace, document = kineto.load(path, _FIELDS)
    names, first, last = _window(trace, steps, path)
    origin = trace.origin_ns - base_ns(document)
    keep = _Keep(names, first + origin, last + origin, _launched(trace, first, last))
    try:
        with _replaced(out) as file, _compressed(file, out) as sink:
            sink.write(
                b"{" + b"".join(b'"%s":%s,\n' % (name.encode(), value) for name, value in _facts(document.fields))
            )
            sink.write(b'"traceEvents":[')
            keep.sink = sink
            walk(path, keep)
            keep.flows_with_both_ends()
            sink.write(b"\n]}\n")
    except OSError as error:
        raise EnvironmentProblem(
            f"{out} cannot be written",
            cause=error.strerror or str(error),
            remedy="free some space there, or write to another folder",
        ) from error
    return Trimmed(steps=names, window_ns=last - first, events=keep.written)


def _window(trace: Trace, steps: int, path: Path) -> tuple[list[str], int, int]:
    """(names of the steps, first nanosecond, the one behind the last)."""
    notes = trace.annotations
    of_step = np.array([name.startswith(_STEP) for name in trace.names], bool)
    rows = np.flatnonzero(of_step[notes.name]) if len(notes.name) else np.empty(0, "i8")
    names = list(dict.fromkeys(trace.names[name] for name in notes.name[rows].tolist()))  # by their first start
    if names:
        middle = max(0, (len(names) - steps) // 2)
        chosen = names[middle : middle + steps]
        ids = np.isin(notes.name[rows], [trace.names.index(name) for name in chosen])
        return chosen, int(notes.start[rows][ids].min()), int(notes.end[rows][ids].max())
    for table in (trace.gpu, trace.operators, trace.calls, notes):
        if len(table.start):
            first = int(table.start[0])
            return [], first, min(first + SPAN_NS, int(table.end.max()) + 1)
    raise TraceError(f"{path} holds nothing to keep", cause="it has neither device events nor host events")


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
        except _NOT_JSON:  # read() said so; a damaged fact is not passed on
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
        self.flows: dict[tuple[str, str], list[bytes]] = defaultdict(list)

    def block(self, array: bytes, offset: int) -> bool:
        try:
            raws = _RAWS.decode(array)
            found = _EVENTS.decode(array)
        except msgspec.ValidationError:  # something in it is no object
            return all([self.event(bytes(raw), offset) for raw in raws])
        except _NOT_JSON:
            fixed = repaired(array)
            return fixed != array and self.block(fixed, offset)
        for event, raw in zip(found, raws, strict=True):
            if self._belongs(event):
                self._write(event, bytes(raw))
        return True

    def event(self, text: bytes, offset: int) -> bool:
        try:
            value = msgspec.json.decode(text)
        except RecursionError:  # nested too deeply for any reader
            return True
        except _NOT_JSON:
            fixed = repaired(text)
            return fixed != text and self.event(fixed, offset)
        return not isinstance(value, dict) or self.block(b"[" + text + b"]", offset)

    def _belongs(self, event: _Event) -> bool:
        if event.ph == "M":
            return event.name in _NAMING
        if event.ph in _FLOW and event.id in self.correlations:
            return True
        start = exact_ns(bytes(event.ts))
        if start is None:
            return False
        end = start + max(exact_ns(bytes(event.dur)) or 0, 0)
        if isinstance(event.name, str) and event.name.startswith(_STEP):
            return event.name in self.steps
        if start < self.last and (end > self.first or start >= self.first):
            return True
        if event.cat in KINDS and KINDS[event.cat] == "call":
            try:
                return _ARGS.decode(event.args).correlation in self.correlations
            except (*_NOT_JSON, TypeError):  # no arguments, or a correlation that is no number
                return False
        return False

    def _write(self, event: _Event, text: bytes) -> None:
        try:
            msgspec.json.decode(text)  # what is skipped while decoding is not checked
        except UnicodeDecodeError:
            text = repaired(text)
        except _NOT_JSON:
            return
        if event.ph in _FLOW:
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


@contextlib.contextmanager
def _replaced(out: Path) -> Iterator[BinaryIO]:
    """A file that becomes `out` when the block ends well, and is gone when it does not."""
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with open(part, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


def _compressed(file: BinaryIO, out: Path) -> Any:
    """`file` itself, or a gzip stream into it that tells neither a name nor a time."""
    return gzip.GzipFile("", "wb", 6, file, mtime=0) if out.name.endswith(".gz") else contextlib.nullcontext(file)
