"""Kineto files made by hand: events as dicts, with every number as the text that stands in the file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from saturate.trace.columns import Trace


class Number(str):
    """Stands in the file without quotes, digit for digit."""


class Raw(Number):
    """Any text that stands in the file as it is."""


def dumps(value: Any, indent: str = "") -> str:
    """JSON as the standard library writes it, but for `Number`."""
    if isinstance(value, Number):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{indent}{json.dumps(key)}: {dumps(part, indent)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(indent + dumps(part, indent) for part in value) + indent + "]"
    return json.dumps(value)


def event(category: str, name: str, ts: Any, dur: Any, args: dict[str, Any] | None = None, *,
          pid: Any = 7, tid: Any = 7, ph: str = "X", **more: Any) -> dict[str, Any]:
    return {"ph": ph, "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, **more, "args": args or {}}


def operator(name: str, ts: Any, dur: Any, external: int, **args: Any) -> dict[str, Any]:
    return event("cpu_op", name, ts, dur, {"External id": external, **args})


def call(name: str, ts: Any, dur: Any, correlation: int, external: int = 0) -> dict[str, Any]:
    return event("cuda_runtime", name, ts, dur, {"External id": external, "cbid": 211, "correlation": correlation})


def kernel(name: str, ts: Any, dur: Any, correlation: int, external: int = 0, **args: Any) -> dict[str, Any]:
    return event("kernel", name, ts, dur, {
        "External id": external, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": correlation, **args},
        pid=0, tid=7)


def step(number: int, ts: Any, dur: Any) -> dict[str, Any]:
    return event("user_annotation", f"ProfilerStep#{number}", ts, dur)


def flow(phase: str, identity: int, ts: Any, category: str = "ac2g") -> dict[str, Any]:
    return {"ph": phase, "id": identity, "pid": 7, "tid": 7, "ts": ts, "cat": category, "name": category}


def metadata(name: str, /, **args: Any) -> dict[str, Any]:
    return {"name": name, "ph": "M", "ts": 0, "pid": 7, "tid": 0, "args": args}


def training(steps: int = 4, start: int = 0) -> list[dict[str, Any]]:
    """A plausible training: per step an operator, its call, its kernel, which ends in the next step, and their flow. Times from `start` on, in us."""
    events = [metadata("process_name", name="python"), metadata("thread_name", name="thread 7 (python)")]
    for number in range(steps):
        at = start + 1000 * number
        events += [
            step(number, at, 1000),
            event("python_function", "train.py(3): <module>", at, 900),
            operator("aten::mm", at + 10, Number("50.125"), number + 1, **{
                "Input Dims": [[4, 8], [8, 2]], "Input type": ["float", "float"], "Input Strides": [[8, 1], [2, 1]],
                "Concrete Inputs": ["", ""]}),
            call("cudaLaunchKernel", at + 20, 9, number + 100, number + 1),
            kernel("gemm", at + 900, Number("200.5"), number + 100, number + 1, grid=[4, 2, 1], block=[128, 1, 1],
                   **{"blocks per SM": 0.1, "registers per thread": 32, "shared memory": 1024, "est. achieved occupancy %": 25}),
            flow("s", number + 100, at + 20), flow("f", number + 100, at + 900),
        ]
    return events


def document(events: Any, *, last: bool = False, indent: str = "", **top: Any) -> bytes:
    """A whole file. `last`: the events come behind the other top-level values."""
    parts = {"traceEvents": events}
    return dumps({**top, **parts} if last else {**parts, **top}, indent).encode("utf-8", "surrogateescape")


def write(path: Path, text: bytes) -> Path:
    path.write_bytes(gzip.compress(text, 1) if path.suffix == ".gz" else text)
    return path


def rows(trace: Trace, table: str) -> list[tuple[Any, ...]]:
    """Rows of a table as sorted tuples of plain values, names and threads as text and inputs as signatures: the same for
    every reading of the same events, whatever was interned first."""
    columns = vars(getattr(trace, table))
    look_up = {"name": trace.names, "tid": trace.threads, "shapes": [*trace.signatures, None]}
    values = []
    for name, column in columns.items():
        plain = [None if isinstance(v, float) and np.isnan(v) else v for v in column.tolist()]
        values.append([look_up[name][v] for v in plain] if name in look_up else plain)
    return sorted(zip(*values, strict=True), key=repr)


def contents(trace: Trace) -> dict[str, Any]:
    """All that a trace says, for comparison."""
    return {"left_out": dict(sorted(trace.left_out.items())), "origin": trace.origin_ns, "devices": trace.devices,
            **{table: rows(trace, table) for table in ("gpu", "operators", "calls", "annotations", "memory")}}
