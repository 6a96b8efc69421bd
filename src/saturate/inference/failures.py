"""How a candidate fails: its process, or the user's check on it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Literal

from saturate.errors import EnvironmentProblem

Kind = Literal["not_applied", "not_made", "other_sizes", "failed", "out_of_memory", "timeout", "disk_full"]


class WorkerFailed(Exception):
    """A candidate refused, failed, or had to be ended. `reason` is one sentence; `log` is the traceback or the end of
    what was printed. `alive`: the process is still there and takes other requests (it does not like these inputs).
    `outside`: it was no fault of its own, so that it may work another time. Of the kinds, not_made: the process could not make the
    model (`source.NotMade`); other_sizes: its program was made for other inputs than these (`formats.OtherSizes`)."""

    def __init__(self, kind: Kind, reason: str, log: str = "", alive: bool = False, outside: bool = False):
        super().__init__(reason)
        self.outside = outside
        self.kind: Kind = kind
        self.reason = reason
        self.log = log
        self.alive = alive


class CheckFailed(Exception):
    """The check gave no scores for a candidate; the message says why."""


def no_model(error: WorkerFailed, folder: Path) -> EnvironmentProblem:
    """A fresh process of the model itself does not live, although others did."""
    return EnvironmentProblem("the model's own process ended, and another one does not live either", cause=str(error),
                              remedy="look for what ends processes here (memory, other users), and give the same command again: with "
                                     f"workdir={str(folder)!r} it goes on from here")


def first_words(text: str) -> str:
    """The first line of a message, with the next one where it only announces it ("backend='inductor' raised:")."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = list(itertools.takewhile(lambda line: line.endswith(":"), lines))
    return " ".join(lines[:len(said) + 1]) or "no message"
