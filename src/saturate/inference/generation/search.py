"""Which way to generate is the fastest for this model, these prompts and this machine, and is it still the same text?

Each way lives in a process of its own (see host.py) and is raced there against the plain loop: one token per forward,
in eager PyTorch, with the same static cache; one runs while the other stands still. Lossless ways must give the same
greedy tokens. Ways that change numbers need a check. The winner is raced, compared and scored once more, in fresh
processes, on prompts and samples that took no part in choosing it; one that does not hold there gives way to the next.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from saturate.inference.accuracy import Budget
from saturate.inference.confirm import once_more
from saturate.inference.failures import WorkerFailed
from saturate.inference.generation import measure, weights
from saturate.inference.generation.conclusion import THRESHOLD, TIME_OVER, no_time
from saturate.inference.generation.decode import Batch, Loop, Request
from saturate.inference.generation.host import Host, Refused, Yard
from saturate.inference.generation.judging import Batches, Judge
from saturate.inference.generation.recipe import LOOKUP, MODEL, PLAIN, Given, Recipe
from saturate.inference.generation.remembered import Memory
from saturate.inference.phases import Phases
from saturate.measure.race import estimate, look_confidence, verdict
from saturate.records.generation import GenerationCandidate
from saturate.records.inference import Fate

#: Fates of ways that give the right tokens; `dominated`, until one is kept: faster than the plain loop beyond doubt.
_WORKED = ("dominated", "no_difference", "inconclusive", "slower")

#: Kinds of ways to generate, that a search may be limited to.
KINDS = ("draft", "lookup", "compile", "weights")

#: The winner races in so many fresh pairs of processes at most: two processes differ by a constant.
_PAIRS = 3

#: The first pair has a share of at least so many seconds, however late it is.
_LEAST_CONFIRM_S = 10.0

#: So many ways are confirmed at most, the best first: each starts processes anew.
_MOST_CONFIRMED = 3

_with = msgspec.structs.replace

T = TypeVar("T")


@dataclass
class Ready:
    """A way to generate that was tried, and its latest record. like: whose greedy tokens it has to give."""

    label: str
    recipe: Recipe
    record: GenerationCandidate
    like: Recipe = PLAIN
    seconds: float = 0.0        # that trying it took


@dataclass
class Search:
    """One search. `selection` and `confirmation` are batches of prompts, without a prompt in common."""

    torch: Any
    given: Given
    yard: Yard
    selection: Batches
    confirmation: Batches
    request: Request
    deadline: float                     # time.monotonic()
    plain: Loop                         # in this process: proves that the model is called rightly
    check: Callable[..., Any] | None = None
    budget: Budget | None = None
    say: Callable[[str], None] = lambda line: None
    kinds: frozenset[str] = frozenset(KINDS)
    recall: Callable[[tuple[Any, ...]], Memory] = lambda heard: Memory()    # what is known, by what the check said of the model
    notes: list[str] = field(default_factory=list)
    found: list[GenerationCandidate] = field(default_factory=list)
    interrupted: bool = False
    phases: Phases = field(default_factory=lambda: Phases(time.monotonic()))
    memory: Memory = field(default_factory=Memory)          # until the check has been heard: of this search alone
    cut_short: set[str] = field(default_factory=set)        # ways that had no time, or ended for it, for a full disk, or from outside
    _start_s: float = 0.0               # that the plain loop took until it could be timed
    _ready: list[Ready] = field(default_factory=list)
    _base: Host = field(init=False, repr=False, compare=False)      # the plain loop's process
    _best: Ready = field(init=False, repr=False, compare=False)     # so far
    judge: Judge = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.judge = Judge(self.given, self.yard, self.selection, self.confirmation, self.request, self.plain, self.check, self.budget,
                           lambda record: self.memory.turn(record))

    def run(self) -> tuple[Ready, GenerationCandidate]:
        """The best way, and the plain loop's record. Ctrl-C ends the search: the best so far is returned then, not
        confirmed. Raises WorkerFailed where the plain loop itself fails, CheckUnusable where the check cannot judge.
        """
        for batch in (*self.selection, *self.confirmation):
            self.plain.check(batch, self.request)      # before anything is measured
        began = time.monotonic()
        self._base = self.yard.start(PLAIN, self.selection[0], self.request)
        try:
            self.judge.texts[PLAIN, False] = self.judge.warmed(self._base, self.selection)
            self._start_s = time.monotonic() - began
            runs = [self._base.generate(batch, self.request) for batch in self.selection]
            self.yard.slowest_s = max(run.total_ns for run in runs) / 1e9
            base = GenerationCandidate(
                id="plain", numerics="exact", fate="dominated", reason="one token per forward, in eager PyTorch",
                speedup=1.0, timing=measure.timing(runs), identical=1.0, length_ratio=1.0,
                code="token = model(ids)[:, -1].argmax(-1)", **_before_steady(self._base, self._start_s),
            )
            self._best = plain = Ready("plain", PLAIN, base)
            try:
                self.phases.end("start")
                if "weights" in self.kinds and time.monotonic() <= self._until("precision"):
                    self.notes += self.judge.control(self._base, self._until("precision"))
                self.memory = self.recall(() if self.judge.jury is None else self.judge.jury.heard)
                if self.judge.jury is not None:
                    self.phases.end("check")
                self._walk(plain)
                self._base.close()
                self.phases.end("ways")
                self._best = self._conclude(plain)
                self.phases.end("winner")
            except KeyboardInterrupt:
                self.interrupted = True
                self.notes.append(f"interrupted: {self._best.label} is the best so far"
                                  + ("" if self._best is plain else ", and was not confirmed on other prompts"))
        finally:
            self._base.close()
        return self._best, base

    def _walk(self, plain: Ready) -> None:
        tried = [ready for label, recipe in self._single()
                 if (ready := self._try(label, "reordering", recipe, PLAIN)) is not None]
        drafting = [ready for ready in tried if ready.recipe.draft is not None and ready.record.fate in _WORKED]
        runtime = self._better(plain, *(ready for ready in tried if ready.recipe.draft is None))
        runtime = self._better(runtime, *self._weight_only(runtime))
        if runtime is plain or not drafting:
            return
        draft = max(drafting, key=lambda ready: ready.record.speedup or 0.0)
        recipe = replace(runtime.recipe, draft=draft.recipe.draft, may_stop=False)
        self._try(f"{runtime.label} + {draft.label}", runtime.record.numerics, recipe, Recipe(weights=recipe.weights))

    # -- candidates ------------------------------------------------------------------------------------------------

    def _single(self) -> list[tuple[str, Recipe]]:
        mode = "reduce-overhead" if str(self.plain.target.device).startswith("cuda") else "default"   # CUDA graphs
        ways = [
            ("draft", self.given.draft is not None, "speculative, draft model", Recipe(MODEL, may_stop=False)),
            ("lookup", True, "speculative, prompt lookup", Recipe(LOOKUP, may_stop=False)),
            ("compile", True, "compile", Recipe(compile_mode=mode)),
        ]
        return [(label, recipe) for kind, possible, label, recipe in ways if possible and kind in self.kinds]

    def _weight_only(self, runtime: Ready) -> list[Ready | None]:
        ready: list[Ready | None] = []
        if "weights" not in self.kinds:
            return ready
        for name, (_, refusal) in weights.techniques(self.torch, self.given.model).items():
            if refusal:
                self._lost(name, "precision", "not_applicable", refusal)
            elif self.check is None:
                self._lost(
                    name, "precision", "not_tried", "changes numbers: pass check= and budget= to have it judged"
                )
            elif self.judge.jury is None:
                self.cut_short.add(name)
                self._lost(name, "precision", "not_tried", f"{TIME_OVER} before the check was known to judge")
            else:
                mode = runtime.recipe.compile_mode
                label = name if mode is None else f"{name} + compile"
                ready.append(self._try(label, "precision", Recipe(weights=name, compile_mode=mode), PLAIN))
        return ready

    def _try(self, label: str, numerics: str, recipe: Recipe, like: Recipe) -> Ready | None:
        """Start, compare, race. None where it does not work, is wrong, or there is no time."""
        known = self.memory.tried(label)
        if known is not None:
            record, seconds = known, (known.prepare_s or 0.0) + (known.first_call_s or 0.0)
            self.yard.know(recipe, seconds)
            self.say(f"{label}: known from the search before")
        else:
            if time.monotonic() > self._until(numerics):
                self.cut_short.add(label)
                self._lost(label, numerics, "not_tried", no_time(self._needed_s(numerics)))
                return None
            self.say(label)
            began = time.monotonic()
            record, lasting = self._tried(label, numerics, recipe, like)
            seconds = time.monotonic() - began
            if lasting:
                self.memory.keep_tried(record)
        self.found.append(record)
        ready = Ready(label, recipe, record, like, seconds)
        self._ready.append(ready)
        self._best = self._better(self._best, ready)
        return ready if record.fate in _WORKED else None

    def _until(self, numerics: str = "reordering") -> float:
        """When a way must begin, so that it is ready, and the best confirmed, in time."""
        return self.deadline - self._needed_s(numerics)

    def _needed_s(self, numerics: str) -> float:
        """What it takes to try one more way and to confirm the best. To be ready takes any of them as long as the plain loop took, at
        least; to confirm the best, about as long as it took to try it, and a plain loop beside it, which starts anew."""
        check_s = self.judge.check_s if numerics == "precision" else 0.0
        return 2 * self._start_s + check_s + max(self._best.seconds, self._start_s + check_s)

    def _tried(self, label: str, numerics: str, recipe: Recipe, like: Recipe) -> tuple[GenerationCandidate, bool]:
        """The record, and whether the same would come of it another time."""
        record = GenerationCandidate(id=label, numerics=numerics, fate="not_tried", reason="")
        try:
            return self._measured(record, recipe, like)
        except _PlainEnded:
            self._renew()
        try:
            return self._measured(record, recipe, like)
        except _PlainEnded as ended:
            self._renew()
            self.cut_short.add(label)
            return _with(record, fate="failed", reason=f"{_TWICE}: {ended}"), False

    def _renew(self) -> None:
        """A fresh process with the plain loop. Raises WorkerFailed."""
        self._base.close()
        self._base = self.yard.start(PLAIN, self.selection[0], self.request)
        self.judge.warmed(self._base, self.selection)

    def _plain(self, batch: Batch, request: Request) -> Any:
        """A run of the plain loop. Raises _PlainEnded: that is not to be blamed on the way beside it."""
        return _of_plain(lambda: self._base.generate(batch, request))

    def _measured(self, record: GenerationCandidate, recipe: Recipe, like: Recipe) -> tuple[GenerationCandidate, bool]:
        """As `_tried`, in a process of its own. Raises _PlainEnded."""
        began = time.monotonic()
        try:
            with self.yard.running(recipe, self.selection[0], self.request) as host:
                text = self.judge.warmed(host, self.selection)
                record = _with(record, **_before_steady(host, time.monotonic() - began))
                left = max(0.0, self.deadline - time.monotonic())
                found, before, after = measure.race(
                    lambda batch: self._plain(batch, self.request),
                    lambda batch: host.generate(batch, self.request), self.selection, left / 4)
                record = self.judge.judged(record, host, text, like, found, before, after, confirming=False)
                return record, record.fate != "inconclusive"
        except Refused as refusal:
            return _with(record, fate=refusal.fate, reason=str(refusal)), True
        except WorkerFailed as error:
            self._note_cut(record.id, error)
            return _with(record, fate="not_applied" if error.kind == "not_applied" else "failed", reason=error.reason), _own_doing(error)

    def _note_cut(self, label: str, error: WorkerFailed) -> None:
        """What ended it was not its own doing, or only the time: it may be the answer."""
        if error.outside or error.kind in ("timeout", "disk_full"):
            self.cut_short.add(label)

    def _lost(self, label: str, numerics: str, fate: Fate, reason: str) -> None:
        self.found.append(GenerationCandidate(id=label, numerics=numerics, fate=fate, reason=reason))

    # -- the winner ------------------------------------------------------------------------------------------------

    def _better(self, best: Ready, *others: Ready | None) -> Ready:
        """The fastest of those that are faster than the plain loop beyond doubt and right."""
        right = [ready for ready in others if ready is not None and ready.record.fate == "dominated"]
        return max([best, *right], key=lambda ready: ready.record.speedup or 0.0)

    def _conclude(self, plain: Ready) -> Ready:
        """The best way that holds in fresh processes, on prompts that did not choose it; else the plain loop. The next one has its
        turn while there is time. Who did not hold in an earlier search in the same folder needs no turn."""
        for ready in self._ready:
            known = self.memory.refused(ready.label) if ready.record.fate == "dominated" else None
            if known is not None:
                self.say(f"{ready.label}: known from the search before not to hold on other prompts")
                self._refuse(ready, known)
        turns = 0
        while (best := self._better(plain, *self._ready)) is not plain:
            late = turns > 0 and time.monotonic() > self.deadline
            if late or turns == _MOST_CONFIRMED:
                self._unconfirmed(TIME_OVER if late else f"{_MOST_CONFIRMED} others were")
                break
            turns += 1
            self._best = best           # of a search that is interrupted now
            if self._confirmed(best):
                return best
        return plain

    def _unconfirmed(self, why: str) -> None:
        """Those that were faster, where none held and time or turns are spent: nobody knows of them."""
        self.found = [_with(row, reason="; ".join(filter(None, (row.reason, f"not confirmed: {why}")))) if row.fate == "dominated" else row
                      for row in self.found]

    def _confirmed(self, best: Ready) -> bool:
        """Whether a way holds as it will run; its row says what came of it."""
        self.say(f"confirm: {best.label}")
        tried, best.recipe = best.record, replace(best.recipe, may_stop=True)
        try:
            record = self._once_more(best)
            lasting = record.fate != "inconclusive"
        except _PlainEnded as ended:
            record, lasting = _with(tried, fate="failed", reason=f"{_TWICE}: {ended}"), False
            self.cut_short.add(best.label)
        except (Refused, WorkerFailed) as error:
            record = _with(tried, fate="failed", reason=str(error))
            lasting = not isinstance(error, WorkerFailed) or _own_doing(error)
            if isinstance(error, WorkerFailed):
                self._note_cut(best.label, error)
        if record.fate != "dominated":
            if lasting:
                self.memory.keep_refused(record)
            self._refuse(best, record)
            return False
        best.record = _with(record, fate="kept")
        self.found = [_with(row, fate="kept") if row.id == best.label else row for row in self.found]
        return True

    def _refuse(self, ready: Ready, record: GenerationCandidate) -> None:
        """What the row and a note say of a way that does not hold; record: of its confirmation."""
        changes: dict[str, Any] = {"fate": record.fate, "reason": f"on other prompts: {record.reason}", "speedup": record.speedup,
                                   "speedup_ci": record.speedup_ci}
        self.found = [_with(row, **changes) if row.id == ready.label else row for row in self.found]
        ready.record = _with(ready.record, **changes)
        if record.fate == "inconclusive":
            then = "of others it is not known"
        else:
            then = "not on others" if record.fate in _WORKED else f"does not hold on others: {record.reason}"
        self.notes.append(f"{ready.label} was faster on the prompts that chose it, and {then}")

    def _once_more(self, best: Ready) -> GenerationCandidate:
        """As `_again`; tried again where it was no fault of the way's that a process ended."""
        try:
            return once_more(lambda: self._again(best))
        except _PlainEnded:
            return once_more(lambda: self._again(best))

    def _again(self, best: Ready) -> GenerationCandidate:
        """The winner's record, from races in fresh pairs of processes. Raises _PlainEnded."""
        pairs: list[list[float]] = []
        before: list[Any] = []
        after: list[Any] = []
        ends = time.monotonic() + max(_LEAST_CONFIRM_S, self.deadline - time.monotonic())
        start_s = 0.0           # of a pair, which no deadline cuts short
        while True:
            first, began = self.confirmation[0], time.monotonic()
            with (contextlib.closing(_of_plain(lambda first=first: self.yard.start(PLAIN, first, self.request))) as base,
                  self.yard.running(best.recipe, first, self.request) as host):
                self.judge.texts[PLAIN, True] = _of_plain(lambda base=base: self.judge.warmed(base, self.confirmation))
                text = self.judge.warmed(host, self.confirmation)
                start_s = max(start_s, time.monotonic() - began)
                left = max(0.0, ends - time.monotonic()) / (_PAIRS - len(pairs) + 1)
                ratios, one, other = measure.rounds(
                    lambda batch, base=base: _of_plain(lambda: base.generate(batch, self.request)),
                    lambda batch, host=host: host.generate(batch, self.request), self.confirmation, left)
                pairs.append(ratios)
                before += one
                after += other
                found = estimate(pairs, confidence=look_confidence(_PAIRS))
                last = not self.yard.isolated or len(pairs) == _PAIRS or time.monotonic() + start_s > self.deadline
                if last or verdict(found, THRESHOLD) != "inconclusive":
                    return self.judge.judged(best.record, host, text, best.like, found, before, after, confirming=True)


class _PlainEnded(Exception):
    """The plain loop's process ended beside a way that was tried; the message says how."""


#: What is said of a way that could not be compared for that.
_TWICE = "twice the plain loop's own process ended beside it"


def _of_plain(asked: Callable[[], T]) -> T:
    """What the plain loop's process gives. Raises _PlainEnded."""
    try:
        return asked()
    except WorkerFailed as error:
        raise _PlainEnded(error.reason) from error


def _before_steady(host: Host, seconds: float) -> dict[str, float | None]:
    """What the `seconds` until it had met every batch went into."""
    first_call_s = host.first_call_s or 0.0
    return {"prepare_s": seconds - first_call_s, "first_call_s": first_call_s, "compile_s": host.compile_s()}


def _own_doing(error: WorkerFailed) -> bool:
    """Whether a way would end like this another time, too."""
    return not error.outside and error.kind not in ("timeout", "out_of_memory", "disk_full")
