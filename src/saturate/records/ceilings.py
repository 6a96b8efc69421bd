"""What a device really reaches, measured by small benchmarks on it: the roofs that a roofline compares with.

Every rate is per second, and the best of several runs. What could not be measured is absent, with the reason in
`unknown`.
"""

from __future__ import annotations

from typing import Any

import msgspec

SCHEMA = 1
_FASTEST = 1e19                 # per second: no device is

#: Measured while other processes had the cores for more than this share of the time, rates are too low.
BUSY = 0.1


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """One device, under one driver and one torch; a CPU, with one number of threads."""

    schema: int = SCHEMA
    device: str                             # "cuda", "cpu", ...
    device_name: str                        # as torch, or /proc/cpuinfo, calls it
    driver: str = ""
    torch: str = ""
    threads: int | None = None              # of a CPU: rates grow with them
    measured_at: str = ""                   # date, ISO 8601
    #: "float32", "tfloat32", "bfloat16", ...: operations per second of a matrix product.
    rates: dict[str, float]
    #: "read", "write", "copy", "triad": (bytes moved by one operation, bytes per second).
    bandwidth: dict[str, list[tuple[int, float]]]
    host_to_device: dict[str, float] = {}   # "pinned", "pageable": bytes/s; empty on a CPU
    launch_ns: float | None = None          # from one launch of a tiny kernel to the next, through torch
    queued_share: float | None = None       # of a CPU: of the survey's time, what other processes had the cores for; None: not known
    unknown: dict[str, str] = {}            # what could not be measured -> why

    @property
    def busy(self) -> bool:
        """Whether the machine was busy with other processes when this was measured."""
        return self.queued_share is not None and self.queued_share > BUSY

    def memory_rate(self, moved_bytes: int | None = None) -> float | None:
        """The fastest that memory was seen at, for an operation that moves so many bytes: small ones are served by
        caches.

        Without a size, or with one beyond what was measured: the best of the largest operations. A smaller one may be
        as fast as any larger one was, so the roof never rises with size. None: nothing was measured.
        """
        measured = [series for series in self.bandwidth.values() if series]
        if not measured:
            return None
        largest = min(max(size for size, _ in series) for series in measured)
        least = largest if moved_bytes is None else min(moved_bytes, largest)
        return max(rate for series in measured for size, rate in series if size >= least)


def encode(record: Ceilings) -> bytes:
    """JSON for a person to read."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def decode(data: bytes) -> Ceilings:
    """What `encode` wrote. Raises ValueError where it is damaged, of another version, or what no device can be."""
    try:
        return _checked(msgspec.json.decode(data, type=Ceilings))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def convert(found: dict[str, Any]) -> Ceilings:
    """A record of plain values. Raises as `decode`."""
    return _checked(msgspec.convert(found, Ceilings))


def _checked(record: Ceilings) -> Ceilings:
    values = [*record.rates.values(), *record.host_to_device.values(),
              *(rate for series in record.bandwidth.values() for _, rate in series)]
    if record.schema != SCHEMA:
        raise ValueError(f"it is of version {record.schema}, and this saturate reads version {SCHEMA}")
    if not record.rates or not any(record.bandwidth.values()):
        raise ValueError("it holds no rates")
    if not all(0 < value < _FASTEST for value in values):
        raise ValueError("a rate is not a positive number")
    return record
