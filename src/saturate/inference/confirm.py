"""From the best candidate of a search to a claim: stored, loaded again in a fresh process, guarded, scored on samples
that the selection never saw, and raced against the user's baseline and against the best lossless candidate.

A contender that does not survive this gives way to the next one. Two contenders that a screening cannot tell apart race
each other first: the best of many short measurements is partly the luckiest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from saturate.inference import racing
from saturate.inference.candidates import Candidate
from saturate.inference.failures import CheckFailed, WorkerFailed
from saturate.inference.limits import decided, over_limit, too_few_calls
from saturate.inference.racing import Race
from saturate.inference.search import NEEDS_LESS, WEIGHED, Lab, Search, Tried
from saturate.measure.race import Limits
from saturate.records.inference import ANSWERS, Fate
from saturate.records.sizes import show

#: So many contenders are stored and confirmed at most.
MOST = 4

#: When the time is over, one that was not scored still has a turn where it is this many times as fast as what is left without loss.
WORTH = 1.25

#: Contenders this close to the first, by their screening, race it.
CLOSE = 1.06

#: Where samples per second are the objective: beside the fastest so many others look for their best batch size, of those that are no more
#: than this factor behind it at the batch size that the model came with. What loses there may serve more at a larger one.
NEAR, RIVALS = 1.5, 2

FINAL = Limits(max_pairs=4, min_rounds=6, max_rounds=16)
DUEL = Limits(max_pairs=2, min_rounds=6, max_rounds=12)

T = TypeVar("T")


class NotStored(Exception):
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
    """What may win, best first."""
    found = [one for one in search.tried.values() if eligible(one, search) and search.value(one) > search.least]
    return sorted(found, key=lambda one: -search.value(one))


def waiting(search: Search) -> list[Tried]:
    """Contenders that a screening can tell from what is of no use: while there are any, nobody knows that nothing helps."""
    return [one for one in contenders(search) if search.promises(one)]


def eligible(found: Tried, search: Search) -> bool:
    """It works, or its accuracy may be confirmed: it is undecided although its drop lies within the budget, or was not scored because something
    better was known, and the check has samples enough to confirm anybody."""
    return found.working or ((found.unscored or promising(found, search)) and search.lab.certifies())


def promising(found: Tried, search: Search) -> bool:
    judgement = found.judgement
    return found.fate == "undecided" and judgement is not None and judgement.drop_ci is not None and judgement.drop <= search.max_drop


def champion(search: Search, lab: Lab, deadline_s: float,
             mend: Callable[[Tried], None] | None = None) -> tuple[Confirmed | None, Race | None]:
    """The best contender that wins its final race against the user's baseline. It has to keep the user's limits there as well,
    loaded from its artifact and over as many calls as it takes to tell; else it gives way to the next one. Where the baseline itself passes one
    by all of its calls, it need not win it. None: no contender did, each has its fate; what is still `waiting` had no turn. `mend` gets
    what does not survive (default: the search's own)."""
    for turn in range(MOST):
        if turn and search.too_late():
            break
        won = winner(search, lab, search.mend if mend is None else mend)
        if won is None:
            break
        final = crowned(won, search, lab, deadline_s)
        if final is not None:
            return won, final
        if won.found.fate not in ("failed", "over_limit") and not (search.time_left() and waiting(search)):
            break               # another race would have no time either, or no chance
    return None, None


def crowned(won: Confirmed, search: Search, lab: Lab, deadline_s: float) -> Race | None:
    """The final race of a contender against the user's baseline, if it is the answer by it. None: it is not, and its fate says why."""
    try:
        if search.objective == "memory":
            won.memory_bytes = once_more(lambda: most_bytes(won, lab))
        final = once_more(lambda: against(lab, won.artifact, None, deadline_s))
        search.hear(final.times_a)
        verdict = outcome(final, search, won)
        if verdict == "keeps_limits" and search.objective != "memory" and "peak_memory_gb" in search.limits:
            won.memory_bytes = once_more(lambda: most_bytes(won, lab))
        if verdict in ANSWERS:
            final = once_more(lambda: with_enough_calls(won, final, lab, search.limits, deadline_s, verdict))
    except WorkerFailed as error:
        won.found.fail(error, f"in the final race, {error}")
        search.progress(f"{won.found.candidate.label()}: {won.found.reason}")
        return None
    over = refused(won, final, verdict, search.limits) or as_heavy(won, verdict, search)
    if over is not None:
        won.found.fate, won.found.reason = over
    else:
        settle(won, final, verdict)
        if verdict in ANSWERS:
            return final
    search.progress(f"{won.found.candidate.label()}: {won.found.reason}")
    return None


def with_enough_calls(won: Confirmed, final: Race, lab: Lab, limits: Mapping[str, float], deadline_s: float, verdict: str) -> Race:
    """The final race with more calls of the artifact, where it had too few to tell whether they keep a limit that they seem to
    pass: a slow model may have a dozen, and one that something else held up is their 99th percentile. What `keeps_limits` and has nothing
    else to offer needs them where it seems to keep the limits, too."""
    times = list(final.times_b)
    if not too_few_calls(times, won.memory_bytes, limits, verdict == "keeps_limits") or time.monotonic() >= deadline_s:
        return final
    with racing.lane(lambda: lab.load(won.artifact)) as more:
        while not decided(times, won.memory_bytes, limits) and time.monotonic() < deadline_s:
            before = len(more.times_ns)
            more.run()
            times += more.times_ns[before:]
    return replace(final, b=racing.timing(times), times_b=tuple(times))


def refused(won: Confirmed, final: Race, verdict: str, limits: Mapping[str, float]) -> tuple[Fate, str] | None:
    """The fate of what passes a limit in its final race, and the reason. `inconclusive`: it would be the answer, and time ended before there
    were enough calls."""
    over = over_limit(final.b or won.found.timing, won.memory_bytes, limits)
    if too_few_calls(final.times_b, won.memory_bytes, limits, verdict == "keeps_limits"):
        few = f"the time ended after {len(final.times_b)} calls, too few to tell: give it more time"
        return ("inconclusive", f"loaded from its artifact: {over or 'it seems to keep the limits'}; {few}") if verdict in ANSWERS else None
    return None if over is None else ("over_limit", f"loaded from its artifact: {over}")


def most_bytes(won: Confirmed, lab: Lab) -> int | None:
    """The most that some fresh processes of the artifact take; None: not known. The first was confirmed; one that the search had chosen
    for what it took would be partly the luckiest."""
    found = [won.memory_bytes, *(lab.artifact_bytes(won.artifact) for _ in range(WEIGHED - 1))]
    return None if None in found else max(found)        # type: ignore[type-var]


def as_heavy(won: Confirmed, verdict: str, search: Search) -> tuple[Fate, str] | None:
    """The fate of what does not need less, where that is the objective, and the reason."""
    before = search.baseline.peak_memory_bytes if search.baseline else None
    if search.objective != "memory" or verdict != "nothing_helps" or not before or not won.memory_bytes:
        return None
    won.found.peak_memory_bytes = won.memory_bytes
    return "no_difference", (f"loaded from its artifact: {show(won.memory_bytes)}, and the model takes {show(before)}; that is not "
                             f"{NEEDS_LESS:g} times as much")


def outcome(final: Race, search: Search, won: Confirmed) -> str:
    """What the final race says of the artifact, in the words of the record's verdict; where memory is the objective, the race only says
    what that costs. `keeps_limits`: unless it is `refused`, as the model would be."""
    if search.objective == "memory" and (final.estimate is None or won.memory_bytes is None):
        return "inconclusive"
    if search.objective == "memory":
        found = "faster" if search.lighter(won.memory_bytes) > search.beats else "nothing_helps"
    else:
        found = {"faster": "faster", "inconclusive": "inconclusive"}.get(final.verdict, "nothing_helps")
    if found != "faster" and final.estimate is not None and search.over is not None:
        return "keeps_limits"
    return found


def settle(won: Confirmed, final: Race | None, verdict: str) -> None:
    """The fate of a contender, from its final race, and its scores, where it had none before."""
    if won.found.scores is None and not won.found.candidate.lossless:
        won.found.scores, won.found.judgement = won.scores, won.judgement
    if verdict in ANSWERS:
        won.found.fate = "kept"
    elif final is not None:
        won.found.fate = final.verdict if final.verdict in ("inconclusive", "slower") else "no_difference"
    if final is not None and final.estimate is not None:
        low, high = final.estimate.speedup_ci
        won.found.speedup, won.found.timing = final.estimate.speedup, final.b or won.found.timing
        won.found.reason = f"{final.estimate.speedup:.2f}x [{low:.2f}, {high:.2f}] in the final race, loaded from its artifact"
        won.found.reason += "; it keeps the limits, and the model does not" if verdict == "keeps_limits" else ""
    elif final is not None:
        won.found.reason = f"in the final race {final.reason}; {won.found.speedup or 1.0:.2f}x in a screening"


def winner(search: Search, lab: Lab, mend: Callable[[Tried], None] = lambda found: None) -> Confirmed | None:
    """The best contender that survives; None: only the baseline is left. What does not survive gets its fate, and goes to
    `mend`, which may bring other contenders in its place."""
    best: Confirmed | None = None
    seen: set[Candidate] = set()
    spare = True
    while (found := following(search, seen, best, spare)) is not None:
        seen.add(found.candidate)
        spare = spare and (not found.unscored or search.time_left())
        confirmed = survive(found, lab, search.progress)
        if confirmed is None:
            mend(found)
        elif best is None:
            best = confirmed
        elif search.objective != "memory" and search.time_left():
            best = duel(best, confirmed, lab, search)
    return best


def following(search: Search, seen: set[Candidate], best: Confirmed | None, spare: bool = False) -> Tried | None:
    """The next contender. One that was not scored has its turn where those that outran it did not survive, and a lossless one
    however many others did not: it needs no samples. Behind the end of the time one that was not scored may be the `spare`:
    much faster than what loses nothing, and made by other techniques than those that fell. Much later than that nobody has a
    turn but the first, and one that needs no samples."""
    left = [one for one in contenders(search) if one.candidate not in seen]
    if seen and search.too_late():
        safe_too = best is None and not any(candidate.lossless for candidate in seen)
        return next((one for one in left if one.candidate.lossless), None) if safe_too else None
    room = len(seen) < MOST + 2
    if best is not None:
        room = room and search.objective != "memory" and search.time_left()     # else nobody would race it
        close = (one for one in left if not one.unscored and search.value(best.found) <= CLOSE * search.value(one))
        return next(close, None) if room else None
    safe = max((search.value(one) for one in left if one.candidate.lossless), default=1.0)
    fallen = {part.id for candidate in seen for part in candidate.parts}

    def has_turn(one: Tried) -> bool:
        other = search.value(one) >= WORTH * safe and fallen.isdisjoint(one.candidate.ids)
        return one.candidate.lossless or (room and (not one.unscored or search.time_left() or (spare and other)))

    return next(filter(has_turn, left), None)


def rivals(search: Search, lab: Lab, won: Confirmed | None, until_s: float) -> tuple[list[Confirmed], bool]:
    """Those `NEAR` the winner (None: nobody was faster than the model in a final race), and made by other techniques, stored and confirmed
    as it was; and whether that was all of them: none is begun that would not be through by `until_s` (`time.monotonic()`), and then its
    row says so."""
    runs = [one for one in search.tried.values() if one.speedup is not None and _runs(one, search)]
    best = max([0.0 if search.over else 1.0, *(one.speedup or 0.0 for one in runs)])
    found: list[Confirmed] = []
    all_of_them = True
    seen = [] if won is None else [won.found.candidate.ids]
    for one in sorted(runs, key=lambda one: -(one.speedup or 0.0)):
        if len(found) == RIVALS or NEAR * (one.speedup or 0.0) < best:
            break
        if one.candidate.ids in seen:
            continue
        seen.append(one.candidate.ids)
        if time.monotonic() + search.confirming_s(one) > until_s:
            one.reason += "; whether it serves more at another batch size was not looked for: the time ended"
            all_of_them = False
            continue
        unscored = one.unscored
        if (survived := survive(one, lab, search.progress)) is not None:
            found.append(survived)
            if unscored and survived.judgement is not None:
                one.fate, one.scores, one.judgement = "dominated", survived.scores, survived.judgement
                one.reason = f"{one.speedup:.2f}x; {survived.judgement.reason}"
    return found, all_of_them


def _runs(one: Tried, search: Search) -> bool:
    """Whether it may serve, although it did not win: it was not refused, but for being slower than another or than the model."""
    slower = one.fate in ("slower", "no_difference", "inconclusive")
    return eligible(one, search) or (slower and (one.candidate.lossless or one.scores is not None))


def survive(found: Tried, lab: Lab, progress: Callable[[str], None]) -> Confirmed | None:
    """Store, load, guard, score. None where one of these fails; `found` then says why."""
    try:
        artifact = lab.deploy(found)
    except NotStored as error:
        _not_deployed(found, error.__cause__ or error, f"it cannot be stored: {error}", progress)
        return None
    try:
        confirmed = once_more(lambda: _served(found, artifact, lab))
    except WorkerFailed as error:
        _not_deployed(found, error, f"its artifact does not serve in a fresh process: {error}", progress)
        return None
    if confirmed is None:
        return None
    if confirmed.scores is None:
        return confirmed
    confirmed.judgement = lab.confirmed(confirmed.scores, found.candidate)
    verdict = confirmed.judgement.verdict
    if verdict == "pass" or (verdict == "undecided" and found.candidate.lossless):
        return confirmed
    found.fate = "undecided" if verdict == "undecided" else "rejected_accuracy"
    found.judgement = confirmed.judgement
    found.reason = f"{found.speedup:.2f}x; on samples that the selection did not see: {confirmed.judgement.reason}"
    progress(f"{found.candidate.label()}: {found.reason}")
    return None


def _served(found: Tried, artifact: Path, lab: Lab) -> Confirmed | None:
    """Load, guard, score, without a judgement. None where guards or the check refuse; raises where the process does not live."""
    worker = lab.load(artifact)
    try:
        problem = lab.examine(worker, found.candidate).problem
        confirmed = Confirmed(found, artifact, memory_bytes=worker.memory_bytes())      # before larger batches take more
        problem = problem or lab.other_sizes(worker, found.candidate)
        if problem is not None:
            found.fate, found.reason = "rejected_behaviour", f"loaded from its artifact: {problem}"
            return None
        try:
            confirmed.scores = lab.score(worker)
        except CheckFailed as error:
            found.fate, found.reason = "rejected_behaviour", f"the check fails on its artifact: {error}"
            return None
    finally:
        worker.close()
    return confirmed


def duel(first: Confirmed, second: Confirmed, lab: Lab, search: Search) -> Confirmed:
    """The faster of two; the first where they cannot be told apart."""
    try:
        race = racing.race(lambda: lab.load(first.artifact), lambda: lab.load(second.artifact), limits=DUEL,
                           threshold=0.0, deadline_s=search.deadline_s)
    except WorkerFailed as error:            # whose doing it was the final race will tell
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


def _not_deployed(found: Tried, cause: BaseException, reason: str, progress: Callable[[str], None]) -> None:
    """What could not be stored or served, by what a process of it ended of, if one did: the time, or what was no fault of its own, leaves
    open whether it may be the answer."""
    ended = cause if isinstance(cause, WorkerFailed) else None
    found.fate, found.reason, found.outside = "not_deployable", reason, ended is not None and ended.outside
    if ended is not None and ended.kind == "timeout":
        found.fail(ended, reason)
    progress(f"{found.candidate.label()}: {found.reason}")


def once_more(trial: Callable[[], T]) -> T:
    """What it gives; tried again where it was no fault of the candidate's that a process ended."""
    try:
        return trial()
    except WorkerFailed as error:
        if not error.outside:
            raise
    return trial()


def against(lab: Lab, artifact: Path, other: Path | None, deadline_s: float) -> Race:
    """The final race of an artifact: against another one, or (None) against the user's baseline."""
    start = lab.baseline if other is None else (lambda: lab.load(other))
    return racing.race(start, lambda: lab.load(artifact), limits=FINAL, deadline_s=deadline_s)
