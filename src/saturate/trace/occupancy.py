"""How full kernels made the device, from the shapes they were launched with. Proxies: no counter was read.

    sm_fill     min(1, blocks / SMs)
    waves       blocks / (SMs x resident blocks per SM)         tail = waves / ceil(waves)
    occupancy   min(blocks x threads / (SMs x threads per SM), resident blocks x threads / threads per SM)

Resident blocks follow from registers, shared memory, threads and the architecture's own limit (NVIDIA, "CUDA C++
Programming Guide", technical specifications per compute capability). All are upper bounds: a block counts as busy
while its kernel runs. Kineto's own "est. achieved occupancy %" is used only where the shapes do not tell, because it
is 0 for kernels that ask for much shared memory. Means are weighted by kernel time inside the window; the one "of the
step" counts gaps as 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from saturate.records.analysis import Occupancy
from saturate.trace import intervals
from saturate.trace.breakdown import Work
from saturate.trace.columns import KERNEL, Column, DeviceInfo, Trace
from saturate.trace.intervals import covered, length, overlap, union
from saturate.trace.windows import Window

#: A mean over less than this share of the kernel time says nothing about the rest.
KNOWN_AT_LEAST = 0.95

WARP = 32
REGISTERS_PER_ALLOCATION = 256      # per warp, since compute capability 3.0
PARTITIONS = 4                      # of an SM, each with its share of the registers: a warp lives in one of them
#: Most resident blocks per SM where it is not 32.
BLOCKS_PER_SM = {(7, 5): 16, (8, 6): 16, (8, 7): 16, (8, 9): 24, (11, 0): 24, (12, 0): 24, (12, 1): 24}
RESERVED_SHARED_BYTES = 1024        # per block, by the system, from compute capability 8.0


def occupancy(trace: Trace, device: DeviceInfo | None, window: Window,
              work: Work) -> tuple[Occupancy, dict[str, str]]:
    """The proxies of one device, and for each that is None the reason."""
    rows = work.rows[trace.gpu.kind[work.rows] == KERNEL]
    running = overlap(union(trace.gpu.start[rows], trace.gpu.end[rows]), window.steps) / max(1, length(window.steps))
    total, sums = 0, {name: _Sum() for name in ("sm_fill", "tail", "occupancy")}
    for first in range(0, len(rows), intervals.AT_ONCE):
        total += _add(sums, trace, rows[first:first + intervals.AT_ONCE], device, window)

    means = {name: one.mean(total) for name, one in sums.items()}
    fill = means["sm_fill"]
    unknown = {f"occupancy.{name}": _reason(name, one.weight, total) for name, one in sums.items() if means[name] is None}
    if fill is None:
        unknown["occupancy.sm_fill_of_step"] = unknown["occupancy.sm_fill"]
    return Occupancy(sm_fill_of_step=None if fill is None else fill * running, **means), unknown


@dataclass
class _Sum:
    """A weighted sum over kernels whose value is known; `weight` is their nanoseconds."""

    value: float = 0.0
    weight: int = 0

    def mean(self, total: int) -> float | None:
        """None where the known ones are too small a part of `total`."""
        return self.value / self.weight if self.weight and self.weight >= KNOWN_AT_LEAST * total else None


def _add(sums: dict[str, _Sum], trace: Trace, rows: Column, device: DeviceInfo | None, window: Window) -> int:
    """Add some kernels to the sums; returns their nanoseconds inside the window."""
    weight = covered(window.steps, trace.gpu.start[rows], trace.gpu.end[rows])
    rows, weight = rows[weight > 0], weight[weight > 0]
    columns = {"sm_fill": _fill(trace, rows, device), "tail": _tail(trace, rows, device),
               "occupancy": _resident(trace, rows, device)}
    for name, values in columns.items():
        known = ~np.isnan(values)
        sums[name].value += float(values[known] @ weight[known])
        sums[name].weight += int(weight[known].sum())
    return int(weight.sum())


def _fill(trace: Trace, rows: Column, device: DeviceInfo | None) -> Column:
    return np.minimum(1.0, _blocks_per_sm(trace, rows, device))


def _blocks_per_sm(trace: Trace, rows: Column, device: DeviceInfo | None) -> Column:
    """Launched blocks / SMs: from the grid where the SMs are known, else as the profiler wrote it (NaN: neither)."""
    recorded = trace.gpu.blocks_per_sm[rows].astype("f8")
    if device is None or not device.sms:
        return recorded
    blocks = trace.gpu.blocks[rows]
    return np.where(blocks > 0, blocks / device.sms, recorded)


def _tail(trace: Trace, rows: Column, device: DeviceInfo | None) -> Column:
    """The last wave fills part of the device only: mean fill over the waves."""
    waves = _blocks_per_sm(trace, rows, device) / resident_blocks(trace, rows, device)
    return waves / np.maximum(np.ceil(waves), 1)


def _resident(trace: Trace, rows: Column, device: DeviceInfo | None) -> Column:
    """Resident threads / the SM's most; the profiler's own estimate where the shapes do not tell."""
    recorded = trace.gpu.occupancy[rows].astype("f8")
    if device is None or not device.threads_per_sm:
        return recorded
    threads = np.where(trace.gpu.threads[rows] > 0, trace.gpu.threads[rows], np.nan)
    launched = _blocks_per_sm(trace, rows, device) * threads / device.threads_per_sm
    most = resident_blocks(trace, rows, device) * threads / device.threads_per_sm
    own = np.minimum(np.minimum(launched, most), 1.0)
    return np.where(np.isnan(own), recorded, own)


def resident_blocks(trace: Trace, rows: Column, device: DeviceInfo | None) -> Column:
    """Blocks of each kernel that fit on one SM at a time; NaN where a limit is not known.

    Known for NVIDIA devices whose trace states registers and shared memory per SM.
    """
    if device is None or device.name.startswith("AMD") or not (
            device.capability and device.threads_per_sm and device.registers_per_sm and device.shared_bytes_per_sm):
        return np.full(len(rows), np.nan)
    gpu = trace.gpu
    warps = np.ceil(gpu.threads[rows] / WARP)
    registers = np.ceil(gpu.registers[rows] * WARP / REGISTERS_PER_ALLOCATION) * REGISTERS_PER_ALLOCATION
    reserved = RESERVED_SHARED_BYTES if device.capability >= (8, 0) else 0
    shared = gpu.shared_bytes[rows].astype("f8") + reserved
    known = (gpu.threads[rows] > 0) & (gpu.registers[rows] >= 0) & (gpu.shared_bytes[rows] >= 0)
    with np.errstate(divide="ignore", invalid="ignore"):        # a kernel of no shared memory is not limited by it
        fits = np.minimum.reduce([
            np.floor(device.threads_per_sm / WARP / warps),
            np.floor(np.floor(device.registers_per_sm / PARTITIONS / registers) * PARTITIONS / warps),
            np.floor(device.shared_bytes_per_sm / shared),
            np.full(len(rows), float(BLOCKS_PER_SM.get(device.capability, 32))),
        ])
    return np.where(known, np.maximum(fits, 1.0), np.nan)       # it ran, so one fits


def _reason(name: str, known_ns: int, total_ns: int) -> str:
    if not total_ns:
        return "no kernel ran in the window"
    what = {"sm_fill": "the grid", "tail": "the grid, block and resources", "occupancy": "the grid and block"}[name]
    return f"{what}, or the device's limits, are not known for {1 - known_ns / total_ns:.0%} of the kernel time"
