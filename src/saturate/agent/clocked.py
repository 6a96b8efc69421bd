"""Which of the steps that a clock went through are like the others, and what those took."""

from __future__ import annotations

from typing import Any, NamedTuple

#: A step this many times longer than the median holds something that other steps do not.
EVENT = 3.0

#: Mean and median wait for input that differ by more than this share of the median step: input comes unevenly.
UNEVEN = 0.1


class Step(NamedTuple):
    """Nanoseconds by part; how many batches were fetched in it; whether a pass over a loader began in it."""

    evaluated: bool
    parts: dict[str, int]
    batches: int = 0
    begins: bool = False

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def input(self) -> int:
        return self.parts.get("input", 0)

    @property
    def work(self) -> int:
        return self.total - self.input


def training_steps(steps: list[Step], undisturbed: int) -> dict[str, Any]:
    """The parts of the steps that are like the others: those with an evaluation in them, a checkpoint or the end of an
    epoch say nothing about a step. Where most are like that, all count.

    They are the first `undisturbed` steps. Where input comes in bursts (a file of many batches, workers that deliver together)
    long waits are rare, so input is the mean over whole turns of all steps.
    """
    kept = _usual(steps)
    usual = [steps[index] for index in kept]
    first = [steps[index] for index in kept if index < undisturbed] or usual
    total: dict[str, int] = {}
    for step in first:
        for name, ns in step.parts.items():
            total[name] = total.get(name, 0) + ns
    uneven = _uneven(usual)
    if uneven:
        turns = _whole_turns(usual)
        total["input"] = sum(step.input for step in turns) * len(first) // len(turns)
    return {"parts": total, "clocked_steps": len(first), "uneven_input": uneven}


def _usual(steps: list[Step]) -> list[int]:
    """Indices of the steps that count."""
    training = [step for step in steps if not step.evaluated]
    if not training:
        return list(range(len(steps)))
    total, work = _median([step.total for step in training]), _median([step.work for step in training])
    batches = _median([step.batches for step in training])
    recurs = sum(step.begins for step in training) > 1      # then passes are short, and their beginnings part of the steps

    def event(step: Step) -> bool:
        if step.total <= EVENT * total:
            return False
        worked = step.work > EVENT * work and 2 * step.work > step.total    # what is long is not its wait for a batch
        return worked or step.batches > EVENT * max(1, batches) or (step.begins and not recurs)

    kept = [index for index, step in enumerate(steps) if not step.evaluated and not event(step)]
    return kept if 2 * len(kept) >= len(steps) else list(range(len(steps)))


def _uneven(steps: list[Step]) -> bool:
    """Whether a few waits for input are so long that the median step says nothing about the mean."""
    if not steps:
        return False
    waits = [step.input for step in steps]
    return abs(sum(waits) / len(waits) - _median(waits)) > UNEVEN * _median([step.total for step in steps])


def _whole_turns(steps: list[Step]) -> list[Step]:
    """The steps behind the first long wait, up to the last: however the window lies, as many short ones as belong to
    them. All steps where there was one long wait."""
    mean = sum(step.input for step in steps) / len(steps)
    long = [index for index, step in enumerate(steps) if step.input > mean]
    return steps[long[0] + 1 : long[-1] + 1] if len(long) > 1 else steps


def _median(values: list[int]) -> int:
    return sorted(values)[len(values) // 2]
