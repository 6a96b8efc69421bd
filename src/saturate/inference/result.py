"""What `optimize` returns: the best artifact, ready to be called, and everything that was found on the way."""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import time as clock
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from saturate.checkpoints import durable
from saturate.errors import EnvironmentProblem, NothingFaster, UsageError
from saturate.inference import artifact, confirm, lines
from saturate.inference.artifact import Artifact
from saturate.inference.candidates import Candidate
from saturate.inference.confirm import Confirmed
from saturate.inference.phases import slack_s
from saturate.inference.plan import Pool
from saturate.inference.racing import Race
from saturate.inference.source import Source
from saturate.inference.tried import Tried, code
from saturate.machine import facts as machine
from saturate.records.inference import (
    ANSWERS,
    LEFT_OUT,
    OF_THE_USER,
    SEARCH_ENDED,
    TIME_ENDED,
    Best,
    CandidateRecord,
    Fate,
    OptimizeRecord,
)
from saturate.records.result import Phase
from saturate.trial.lock import FolderLock

if TYPE_CHECKING:
    from saturate.inference.lab import Lab
    from saturate.inference.search import Search


#: Seconds that `Result.pick` may take, unless it is told: scoring some contenders, and a race.
PICK_S = 600.0

#: Fates that follow from scores, and so from the budget.
JUDGED: tuple[Fate, ...] = ("kept", "dominated", "no_difference", "inconclusive", "undecided", "rejected_accuracy")


class Result:
    """`record` holds all numbers; the methods show them, or give the winner to use."""

    def __init__(self, record: OptimizeRecord, search: Search, lab: Lab):
        self.record = record
        self._search, self._lab = search, lab
        self._best: Artifact | None = None

    @staticmethod
    def of(record: OptimizeRecord, search: Search, lab: Lab) -> Result:
        """Write the report and the record beside the artifacts, and the scores into the winner's manifest."""
        if record.artifact is not None and record.best is not None:
            artifact.confirm(record.artifact, record.best)
        path = lab.folder / "report.html"
        result = Result(msgspec.structs.replace(record, report=str(path)), search, lab)
        result.report(path)
        _written(lab.folder / "result.json", msgspec.json.encode(result.record))
        return result

    @property
    def best(self) -> Artifact:
        """The winner, loaded from its artifact. Raises NothingFaster where there is none."""
        if self._best is None:
            if self.record.artifact is None:        # also where the best so far is stored, and nothing was confirmed
                over = self.record.baseline.fate == "over_limit"
                use = "other limits, or more time" if over else "use the model as it is"
                if self.record.verdict == "inconclusive":
                    use = f"the same call with more time and workdir={str(self._lab.folder)!r} goes on from here"
                raise NothingFaster(f"nothing that {_better(self.record.objective, over)} was found, so there is no artifact", cause=self._why(),
                                    remedy=f"{use}; result.table() says what was tried")
            self._best = artifact.load(self.record.artifact)
        return self._best

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.best(*inputs, **named)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        return self.best.save(folder)

    def _why(self) -> str:
        from saturate.report import inference_words

        return inference_words.why_nothing(self.record)

    def __repr__(self) -> str:
        from saturate.report import inference as report

        return report.summary(self.record, width=100, color=False)

    def table(self) -> str:
        """Every candidate with its fate and reason, as text."""
        from saturate.report import inference as report

        return report.table(self.record)

    def pareto(self) -> list[CandidateRecord]:
        """The candidates that no other, nor the model itself (if it keeps the limits), beats in both latency and accuracy, the fastest first. The
        winner with its confirmed numbers."""
        from saturate.report import inference as report

        return [one for one in report.front([self.record.baseline, *report.rows(self.record)]) if one is not self.record.baseline]

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the report, one self-contained HTML file. Raises EnvironmentProblem where it cannot be written."""
        from saturate.report import inference_html

        return _written(Path(path), inference_html.render(self.record).encode())

    def pick(self, max_drop: float, time: str | float = PICK_S) -> Artifact:
        """The fastest candidate within another budget: stored, loaded in a fresh process, scored and raced like the
        winner. Where the model itself passes a limit, it may be slower than the model. `time`: how long it may take ("20m", or seconds),
        beside storing and loading. The result itself stays as it is.

        Raises UsageError where the search had no check or the time is none, NothingFaster where nothing is shown to be of use within
        that budget, CheckUnusable where the check works no more, and EnvironmentProblem where another search works in the folder by now, or has.
        """
        if self._lab.budget is None:
            raise UsageError("pick needs a search with a check", remedy="optimize(model, inputs, check=..., budget=...)")
        seconds = seconds_of(time)
        with FolderLock(self._lab.folder, "workdir"):
            Source.open(self._lab.source.folder, self._lab.source.identity)
            return self._picked(max_drop, seconds)

    def _picked(self, max_drop: float, seconds: float) -> Artifact:
        if self._lab.jury is None:
            raise NothingFaster("nothing was tried", cause=self._why(), remedy="give optimize more time")
        until_s = clock.monotonic() + seconds
        lab = self._lab.within(max_drop, until_s)
        search = dataclasses.replace(self._search, lab=lab, max_drop=max_drop, deadline_s=until_s, end_s=math.inf, late_s=until_s + slack_s(seconds), journal=None,
                                     tried={one.candidate: judged(one, lab) for one in self._search.tried.values()})
        won, final = confirm.champion(search, lab, until_s, mend=lambda found: None)
        lab.discard(won.artifact if won is not None else None)
        best = best_of(won, won if won is not None and won.found.candidate.lossless else None, final, None,
                       "another budget's choice is raced against the model alone")
        if won is None or best is None:
            better = _better(search.objective, search.over is not None)
            raise NothingFaster(f"nothing that was tried {better} within a drop of {max_drop:g}, as far as is shown", cause=_closest(search),
                                remedy="result.table() says what was tried; more time may decide what is open: pick(max_drop, time=1200)")
        artifact.confirm(won.artifact, best)
        return artifact.load(won.artifact)


def seconds_of(time: str | float) -> float:
    """"20m", "90s", "1h" or seconds. Raises UsageError."""
    text = str(time).strip().lower()
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    try:
        found = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 30 * 86400:
        raise UsageError(f"time is {time!r}", remedy='a duration such as "20m", "90s" or "1h"')
    return found


def judged(found: Tried, lab: Lab) -> Tried:
    """A copy, judged by the lab's budget. What works, and was not scored because a better one was known, has its turn now:
    that one may be outside of this budget. So has what computes the same, and was not decided in a race."""
    found = dataclasses.replace(found)
    if found.fate in JUDGED and found.scores is not None:
        found.judge(lab.judge(found.scores))
    elif found.unscored or (found.fate == "inconclusive" and found.candidate.lossless):
        found.fate = "dominated"
    return found


def _better(objective: str, over: bool) -> str:
    from saturate.report import inference_words

    return inference_words.better(objective, over)


def _closest(search: Search) -> str:
    """The fastest of those that may be within the budget, else of those that are not, and why."""
    refused = [one for one in search.tried.values() if not one.working and search.value(one) > search.least]
    first = max(refused, key=lambda one: (one.fate == "undecided", search.value(one)), default=None)
    return "" if first is None else f"{first.candidate.label()}: {first.reason}"


def _written(path: Path, content: bytes) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.replace(path, lambda stream: stream.write(content))     # a full disk leaves those of the search before
    except OSError as error:
        raise EnvironmentProblem(f"{path} cannot be written", cause=str(error), remedy="free some space, or choose another folder") from error
    return path


def record_of(search: Search, lab: Lab, won: Confirmed | None = None, lossless: Confirmed | None = None, final: Race | None = None,
              versus: Race | None = None, unraced: str = "", *, notes: list[str], began: float, phases: Sequence[Phase] = (),
              complete: bool = True) -> OptimizeRecord:
    """Everything, as a record. `began`: time.monotonic() of the call, `phases`: what the time since went into. `complete`: the search came to
    its end. Others: see `Ending`."""
    facts, budget = lab.facts, lab.budget
    assert facts is not None and search.baseline is not None
    baseline = search.baseline.record()
    if lab.jury is not None:
        baseline = msgspec.structs.replace(baseline, accuracy=lab.jury.scores.mean)
    if final is not None and final.a is not None:
        baseline = msgspec.structs.replace(baseline, latency_ms=final.a)
    if search.over is not None:
        baseline = msgspec.structs.replace(baseline, fate="over_limit", reason=f"{baseline.reason}; {search.over}")
        notes = [f"the model itself does not keep the limits: {search.over}", *notes]
    waiting = untried(search, lab.threads, TIME_ENDED if complete else SEARCH_ENDED)
    verdict = verdict_of(won, final, search, complete and not waiting and not open_ones(search))
    best = best_of(won, lossless, final, versus, unraced) if verdict in ANSWERS else None
    rows = [rowed(found, lab) for found in search.tried.values()]
    rows += [*refused(search.pool), *waiting]
    return OptimizeRecord(
        run=secrets.token_hex(4), model=facts.kind, device=facts.device, machine=machine.cpu_name() or "unknown processor", torch=facts.torch,
        objective=search.objective, batch_size=facts.batch_size, max_drop=budget.max_drop if budget else None,
        relative=bool(budget and budget.relative),
        confidence=budget.confidence if budget else None, limits=search.limits, verdict=verdict, baseline=baseline,
        best_lossless=rowed(lossless.found, lab) if lossless is not None else None if unraced else baseline, best=best, candidates=rows, notes=notes,
        seconds=round(clock.monotonic() - began, 1), given_s=round(lab.deadline_s - began, 1), phases=list(phases),
        artifact=str(won.artifact) if won is not None and best is not None else None,
        serve=lines.of_artifact(won.artifact, artifact.read(won.artifact)) if won is not None and best is not None else "")


def verdict_of(won: Confirmed | None, final: Race | None, search: Search, complete: bool) -> str:
    """`complete`: everything had its turn; else nobody knows that nothing helps."""
    if won is None or final is None:
        return "nothing_helps" if complete else "inconclusive"
    if search.objective == "throughput" and final.estimate is not None:
        return "faster"         # or slower, by a call of the given size: who serves most was chosen, and `with_throughput` says more
    return confirm.outcome(final, search, won)


def open_ones(search: Search) -> list[Tried]:
    """Candidates that may be the answer, and nobody knows: ended for the time that they took or from outside, undecided in
    accuracy or in a race, without a turn to be confirmed, or left out beside a best that did not stand."""
    waiting, left_out = confirm.waiting(search), search.wanted_after_all()
    return [one for one in search.tried.values()
            if cut_short(one) or one.fate == "inconclusive" or one in waiting or one.candidate in left_out
            or (one.fate == "undecided" and search.promises(one))]


def undecided_lossless(search: Search) -> str:
    """Why a lossless candidate that nobody knows may be faster than the model; or "". Of one that works the screening knows."""
    lossless = search.pool.lossless()
    if any(one.candidate.lossless and not one.working for one in open_ones(search)):
        return "of some lossless candidates it was not decided whether they are faster"
    if not lossless <= _reached(search):
        return "some lossless candidates had no turn"
    return "the lossless candidates were left out" if not lossless and LEFT_OUT in search.pool.refused.values() else ""


def _reached(search: Search) -> set[str]:
    """Ids of the techniques that were tried, alone or with others."""
    return {part.id for candidate in search.tried for part in candidate.parts}


def cut_short(found: Tried) -> bool:
    """Whether it was ended for the time that it took, or by what was not its doing: with more time, or on a machine with room,
    it may be the answer."""
    return found.outside or (found.fate == "failed" and found.late)


def best_of(won: Confirmed | None, lossless: Confirmed | None, final: Race | None, versus: Race | None, unraced: str = "") -> Best | None:
    if won is None or final is None or final.estimate is None or final.b is None:
        return None
    judgement, own = won.judgement, lossless is won
    drop, drop_ci = judgement.numbers() if judgement else (None, None)
    if lossless is None and not unraced:
        versus = final                      # the best lossless is the model itself
    known = own or (versus is not None and versus.speedup is not None)
    return Best(
        recipe=won.found.candidate.techniques(), latency_ms=final.b, speedup=final.estimate.speedup, speedup_ci=final.estimate.speedup_ci,
        speedup_over_lossless=1.0 if own else versus.speedup if versus else None,
        speedup_over_lossless_ci=(1.0, 1.0) if own else versus.speedup_ci if versus else None,
        speedup_over_lossless_reason=None if known else versus.reason if versus else unraced,
        accuracy=won.scores.mean if won.scores is not None else None, accuracy_drop=drop, accuracy_drop_ci=drop_ci,
        verdict=judgement.verdict if judgement else None,
        samples_needed=judgement.samples_needed if judgement else None,
        peak_memory_bytes=won.memory_bytes, size_bytes=artifact.size_bytes(won.artifact))


def rowed(found: Tried, lab: Lab) -> CandidateRecord:
    row, batch_size = found.record(lab.threads), lab.facts.batch_size if lab.facts else None
    if row.latency_ms is not None and batch_size:
        row = msgspec.structs.replace(row, throughput_per_s=1000 * batch_size / row.latency_ms.p50)
    return row


def refused(pool: Pool) -> list[CandidateRecord]:
    """Techniques that no candidate may hold: the user left them out, or gave nothing that they need, or they do not apply."""
    return [CandidateRecord(id=id, techniques=[{"id": id, "options": {}}], reason=reason,
                            fate="not_tried" if reason in OF_THE_USER else "not_applicable") for id, reason in pool.refused.items()]


def untried(search: Search, threads: int, reason: str) -> list[CandidateRecord]:
    """Techniques that the search did not reach: nothing vanishes."""
    seen, pool = _reached(search), search.pool
    waiting = {part.id: part for part in (*pool.switches, *pool.runtimes, *pool.numbers, *pool.trained) if part.id not in seen}
    return [CandidateRecord(id=id, techniques=[{"id": id, "options": {}}], numerics=part.module.TECHNIQUE.numerics, fate="not_tried",
                            reason=reason, code=code(Candidate.of([part]), threads)) for id, part in waiting.items()]
