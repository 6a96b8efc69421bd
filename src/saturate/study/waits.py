"""The places where the host waits for the device: with the line, where one was seen, else with the operator around the wait."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from saturate.records.analysis import Sync
from saturate.records.observations import Observations, SyncSeen

#: A line of code in `SyncSeen.where`, where it is not the name of an operator.
_LINE = re.compile(r"(.*[^:]):([1-9]\d*)", re.DOTALL)


def timed(record: dict[str, Any], shorten: Callable[[str], str], unprofiled: float) -> tuple[SyncSeen, ...]:
    """Those that `agent.hostsyncs` clocked in the window of this record. `unprofiled`: what a recorded time is multiplied with."""
    return tuple(SyncSeen(where=f"{shorten(file)}:{line}", what=what, calls_per_step=calls / record["steps"],
                          ms_per_step=unprofiled * ns / record["steps"] / 1e6)
                 for file, line, what, calls, ns in record.get("syncs", []))


def of_trace(base: Observations, shorten: Callable[[str], str], unprofiled: float) -> tuple[SyncSeen, ...]:
    """On a device, those that a trace alone shows: inside operators (`nonzero`, a mask as an index), copies to the device, and in
    libraries."""
    if base.device == "cpu":
        return ()
    return tuple(dataclasses.replace(one, where=_shortened(one.where, shorten), ms_per_step=unprofiled * one.ms_per_step)
                 for one in base.syncs)


def _shortened(where: str, shorten: Callable[[str], str]) -> str:
    line = _LINE.fullmatch(where)
    return f"{shorten(line[1])}:{line[2]}" if line else where


def shown(one: SyncSeen) -> Sync:
    """In a report."""
    if line := _LINE.fullmatch(one.where):
        return Sync(file=line[1], line=int(line[2]), what=one.what, calls_per_step=one.calls_per_step, ms_per_step=one.ms_per_step)
    return Sync(file="", line=0, what=f"{one.what} in {one.where}" if one.where else one.what, calls_per_step=one.calls_per_step,
                ms_per_step=one.ms_per_step)
