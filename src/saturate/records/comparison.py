"""What changed between two analyses of the same workload: the object behind `analyze --against OLD NEW --json`."""

from __future__ import annotations

from typing import Literal

import msgspec

from saturate.records.analysis import Finding, Limit

SCHEMA = 1

#: What every `ratio` in here means.
DIRECTION = "ratios are old / new: above 1, the new one is smaller"


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity before and after, in one unit. Lengths are per step, so that any numbers of steps compare."""

    name: str                       # "step", "exposed_communication", "busy_of_span", "input"
    unit: str                       # "ns per step", "of the step", "of the span"
    old: float | None
    new: float | None
    ratio: float | None = None      # old / new; None: one is not known, or new is 0
    unknown: str = ""               # why a value is None


class OperatorChange(msgspec.Struct, frozen=True, kw_only=True):
    """The kernels of one operator with one set of shapes. Times are summed over kernels, ns per step."""

    name: str
    shapes: str
    dtypes: str
    fate: Literal["appeared", "vanished", "changed"]
    old_ns: float
    new_ns: float
    calls_old: float                # per step
    calls_new: float
    ratio: float | None = None      # old / new; None where it appeared
    kernels_old: list[str] = []     # only where they differ
    kernels_new: list[str] = []


class DeviceComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One device of one rank, before and after."""

    id: int
    rank: int | None
    old_name: str
    new_name: str
    old_steps: int
    new_steps: int
    step: Change                    # unit "ns per step"
    span: Change                    # unit "ns": how long was recorded; no measure of speed by itself
    parts: list[Change]             # the four exclusive parts, which sum to `step`
    shares: list[Change]            # busy_of_step, busy_of_span, the parts, overlap, data wait; the unit says of what
    gaps: list[Change]              # idle time by cause, inside the span and at the edges of the steps
    operators: list[OperatorChange]     # the largest differences first
    operators_left_out: int = 0     # that differ by less than is worth a line
    old_verdict: Limit
    new_verdict: Limit
    unknown: dict[str, str] = {}


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Old against new. A trace explains a difference; only a race of unprofiled runs decides that there is one."""

    schema: int = SCHEMA
    old: list[str]                  # sources
    new: list[str]
    direction: str = DIRECTION
    devices: list[DeviceComparison]
    old_verdict: Limit
    new_verdict: Limit
    findings_gone: list[Finding]
    findings_new: list[Finding]
    findings_kept: list[Finding]    # as the new analysis states them
    not_judged_by_new: list[Finding] = []   # of the old analysis; the new trace does not carry what they rest on
    not_judged_by_old: list[Finding] = []   # of the new one, likewise
    notes: list[str] = []           # what limits the comparison: other devices, other numbers of steps, no steps
