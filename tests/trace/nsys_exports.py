"""Writes small Nsight Systems exports, in the schema of today or in an early one with fewer columns."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

RUNTIME = {"cudaLaunchKernel": "cudaLaunchKernel_v7000", "cudaMemcpyAsync": "cudaMemcpyAsync_v3020"}

SCHEMA = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "META_DATA_EXPORT": "name TEXT NOT NULL, value TEXT",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT",
    "TARGET_INFO_SYSTEM_ENV": "globalVid INTEGER, name TEXT, value TEXT",
    "DIAGNOSTIC_EVENT": "timestamp INTEGER, timestampType INTEGER, source INTEGER, severity INTEGER, text TEXT, "
                        "globalPid INTEGER",
    "TARGET_INFO_GPU": "vmId INTEGER, id INTEGER, name TEXT, smCount INTEGER, totalMemory INTEGER, "
                       "computeMajor INTEGER, computeMinor INTEGER, maxWarpsPerSm INTEGER, "
                       "threadsPerWarp INTEGER, maxShmemPerSm INTEGER, maxRegistersPerSm INTEGER",
    "TARGET_INFO_CUDA_DEVICE": "gpuId INTEGER, cudaId INTEGER, pid INTEGER, uuid TEXT, numMultiprocessors INTEGER",
    "ENUM_CUDA_MEM_KIND": "id INTEGER PRIMARY KEY, name TEXT, label TEXT",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER, "
        "contextId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, "
        "shortName INTEGER, registersPerThread INTEGER, gridX INTEGER, gridY INTEGER, gridZ INTEGER, "
        "blockX INTEGER, blockY INTEGER, blockZ INTEGER, staticSharedMemory INTEGER, "
        "dynamicSharedMemory INTEGER, graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER, streamId INTEGER, "
        "correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER, srcKind INTEGER, "
        "dstKind INTEGER, graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER, streamId INTEGER, "
        "correlationId INTEGER, globalPid INTEGER, bytes INTEGER, memKind INTEGER, graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start INTEGER, end INTEGER, deviceId INTEGER, graphId INTEGER, "
        "streamId INTEGER, correlationId INTEGER, globalPid INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER, "
        "globalTid INTEGER, correlationId INTEGER, nameId INTEGER, returnValue INTEGER",
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER, "
        "textId INTEGER",
    "OSRT_API": "start INTEGER, end INTEGER, globalTid INTEGER, nameId INTEGER",
}

#: Before schema 3: no process with a kernel, no graphs, no registered NVTX strings, no facts about GPUs.
EARLY = {
    "StringIds": SCHEMA["StringIds"],
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, "
                                  "correlationId INTEGER, shortName INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, "
                                   "nameId INTEGER",
    "NVTX_EVENTS": "start INTEGER, end INTEGER, text TEXT, globalTid INTEGER",
}


class Export:
    """Collects rows; a table is created with its first row, as nsys does. Columns that a schema lacks are dropped."""

    def __init__(self, path: Path, schema: dict[str, str] = SCHEMA):
        self.path = path
        self.schema = schema
        self.tables: dict[str, list[dict[str, Any]]] = {"StringIds": []}
        self.texts: dict[str, int] = {}
        self.correlation = 0

    def text(self, value: str) -> int:
        if value not in self.texts:
            self.texts[value] = len(self.texts) + 1
            self.add("StringIds", id=self.texts[value], value=value)
        return self.texts[value]

    def add(self, table: str, **row: Any) -> None:
        self.tables.setdefault(table, []).append(row)

    def call(self, name: str, start: int, end: int, pid: int = 100, tid: int = 101,
             correlation: int | None = None) -> int:
        if correlation is None:
            self.correlation += 1
            correlation = self.correlation
        self.add("CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=end, eventClass=0, globalTid=thread(pid, tid),
                 correlationId=correlation, nameId=self.text(RUNTIME.get(name, name)), returnValue=0)
        return correlation

    def kernel(self, name: str, start: Any, end: Any, pid: int = 100, device: int = 0, **row: Any) -> None:
        if "correlationId" not in row:
            row["correlationId"] = self.call("cudaLaunchKernel", start - 5, start - 4, pid)
        self.add("CUPTI_ACTIVITY_KIND_KERNEL", **{
            "start": start, "end": end, "deviceId": device, "contextId": 1, "streamId": 7,
            "globalPid": thread(pid, 0), "demangledName": self.text(name),
            "shortName": self.text(name.partition("<")[0]), "registersPerThread": 32,
            "gridX": 40, "gridY": 2, "gridZ": 1, "blockX": 128, "blockY": 2, "blockZ": 1, "staticSharedMemory": 16,
            "dynamicSharedMemory": 1024, **row})

    def copy(self, start: int, end: int, kind: int = 1, source: int | None = 0, target: int | None = 2,
             **row: Any) -> None:
        self.add("CUPTI_ACTIVITY_KIND_MEMCPY", **{
            "start": start, "end": end, "deviceId": 0, "streamId": 7, "globalPid": thread(100, 0), "bytes": 4096,
            "copyKind": kind, "srcKind": source, "dstKind": target,
            "correlationId": self.call("cudaMemcpyAsync", start - 5, start - 4), **row})

    def range(self, text: str | None, start: int, end: int | None, **row: Any) -> None:
        self.add("NVTX_EVENTS", **{"start": start, "end": end, "eventType": 59, "text": text,
                                   "globalTid": thread(100, 101), **row})

    def write(self) -> Path:
        with sqlite3.connect(self.path) as connection:
            for table, rows in self.tables.items():
                if table not in self.schema:
                    continue
                declared = [column.strip().partition(" ")[0] for column in self.schema[table].split(",")]
                connection.execute(f"CREATE TABLE {table} ({self.schema[table]})")
                connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(declared))})",
                                       [[row.get(column) for column in declared] for row in rows])
        connection.close()
        return self.path


def thread(pid: int, tid: int) -> int:
    """nsys's serialized id of a thread; of a process with thread 0."""
    return (1 << 48) | (pid << 24) | tid


def training(path: Path) -> Export:
    """Two steps of one process: operators, a copy, kernels, a memset, labels; not yet written."""
    made = Export(path)
    made.add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.25.0")
    made.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=1_790_000_000_000_000_001)
    made.add("TARGET_INFO_GPU", vmId=0, id=0, name="NVIDIA H100 80GB HBM3", smCount=132, totalMemory=80 << 30,
             computeMajor=9, computeMinor=0, maxWarpsPerSm=64, threadsPerWarp=32, maxShmemPerSm=233472,
             maxRegistersPerSm=65536)
    for step in range(2):
        at = 10_000 * step + 1_000
        made.range(f"ProfilerStep#{step + 4}", at, at + 9_000)
        made.range("my block", at + 100, at + 5_000)
        made.range(f"aten::mm, seq = {step}, op_id = {90 + step}, sizes = [[4, 8], [8, 2]]", at + 200, at + 300)
        made.copy(at + 400, at + 900)
        made.kernel("void gemm<float>(float*)", at + 1_000, at + 3_000)
        made.kernel("ncclDevKernel_AllReduce_Sum_f32(ncclDevComm*)", at + 3_000, at + 6_001, streamId=9)
        made.add("CUPTI_ACTIVITY_KIND_MEMSET", start=at + 7_000, end=at + 7_100, deviceId=0, streamId=7, bytes=64,
                 memKind=2, globalPid=thread(100, 0),
                 correlationId=made.call("cudaMemsetAsync_v3020", at + 6_900, at + 6_910))
        made.call("cudaStreamSynchronize_v3020", at + 7_200, at + 8_000)
    return made
