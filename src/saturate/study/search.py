"""The search: screen every eligible technique, add greedily, drop what does not earn its place, confirm.

A technique joins only when it is faster *and* verifies; so whatever the search is interrupted at, the set kept so far is
measured and verified. What is large and beyond doubt joins while the others are still screened, and they are screened on
top of it: a faster optimizer is not seen behind a loader that starves it. What is beyond doubt but not large joins before what
changes where the work runs is screened. What the diagnosis promised and screening did not
show is tried in a pair with what changes where it runs: smaller numbers may pay only with an allocator that keeps them in cache.
Where time is left for one turn more, what speaks for itself without a race and what stayed undecided are raced at once (`_together`);
where there is none to add what is beyond doubt one after the other, that is (`_add_at_once`).

Under a memory limit that the baseline does not keep, everything stands on `base`, a set that keeps it (`study.fitting`); a trial
that passes the limit is ended like any other that fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from saturate.measure.race import Limits
from saturate.records.analysis import Finding
from saturate.records.facts import Facts
from saturate.study import crowding, eligibility
from saturate.study.candidates import Candidate, Set, conflict, key, names, ordered, without
from saturate.study.fates import UNCHECKED, Fate, cut_short, how, in_words, leads, of_end
from saturate.study.guidance import SLOW, promise, promised_gain
from saturate.study.racing import Racer, Result
from saturate.study.verification import Verified, Verifier
from saturate.trial.process import TrialEnded

#: Screening asks whether a technique is promising; adding and the final race settle how much it gives.
SCREEN = Limits(max_pairs=1, min_rounds=4, max_rounds=10)
ADD = Limits(max_pairs=5, min_rounds=4, max_rounds=12)

#: Of the time that is left, what the races for processes that are alike may take where the first says nothing: they need fresh pairs.
STEADYING = 0.25

#: What gave nothing alone gets one pair in combination; only when that looks good, the others.
RETRY = Limits(max_pairs=1, min_rounds=4, max_rounds=12)

#: Pairs that a final race takes at least.
LAST_PAIRS = 2

#: Of the time that is left, what one technique may take to come to where it is measured while others wait for their turn.
TURN_SHARE = 0.5

#: Alone slower than this, a technique is not tried in combination.
HOPELESS = -0.10

#: A technique that gains this much beyond doubt joins at once.
LARGE = 0.10

#: What is raced at once where time is short: a set that fails says nothing of its members, so those that change numbers are left out.
SAFE = ("exact", "reordering")

#: A technique that a finding lets give this much, and that gave no large gain, is tried in pairs; with so many others, the
#: fastest first.
PROMISING, MOST_PARTNERS = 0.40, 2


class CannotVerify(Exception):
    """No candidate can be compared with this baseline; the message is the reason."""


@dataclass
class Search:
    """Walks the techniques. `deadline` (time.monotonic) leaves room for the final race; as long as nothing is kept, there is nothing
    to confirm, and what had no turn by then, or is undecided, is raced on until `end`."""

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
    _variants: list[list[Candidate]] | None = None

    # -- eligibility -----------------------------------------------------------------------------------------------

    def eligible(self) -> list[list[Candidate]]:
        """The variants of every technique worth a trial, most promising first; the others get their fate. Asked once."""
        if self._variants is None:
            asked = eligibility.Asked(self.facts, self.only, self.skip, self.allow_convergence, self.findings, self.racer.steadying)
            self._variants = asked.of(self.registry, self.fates)
        return self._variants

    def saves_memory(self, candidate: Candidate) -> bool:
        """Whether this technique is only eligible because a memory limit was asked for."""
        return eligibility.saves_memory(candidate, self.facts)

    # -- the walk --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises CannotVerify."""
        promising = self._screen(self.eligible())
        self._pair_up()
        self._add_at_once(promising)
        self.racer.drop_base()
        for candidate in promising:
            if candidate in self.kept:
                continue        # in a pair, or with others
            # The first that is clearly faster needs no more races, only its verification: it has its turn in any case.
            if time.monotonic() > self._last() and not self._certain(candidate):
                break
            self._try_to_add(candidate)
        self._look_again()
        self._ablate()

    def _certain(self, candidate: Candidate) -> bool:
        """Whether its screening says all: against what is kept now, and without doubt."""
        return self.against[candidate.id] == self.kept and self.screened[candidate.id].decision.verdict == "faster"

    def _until(self, takes_s: float = 0.0) -> float:
        """Until when what takes so long may begin. What is kept must be confirmed in the time behind the deadline; as long as there is
        nothing, that time is for what may still be found."""
        return self.deadline if self.kept != self.base else max(self.deadline, self.end - takes_s)

    def _last(self) -> float:
        """Until when something may be added: two pairs of a final race must still end in time."""
        return self._until(LAST_PAIRS * self.racer.pair_s)

    def _last_turn(self) -> float:
        """Until when a technique may have its turn. Before any had one: it starts one process, and a pair started two."""
        return self._until(max(self.turn_s, self.racer.pair_s / 2))

    def _screen(self, eligible: list[list[Candidate]]) -> list[Candidate]:
        """Race each technique against what is kept; the candidates that remain to be combined, best first. Other variants of
        a technique have their turn when every technique had one, or at once where the first gives much."""
        scored: list[tuple[float, Candidate]] = []
        waiting: list[tuple[list[Candidate], Candidate | None]] = []
        grouped = False
        for place, (first, *others) in enumerate(eligible):
            if first.id in {member.id for member in (*self.base, *self.kept)}:
                continue
            if not grouped and self._short_of_time(first, len(eligible) - place):
                grouped = True
                waiting = self._add_certain(waiting)
                if time.monotonic() <= self._last_turn():
                    self._together([variants[0] for variants in eligible[place:]])
                    waiting = [(others, best) for others, best in waiting if best is None or best not in self.kept]
                if first in self.kept:
                    continue
            if first.id in self.racer.steadying and time.monotonic() <= self._last_turn() and self._steady(first):
                continue
            if first.module.TECHNIQUE.stage == "environment":
                waiting = self._add_certain(waiting)
            with self._turn(alone=place + 1 == len(eligible)):
                best = self._best_of([first], None)
            if first.id in self.late:
                others = [first]        # once more: what it has compiled is in the cache
            elif first.module.TECHNIQUE.fallbacks:
                best, others = best or self._fallen_back(first, others), []
            if best is not None and self._gives_much(best):
                self._try_to_add(self._best_of(others, best) or best)
            else:
                waiting.append((others, best))
        for others, first_best in waiting:
            best = self._best_of(others, first_best)
            if best is None or self.screened[best.id].gain <= HOPELESS:
                continue
            if self._gives_much(best):
                self._try_to_add(best)
            else:
                scored.append((self.screened[best.id].gain, best))
        return [candidate for _, candidate in sorted(scored, key=lambda entry: -entry[0])]

    def _add_certain(self, waiting: list[tuple[list[Candidate], Candidate | None]]) -> list[tuple[list[Candidate], Candidate | None]]:
        """Add what is faster beyond doubt, the largest gain first; what still waits. What changes where the work runs depends on the
        work: screened before, it would be raced on top of the kept set once more, in time that a short budget has for one of the two."""
        expected = {candidate.id for candidate in self._disappointing()}        # to be tried in pairs
        certain = sorted(((others, best) for others, best in waiting
                          if best is not None and best.id not in expected and self.screened[best.id].decision.verdict == "faster"),
                         key=lambda entry: -self.screened[entry[1].id].gain)
        self._add_at_once([best for _, best in certain])
        added = {best.id for _, best in certain if best in self.kept}
        for others, best in certain:
            if best.id in added:
                continue
            if time.monotonic() > self.deadline:
                break
            self._try_to_add(self._best_of(others, best) or best)
            added.add(best.id)
        return [(others, best) for others, best in waiting if best is None or best.id not in added]

    def _steady(self, candidate: Candidate) -> bool:
        """Keep what makes processes of the baseline alike, if that is faster and verifies; whether its fate is settled. Raced in fresh
        pairs only: the process that screening races share is slow for ever, or never."""
        if conflict(self.kept, candidate):
            return False
        together = ordered((*self.kept, candidate))
        began = time.monotonic()
        end = began + STEADYING * (self.deadline - began)
        for most in range(1, ADD.max_pairs + 1):
            before = len(self.results)
            result = self.race(f"steady with {candidate.label()}", self.kept, together, dataclasses.replace(ADD, max_pairs=most), (candidate,),
                               min_pairs=most)
            if result is None or len(result.pairs) < most:
                return False
            if most > 1:
                del self.results[before - 1]        # the same race with a pair less
            if result.decision.verdict == "faster":
                self.fates[candidate.id].gain, self.fates[candidate.id].gain_ci = result.gain, result.gain_ci
                self._keep((candidate,), together, result, f"{in_words(result)[1]} ({result.decision.reason})")
                return True
            self.fates[candidate.id] = Fate(*in_words(result), candidate, result.gain, result.gain_ci)      # should it have no other turn
            if time.monotonic() + result.pair_s > end:      # another pair takes as long as these did
                return False
        return False

    @contextlib.contextmanager
    def _turn(self, alone: bool) -> Iterator[None]:
        """The first turn of a technique. Where it is not `alone` with the time that is left, it gets its share: one that compiled for
        minutes left none for any other."""
        bench, now = self.racer.bench, time.monotonic()
        ends = bench.ends
        bench.ends = ends if alone else min(ends, now + TURN_SHARE * (self._last_turn() - now))
        try:
            yield
        finally:
            bench.ends = ends

    def _best_of(self, variants: list[Candidate], best: Candidate | None) -> Candidate | None:
        """The variant that leads `best`, an earlier one of the same technique, and all others that there is time for."""
        for candidate in variants:
            if time.monotonic() > self._last_turn():
                break
            if self._screen_one(candidate, best):
                best = candidate
        return best

    def _fallen_back(self, first: Candidate, others: list[Candidate]) -> Candidate | None:
        """The best of the variants for workloads in which the first one fails, if it did. At once: what failed took little time, and
        what a finding names would else wait behind all that nothing names."""
        return self._best_of(others, None) if self.fates[first.id].fate == "failed" else None

    def _gives_much(self, candidate: Candidate) -> bool:
        result = self.screened[candidate.id]
        return self._certain(candidate) and (result.gain_ci or (0.0,))[0] >= LARGE

    def _short_of_time(self, first: Candidate, turns: int) -> bool:
        """Whether one more turn begins in time, that of `first`, and neither a second one nor all that are left. A slow one that nothing
        names counts twice: in that time what others have shown is made sure of."""
        left_s = self._last_turn() - time.monotonic()
        needed = min(turns, 2) + (self._promise(first) == SLOW)
        return self._as_before(f"short of time before {first.id} | {key(self.kept)}", 0 < left_s < needed * self.turn_s)

    def _as_before(self, question: str, now: bool) -> bool:
        """Once it was so, it stays so: a resumed study, whose earlier turns take no time, groups what it grouped before."""
        store = self.racer.bench.store
        if now and store.answer(question) is None:
            store.set_answer(question, True)
        return store.answer(question) is not None

    def _together(self, left: list[Candidate]) -> None:
        """Race at once what is undecided and, of what had no turn, what is likely to gain; keep all of it or nothing. Gains of a few per cent,
        each too small to be told from the difference between two processes, are seen when they come together."""
        undecided = [fate.candidate for fate in self.fates.values()
                     if fate.candidate is not None and fate.is_open(self.racer.threshold) and (fate.gain or 0.0) > 0]
        group: Set = ()
        for candidate in (*undecided, *filter(self._is_likely, left)):
            if candidate.numerics in SAFE and candidate.id not in self.verified and conflict((*self.kept, *group), candidate) is None:
                group = (*group, candidate)
        if len(group) >= 2:
            self._race_group(group)
        elif group and self.against.get(group[0].id, self.kept) != self.kept:       # else its own turn says as much
            self._try_to_add(group[0])

    def _add_at_once(self, candidates: list[Candidate]) -> None:
        """Add what was faster beyond doubt, the best of `candidates` first, in one race and one verification, where the time does not do for
        a turn and a verification of each. What fails blames nobody: then the best has its own."""
        group: Set = ()
        for candidate in candidates:
            if self._certain(candidate) and candidate.id not in self.verified and conflict((*self.kept, *group), candidate) is None:
                group = (*group, candidate)
        now = time.monotonic()
        short = self.deadline - now < (2 * len(group) - 1) * self.turn_s and now <= self._last()
        if len(group) >= 2 and self._as_before(f"short of time for {names(group)} | {key(self.kept)}", short):
            self._race_group(group, above=self.screened[group[0].id].gain)

    def _race_group(self, group: Set, above: float = 0.0) -> None:
        """Keep all of it, or nothing. `above`: what it must gain, besides being faster."""
        together = ordered((*self.kept, *group))
        result = self.race(f"add {names(group)} to {self._kept_names()}", self.kept, together, SCREEN, group, share_base=True, until=self._until())
        if result is None:
            return
        fate, reason = in_words(result)
        reason = f"{reason} for {names(group)} together"
        if fate != "kept" or result.gain <= above:
            self._of_group(group, reason)
        else:
            self._keep(group, together, result, reason)

    def _of_group(self, group: Set, word: str) -> None:
        """What became of several at once says nothing of one of them: each keeps its fate, and what was measured of it alone."""
        for candidate in group:
            self.fates[candidate.id] = self.fates[candidate.id].with_word(word)

    def _is_likely(self, candidate: Candidate) -> bool:
        """Whether something lets hope for a gain before it was raced: a finding, or a bound that is no trifle. Not of what starts slowly,
        nor of what is only worth a trial under a limit."""
        return self._promise(candidate) <= 1 and not candidate.module.TECHNIQUE.slow_start and not self.saves_memory(candidate)

    def _promise(self, candidate: Candidate) -> int:
        return promise(candidate.id, candidate.module.bound(self.facts), self.findings, candidate.module.TECHNIQUE.slow_start)[0]

    def _screen_one(self, candidate: Candidate, best: Candidate | None) -> bool:
        """Race one candidate against what is kept; whether it takes the place of `best`, an earlier variant of it."""
        began = time.monotonic()
        self.late.discard(candidate.id)
        clash = conflict(self.kept, candidate)
        if clash:
            self.settle(best or candidate, "not_applicable", clash)      # the same resource, whichever variant
            return False
        together = ordered((*self.kept, candidate))
        question = f"screen {candidate.label()}" + (f" with {self._kept_names()}" if self.kept != self.base else "")
        result = self.race(question, self.kept, together, SCREEN, (candidate,), share_base=True, until=self._until())
        if candidate.id not in self.late:
            self.turn_s = max(self.turn_s, time.monotonic() - began)
        if result is None or (best is not None and not leads(result, self.screened[best.id])):
            return False
        fate, reason = in_words(result)
        fate = "inconclusive" if fate == "kept" else fate       # until it is added and verified
        self.fates[candidate.id] = Fate(fate, reason + self._on_top(), candidate, result.gain, result.gain_ci)
        self.screened[candidate.id], self.against[candidate.id] = result, self.kept
        return True

    def _kept_names(self) -> str:
        return names(self.kept)

    def _on_top(self) -> str:
        return f" on top of {self._kept_names()}" if self.kept else ""

    def _pair_up(self) -> None:
        """Try what disappointed together with what changes where it runs, in pairs; the first large gain joins."""
        for promised in self._disappointing():
            for partner in self._partners(promised):
                if time.monotonic() > self.deadline or self._try_pair(promised, partner):
                    return

    def _disappointing(self) -> list[Candidate]:
        """What gave far less than the findings that name it promise, the most promising first."""
        found = []
        for identity, result in self.screened.items():
            candidate = self.fates[identity].candidate
            if candidate is None or candidate.id in self.verified or result.gain <= HOPELESS:
                continue
            promised = promised_gain(identity, candidate.module.bound(self.facts), self.findings)
            if promised >= PROMISING and result.gain < LARGE:
                found.append((promised, candidate))
        return [candidate for _, candidate in sorted(found, key=lambda entry: -entry[0])]

    def _partners(self, promised: Candidate) -> list[Candidate]:
        found = []
        for identity, result in self.screened.items():
            other = self.fates[identity].candidate
            if other is None or other.module.TECHNIQUE.stage != "environment" or conflict((*self.kept, promised), other):
                continue
            if identity not in self.verified and result.gain > HOPELESS:
                found.append((result.gain, other))
        return [other for _, other in sorted(found, key=lambda entry: -entry[0])[:MOST_PARTNERS]]

    def _try_pair(self, promised: Candidate, partner: Candidate) -> bool:
        """Keep both if they gain much together, and `promised` much of that on top of `partner`."""
        if conflict(self.kept, promised):
            return False
        before, together = ordered((*self.kept, partner)), ordered((*self.kept, partner, promised))
        pair, known = f"{promised.id} and {partner.label()}", self.fates[promised.id]
        both = self.race(f"screen {pair} with {self._kept_names()}", self.kept, together, SCREEN, (promised,), share_base=True)
        if both is not None and both.gain < LARGE:
            return False
        alone = both and self.race(f"add {promised.label()} to {partner.id}", before, together, ADD, (promised,))
        if alone is None:       # a process ended: that says nothing of what it gives without the other
            self.fates[promised.id] = known.with_word(f"with {partner.id}: {self.fates[promised.id].reason}")
            return False
        if alone.decision.verdict != "faster" or alone.gain < LARGE:
            return False
        self.fates[promised.id].gain, self.fates[promised.id].gain_ci = alone.gain, alone.gain_ci
        if not self._keep((promised,), together, alone, f"{alone.gain:+.1%} with {partner.id}"):
            return False
        self.stairs.insert(-1, ((partner,), self.screened[partner.id]))
        self.settle(partner, "kept", f"{promised.id} gives {alone.gain:+.1%} on top of it")
        return True

    def _look_again(self) -> None:
        """Race what is undecided once more, and for longer, what could give most first: time that is left is for this."""
        undecided = [(fate.gain_ci[1], fate.candidate) for fate in self.fates.values()
                     if fate.is_open(self.racer.threshold) and fate.gain_ci is not None
                     and fate.candidate is not None and fate.candidate.id not in self.verified]
        for _, candidate in sorted(undecided, key=lambda entry: -entry[0]):
            if time.monotonic() > self._last():
                return
            self._try_to_add(candidate, again=True)

    def _try_to_add(self, candidate: Candidate, again: bool = False) -> None:
        """Keep `candidate` if the kept set is faster with it and the two together still verify. `again`: one noisy race
        left it undecided, and does not count."""
        clash = conflict(self.kept, candidate)
        if clash:
            self.settle(candidate, "not_applicable", clash)
            return
        together = ordered((*self.kept, candidate))
        if again:
            result = self.race(f"look again at {candidate.label()} with {self._kept_names()}", self.kept, together, ADD, (candidate,),
                               until=self._last())
        else:
            result = self._race_to_add(f"add {candidate.label()} to {self._kept_names()}", together, candidate)
        if result is None:
            return
        self.fates[candidate.id].gain, self.fates[candidate.id].gain_ci = result.gain, result.gain_ci
        fate, reason = in_words(result)
        if fate != "kept":
            self.settle(candidate, fate, reason + self._on_top())
            return
        self._keep((candidate,), together, result, reason)

    def _keep(self, added: Set, together: Set, result: Result, reason: str) -> bool:
        """Keep `together`, which is faster by `result` with what is `added` to it, if it verifies; whether it does. Raises CannotVerify."""
        alone = added[0] if len(added) == 1 else None       # else nobody knows which of them is to blame
        if alone is not None:
            self.verified.add(alone.id)
        verified = self.verify(together, alone)
        if isinstance(verified, str):
            if alone is None:
                self._of_group(added, f"{reason}; in verification: {verified}")
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
                self._of_group(added, f"{reason}; {verified.reason}")
            return False
        self.kept = together
        self.stairs.append((added, result))
        self.verified.update(candidate.id for candidate in added)
        for candidate in added:
            self.fates[candidate.id] = Fate("kept", f"{reason}; {verified.reason}", candidate, result.gain, result.gain_ci)
        self.tell_kept()
        return True

    def _race_to_add(self, question: str, together: Set, candidate: Candidate) -> Result | None:
        screened = self.screened[candidate.id]
        if self._certain(candidate):
            return screened         # the same two sets were just raced, and left no doubt
        if self.against[candidate.id] == self.kept and screened.gain < self.racer.threshold:
            return screened         # nothing new to combine it with
        if screened.gain < self.racer.threshold:
            retried = self.race(question, self.kept, together, RETRY, (candidate,), until=self._last())
            if retried is None or retried.gain < self.racer.threshold or retried.decision.verdict == "faster":
                return retried      # not there, not worth more, or beyond doubt already
        return self.race(question, self.kept, together, ADD, (candidate,), until=self._last())

    def _ablate(self) -> None:
        """Race the kept set against itself without each technique but the last added, whose own race that was; drop what gives
        nothing. What is not raced so stays, and its reason says why that was left out."""
        own = self.stairs and len(self.stairs[-1][0]) == 1       # the members of a group had none
        earlier = self.stairs[:-1] if own else self.stairs
        for candidate in (*self.base, *(candidate for added, _ in earlier for candidate in added)):
            if len(self.kept) < 2:
                return
            if time.monotonic() > self.deadline:
                self.fates[candidate.id] = self.fates[candidate.id].with_word(f"{UNCHECKED}: the budget had ended")
                continue
            rest = without(self.kept, candidate)
            needed = self.racer.bench.why_not_fit(rest)
            if needed is not None:
                self.settle(candidate, "kept", f"needed: without it the training {needed}")
                continue
            result = self.race(f"without {candidate.id}", rest, self.kept, ADD, (candidate,))
            if result is None:
                continue
            fate, reason = in_words(result)
            self.fates[candidate.id].gain, self.fates[candidate.id].gain_ci = result.gain, result.gain_ci
            verified = self.verify(rest, None) if fate in ("no_difference", "slower") else None
            if isinstance(verified, Verified) and verified.passed:
                self.kept = rest
                self.settle(candidate, fate, f"{reason}, in the final set")
                self.tell_kept()
            else:
                self.settle(candidate, "kept", f"{reason}, in the final set{_why_it_stays(verified)}")

    def tell_kept(self) -> None:
        if self.on_kept is not None:
            self.on_kept(self)

    # -- asking ----------------------------------------------------------------------------------------------------

    def race(self, question: str, a: Set, b: Set, limits: Limits, asked: Set, share_base: bool = False,
             until: float | None = None, min_pairs: int = 1) -> Result | None:
        """The result, or None when one of the two does not run or is not active: the fate of what was `asked` about, one technique or
        several at once, then says why. `until`: another deadline."""
        try:
            result = self.racer.run(question, a, b, limits, self.deadline if until is None else until, share_base, min_pairs)
        except TrialEnded as ended:
            if ended.side == "a" and a == self.base and ended.outcome.kind not in ("too_short", "not_in_time"):
                raise
            fate, reason = of_end(ended, a)
            if ended.outcome.kind == "not_in_time":
                self.late.update(candidate.id for candidate in asked)
            if len(asked) == 1:
                self.fates[asked[0].id] = cut_short(self.fates[asked[0].id], asked[0], fate, reason)
            else:
                self._of_group(asked, f"{names(asked)} together: {reason}")
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
            says_nothing = ended.side == "a" or ended.outcome.kind == "not_in_time"
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


def _why_it_stays(verified: Verified | str | None) -> str:
    """Why a technique that gives nothing in the final set is in it all the same; `verified` is the set without it, where that was asked."""
    if verified is None:
        return ""
    if isinstance(verified, str):
        return f", which could not be verified without it ({verified})"
    return f", which {'did not verify' if verified.passed is False else 'could not be verified'} without it"
