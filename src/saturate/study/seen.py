"""What the windows of a profile saw, before anything is concluded from it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saturate.records.analysis import LoaderCost
from saturate.records.ceilings import Ceilings
from saturate.records.facts import Facts
from saturate.trial.outcome import Outcome


@dataclass
class Seen:
    """What the windows saw. Empty where the workload ended before."""

    facts: Facts
    step_ns: list[int] = field(default_factory=list)    # without a profiler
    loader_cost: LoaderCost | None = None               # when it was asked for
    resident_bytes: int | None = None                   # of all processes of the workload, once it was warm: see `meter.in_use`
    sample: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    telemetry: dict[str, Any] = field(default_factory=dict)
    traces: list[Path] = field(default_factory=list)    # by rank
    notes: dict[str, str] = field(default_factory=dict)
    ended: Outcome | None = None                        # the workload ended by itself, before everything was seen

    @property
    def step_ms(self) -> float | None:
        """A typical step: the median, or the mean where a few of them wait for all the others' input. On a CPU that of the clocked
        steps, which the split is of; the clock in them is the host's, and on an accelerator the host is not what a step takes."""
        uneven = self.sample.get("uneven_input")
        if uneven and self.facts.device != "cpu" and self.step_ns:
            return statistics.fmean(self.step_ns) / 1e6
        if uneven:
            return sum(self.sample["parts"].values()) / self.sample["clocked_steps"] / 1e6
        return statistics.median(self.step_ns) / 1e6 if self.step_ns else None

    @property
    def input_share(self) -> float | None:
        """Share of the clocked steps in which the training thread waits for its loader; None: there is none, or no clock."""
        clocked = sum(self.sample["parts"].values()) if self.sample else 0
        return self.sample["parts"].get("input", 0) / clocked if clocked and self.sample["dataset"] else None
