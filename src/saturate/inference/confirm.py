"""From the best candidate of a search to a claim: stored, loaded again in a fresh process, guarded, scored on samples
that the selection never saw, and raced against the user's baseline and against the best lossless candidate.

A contender that does not survive this gives way to the next one. Two contenders that a screening cannot tell apart race
each other first: the best of many short measurements is partly the luckiest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from saturate.inference import racing
from saturate.inference.racing import Race
from saturate.inference.search import Search, Tried, over_limit
from saturate.measure.race import Limits

#: So many contenders are stored and confirmed at most.
MOST = 4

#: Contenders this close to the first, by their screening, race it.
CLOSE = 1.06

FINAL = Limits(max_pairs=4, min_rounds=6, max_rounds=16)
DUEL = Limits(max_pairs=2, min_rounds=6, max_rounds=12)


class Yard(Protocol):
    """What confirming asks of the machine."""

    def deploy(self, found: Tried) -> Path:
        """Store the candidate as an artifact. Raises NotDeployable."""

    def load(self, artifact: Path) -> Any:
        """A fresh process that serves the artifact. Raises `process.WorkerFailed`."""

    def baseline(self) -> Any:
        """A fresh process with the user's own model."""

    def problem(self, worker: Any, candidate: Any) -> str | None: ...

    def other_sizes(self, worker: Any, candidate: Any) -> str | None:
        """What a guard has against it on batches of other sizes."""

    def score(self, worker: Any) -> Any: ...

    def confirmed(self, scores: Any) -> Any:
        """Judgement of the samples that the selection did not see."""


class NotDeployable(Exception):
    """The candidate cannot be stored; the message is the reason."""


@dataclass
class Confirmed:
    """A contender that survived. `judgement` is None for a lossless one without a check."""

    found: Tried
    artifact: Path
    judgement: Any = None
    scores: Any = None
    memory_bytes: int | None = None


def contenders(search: Search) -> list[Tried]:
    """What may win, best first: what works, and what is undecided although its drop lies within the budget."""
    found = [one for one in search.tried.values() if one.working or promising(one, search)]
    return sorted(found, key=lambda one: -search.value(one))


def promising(found: Tried, search: Search) -> bool:
    judgement = found.judgement
    return found.fate == "undecided" and judgement is not None and judgement.drop_ci is not None and judgement.drop <= search.max_drop


def champion(search: Search, yard: Yard, failed: type[Exception], check_failed: type[Exception],
             deadline_s: float) -> tuple[Confirmed | None, Race | None]:
    """The best contender with its final race against the user's baseline. It has to keep the user's limits there as well,
    loaded from its artifact and over many more calls than a screening has; else it gives way to the next one."""
    for _ in range(MOST):
        won = winner(search, yard, failed, check_failed)
        if won is None:
            break
        try:
            final = against(yard, won.artifact, None, deadline_s)
        except failed as error:
            won.found.fate, won.found.reason = "failed", f"{error.kind.replace('_', ' ')}: in the final race, {error}"  # type: ignore[attr-defined]
            search.progress(f"{won.found.candidate.label()}: {won.found.reason}")
            continue
        over = over_limit(final.b or won.found.timing, won.memory_bytes, search.limits)
        if over is None:
            return won, final
        won.found.fate, won.found.reason = "over_limit", f"loaded from its artifact: {over}"
        search.progress(f"{won.found.candidate.label()}: {won.found.reason}")
    return None, None


def winner(search: Search, yard: Yard, failed: type[Exception], check_failed: type[Exception]) -> Confirmed | None:
    """The best contender that survives; None: only the baseline is left. What does not survive gets its fate."""
    best: Confirmed | None = None
    for found in contenders(search)[: MOST + 2]:
        if search.value(found) <= 1.0:
            break
        if best is not None and search.value(best.found) > CLOSE * search.value(found):
            break
        confirmed = survive(found, yard, failed, check_failed, search.progress)
        if confirmed is None:
            continue
        if best is None:
            best = confirmed
        elif search.objective != "memory" and search.time_left():
            best = duel(best, confirmed, yard, search)
    return best


def survive(found: Tried, yard: Yard, failed: type[Exception], check_failed: type[Exception],
            progress: Callable[[str], None]) -> Confirmed | None:
    """Store, load, guard, score. None where one of these fails; `found` then says why."""
    try:
        artifact = yard.deploy(found)
    except NotDeployable as error:
        found.fate, found.reason = "not_deployable", str(error)
        progress(f"{found.candidate.label()}: cannot be stored, {error}")
        return None
    try:
        worker = yard.load(artifact)
    except failed as error:
        found.fate, found.reason = "not_deployable", f"stored, it does not load in a fresh process: {error}"
        progress(f"{found.candidate.label()}: {found.reason}")
        return None
    try:
        problem = yard.problem(worker, found.candidate)
        confirmed = Confirmed(found, artifact, memory_bytes=worker.memory_bytes())      # before larger batches take more
        problem = problem or yard.other_sizes(worker, found.candidate)
        if problem is not None:
            found.fate, found.reason = "rejected_behaviour", f"loaded from its artifact: {problem}"
            return None
        try:
            confirmed.scores = yard.score(worker)
        except check_failed as error:
            found.fate, found.reason = "rejected_behaviour", f"the check fails on its artifact: {error}"
            return None
    except failed as error:
        found.fate, found.reason = "not_deployable", f"loaded from its artifact: {error}"
        return None
    finally:
        worker.close()
    if confirmed.scores is None:
        return confirmed
    confirmed.judgement = yard.confirmed(confirmed.scores)
    verdict = confirmed.judgement.verdict
    if verdict == "pass" or (verdict == "undecided" and found.candidate.lossless):
        return confirmed
    found.fate = "undecided" if verdict == "undecided" else "rejected_accuracy"
    found.judgement = confirmed.judgement
    found.reason = f"{found.speedup:.2f}x; on samples that the selection did not see: {confirmed.judgement.reason}"
    progress(f"{found.candidate.label()}: {found.reason}")
    return None


def duel(first: Confirmed, second: Confirmed, yard: Yard, search: Search) -> Confirmed:
    """The faster of two; the first where they cannot be told apart."""
    try:
        race = racing.race(lambda: yard.load(first.artifact), lambda: yard.load(second.artifact), limits=DUEL,
                           threshold=0.0, deadline_s=search.deadline_s)
    except search.failed as error:          # whose doing it was the final race will tell
        second.found.reason = f"{second.found.speedup or 1.0:.2f}x in a screening; a race with {first.found.candidate.label()} failed: {error}"
        search.progress(f"{second.found.candidate.label()}: {second.found.reason}")
        return first
    faster = race.estimate is not None and race.estimate.log_ratio > 0
    loser, best = (first, second) if faster else (second, first)
    loser.found.fate, name = "dominated", best.found.candidate.label()
    if race.estimate is None:
        loser.found.reason = f"{loser.found.speedup or 1.0:.2f}x in a screening, not told from {name} in a race: {race.reason}"
        search.progress(f"{name} and {loser.found.candidate.label()}: {race.reason}")
    else:
        ratio = math.exp(abs(race.estimate.log_ratio))
        loser.found.reason = f"{ratio:.2f}x slower than {name} in a race"
        search.progress(f"{name} beats {loser.found.candidate.label()}, {ratio:.2f}x")
    return best


def against(yard: Yard, artifact: Path, other: Path | None, deadline_s: float) -> Race:
    """The final race of an artifact: against another one, or (None) against the user's baseline."""
    start = yard.baseline if other is None else (lambda: yard.load(other))
    return racing.race(start, lambda: yard.load(artifact), limits=FINAL, deadline_s=deadline_s)
