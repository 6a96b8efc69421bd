"""What `saturate bench` measured: an artifact at several batch sizes, alone or against another one."""

from __future__ import annotations

from typing import Literal

import msgspec

from saturate.records.inference import Timing

SCHEMA = 1


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One artifact at one batch size, in a process of its own."""

    latency_ms: Timing | None = None
    throughput_per_s: float | None = None  # samples per second at the median
    memory_bytes: int | None = None  # peak of the processes; on a GPU, of its memory
    load_s: float | None = None  # until the first answer
    reason: str = ""  # why there are no numbers


class BatchRow(msgspec.Struct, frozen=True, kw_only=True):
    batch: int | None  # None: as stored, where the inputs do not share a first dimension
    artifact: Measured
    against: Measured | None = None
    verdict: Literal["faster", "no_difference", "slower", "inconclusive"] | None = None  # of the artifact
    speedup: float | None = None  # over the other one, from a race of fresh pairs of processes
    speedup_ci: tuple[float, float] | None = None
    reason: str = ""  # why there is no ratio


class BenchRecord(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    artifact: str
    against: str | None = None
    candidate: str = ""
    candidate_against: str = ""
    threads: int | None = None
    rows: list[BatchRow] = []
    reason: str = ""  # why nothing could be measured
