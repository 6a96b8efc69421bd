"""Where a search stands: what is kept, what is known of the others, what time is left; and how it races, verifies and keeps a set.

In which order, `search` decides; several at once, `combining`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from saturate.measure.race import Limits
from saturate.records.analysis import Finding
from saturate.records.facts import Facts
from saturate.study import crowding, eligibility
from saturate.study.candidates import Candidate, Set, conflict, names, ordered
from saturate.study.fates import Fate, cut_short, how, in_words, of_end
from saturate.study.guidance import promise
from saturate.study.racing import ADD, Racer, Result
from saturate.study.verification import Verified, Verifier
from saturate.techniques._api import bound_of
from saturate.trial.outcome import OUT_OF_MEMORY
from saturate.trial.process import TrialEnded

#: What gave nothing alone gets one pair in combination; only when that looks good, the others.
RETRY = Limits(max_pairs=1, min_rounds=4, max_rounds=12)

#: Pairs that a final race takes at least.
LAST_PAIRS = 2


class CannotVerify(Exception):
    """No candidate can be compared with this baseline; the message is the reason."""


class LimitPassed(Exception):
    """What was needed to keep the memory limit needed more in a later run; the message says how much."""


@dataclass
class Standing:
    """`deadline` (time.monotonic) leaves room for the final race; as long as nothing is kept, there is nothing to confirm, and what had
    no turn by then, or is undecided, is raced on until `end`."""

    registry: dict[str, ModuleType]
    facts: Facts
    racer: Racer
    verifier: Verifier
    deadline: float
    say: Any
    only: frozenset[str] | None = None
    skip: frozenset[str] = frozenset()
    allow_convergence: bool = False
    findings: tuple[Finding, ...] = ()
    end: float = -math.inf
    fates: dict[str, Fate] = field(default_factory=dict)
    base: Set = ()                      # always on: without it the workload needs more memory than it may
    fitted: Result | None = None        # `base` against the baseline
    kept: Set = ()
    stairs: list[tuple[Set, Result]] = field(default_factory=list)      # what was added at once, in the order in which it was
    screened: dict[str, Result] = field(default_factory=dict)
    against: dict[str, Set] = field(default_factory=dict)       # what was kept when it was screened
    results: list[Result] = field(default_factory=list)
    curves: list[Any] = field(default_factory=list)
    verified: set[str] = field(default_factory=set)     # ids whose set the verifier has judged, for or against it
    on_kept: Any = None
    late: set[str] = field(default_factory=set)         # ids whose process had not come to where it is measured in time
    turn_s: float = 0.0                 # the longest turn of a technique so far: what it takes to screen one

    def saves_memory(self, candidate: Candidate) -> bool:
        """Whether this technique is only eligible because a memory limit was asked for."""
        return eligibility.saves_memory(candidate, self.facts)

    # -- what is known, and what there is time for ------------------------------------------------------------------

    def certain(self, candidate: Candidate) -> bool:
        """Whether its screening says all: against what is kept now, and without doubt."""
        return self.against[candidate.id] == self.kept and self.screened[candidate.id].decision.verdict == "faster"

    def leaning(self, candidate: Candidate) -> bool:
        """Whether its screening, against what is kept now, says that it is faster, if perhaps by less than counts."""
        interval = self.screened[candidate.id].gain_ci
        return self.against[candidate.id] == self.kept and interval is not None and interval[0] > 0

    def until(self, takes_s: float = 0.0) -> float:
        """Until when what takes so long may begin. What is kept must be confirmed in the time behind the deadline; as long as there is
        nothing, that time is for what may still be found."""
        return self.deadline if self.kept != self.base else max(self.deadline, self.end - takes_s)

    def last(self) -> float:
        """Until when something may be added: two pairs of a final race must still end in time."""
        return self.until(LAST_PAIRS * self.racer.pair_s)

    def as_before(self, question: str, now: bool) -> bool:
        """Once it was so, it stays so: a resumed study, whose earlier turns take no time, groups what it grouped before."""
        store = self.racer.bench.store
        if now and store.answer(question) is None:
            store.set_answer(question, True)
        return store.answer(question) is not None

    def is_likely(self, candidate: Candidate) -> bool:
        """Whether something lets hope for a gain before it was raced: a finding, or a bound that is no trifle. Not of what starts slowly,
        nor of what is only worth a trial under a limit."""
        return self.promise_of(candidate) <= 1 and not candidate.module.TECHNIQUE.slow_start and not self.saves_memory(candidate)

    def promise_of(self, candidate: Candidate) -> int:
        return promise(candidate.id, bound_of(candidate.module, self.facts), self.findings, candidate.module.TECHNIQUE.slow_start)[0]

    def kept_names(self) -> str:
        return names(self.kept)

    def on_top(self) -> str:
        return f" on top of {self.kept_names()}" if self.kept else ""

    # -- asking ----------------------------------------------------------------------------------------------------

    def race(self, question: str, a: Set, b: Set, limits: Limits, asked: Set, share_base: bool = False,
             until: float | None = None, min_pairs: int = 1) -> Result | None:
        """The result, or None when one of the two does not run or is not active: the fate of what was `asked` about, one technique or
        several at once, then says why. `until`: another deadline."""
        try:
            result = self.racer.run(question, a, b, limits, self.deadline if until is None else until, share_base, min_pairs)
        except TrialEnded as ended:
            if ended.side == "a" and a == self.base and ended.outcome.kind not in ("too_short", "not_in_time"):
                if not passed_limit(ended, self.base):
                    raise
                if self.kept == self.base:
                    raise LimitPassed(ended.outcome.reason) from ended
            fate, reason = of_end(ended, a)
            if ended.outcome.kind == "not_in_time":
                self.late.update(candidate.id for candidate in asked)
            if len(asked) == 1:
                self.fates[asked[0].id] = cut_short(self.fates[asked[0].id], asked[0], fate, reason)
            else:
                self.of_group(asked, f"{names(asked)} together: {reason}")
            self.say(f"  {question}: {reason}")
            return None
        self.results.append(result)
        low, high = result.gain_ci or (math.nan, math.nan)
        self.say(f"  {question}: {result.gain:+.1%} [{low:+.1%}, {high:+.1%}]")
        return result

    def verify(self, techniques: Set, candidate: Candidate | None) -> Verified | str:
        """The verdict; or how one of its runs ended, which is then the fate of `candidate`, if that alone may be to blame."""
        try:
            return crowding.verify(self.verifier, self.racer, techniques)
        except TrialEnded as ended:
            says_nothing = ended.side == "a" or ended.outcome.kind in ("not_in_time", "not_active")
            fate, reason = of_end(ended, self.verifier.reference) if says_nothing else ("failed", how(ended))
            if candidate is not None:
                self.settle(candidate, fate, f"in verification: {reason}")
            else:
                self.say(f"  {names(techniques)}, in verification: {reason}")
            return reason

    def settle(self, candidate: Candidate, fate: str, reason: str) -> None:
        """Record a technique's fate; what was measured of it stays."""
        known = self.fates[candidate.id]
        self.fates[candidate.id] = Fate(fate, reason, candidate, known.gain, known.gain_ci)

    # -- keeping ---------------------------------------------------------------------------------------------------

    def try_to_add(self, candidate: Candidate, again: bool = False) -> None:
        """Keep `candidate` if the kept set is faster with it and the two together still verify. `again`: one noisy race
        left it undecided, and does not count."""
        clash = conflict(self.kept, candidate)
        if clash:
            self.settle(candidate, "not_applicable", clash)
            return
        together = ordered((*self.kept, candidate))
        if again:
            result = self.race(f"look again at {candidate.label()} with {self.kept_names()}", self.kept, together, ADD, (candidate,),
                               until=self.last())
        else:
            result = self._race_to_add(f"add {candidate.label()} to {self.kept_names()}", together, candidate)
        if result is None:
            return
        self.fates[candidate.id].gain, self.fates[candidate.id].gain_ci = result.gain, result.gain_ci
        fate, reason = in_words(result)
        if fate != "kept":
            self.settle(candidate, fate, reason + self.on_top())
            return
        self.keep((candidate,), together, result, reason)

    def _race_to_add(self, question: str, together: Set, candidate: Candidate) -> Result | None:
        screened = self.screened[candidate.id]
        if self.certain(candidate):
            return screened         # the same two sets were just raced, and left no doubt
        if self.against[candidate.id] == self.kept and screened.gain < self.racer.threshold:
            return screened         # nothing new to combine it with
        if screened.gain < self.racer.threshold:
            retried = self.race(question, self.kept, together, RETRY, (candidate,), until=self.last())
            if retried is None or retried.gain < self.racer.threshold or retried.decision.verdict == "faster":
                return retried      # not there, not worth more, or beyond doubt already
        return self.race(question, self.kept, together, ADD, (candidate,), until=self.last())

    def keep(self, added: Set, together: Set, result: Result, reason: str) -> bool:
        """Keep `together`, which is faster by `result` with what is `added` to it, if it verifies; whether it does. Raises CannotVerify."""
        alone = added[0] if len(together) == len(self.kept) + 1 else None       # else nobody knows which of them is to blame
        if alone is not None:
            self.verified.add(alone.id)
        verified = self.verify(together, alone)
        if isinstance(verified, str):
            if alone is None:
                self.of_group(added, f"{reason}; in verification: {verified}")
            return False
        self.curves += verified.curves
        if verified.passed is None:
            for candidate in added:
                self.settle(candidate, "inconclusive", f"cannot verify: {verified.reason}")
            if self.verifier.refusal is not None:       # of any candidate; else what changes less may be told from a wrong one
                raise CannotVerify(verified.reason)
            return False
        if not verified.passed:
            self.say(f"  {names(added)}: rejected, {verified.reason}")
            if alone is not None:
                self.settle(alone, "rejected_numerics", verified.reason)
            else:
                self.of_group(added, f"{reason}; {verified.reason}")
            return False
        self.kept = together
        self.stairs.append((added, result))
        self.verified.update(candidate.id for candidate in added)
        for candidate in added:
            shown = result if len(added) == 1 else self.screened.get(candidate.id)     # what several gave together is no gain of one
            gain, interval = (shown.gain, shown.gain_ci) if shown is not None else (None, None)
            self.fates[candidate.id] = Fate("kept", f"{reason}; {verified.reason}", candidate, gain, interval)
        self.tell_kept()
        return True

    def of_group(self, group: Set, word: str) -> None:
        """What became of several at once says nothing of one of them: each keeps its fate, and what was measured of it alone."""
        for candidate in group:
            self.fates[candidate.id] = self.fates[candidate.id].with_word(word)

    def tell_kept(self) -> None:
        if self.on_kept is not None:
            self.on_kept(self)


def passed_limit(ended: TrialEnded, base: Set) -> bool:
    """Whether what was needed to keep a memory limit, `base`, ended because it did not keep it."""
    return bool(base) and ended.outcome.kind in ("over_limit", *OUT_OF_MEMORY)
