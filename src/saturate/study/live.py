"""Trials of a study as the workbench hands them out: cold at the first gate, or warm and frozen; and which side of a race one was on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from saturate.measure import stationary
from saturate.records.facts import Evidence
from saturate.records.result import TrialRecord
from saturate.study.candidates import Set, key
from saturate.trial.process import Trial, TrialEnded

#: How many times as long a step takes beside another process of its kind where both have all cores (measured on two: minGPT 8, a small
#: GPT 96, an LSTM 144), about how many steps a process runs before its first gate, and how many until it is warm, at least.
SPINNING, FIRST_STEPS = 100, 5
WARM_STEPS = FIRST_STEPS + stationary.LEAST_STEPS

#: No process that has started is held back for steps that take longer than so many starts: what it has opened is not to time out.
HELD = 4

Order = Literal["side by side", "in turn", "one by one"]

T = TypeVar("T")


@dataclass(frozen=True)
class Pace:
    """What of the baseline tells how several processes start soonest. `crowded`: together they have more threads that
    compute than there are cores. Then threads that wait for each other spin on the cores that the others need."""

    step_s: float
    startup_s: float
    crowded: bool

    def order(self, steps: int) -> Order:
        """Of processes that train so many steps each: side by side where nothing is in the way; where so many steps of all at once take
        longer than starting one after the other would, they start together and train in turn; one by one where the steps take most of
        the time."""
        if not self.crowded or SPINNING * steps * self.step_s <= self.startup_s:
            return "side by side"
        return "in turn" if steps * self.step_s <= HELD * self.startup_s else "one by one"


@dataclass
class Cold:
    """A trial that stands at its first gate: it has started, but is not warm."""

    purpose: str
    trial: Trial
    techniques: Set
    hello: dict[str, Any]
    beside: bool = False            # another one, which wanted the same cores, started at the same time, and it did not wait for its turn


@dataclass
class Live:
    """A trial that is past its warm-up and stands frozen at the gate."""

    trial: Trial
    techniques: Set
    hello: dict[str, Any]
    evidence: Evidence
    startup_s: float
    warmup_s: float
    step_ms: float
    stationary: bool
    events: dict[str, float]        # per step
    record: TrialRecord
    too_long: bool = False          # even its fastest step took longer than any may: the budget holds no verification run


def on_side(side: str, action: Callable[[], T]) -> T:
    """What `action` returns; a TrialEnded that it raises is that of `side` of a race."""
    try:
        return action()
    except TrialEnded as ended:
        ended.side = side
        raise


def queues(hello: Mapping[str, Any]) -> bool:
    """Whether the process of this greeting trains on an accelerator, for which its host queues the work."""
    return hello.get("device", "cpu") != "cpu"


def timed_losses(techniques: Set) -> str:
    """The study's question whose answer is the losses of the first updates in the latest timed trial of a set."""
    return f"timed losses {key(techniques)}"
