"""The search: which candidates run, what becomes of each, and which one is the best so far.

Every candidate is one process that lives for its trial: it is prepared, proved active, compared with the baseline's
outputs, timed against the frozen and thawed baseline, and scored where it changes numbers. What fails costs one row with
a reason. What misses the accuracy budget is repaired, layer by layer, as long as it stays faster than the best.

What is close to the best runs beside it once more (`play_off`). Nothing here claims anything: a winner is deployed, raced and confirmed on other
samples by `confirm`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from saturate.inference import guards, order, plan, racing
from saturate.inference.accuracy import Judgement
from saturate.inference.candidates import Candidate
from saturate.inference.failures import CheckFailed, WorkerFailed, no_model
from saturate.inference.limits import model_over_limit, surely_over_limit, too_few_calls
from saturate.inference.repair import Repair
from saturate.inference.scores import Scores
from saturate.inference.techniques._api import COMPRESSED_BYTES, FOR_ALL_S
from saturate.inference.tried import Tried, entry_of, rests_on, tried_of
from saturate.records.inference import Verdict

Objective = Literal["latency", "throughput", "memory"]

#: A candidate that is not this much faster than the best so far need not be scored: the check costs time.
WORTH_SCORING = 0.97

#: A repaired candidate gains less than the broken one; below this advantage over the best it is not worth a repair.
WORTH_REPAIRING = 1.03

#: Where memory is the objective, it is read from so many processes of the model and of the winner's artifact, and the least of the one
#: counts against the most of the other. Two processes of one model may differ: of a small convolutional network by 8 %, as the allocator
#: happened to place its tensors, others by less than 1 %. That all three of one lie below all three of the other is chance once in 20 times.
WEIGHED = 3

#: ... and the one must be so many times the other: as much may lie in how saturate starts them.
NEEDS_LESS = 1.05

#: So much of the time may go into more calls of the model, where the first ones are too few to tell whether it keeps the limits.
TELLING = 0.05

#: A candidate may take so long to prepare, whatever time is left: it suffices on a quiet machine.
LEAST_PREPARE_S = 30.0

#: Storing, loading, scoring and racing a candidate takes about this many times as long as its trial did.
CONCLUDING = 1.2

#: ... in which so many processes of it start afresh.
LOADS = 2


class Lab(Protocol):
    """What the search and the confirmation ask of the machine; `lab` has the real one, tests have one without processes."""

    folder: Path        # what a message names: the same call goes on from there

    def baseline(self) -> Any:
        """A fresh process with the user's own model. Raises WorkerFailed."""

    def start(self, candidate: Candidate) -> Any:
        """A prepared process. Raises WorkerFailed."""

    def deploy(self, found: Tried) -> Path:
        """Store the candidate as an artifact. Raises `confirm.NotStored`."""

    def load(self, folder: Path) -> Any:
        """A fresh process that serves the artifact. Raises WorkerFailed."""

    def examine(self, worker: Any, candidate: Candidate) -> guards.Behaviour:
        """How the worker's outputs compare with the baseline's, and what a guard has against them."""

    def other_sizes(self, worker: Any, candidate: Candidate) -> str | None:
        """What a guard has against it on batches of other sizes."""

    def baseline_bytes(self, processes: int) -> int | None:
        """The least that so many processes of the model itself take to serve; None: not known."""

    def served_bytes(self, worker: Any, found: Tried) -> int | None:
        """The memory of serving what the worker stores, without what preparing it has left behind; None: not known."""

    def artifact_bytes(self, folder: Path) -> int | None:
        """The memory of a fresh process that serves an artifact; None: not known."""

    def score(self, worker: Any) -> Scores | None:
        """The user's check on the worker; None where there is no check. Raises CheckFailed where the check fails on it."""

    def judge(self, scores: Scores) -> Judgement:
        """By the samples that selection may see."""

    def certifies(self) -> bool:
        """Whether the check has samples enough to confirm a candidate that scores as the model does."""

    def confirmed(self, scores: Scores, candidate: Candidate) -> Judgement:
        """By the samples that the selection did not see, at the candidate's own level."""

    def ranking(self) -> tuple[list[str], tuple[str, ...]]:
        """Names of layers, the most sensitive first, and the first and last one."""


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
    progress: Callable[[str], None] = lambda text: None
    journal: Any = None
    baseline: Tried | None = None
    tried: dict[Candidate, Tried] = field(default_factory=dict)
    end_s: float = math.inf
    late_s: float = math.inf                                # of the same clock: behind this only the first contender is confirmed
    broken: list[Tried] = field(default_factory=list)       # missed the accuracy budget, and may be repaired
    fresh: set[Candidate] = field(default_factory=set)     # measured by this search, not by an earlier one
    check_s: float = 0.0                                    # that the check takes on the model
    start_s: float = 0.0                                    # that a process of the model takes to start: the final race has one
    afresh_s: float = 0.0                                   # that one which starts afresh takes longer than those that candidates are tried in
    over: str | None = None                                 # which limit the model itself passes: then what keeps them is of use, however slow it is
    own_times: tuple[int, ...] = ()                         # of its calls, ns, by which that is known
    _lane: Any = None

    # -- the walk --------------------------------------------------------------------------------------------------

    def run(self, baseline_worker: Any) -> None:
        """Walk all stages, as far as time allows. `baseline_worker` is left frozen; where it ends, another one takes its place. Raises
        EnvironmentProblem where none lives."""
        self._lane = racing.Lane(baseline_worker, 0)
        try:
            self._run()
        finally:
            if self._lane.worker is not baseline_worker:
                self._lane.worker.close()

    def _run(self) -> None:
        from saturate.inference import play_off

        try:
            self._lane = racing.Lane.of(self._lane.worker)
            self._lane.run()
        except WorkerFailed:
            self._renew()
        self.baseline = Tried(Candidate(), "dominated", "the model as it came", 1.0, racing.timing(self._lane.times_ns),
                              peak_memory_bytes=self._own_bytes())
        self._tell_limits()
        if self.over is not None:
            self.progress(f"the model itself does not keep the limits: {self.over}; a slower candidate that does is of use, too")
        self._walk(lambda: plan.alone(self.pool, self.tried))
        self._walk(lambda: plan.lossless_together(self.pool, self.speeds()))
        bases = [found.candidate for found in self.ranked()]
        self._walk(lambda: plan.trained(self.pool, bases))
        seen: set[Candidate] = set()
        while self.time_left() and (best := self.best()) is not None and best.candidate not in seen:
            seen.add(best.candidate)
            self._walk(lambda best=best: plan.neighbours(self.pool, best.candidate))
        play_off.run(self)

    def _walk(self, supply: Callable[[], Iterable[Candidate]]) -> None:
        """Try a stage, what promises most for its time first; what is learned on the way may supply more. Repairs have
        their place among the others: another variant that passes costs less."""
        while self.time_left():
            waiting = [candidate for candidate in dict.fromkeys(supply()) if candidate not in self.tried and self._judged_in_time(candidate)]
            left_s = self._until_s() - time.monotonic()
            fitting = [one for one in waiting if self._known(one) or order.seconds(one, self.tried) <= left_s]
            # What is expected to take longer may be quicker. But it gets some time whatever is left, which confirming the best would lack.
            waiting = fitting or (waiting if left_s >= LEAST_PREPARE_S or self.best() is None else [])
            candidate = max(waiting, key=self._rate, default=None)
            broken = max(self.broken, key=self._repair_rate, default=None)
            if broken is not None and (candidate is None or self._repair_rate(broken) > self._rate(candidate)):
                self.broken.remove(broken)
                self._repair(broken)
            elif candidate is None:
                return
            elif not self._known(candidate) and (why := self._hopeless(candidate)) is not None:
                self._settle(Tried(candidate, "not_tried", why))
            else:
                self._try(candidate)

    def _known(self, candidate: Candidate) -> bool:
        """Whether an earlier search has tried it: that costs nothing."""
        return self.journal is not None and candidate.key() in self.journal.known

    def _rate(self, candidate: Candidate) -> float:
        if self._known(candidate):
            return math.inf
        return order.rate(candidate, self.pool.facts, self.tried, self._fastest(candidate.lossless))

    def _repair_rate(self, broken: Tried) -> float:
        return order.repair_rate(broken, self._fastest())

    def _fastest(self, lossless: bool = False, model: float = 1.0) -> float:
        """What the next one has to beat; the best lossless candidate is wanted too. `model`: what the model itself counts for."""
        return max([model, *(found.speedup or 0.0 for found in self.ranked(lossless))])

    def _hopeless(self, candidate: Candidate) -> str | None:
        """Why it is not worth a process: the same techniques with other options took too long, or more memory than there is, or
        what was measured of its number format is far from the best."""
        ids = candidate.ids
        for other, found in self.tried.items():
            if found.out_of_limits and other.ids == ids:
                return f"with other options: {found.reason}"
        slow = self._outrun(candidate)
        return None if slow is None else f"{slow.label()} gave {self.tried[slow].speedup:.2f}x, far from the best"

    def _outrun(self, candidate: Candidate) -> Candidate | None:
        best = self._fastest(model=0.0 if self.over else 1.0)
        return order.outrun(candidate, self.tried, WORTH_SCORING * best) if self.objective != "memory" else None

    def wanted_after_all(self) -> list[Candidate]:
        """What was left out beside a best that has not stood since."""
        return [candidate for candidate, found in self.tried.items() if found.fate == "not_tried" and self._hopeless(candidate) is None]

    def time_left(self) -> bool:
        return time.monotonic() < self._until_s()

    def room_for(self, *found: Tried) -> bool:
        """Whether what takes as long as trying these did would end before trying must."""
        return time.monotonic() + sum(one.again_s for one in found) < self._until_s()

    def too_late(self, *found: Tried) -> bool:
        """Whether confirming these, if it takes as long as it mostly does, would end so late that it is not begun."""
        return time.monotonic() + self.confirming_s(*found) > self.late_s

    def _judged_in_time(self, candidate: Candidate) -> bool:
        """Whether the check, which a candidate that changes numbers meets when it is tried and when it is confirmed, would be through
        before the time ends: on the model it took as long. One that is known from before costs nothing."""
        return candidate.lossless or self._known(candidate) or time.monotonic() + 2 * self.check_s <= self.end_s

    def _until_s(self) -> float:
        """When trying must end, so that the best two can be confirmed in time: large models take long to store and to load."""
        both = {found.candidate: found for found in (self.best(), self.best(lossless=True)) if found is not None}
        racing_s = self.start_s if both else 0.0
        return min(self.deadline_s, self.end_s - self.confirming_s(*both.values()) - racing_s)

    def confirming_s(self, *found: Tried) -> float:
        """What it mostly takes. Those that compute the same have not met the check when they were tried."""
        again_s = CONCLUDING * sum(one.again_s for one in found) + LOADS * self.afresh_s * len(found)
        return again_s + self.check_s * sum(one.candidate.lossless for one in found)

    # -- what is known ---------------------------------------------------------------------------------------------

    def speeds(self) -> dict[Candidate, float]:
        """Speed-ups of what ran, whatever its accuracy."""
        return {candidate: found.speedup for candidate, found in self.tried.items() if found.speedup is not None}

    def value(self, found: Tried) -> float:
        """What the objective wants more of, relative to the baseline."""
        return self.lighter(found.peak_memory_bytes) if self.objective == "memory" else found.speedup or 0.0

    def lighter(self, after: int | None) -> float:
        """How many times as much memory the model takes; 0: not known."""
        before = self.baseline.peak_memory_bytes if self.baseline else None
        return before / after if before and after else 0.0

    @property
    def beats(self) -> float:
        """A value beyond this is better than the model's. Of times the final race tells which differ; memory has a margin."""
        return NEEDS_LESS if self.objective == "memory" else 1.0

    @property
    def least(self) -> float:
        """A value beyond this is worth confirming: any that is known, where the model itself passes a limit."""
        return 0.0 if self.over else self.beats

    def promises(self, found: Tried) -> bool:
        """Whether a screening can tell that it is of use."""
        return self.value(found) > self.least and (self.over is not None or self.value(found) >= plan.HELPS)

    def hear(self, times_ns: Sequence[int]) -> None:
        """Some calls of the model itself: which limit it passes is known by all that were heard of. Where that is other than it was thought
        before, what is slower than the model has another fate."""
        if not self.limits:
            return
        self.own_times += tuple(times_ns)
        before, self.over = self.over, model_over_limit(self.own_times, self.baseline.peak_memory_bytes if self.baseline else None, self.limits)
        if (before is None) is not (self.over is None):
            for found in self.tried.values():
                self._told(found)

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
        found = self._trial(candidate)
        if self._lane.broken:               # whatever ended the model's own process, the candidate has not shown anything
            self.progress(f"{candidate.label()}: once more, for the model's own process ended: {found.reason}")
            self._renew()
            found = self._trial(candidate)
        if self._lane.broken:
            found.outside, found.reason = True, f"twice the model's own process ended beside it: {found.reason}"
            self._renew()
        return self._settle(found)

    def _trial(self, candidate: Candidate) -> Tried:
        """A process of its own for the candidate, and what it shows. Where `_lane` is broken behind it, it was not the candidate's."""
        began = time.monotonic()
        self.fresh.add(candidate)
        found = Tried(candidate, "failed", "")
        try:
            worker = self.lab.start(candidate)
        except WorkerFailed as error:
            _fail(found, error)
        else:
            try:
                self._measure(worker, found)
            except WorkerFailed as error:
                _fail(found, error)
            finally:
                worker.close()
        found.seconds = time.monotonic() - began
        return found

    def _renew(self) -> None:
        """A fresh process with the model itself, to measure candidates against."""
        try:
            self._lane.renew(self.lab.baseline)
            self._lane.run()
        except WorkerFailed as error:
            raise no_model(error, self.lab.folder) from error

    def _measure(self, worker: Any, found: Tried) -> None:
        """Fill in what a living process shows."""
        candidate = found.candidate
        ready = worker.ready
        found.prepare_s, found.first_call_s, found.compile_s = ready.prepare_s, ready.first_call_s, ready.compile_s
        found.done, found.compressed_bytes, found.for_all_s = tuple(ready.done), compressed_bytes(ready.notes), for_all_s(ready.notes)
        idle = next((proof.evidence for proof in ready.proofs if not proof.active), None)
        if idle is not None:
            found.fate, found.reason = "not_applied", idle
            return
        behaviour = self.lab.examine(worker, candidate)
        found.agreement, found.flip_rate = behaviour.agreement_db, behaviour.flip_rate
        if behaviour.problem is not None:
            found.fate, found.reason = "rejected_behaviour", behaviour.problem
            return
        lane = racing.Lane.of(worker)
        found.speedup = racing.screen(self._lane, lane)
        found.timing = racing.timing(lane.times_ns)
        found.peak_memory_bytes = worker.memory_bytes()
        limits = self.limits
        if self.objective == "memory" or (found.peak_memory_bytes or 0) / 1e9 > limits.get("peak_memory_gb", math.inf):
            worker.thaw()
            served = self.lab.served_bytes(worker, found)
            if served is None:      # what preparing it took refuses nobody: what its artifact takes is judged when it is confirmed
                limits = {name: most for name, most in limits.items() if name != "peak_memory_gb"}
            found.peak_memory_bytes = served or found.peak_memory_bytes
        over = surely_over_limit(lane.times_ns, found.peak_memory_bytes, limits)
        if over is not None:
            found.fate, found.reason = "over_limit", over
            return
        found.fate, found.reason = "dominated", f"{found.speedup:.2f}x in a screening"
        if self.objective == "memory" and found.peak_memory_bytes is None:
            found.reason += "; how much memory it takes is not known here"
        best = self.best()
        if candidate.lossless:
            self._told(found)
            return
        if best is not None and self.value(found) < WORTH_SCORING * self.value(best):
            found.fate, found.reason = "slower", f"{found.speedup:.2f}x: less than {best.candidate.label()}, so it was not scored"
            return
        worker.thaw()
        self._score(worker, found)
        self._told(found)

    def _told(self, found: Tried) -> None:
        """What keeps the budget and is slower than the model itself is that, and beaten by nobody; but where the model passes a limit it may
        be the answer, and so may what was no faster in its final race. In an earlier search that may not have been known."""
        if found.fate in ("dominated", "slower", *(["no_difference"] if self.over else [])) and not found.unscored and self.objective != "memory":
            found.fate = "slower" if (found.speedup or 0.0) < 1.0 and not self.over else "dominated"

    def _score(self, worker: Any, found: Tried) -> None:
        try:
            found.scores = self.lab.score(worker)
        except CheckFailed as error:
            found.fate, found.reason = "rejected_behaviour", f"the check fails on it: {error}"
            return
        found.judge(self.lab.judge(found.scores))

    def _settle(self, found: Tried) -> Tried:
        self._know(found)
        self.note(found)
        return found

    def note(self, found: Tried) -> None:
        self.progress(f"{found.candidate.label()}: {found.reason}")
        if self.journal is not None and found.lasting:
            self.journal.add(found.candidate.key(), entry_of(found), rests_on(found))

    def _know(self, found: Tried) -> None:
        self.tried[found.candidate] = found
        repairable = found.candidate.repairable and not found.candidate.keep
        if found.misses(self.max_drop) and repairable and self.lab.certifies():
            self.broken.append(found)

    def _from_journal(self, candidate: Candidate) -> Tried | None:
        entry = self.journal.known.get(candidate.key()) if self.journal is not None else None
        if entry is None:
            return None
        found = tried_of(candidate, entry)
        if found.scores is not None:
            found.judge(self.lab.judge(found.scores))       # the budget may be another one now
        self._told(found)
        self._know(found)
        self.progress(f"{candidate.label()}: {found.reason} (known from before)")
        return found

    # -- repair ----------------------------------------------------------------------------------------------------

    def _repair(self, broken: Tried) -> None:
        """Give the most sensitive layers their precision back, while what remains is better than the best."""
        if not self._worth_repairing(broken):
            return
        try:
            names, ends = self.lab.ranking()
        except WorkerFailed as error:
            self.progress(f"{broken.candidate.label()}: not repaired, its layers cannot be ranked: {error}")
            return
        repair = Repair(names, ends)
        verdict: Verdict = "fail"
        while self.time_left() and self._worth_repairing(broken):
            keep = repair.next(verdict)
            if not keep:
                return
            candidate = Candidate(broken.candidate.parts, keep)
            found = self.tried.get(candidate) or self._try(candidate)
            if found.fate == "slower" or (found.speedup is None and found.fate != "not_applied"):
                return              # keeping more would be slower still
            verdict = "pass" if found.working else "fail"

    def _own_bytes(self) -> int | None:
        """The memory of the model itself, of several processes where it decides and there is room for them."""
        one = self.lab.baseline_bytes(1)
        if self.objective == "memory" or (one or 0) / 1e9 > self.limits.get("peak_memory_gb", math.inf):
            try:
                return self.lab.baseline_bytes(WEIGHED)
            except WorkerFailed as error:
                self.progress(f"the model's memory is that of one process, for another one failed: {error}")
        return one

    def _tell_limits(self) -> None:
        """Which limit the model itself passes, with more calls of it where the first are too few to tell."""
        assert self.baseline is not None
        memory_bytes = self.baseline.peak_memory_bytes
        until_s = time.monotonic() + TELLING * max(0.0, self._until_s() - time.monotonic())
        try:
            while too_few_calls(self._lane.times_ns, memory_bytes, self.limits) and time.monotonic() < until_s:
                self._lane.run()
        except WorkerFailed:
            self._renew()
        self.hear(self._lane.times_ns)

    def _worth_repairing(self, broken: Tried) -> bool:
        best = self.best()
        return self.value(broken) >= WORTH_REPAIRING * max(self.least if self.objective == "memory" else 0.0, self.value(best) if best else 0.0)

    def mend(self, found: Tried) -> None:
        """After the walk, for what did not survive its confirmation: as far as there is time left when the best two have theirs. What did
        not keep the budget on those samples is repaired; one that was repaired already gets more layers back. And what was left out
        because that one was so much faster has its turn."""
        end_s, self.end_s = self.end_s, self.deadline_s
        broken = self.tried.get(Candidate(found.candidate.parts), found)
        missed = (all(one.fate in ("rejected_accuracy", "undecided") for one in (found, broken)) and found.candidate.repairable
                  and self.lab.certifies())
        try:
            if (missed or self.wanted_after_all()) and self.time_left():
                with racing.lane(self.lab.baseline) as self._lane:
                    if missed:
                        self._repair(broken)
                    for candidate in self.wanted_after_all():
                        if self.time_left():
                            self._try(candidate)
        except WorkerFailed as error:
            self.progress(f"{found.candidate.label()}: not repaired, the model itself does not start: {error}")
        finally:
            self.end_s = end_s


def compressed_bytes(notes: Mapping[str, str]) -> int | None:
    """What a technique says that the weights take compressed, where that is its purpose."""
    return int(notes[COMPRESSED_BYTES]) if COMPRESSED_BYTES in notes else None


def for_all_s(notes: Mapping[str, str]) -> float:
    """Seconds of a process's preparation that no later one needs again."""
    return float(notes.get(FOR_ALL_S, 0.0))


def _fail(found: Tried, error: WorkerFailed) -> None:
    """What a WorkerFailed says of a candidate. Which of several techniques it was is said, one alone needs no name."""
    ids = found.candidate.ids
    found.fail(error, error.reason.removeprefix(f"{ids[0]}: ") if len(ids) == 1 else error.reason)
    found.out_of_limits = error.kind in ("timeout", "out_of_memory")
    if error.kind == "not_applied":
        found.fate = "not_applied"
