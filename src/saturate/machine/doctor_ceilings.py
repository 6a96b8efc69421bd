"""What this device really reaches, measured now or earlier, and whether that is far below what its vendor states."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from saturate.errors import EnvironmentProblem
from saturate.machine import accelerators
from saturate.machine.checks import Check
from saturate.machine.gpus import Link

if TYPE_CHECKING:
    from saturate.records.ceilings import Ceilings

#: Of the vendor's dense peak. Healthy devices reach 0.5 (MI300X) to 0.87 (A100) of it in matrix products, 0.85 to 0.95 of
#: their memory bandwidth, and 0.8 of their link.
_LOW_PRODUCTS, _LOW_BANDWIDTH, _LOW_LINK = 0.4, 0.6, 0.5
#: Bytes per second of one lane by PCIe generation, after encoding (PCI Express base specifications).
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
#: A core of any processor that torch supports multiplies faster, alone: less was measured beside other work.
_LEAST_CORE_RATE = 5e9
_NAMES = {"float32": "fp32", "tfloat32": "tf32", "float16": "fp16", "bfloat16": "bf16", "float8": "fp8", "int8": "int8"}


def ceilings(program: str, asked: dict[str, Any], link: Link | None, measure: bool) -> Check:
    """The kept ceilings of the first device (else of the CPU), or with `measure` new ones. `link`: the device's."""
    if "torch" not in asked:
        return Check("ceilings", "unknown", "torch does not import")
    try:
        from saturate.machine import ceilings as measured
    except ImportError as error:                # records need msgspec, and the doctor must not
        return Check("ceilings", "unknown", f"cannot be read: {error}")
    device = "cuda" if asked.get("cuda_available") else "cpu"
    names = asked.get("devices") or []
    name = measured.cpu_name() if device == "cpu" else names[0] if names else None
    if measure:
        try:
            record = measured.measure(program, device)
        except EnvironmentProblem as problem:
            reasons = "; ".join(filter(None, (problem.message, problem.cause, problem.evidence)))
            return Check("ceilings", "note", reasons, "look at the checks above: the device itself did not do its work")
    else:
        kept = measured.kept(name, device=device, torch=asked["torch"], driver=measured.driver(device)).records
        if not kept:
            return Check("ceilings", "ok", "not measured yet; saturate doctor --measure does it in some seconds")
        record = kept[0]
    return judged(record, link)


def judged(record: Ceilings, link: Link | None) -> Check:
    """The measured rates in words, against the vendor's where that is in the table."""
    spec = accelerators.find(record.device_name)
    low: list[str] = []
    peaks = spec.rates if spec else {}
    words = [_share(f"{_NAMES.get(name, name)} {_flops(rate)}", rate, peaks.get(name), _LOW_PRODUCTS, low)
             for name, rate in record.rates.items()]
    if record.device == "cpu" and record.rates.get("float32", math.inf) < _LEAST_CORE_RATE * (record.threads or 1):
        low.append(words[list(record.rates).index("float32")])
    for kind, points in record.bandwidth.items():
        if kind in ("copy", "read") and points:
            rate = max(points)[1]               # of the largest arrays: no cache holds them
            words.append(_share(f"{kind} {_bytes(rate)}", rate, spec.bandwidth if spec else None, _LOW_BANDWIDTH, low))
    lanes = _LANE_BYTES_PER_S.get(link.most_generation or 0, 0) * (link.most_width or 0) if link else 0
    for kind, rate in record.host_to_device.items():
        limit = lanes if kind == "pinned" and lanes else None
        words.append(_share(f"host to device {kind} {_bytes(rate)}", rate, limit, _LOW_LINK, low))
    if record.launch_ns is not None and record.device != "cpu":
        words.append(f"a kernel launch {record.launch_ns / 1e3:.1f} us")
    # Rates of a CPU grow with the threads, and a training that was profiled may have had few.
    threads = f" with {record.threads} thread{'s' * (record.threads > 1)}" if record.device == "cpu" and record.threads else ""
    found = f"{record.device_name}, measured {record.measured_at[:10]}{threads}: {', '.join(words)}"
    values = {name: getattr(record, name) for name in
              ("rates", "bandwidth", "host_to_device", "launch_ns", "measured_at", "queued_share", "unknown")}
    if record.busy:
        return Check("ceilings", "note", f"{found}; other processes had the cores for {record.queued_share:.0%} of the time",
                     "end them, then measure again: saturate doctor --measure", values)
    if low:
        mend = "" if record.device == "cpu" else "mend what links and clocks show above; "
        return Check("ceilings", "note", f"{found}; far below what it should reach: {', '.join(low)}",
                     f"{mend}end other processes on the device, then measure again: saturate doctor --measure", values)
    return Check("ceilings", "ok", found, values=values)


def _share(words: str, rate: float, stated: float | None, least: float, low: list[str]) -> str:
    """The words with the share of the stated rate; collects in `low` what is far below it."""
    if not stated:
        return words
    if rate < least * stated:
        low.append(words)
    return f"{words} ({rate / stated:.0%} of stated)"


def _flops(rate: float) -> str:
    if rate < 1e12:
        return f"{rate / 1e9:.0f} GFLOP/s"
    return f"{rate / 1e12:.0f} TFLOP/s" if rate >= 1e13 else f"{rate / 1e12:.1f} TFLOP/s"


def _bytes(rate: float) -> str:
    return f"{rate / 1e12:.2f} TB/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GB/s"
