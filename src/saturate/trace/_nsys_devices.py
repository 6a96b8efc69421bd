"""Which GPUs an Nsight Systems export speaks of: their numbers on the machine, and their facts."""

from __future__ import annotations

from typing import Any

import numpy as np

from saturate.trace._sqlite import Database
from saturate.trace.columns import Column, DeviceInfo


class DeviceNumbers:
    """From a process's numbering of CUDA devices to the machine's.

    Two ranks with CUDA_VISIBLE_DEVICES of their own both call their GPU 0; TARGET_INFO_CUDA_DEVICE tells them apart.
    """

    def __init__(self, database: Database, problems: list[tuple[str, str]]):
        rows = database.all("TARGET_INFO_CUDA_DEVICE", ["gpuId", "cudaId", "pid"])
        rows = [row for row in rows if isinstance(row["gpuId"], int) and isinstance(row["cudaId"], int)
                and 0 <= row["gpuId"] < 2**31]
        self._problems = problems
        self._of_process = {(row["pid"], row["cudaId"]): row["gpuId"] for row in rows}
        self._of_any: dict[int, set[int]] = {}
        for row in rows:
            self._of_any.setdefault(row["cudaId"], set()).add(row["gpuId"])

    def physical(self, pid: Column, device: Column) -> Column:
        pairs, inverse = np.unique(np.stack([pid, device.astype(np.int64)]), axis=1, return_inverse=True)
        numbers = [self._number(process, number) for process, number in pairs.T.tolist()]
        users: dict[int, set[int]] = {}
        for (process, _), number in zip(pairs.T.tolist(), numbers):
            users.setdefault(number, set()).add(process)
        shared = [number for number, processes in users.items() if len(processes) > 1 and number >= 0]
        if shared and not self._of_process:
            self._problems.append((
                "devices-not-told-apart", f"several processes used a device that each calls number {shared[0]}, and "
                "the export does not say whether it is the same one; it is treated as one device"))
        return np.array(numbers, np.int32)[inverse.reshape(-1)]

    def _number(self, process: int, device: int) -> int:
        known = self._of_process.get((process, device))
        if known is not None:
            return known
        anywhere = self._of_any.get(device, set())
        return next(iter(anywhere)) if len(anywhere) == 1 else device


def devices(database: Database, numbers: list[int]) -> dict[int, DeviceInfo]:
    """What TARGET_INFO_GPU states about these devices; None for what the version of nsys did not record."""
    columns = ["id", "name", "smCount", "totalMemory", "computeMajor", "computeMinor", "maxWarpsPerSm",
               "threadsPerWarp", "maxShmemPerSm", "maxRegistersPerSm"]
    facts = {row["id"]: row for row in database.all("TARGET_INFO_GPU", columns)}
    return {number: _info(number, facts.get(number, dict.fromkeys(columns))) for number in numbers}


def _info(number: int, row: dict[str, Any]) -> DeviceInfo:
    def positive(column: str) -> int | None:
        value = row[column]
        return value if isinstance(value, int) and value > 0 else None

    warps, lanes, major = positive("maxWarpsPerSm"), positive("threadsPerWarp"), positive("computeMajor")
    minor = row["computeMinor"]
    return DeviceInfo(
        id=number, name=row["name"] if isinstance(row["name"], str) else "", sms=positive("smCount"),
        threads_per_sm=warps * lanes if warps and lanes else None, memory_bytes=positive("totalMemory"),
        capability=(major, minor) if major and isinstance(minor, int) else None,
        shared_bytes_per_sm=positive("maxShmemPerSm"), registers_per_sm=positive("maxRegistersPerSm"),
    )
