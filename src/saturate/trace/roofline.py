"""How near each operator came to what its device can do, and what the rest would be worth.

    t_roof = max(FLOPs / compute rate, bytes / memory rate)      efficiency = t_roof / t      recoverable = t - t_roof

The compute rate is that of the operator's number format and path: matrix units for products, convolutions and
attention in formats they take; the vector units' fp32 rate for everything else, and for fp32 products unless the
kernels' names show TF32. Rates are measured on the device where such a record is given, else the specification x 0.80
(compute) and x 0.90 (memory), which is about what the best kernels reach. Williams, Waterman, Patterson: "Roofline",
CACM 52(4), 2009.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from saturate.machine import accelerators
from saturate.records.analysis import Operator, Roofline
from saturate.records.ceilings import Ceilings
from saturate.trace.columns import Column, Trace
from saturate.trace.operators import Group, groups
from saturate.trace.view import facts
from saturate.trace.windows import CPU, Window

INEFFICIENT = 0.40              # of the roof: below it an operator is not near any limit
WORK_AT_LEAST = 0.10            # of its time, else a short operator of a CPU is its call
ANOMALY = 1.10                  # above it the model, the format or the clock is wrong
LATENCY_NS = 10_000             # a kernel this short that does not fill the device once waits for itself
COMPUTE_SHARE, MEMORY_SHARE = 0.80, 0.90

#: Names of kernels that multiply fp32 tensors with TF32 matrix units: CUTLASS and cuDNN say so (tf32; s1688 is the
#: instruction), and cuBLAS's nvjet kernels exist for matrix units only.
_TF32 = re.compile(r"tf32|s1688|^nvjet", re.IGNORECASE)


def by_tf32(kernels: Iterable[str]) -> bool:
    """Whether kernels of these names multiply fp32 tensors with TF32 matrix units."""
    return any(map(_TF32.search, kernels))


_ANOMALIES = {
    "memory": "served by a cache, an argument passed twice, or not all of its kernels were recorded",
    "compute": "an algorithm with fewer operations (Winograd, FFT), another format, or not all of its kernels were "
               "recorded",
}


@dataclass(frozen=True)
class Roof:
    """The ceilings of one device."""

    rates: dict[str, float]                         # operations per second by format
    source: str
    measured: Ceilings | None = None
    bandwidth: float | None = None                  # bytes per second, of the specification

    def memory_rate(self, moved_bytes: int | None = None) -> float | None:
        return self.measured.memory_rate(moved_bytes) if self.measured else self.bandwidth

    def shown(self) -> dict[str, float]:
        """As `records.analysis.Roofline.ceilings`."""
        memory = self.memory_rate()
        return self.rates | ({"copy": memory} if memory else {})


@dataclass(frozen=True)
class _Judged:
    operator: Operator
    modelled_ns: int = 0


def roofline(trace: Trace, device: int, window: Window | None = None,
             ceilings: Ceilings | Iterable[Ceilings] | None = None, launches: Column | None = None,
             communicating: Column | None = None) -> Roofline:
    """Operators by recoverable time. `ceilings`: measured ones, of any devices; the one of this device's name counts.
    `launches`, `communicating`: as for `operators.groups`.

    Without a roof the operators are still listed, by time, and `source` says why nothing is compared.
    """
    found = groups(trace, device, window, launches, communicating)
    roof, reason = roof_of(trace, device, ceilings)
    judged = [_judge(trace, device, group, roof, reason) for group in found]
    total = sum(group.time_ns for group in found)
    order = sorted((one.operator for one in judged), key=lambda op: (-(op.recoverable_ns or 0), -op.time_ns, op.name))
    coverage = sum(one.modelled_ns for one in judged) / total if roof and total else None
    return Roofline(coverage=coverage, operators=order, ceilings=roof.shown() if roof else {},
                    source=roof.source if roof else reason)


def roof_of(trace: Trace, device: int,
            ceilings: Ceilings | Iterable[Ceilings] | None = None) -> tuple[Roof | None, str]:
    """The ceilings to compare with, or None and why there are none."""
    given = [ceilings] if isinstance(ceilings, Ceilings) else list(ceilings or ())
    name = _name(trace, device)
    for record in given:
        # A trace does not name its CPU: the caller vouches for a record of one.
        fits = record.device == "cpu" if device == CPU else bool(name) and record.device_name == name
        if fits and record.rates and record.memory_rate():
            return Roof(record.rates, f"measured on this device ({record.device_name})", measured=record), ""
    if device == CPU:
        return None, "no ceilings were measured on this CPU"
    spec = accelerators.find(name)
    if spec is None:
        return None, f"no ceilings were measured on {name or 'this device, which the trace does not name'}, " \
                     "and the table of accelerators does not have it"
    return Roof({kind: rate * COMPUTE_SHARE for kind, rate in spec.rates.items()},
                f"specification of {spec.name} x {COMPUTE_SHARE:.2f}, {MEMORY_SHARE:.2f}",
                bandwidth=spec.bandwidth * MEMORY_SHARE), ""


def _name(trace: Trace, device: int) -> str:
    info = facts(trace, device)
    return info.name if info else ""


def _judge(trace: Trace, device: int, group: Group, roof: Roof | None, reason: str) -> _Judged:
    record = group.record()
    if group.cost is None:
        return _Judged(_without(record, group.reason))
    if roof is None:
        return _Judged(_without(record, reason))
    path = path_of(group, roof)
    rate = roof.rates.get(path)
    memory = roof.memory_rate(group.bytes // max(1, group.calls))
    if memory is None or (rate is None and group.flops):
        return _Judged(_without(record, f"no ceiling for {path}"))
    computing = group.flops / rate * 1e9 if rate else 0.0
    moving = group.bytes / memory * 1e9
    roof_ns = max(computing, moving)
    if not roof_ns or not group.time_ns:
        return _Judged(_without(record, "it has nothing to do by the formula, or took no time by the trace"))
    efficiency = roof_ns / group.time_ns
    limit = "memory" if moving > computing else "compute"
    if efficiency > ANOMALY:
        # Never good news. Its time counts as not modelled.
        why = f"{efficiency:.2f} times as fast as the {limit} ceiling allows: {_ANOMALIES[limit]}"
        return _Judged(_without(record, why))
    short = group.time_ns < LATENCY_NS * group.launches and not _fills(trace, device, group)
    if short or (device == CPU and _is_its_call(group, roof_ns)):
        limit = "latency"
    return _Judged(msgspec.structs.replace(
        record, limit=limit, efficiency=efficiency, inefficient=efficiency < INEFFICIENT,
        recoverable_ns=max(0, group.time_ns - int(roof_ns))), group.time_ns)


def _is_its_call(group: Group, roof_ns: float) -> bool:
    """Whether an operator of a CPU has so little to do that calling it takes its time: near no ceiling, whatever its bytes."""
    return roof_ns < LATENCY_NS * group.calls and roof_ns < WORK_AT_LEAST * group.time_ns


def path_of(group: Group, roof: Roof) -> str:
    """The format whose ceiling counts."""
    cost = group.cost
    assert cost is not None
    if not cost.multiplies:
        return "float32"        # vector units take narrower formats at least as fast, and memory decides anyway
    if cost.dtype == "float32":
        return "tfloat32" if "tfloat32" in roof.rates and by_tf32(group.kernels) else "float32"
    if cost.dtype.startswith("float8"):
        return "float8"
    if cost.dtype in ("float16", "bfloat16") and cost.dtype not in roof.rates:
        return "float32"        # no unit of its own: computed in fp32
    return "int8" if cost.dtype == "uint8" else cost.dtype


def _fills(trace: Trace, device: int, group: Group) -> bool:
    """Whether the kernels' grids fill the device at least once, by the median kernel. Unknown grids: no."""
    from saturate.trace.occupancy import resident_blocks

    info = facts(trace, device) if device != CPU else None
    if info is None or not info.sms:
        return False
    rows = np.concatenate(group.rows)
    blocks = trace.gpu.blocks[rows].astype("f8")
    resident = resident_blocks(trace, rows, info)
    # Where it is not known how many blocks fit on an SM, one on each counts as full: fewer are called latency-bound.
    waves = blocks / (info.sms * np.where(np.isnan(resident), 1.0, resident))
    return bool(np.median(waves) >= 1.0)


def _without(record: Operator, reason: str) -> Operator:
    """The record with the reason beside each value that it does not have."""
    missing = [name for name in _MODELLED if getattr(record, name) is None]
    return msgspec.structs.replace(record, unknown={**dict.fromkeys(missing, reason), **record.unknown})


#: What is known of an operator only where its cost is, or its roof.
_MODELLED = ("flops", "bytes", "limit", "inefficient", "efficiency", "recoverable_ns")
