"""A step that the user named with --step: whether there is such a thing in this training.

Optimizers are numbered from 0, in the order in which they first step. Without this look, the run would wait for ever for the steps
of an optimizer that does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from saturate.agent.motif import Step

#: Events without the step that the user named, after which it is not expected any more; and as long as an optimizer that was built
#: has not stepped yet (a critic may take a hundred steps before the generator's first).
FEW, MANY = 64, 2048

#: As many optimizers are listed by number.
MOST_LISTED = 4


def seen(step: Step, counts: Mapping[str, int]) -> bool:
    return step.token in counts


def hopeless(counts: Mapping[str, int], waiting: Callable[[], bool]) -> bool:
    """Whether a step that did not come yet will not come. Long accumulation is patience with optimizers: their steps count, if
    there are any."""
    events = sum(counts.values())
    steps = events - counts.get("B", 0)
    return events >= MANY or (steps >= FEW and not waiting())


def option(step: Step) -> str:
    """
    >>> option(Step("S7", 1, ("S7",))), option(Step("B", 4, ("B",) * 4))
    ('--step optimizer:7', '--step backward:4')
    """
    return f"--step backward:{step.count}" if step.token == "B" else f"--step optimizer:{step.token[1:]}"


def complaint(step: Step, counts: Mapping[str, int]) -> str:
    """Why the step that the user named is none.

    >>> complaint(Step("S7"), {"B": 40, "S1": 20, "S0": 20})
    '--step optimizer:7: only optimizers 0 and 1 step here (numbered from 0, in the order of their first steps)'
    >>> complaint(Step("B", 4), {"S0": 64})
    '--step backward:4: no backward pass runs outside of the step of an optimizer'
    """
    if step.token == "B":
        return f"{option(step)}: no backward pass runs outside of the step of an optimizer"
    numbers = sorted(int(token[1:]) for token in counts if token.startswith("S"))
    if not numbers:
        return f"{option(step)}: no optimizer steps here"
    listed = ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
    if len(numbers) > MOST_LISTED:
        listed = f"{numbers[0]} to {numbers[-1]}"
    verb = "optimizers" if len(numbers) > 1 else "optimizer"
    return (f"{option(step)}: only {verb} {listed} step{'' if len(numbers) > 1 else 's'} here "
            "(numbered from 0, in the order of their first steps)")
