"""The search: which candidates run, what becomes of each, and which one is the best so far.

Every candidate is one process that lives for its trial: it is prepared, proved active, compared with the baseline's
outputs, timed against the frozen and thawed baseline, and scored where it changes numbers. What fails costs one row with
a reason. What misses the accuracy budget is repaired, layer by layer, as long as it stays faster than the best.

Nothing here claims anything: a winner is deployed, raced and confirmed on other samples by `confirm`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from saturate.inference import order, plan, racing
from saturate.inference.candidates import Candidate
from saturate.records.inference import CandidateRecord, Fate, Timing, Verdict

Objective = Literal["latency", "throughput", "memory"]

#: A candidate that is not this much faster than the best so far need not be scored: the check costs time.
WORTH_SCORING = 0.97

#: A repaired candidate is slower than the broken one; below this advantage over the best it is not worth a repair.
WORTH_REPAIRING = 1.03

#: Storing, loading, scoring and racing a candidate takes about this many times as long as its trial did.
CONCLUDING = 1.2

#: Fates of candidates that work and may be the best.
WORKING: tuple[Fate, ...] = ("kept", "dominated")


class Lab(Protocol):
    """What the search asks of the machine; `api` has the real one, tests have one without processes."""

    def start(self, candidate: Candidate) -> Any:
        """A prepared process. Raises `process.WorkerFailed`."""

    def problem(self, worker: Any, candidate: Candidate) -> str | None:
        """What a behaviour guard has against the worker's outputs."""

    def agreement(self, worker: Any) -> float | None:
        """Signal-to-noise ratio of its outputs against the baseline's, dB."""

    def served_bytes(self, worker: Any, found: Tried) -> int | None:
        """The memory of serving what the worker stores, without what preparing it has left behind; None: not known."""

    def score(self, worker: Any) -> Any:
        """The user's check on the worker: Scores. Raises `checking.CheckFailed` where the check fails on it."""

    def judge(self, scores: Any) -> Any:
        """Judgement of the samples that selection may see."""

    def ranking(self) -> tuple[list[str], tuple[str, ...]]:
        """Names of layers, the most sensitive first, and the first and last one."""


@dataclass
class Tried:
    """One candidate and what is known of it. `speedup` is over the user's own baseline, from a screening."""

    candidate: Candidate
    fate: Fate
    reason: str
    speedup: float | None = None
    timing: Timing | None = None
    scores: Any = None
    judgement: Any = None
    agreement: float | None = None
    peak_memory_bytes: int | None = None
    prepare_s: float | None = None
    first_call_s: float | None = None
    seconds: float = 0.0
    out_of_limits: bool = False             # its process was ended for the time or the memory that it took

    @property
    def working(self) -> bool:
        return self.fate in WORKING

    def record(self) -> CandidateRecord:
        candidate, judgement = self.candidate, self.judgement
        return CandidateRecord(
            id=candidate.label(), techniques=candidate.techniques(), kept_layers=sorted(candidate.keep),
            numerics=candidate.numerics, fate=self.fate, reason=self.reason, latency_ms=self.timing, speedup=self.speedup,
            accuracy=self.scores.mean if self.scores is not None else None,
            accuracy_drop=judgement.drop if judgement is not None else None,
            accuracy_drop_ci=judgement.drop_ci if judgement is not None else None,
            verdict=judgement.verdict if judgement is not None else None,
            samples_needed=judgement.samples_needed if judgement is not None else None,
            flip_rate=judgement.flip_rate if judgement is not None else None,
            agreement=self.agreement, peak_memory_bytes=self.peak_memory_bytes, prepare_s=self.prepare_s,
            first_call_s=self.first_call_s, seconds=round(self.seconds, 3), code=code(candidate))


def code(candidate: Candidate) -> str:
    """The same without saturate."""
    kept = [f"# These modules stay in their own precision: leave them out of what is quantized: {', '.join(sorted(candidate.keep))}"]
    return "\n".join([*(kept if candidate.keep else ()), *(part.module.as_code(part.options) for part in candidate.parts)])


@dataclass
class Search:
    """Walks the plan. `deadline_s` is in `time.monotonic()` seconds and leaves room for the confirmation; `end_s`, of the
    same clock, is when that should have ended too."""

    lab: Lab
    pool: plan.Pool
    objective: Objective
    limits: dict[str, float]
    deadline_s: float
    max_drop: float                             # of the budget; 0 without one
    failed: type[Exception]                     # process.WorkerFailed
    check_failed: type[Exception]
    progress: Callable[[str], None] = lambda text: None
    journal: Any = None
    baseline: Tried | None = None
    tried: dict[Candidate, Tried] = field(default_factory=dict)
    end_s: float = math.inf
    broken: list[Tried] = field(default_factory=list)       # missed the accuracy budget, and may be repaired
    _lane: Any = None

    # -- the walk --------------------------------------------------------------------------------------------------

    def run(self, baseline_worker: Any) -> None:
        """Walk all stages, as far as time allows. `baseline_worker` lives on, and is left frozen."""
        self._lane = racing.Lane.of(baseline_worker)
        self._lane.run()
        self.baseline = Tried(Candidate(), "dominated", "the model as it came", 1.0, racing.timing(self._lane.times_ns),
                              peak_memory_bytes=baseline_worker.memory_bytes())
        self._walk(lambda: plan.alone(self.pool, self.tried))
        self._walk(lambda: plan.lossless_together(self.pool, self.speeds()))
        bases = [found.candidate for found in self.ranked()]
        self._walk(lambda: plan.trained(self.pool, bases))
        seen: set[Candidate] = set()
        while self.time_left() and (best := self.best()) is not None and best.candidate not in seen:
            seen.add(best.candidate)
            self._walk(lambda best=best: plan.neighbours(self.pool, best.candidate))

    def _walk(self, supply: Callable[[], Iterable[Candidate]]) -> None:
        """Try a stage, what promises most for its time first; what is learned on the way may supply more. Repairs have
        their place among the others: another variant that passes costs less."""
        while self.time_left():
            waiting = [candidate for candidate in dict.fromkeys(supply()) if candidate not in self.tried]
            left_s = self._until_s() - time.monotonic()
            waiting = [one for one in waiting if order.seconds(one, self.tried) <= left_s] or waiting
            candidate = max(waiting, key=self._rate, default=None)
            broken = max(self.broken, key=self._repair_rate, default=None)
            if broken is not None and (candidate is None or self._repair_rate(broken) > self._rate(candidate)):
                self.broken.remove(broken)
                self._repair(broken)
            elif candidate is None:
                return
            elif (other := self._hopeless(candidate)) is not None:
                self._settle(Tried(candidate, "not_tried", f"with other options: {other.reason}"))
            else:
                self._try(candidate)

    def _rate(self, candidate: Candidate) -> float:
        if self.journal is not None and candidate.label() in self.journal.known:
            return math.inf                 # it costs nothing
        return order.rate(candidate, self.pool.facts, self.tried, self._fastest(candidate.lossless))

    def _repair_rate(self, broken: Tried) -> float:
        return order.repair_rate(broken, self._fastest())

    def _fastest(self, lossless: bool = False) -> float:
        """What the next one has to beat; the best lossless candidate is wanted too."""
        return max([1.0, *(found.speedup or 0.0 for found in self.ranked(lossless))])

    def _hopeless(self, candidate: Candidate) -> Tried | None:
        """The same techniques with other options that took too long, or more memory than there is."""
        ids = [part.id for part in candidate.parts]
        return next((found for other, found in self.tried.items()
                     if found.out_of_limits and [part.id for part in other.parts] == ids), None)

    def time_left(self) -> bool:
        return time.monotonic() < self._until_s()

    def _until_s(self) -> float:
        """When trying must end, so that the best two can be confirmed in time: large models take long to store and to load."""
        both = {found.candidate: found for found in (self.best(), self.best(lossless=True)) if found is not None}
        return min(self.deadline_s, self.end_s - CONCLUDING * sum(found.seconds for found in both.values()))

    # -- what is known ---------------------------------------------------------------------------------------------

    def speeds(self) -> dict[Candidate, float]:
        """Speed-ups of what ran, whatever its accuracy."""
        return {candidate: found.speedup for candidate, found in self.tried.items() if found.speedup is not None}

    def value(self, found: Tried) -> float:
        """What the objective wants more of, relative to the baseline."""
        if self.objective == "memory":
            before, after = (self.baseline.peak_memory_bytes if self.baseline else None), found.peak_memory_bytes
            return before / after if before and after else 0.0
        return found.speedup or 0.0

    def ranked(self, lossless: bool = False) -> list[Tried]:
        """Working candidates, best first."""
        found = [one for one in self.tried.values() if one.working and (one.candidate.lossless or not lossless)]
        return sorted(found, key=lambda one: -self.value(one))

    def best(self, lossless: bool = False) -> Tried | None:
        return next(iter(self.ranked(lossless)), None)

    # -- one candidate ---------------------------------------------------------------------------------------------

    def _try(self, candidate: Candidate) -> Tried:
        resource = candidate.conflict()
        if resource is not None:
            return self._settle(Tried(candidate, "not_applicable", f"two of its techniques claim the {resource}"))
        known = self._from_journal(candidate)
        if known is not None:
            return known
        began = time.monotonic()
        found = Tried(candidate, "failed", "")
        try:
            worker = self.lab.start(candidate)
        except self.failed as error:
            found.fate = "not_applied" if error.kind == "not_applied" else "failed"     # type: ignore[attr-defined]
            found.reason = _reason(error, candidate)
            found.out_of_limits = error.kind in ("timeout", "out_of_memory")            # type: ignore[attr-defined]
        else:
            try:
                self._measure(worker, found)
            except self.failed as error:
                found.fate, found.reason = "failed", _reason(error, candidate)
                found.out_of_limits = error.kind in ("timeout", "out_of_memory")        # type: ignore[attr-defined]
            finally:
                worker.close()
        found.seconds = time.monotonic() - began
        return self._settle(found)

    def _measure(self, worker: Any, found: Tried) -> None:
        """Fill in what a living process shows."""
        candidate = found.candidate
        found.prepare_s, found.first_call_s = worker.ready.prepare_s, worker.ready.first_call_s
        idle = next((proof.evidence for proof in worker.ready.proofs if not proof.active), None)
        if idle is not None:
            found.fate, found.reason = "not_applied", idle
            return
        problem = self.lab.problem(worker, candidate)
        found.agreement = self.lab.agreement(worker)
        if problem is not None:
            found.fate, found.reason = "rejected_behaviour", problem
            return
        lane = racing.Lane.of(worker)
        found.speedup = racing.screen(self._lane, lane)
        found.timing = racing.timing(lane.times_ns)
        found.peak_memory_bytes = worker.memory_bytes()
        if self.objective == "memory" or (found.peak_memory_bytes or 0) / 1e9 > self.limits.get("peak_memory_gb", math.inf):
            worker.thaw()
            found.peak_memory_bytes = self.lab.served_bytes(worker, found) or found.peak_memory_bytes
        over = over_limit(found.timing, found.peak_memory_bytes, self.limits)
        if over is not None:
            found.fate, found.reason = "over_limit", over
            return
        found.fate, found.reason = "dominated", f"{found.speedup:.2f}x in a screening"
        best = self.best()
        if candidate.lossless:
            if self.objective != "memory" and found.speedup < 1.0:
                found.fate = "slower"
            return
        if best is not None and self.value(found) < WORTH_SCORING * self.value(best):
            found.fate, found.reason = "slower", f"{found.speedup:.2f}x: less than {best.candidate.label()}, so it was not scored"
            return
        worker.thaw()
        self._score(worker, found)

    def _score(self, worker: Any, found: Tried) -> None:
        try:
            found.scores = self.lab.score(worker)
        except self.check_failed as error:
            found.fate, found.reason = "rejected_behaviour", f"the check fails on it: {error}"
            return
        found.judgement = self.lab.judge(found.scores)
        found.fate, found.reason = fate_of(found.judgement), f"{found.speedup:.2f}x; {found.judgement.reason}"

    def _settle(self, found: Tried) -> Tried:
        self._know(found)
        if self.journal is not None and found.fate not in ("not_applicable", "not_tried") and not found.reason.startswith("disk full"):
            self.journal.add(found.candidate.label(), entry_of(found))
        self.progress(f"{found.candidate.label()}: {found.reason}")
        return found

    def _know(self, found: Tried) -> None:
        self.tried[found.candidate] = found
        if found.fate == "rejected_accuracy" and found.candidate.numerics == "precision" and not found.candidate.keep:
            self.broken.append(found)

    def _from_journal(self, candidate: Candidate) -> Tried | None:
        entry = self.journal.known.get(candidate.label()) if self.journal is not None else None
        if entry is None:
            return None
        found = tried_of(candidate, entry)
        if found.scores is not None:
            found.judgement = self.lab.judge(found.scores)
        self._know(found)
        self.progress(f"{candidate.label()}: {found.reason} (known from before)")
        return found

    # -- repair ----------------------------------------------------------------------------------------------------

    def _repair(self, broken: Tried) -> None:
        """Give the most sensitive layers their precision back, while what remains is faster than the best."""
        from saturate.inference.repair import Repair

        best = self.best()
        if best is not None and (broken.speedup or 0.0) < WORTH_REPAIRING * (best.speedup or 0.0):
            return
        names, ends = self.lab.ranking()
        repair = Repair(names, ends)
        verdict: Verdict = "fail"
        while self.time_left():
            best = self.best()
            if best is not None and (broken.speedup or 0.0) < WORTH_REPAIRING * (best.speedup or 0.0):
                return
            keep = repair.next(verdict)
            if not keep:
                return
            found = self._try(Candidate(broken.candidate.parts, keep))
            if found.fate == "slower" or (found.speedup is None and found.fate != "not_applied"):
                return              # keeping more would be slower still
            verdict = "pass" if found.working else "fail"


def fate_of(judgement: Any) -> Fate:
    """By the samples of the selection. `undecided` may still be confirmed by the others, if its drop is small enough."""
    return {"pass": "dominated", "fail": "rejected_accuracy", "undecided": "undecided"}[judgement.verdict]


def over_limit(timing: Timing | None, memory_bytes: int | None, limits: dict[str, float]) -> str | None:
    """Which of the user's limits this passes."""
    for name, most in limits.items():
        if name == "peak_memory_gb":
            have = (memory_bytes or 0) / 1e9
        else:                               # p50_ms, p90_ms, p99_ms
            have = getattr(timing, name.removesuffix("_ms")) if timing else math.inf
        if have > most:
            return f"{name} is {have:.3g}, at most {most:g} was asked for"
    return None


def _reason(error: Exception, candidate: Candidate) -> str:
    """Which of several techniques it was is said, one alone needs no name."""
    ids = [part.id for part in candidate.parts]
    said = error.reason.removeprefix(f"{ids[0]}: ") if len(ids) == 1 else error.reason     # type: ignore[attr-defined]
    return f"{error.kind.replace('_', ' ')}: {said}"    # type: ignore[attr-defined]


def entry_of(found: Tried) -> dict[str, Any]:
    """For the journal: JSON values."""
    timing = found.timing
    scores = found.scores
    return {
        "fate": found.fate, "reason": found.reason, "speedup": found.speedup, "agreement": found.agreement,
        "timing": None if timing is None else [timing.p50, timing.p90, timing.p99, timing.calls],
        "scores": None if scores is None else {"mean": scores.mean, "values": scores.values, "metric": scores.metric,
                                               "others": [list(other) for other in scores.others]},
        "peak_memory_bytes": found.peak_memory_bytes, "prepare_s": found.prepare_s, "first_call_s": found.first_call_s,
        "seconds": found.seconds,
    }


def tried_of(candidate: Candidate, entry: dict[str, Any]) -> Tried:
    """The reverse of `entry_of`."""
    from saturate.inference.accuracy import Scores

    timing, scores = entry["timing"], entry["scores"]
    return Tried(
        candidate, entry["fate"], entry["reason"], entry["speedup"],
        None if timing is None else Timing(p50=timing[0], p90=timing[1], p99=timing[2], calls=timing[3]),
        None if scores is None else Scores(scores["mean"], None if scores["values"] is None else tuple(scores["values"]),
                                           scores["metric"], tuple((name, mean) for name, mean in scores["others"])),
        None, entry["agreement"], entry["peak_memory_bytes"], entry["prepare_s"], entry["first_call_s"], entry["seconds"])
