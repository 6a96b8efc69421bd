"""Small traces made by hand: what a reader would have read from a recording of such a program.

    made = Recording()
    made.step(0, 100)
    made.operator("aten::mm", 10, 30, dims=((4, 8), (8, 2)), types=("float", "float"))
    made.kernel("gemm", 40, 60, launched=20)        # launched at 20 by a call of one nanosecond
    made.call("cudaStreamSynchronize", 30, 60)
    trace = made.trace()

Times are nanoseconds. Threads and names are text here and are interned in `trace()`; every table is sorted by start.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from saturate.trace.columns import (
    KERNEL,
    MEMCPY,
    MEMSET,
    DeviceInfo,
    GpuEvents,
    HostEvents,
    MemoryEvents,
    Signature,
    Trace,
)

V100 = DeviceInfo(id=0, name="Tesla V100-SXM2-32GB", sms=80, threads_per_sm=2048, memory_bytes=32 << 30,
                  capability=(7, 0), shared_bytes_per_sm=98304, registers_per_sm=65536)


class Recording:
    """Collects rows. Methods return the row's correlation (device events) or its own external id (operators)."""

    def __init__(self, *devices: DeviceInfo, source: str = "made.json", rank: int | None = None,
                 world_size: int | None = None, main: str = "1/1", kind: str = "kineto"):
        self.main = main
        self.facts: dict[str, Any] = {
            "source": source, "kind": kind, "rank": rank, "world_size": world_size,
            "devices": {device.id: device for device in devices}}
        self.gpu: list[dict[str, Any]] = []
        self.host: dict[str, list[dict[str, Any]]] = {"operators": [], "calls": [], "annotations": []}
        self.memory: list[dict[str, Any]] = []
        self.signatures: list[Signature] = []
        self.arguments: dict[int, dict[str, Any]] = {}      # correlation -> recorded arguments of a collective
        self.next = 1

    def _id(self) -> int:
        self.next += 1
        return self.next - 1

    def _host(self, table: str, name: str, start: int, end: int, thread: str | None, **columns: int) -> None:
        self.host[table].append({"name": name, "start": start, "end": end, "thread": thread or self.main, **columns})

    def step(self, start: int, end: int, thread: str | None = None) -> None:
        self.annotation(f"ProfilerStep#{self._id()}", start, end, thread)

    def annotation(self, name: str, start: int, end: int, thread: str | None = None) -> None:
        self._host("annotations", name, start, end, thread)

    def loader(self, start: int, end: int, thread: str | None = None) -> None:
        self.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start, end, thread)

    def operator(self, name: str, start: int, end: int, thread: str | None = None, dims: Any = None,
                 types: tuple[str, ...] = (), strides: Any = (), concrete: tuple[str, ...] = ()) -> int:
        shapes = -1
        if dims is not None:
            shapes = len(self.signatures)
            self.signatures.append(Signature(dims, types, strides, concrete))
        external = self._id()
        self._host("operators", name, start, end, thread, external=external, shapes=shapes)
        return external

    def call(self, name: str, start: int, end: int, thread: str | None = None, correlation: int | None = None,
             external: int = -1) -> int:
        correlation = self._id() if correlation is None else correlation
        self._host("calls", name, start, end, thread, correlation=correlation, external=external)
        return correlation

    def kernel(self, name: str, start: int, end: int, *, launched: int | None = None, thread: str | None = None,
               **columns: Any) -> int:
        return self._device(KERNEL, name, start, end, "cudaLaunchKernel", launched, thread, columns)

    def copy(self, name: str, start: int, end: int, *, launched: int | None = None, thread: str | None = None,
             **columns: Any) -> int:
        return self._device(MEMCPY, name, start, end, "cudaMemcpyAsync", launched, thread, columns)

    def memset(self, start: int, end: int, *, launched: int | None = None, thread: str | None = None,
               **columns: Any) -> int:
        return self._device(MEMSET, "Memset (Device)", start, end, "cudaMemsetAsync", launched, thread, columns)

    def collective(self, name: str, start: int, end: int, *, arguments: dict[str, Any], **columns: Any) -> int:
        correlation = self.kernel(name, start, end, **columns)
        self.arguments[correlation] = arguments
        return correlation

    def allocation(self, time: int, allocated: int, reserved: int, device: int = 0, size: int = 0) -> None:
        self.memory.append({"time": time, "allocated": allocated, "reserved": reserved, "device": device,
                            "bytes": size})

    def _device(self, kind: int, name: str, start: int, end: int, by: str, launched: int | None, thread: str | None,
                columns: dict[str, Any]) -> int:
        correlation = columns.pop("correlation", None)
        if correlation is None:
            correlation = self._id()
        if launched is not None:
            self.call(columns.pop("by", by), launched, launched + 1, thread, correlation)
        self.gpu.append({"kind": kind, "name": name, "start": start, "end": end, "correlation": correlation,
                         "device": 0, "stream": 7, "pid": 1, **columns})
        return correlation

    def trace(self, **changes: Any) -> Trace:
        names: dict[str, int] = {}
        threads: dict[str, int] = {}

        def number(text: str, table: dict[str, int]) -> int:
            return table.setdefault(text, len(table))

        def columns(kind: type, rows: list[dict[str, Any]], by: str = "start") -> Any:
            rows = sorted(rows, key=lambda row: row[by])
            filled = {}
            for name, field in kind.__dataclass_fields__.items():       # type: ignore[attr-defined]
                empty = field.default_factory()
                missing = float("nan") if empty.dtype.kind == "f" else 0 if name == "graph" else -1
                filled[name] = np.array([row.get(name, missing) for row in rows], empty.dtype)
            return kind(**filled)

        device_rows = [{**row, "name": number(row["name"], names)} for row in self.gpu]
        host = {table: [{**row, "name": number(row["name"], names), "pid": int(row["thread"].partition("/")[0]),
                         "tid": number(row["thread"], threads)} for row in rows] for table, rows in self.host.items()}
        gpu = columns(GpuEvents, device_rows)
        collectives = {row: self.arguments[correlation] for row, correlation in enumerate(gpu.correlation.tolist())
                       if correlation in self.arguments}
        return Trace(**{**self.facts, "names": list(names), "threads": list(threads), "signatures": self.signatures,
                        "gpu": gpu, "memory": columns(MemoryEvents, self.memory, "time"), "collectives": collectives,
                        **{table: columns(HostEvents, rows) for table, rows in host.items()}, **changes})


def training(steps: int = 3, *, step_ns: int = 1_000_000, device: DeviceInfo = V100,
             rank: int | None = None) -> Trace:
    """An ordinary training: per step a loader wait of 10 %, four kernels, one of them a collective, and one copy."""
    made = Recording(device, rank=rank, world_size=None if rank is None else 2)
    for number in range(steps):
        at = number * step_ns
        unit = step_ns // 100
        made.step(at, at + step_ns)
        made.loader(at, at + 10 * unit)
        made.copy("Memcpy HtoD (Pageable -> Device)", at + 12 * unit, at + 16 * unit, launched=at + 11 * unit,
                  bytes=1 << 20)
        for kernel, first, last in (("gemm", 16, 40), ("softmax", 40, 60), ("ncclDevKernel_AllReduce", 55, 80),
                                    ("adam", 80, 90)):
            made.operator(f"aten::{kernel}", at + (first - 4) * unit, at + (first - 2) * unit, dims=((64, 64),),
                          types=("float",))
            made.kernel(kernel, at + first * unit, at + last * unit, launched=at + (first - 3) * unit, blocks=160,
                        threads=256, registers=32, shared_bytes=0, stream=9 if kernel.startswith("nccl") else 7)
    return made.trace()
