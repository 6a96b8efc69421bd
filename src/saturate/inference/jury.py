"""Who judges: the user's check and what it said of the baseline, on samples that choose and on others that confirm.

`control` asks whether the check can judge at all; the `Jury` that comes of it is the one place where scores become verdicts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from saturate.errors import CheckUnusable, UsageError
from saturate.inference import accuracy, checking, controls, samples, users_code
from saturate.inference.accuracy import Budget, Judgement
from saturate.inference.scores import Scores, UnusableScores
from saturate.inference.source import Source
from saturate.inference.techniques._api import Train

#: Of the time that is left, so much may go into looking for the check's samples in the training data, which may be endless.
LOOK_SHARE = 0.05


@dataclass(frozen=True)
class Jury:
    """`scores`: the baseline's. `halves`: samples that choose, and others that confirm; None: the check cannot be split, `unsplit` says
    why where it is not that it has too few. `asked`, `answers`: digests of what the check asked the baseline, and got; `seconds`: that it takes."""

    scores: Scores
    budget: Budget
    halves: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    unsplit: str = ""
    asked: str = ""
    answers: str = ""
    seconds: float = 0.0

    @classmethod
    def of(cls, found: controls.Controls, budget: Budget) -> tuple[Jury, list[str]]:
        """With what the user must know about it. Raises CheckUnusable where the check cannot judge."""
        if found.problem is not None:
            raise CheckUnusable(f"the check cannot be used: {found.problem.what}", evidence=found.baseline.output[-2000:],
                                remedy=found.problem.remedy)
        scores = found.baseline.scores
        assert scores is not None
        jury, notes = cls(scores, budget, asked=found.baseline.asked, answers=found.baseline.answers, seconds=found.seconds), list(found.notes)
        if scores.values is None:
            return jury, [*notes, "the check returns a single number: it cannot certify a budget; return one value per sample"]
        if found.shuffled or found.redrawn:
            return replace(jury, unsplit=controls.SHUFFLED if found.shuffled else controls.REDRAWN), notes
        count = len(scores.values)
        if count >= accuracy.FEWEST_TO_SPLIT:
            jury = replace(jury, halves=accuracy.split(count))
            few = [] if jury.certifies else [f"even a candidate that scores as the model does cannot be certified: {jury.best_case.reason}"]
            return jury, [*notes, *few]
        return jury, [*notes, f"the check scores {count} samples: with fewer than {accuracy.FEWEST_TO_SPLIT} none are left to confirm what "
                              "the others chose, so it cannot certify a budget"]

    @property
    def heard(self) -> tuple[Any, ...]:
        """What the scores of a candidate rest on, beside the code of the check."""
        return self.budget.metric, self.asked, (self.scores.mean, self.scores.values)

    @property
    def best_case(self) -> Judgement:
        """What the confirmation says of the first candidate that scores as the model does, with other answers."""
        return self.judge(replace(self.scores, identical=False), turn=0)

    @property
    def certifies(self) -> bool:
        """Whether there are samples enough for that one. Else hardly anybody passes: who scores better than the model, perhaps."""
        return self.best_case.verdict != "undecided"

    def judge(self, scores: Scores, turn: int | None = None) -> Judgement:
        """By the samples of the selection, or (`turn`) by those of the confirmation, for the contender that meets them as number
        `turn`. They are the same for all contenders, so each has to pass by its own share of the chance of a false one: with so many
        tries at the whole of it, one would pass too often. Where that lets hardly anybody pass, the selection asks for as much. Scores
        that are none of the same samples `fail`: the model's own two runs gave as many, so it is the candidate's doing, and a lossless
        one that was merely undecided would win."""
        before, budget, share = self.scores, self.budget, 1.0
        confidence = accuracy.level(budget.confidence, turn or 0)
        if turn is not None or not self.certifies:
            budget = replace(budget, confidence=confidence)
        if self.halves is not None and scores.values is not None and len(scores.values) == len(before.values or ()):
            half = self.halves[turn is not None]
            share = len(half) / len(scores.values)
            before, scores = before.at(half), scores.at(half)
        try:
            found = accuracy.compare(before, scores, budget, share=share, confirmed_at=confidence, unpaired=self.unsplit)
        except UnusableScores as error:
            return Judgement("fail", math.inf, None, None, None, str(error))
        return found if self.halves is not None or budget.confidence is None else accuracy.unsplit(found, self.unsplit)


def control(check: checking.Check, run: Callable[..., Any], budget: Budget, source: Source, train: Train | None,
            deadline_s: float, until_s: float = math.inf) -> tuple[Jury | None, list[str]]:
    """The jury of a search that ends at `deadline_s` (`time.monotonic()`), and what the user must know about it. `run` is the baseline.
    None: no candidate begins behind `until_s`, and that came first. Raises CheckUnusable where the check cannot judge, or scores what
    calibrates or trains candidates."""
    import torch

    found = controls.controls(check, run, budget, until_s)
    jury, notes = Jury.of(found, budget)
    if found.late:
        return None, []
    shared = samples.overlap(source.calibration(torch), found.baseline.samples)
    if shared.refused:
        raise CheckUnusable("calibration data is among the data of the check", cause=shared.words(),
                            remedy="give inputs, or calibration (--calibration NAME), that the check does not score: training data, for one")
    if train is not None:
        notes += apart(train, found.baseline.samples, LOOK_SHARE * (deadline_s - time.monotonic()))
    return jury, notes


def apart(train: Train, used: samples.Seen, limit_s: float) -> list[str]:
    """What was not looked at of the training data within the time. Raises CheckUnusable where the check scores it, and
    UsageError, WorkloadFailed for a loader that is none, or breaks."""
    import torch

    until = time.monotonic() + limit_s
    given = samples.Seen(used.names())
    notes = []
    with torch.random.fork_rng(devices=[]):         # a DataLoader draws from the user's random numbers
        for number, batch in enumerate(users_code.items(train.loader, "`train.loader`"), 1):
            if not isinstance(batch, tuple | list) or len(batch) < 2:
                raise UsageError(f"`train.loader` yields {type(batch).__name__}, not tuples (*inputs, target)",
                                 remedy="train.loader=[(first, second, ..., target)], one tuple for each batch")
            given.add(tuple(batch[:-1]))
            if time.monotonic() > until:
                notes.append(f"whether the check scores training data was looked up in the first {number:,} batches of it: the time for "
                             "that was over")
                break
    shared = samples.between(given, used)
    if shared.refused:
        raise CheckUnusable("training data is among the data of the check", cause=shared.words("training"),
                            remedy="train on samples that the check does not score")
    return notes
