"""The uninterrupted run of a resume drill: what was seen of it, and how long it must be."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from saturate.verify import resume_log
from saturate.verify.resume_log import Save, Step, Update

#: Updates that are compared behind the last checkpoint, unless the script saves so often that fewer lie between two.
LEAST_TAIL, MOST_TAIL = 8, 40

#: Of its process and of the first one of the chain, which are the same training: later ones count on from it.
SEED = 20


@dataclass
class Reference:
    """The uninterrupted run. `others`: it wrote no checkpoint that could be told as one, and `saves` are its other binary files.
    `files`: the fewest that one process wrote in a save."""

    updates: list[Update]
    saves: list[Save]
    step: Step
    step_s: float
    others: bool = False
    loads: bool = True          # a DataLoader gave batches
    files: int = 1
    cut_short: bool = False     # for want of time

    @property
    def gap(self) -> int:
        """Updates from one checkpoint to the next."""
        places = [0, *(save.update for save in self.saves)]
        return max(1, round(statistics.median(b - a for a, b in zip(places, places[1:])))) if self.saves else 1


def updates_needed(places: list[int], kills: int) -> int | None:
    """How long the uninterrupted run must be, by the updates after which it saved; None: it has saved too seldom yet.

    >>> updates_needed([6, 12, 18], kills=2), updates_needed([6, 12], kills=2)
    (26, None)
    """
    if len(places) < kills + 1:
        return None
    places = [0, *places[: kills + 1]]
    gap = max(b - a for a, b in zip(places, places[1:]))
    return places[-1] + max(LEAST_TAIL, min(gap, MOST_TAIL))


def fewest_files(logs: list[resume_log.Log], kind: str) -> int:
    """How many files each process that saves has in each of its saves at least: of a checkpoint in parts, every rank writes its own. A
    save is what lies between two tokens, as for the agent (`hold` of `agent.drill.Drill`); one that no token follows may have been cut
    short. `kind`: see `resume_log.saves`."""
    whole: list[int] = []
    last: list[int] = []
    for log in logs:
        files = 0
        for event in log.events:
            if resume_log.is_token(event):
                whole, files = [*whole, *([files] if files else [])], 0
            files += event["at"] == kind
        last += [files] if files else []
    return min(whole or last, default=1)
