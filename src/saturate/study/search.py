"""The search: screen every eligible technique, add greedily, drop what does not earn its place, confirm.

A technique joins only when it is faster *and* verifies. So whatever the search is interrupted at, the set kept so far is measured and
verified. In this order:

    screen   Race each technique against what is kept. A large gain beyond doubt joins at once, and the others are screened on top of it:
             a faster optimizer is not seen behind a loader that starves it. Smaller gains beyond doubt join before the techniques that
             change where the work runs are screened, and before what nothing names takes minutes to find out. Where only one more turn
             begins in time, what speaks for itself without a race and what stayed undecided are raced together (`combining.race_rest`).
    pair     What the diagnosis promised and screening did not show is tried beside what changes where it runs: numbers in fewer
             bits may pay only with an allocator that keeps them in cache.
    add      What is left, the largest gain first: all at once where the time does not do for one after the other.
    look     What is undecided is looked at again, and so is what contradicts the finding that names it; then come other variants of
             what was far slower.
    ablate   Take each kept technique out once. The last race is `confirming`'s.

Under a memory limit that the baseline does not keep, everything stands on `base`, a set that keeps it (`study.memory_limit`); a trial
that passes the limit is ended like any other that fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from saturate.study import combining, eligibility
from saturate.study.candidates import Candidate, conflict, key, ordered, without
from saturate.study.fates import UNCHECKED, Fate, in_words, leads
from saturate.study.guidance import SLOW, promised_gain
from saturate.study.racing import ADD, SCREEN
from saturate.study.standing import Standing
from saturate.study.verification import Verified
from saturate.techniques._api import bound_of

#: Of the time that is left, what the races for processes that are alike may take where the first says nothing: they need fresh pairs.
STEADYING = 0.25

#: What a first verification takes, in turns of a technique: the baseline is recorded several times. An estimate,
#: not a measurement.
VERIFIES = 2

#: Of the time that is left, what one technique may take to come to where it is measured while others wait for their turn.
TURN_SHARE = 0.5


@dataclass
class Search(Standing):
    """Walks the techniques."""

    _variants: list[list[Candidate]] | None = None
    _left: list[tuple[list[Candidate], Candidate]] = field(default_factory=list)    # other variants of what is hopeless, and its best

    # -- eligibility -----------------------------------------------------------------------------------------------

    def eligible(self) -> list[list[Candidate]]:
        """The variants of every technique worth a trial, most promising first; the others get their fate. Asked once."""
        if self._variants is None:
            asked = eligibility.Asked(self.facts, self.only, self.skip, self.allow_convergence, self.findings, self.racer.noise.steadying)
            self._variants = asked.of(self.registry, self.fates)
        return self._variants

    # -- the walk --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises CannotVerify."""
        promising = self._screen(self.eligible())
        combining.pair_up(self)
        combining.add_at_once(self, promising)
        self.racer.drop_base()
        for candidate in promising:
            if candidate in self.kept:
                continue        # in a pair, or with others
            # The first that is clearly faster needs no more races, only its verification: it has its turn in any case.
            if time.monotonic() > self.last() and not self.certain(candidate):
                break
            self.try_to_add(candidate)
        self._look_again()
        self._try_what_is_left()
        self._ablate()

    def _last_turn(self) -> float:
        """Until when a technique may have its turn. Before any had one: it starts one process, and a pair started two."""
        return self.until(max(self.turn_s, self.racer.pair_s / 2))

    def _screen(self, eligible: list[list[Candidate]]) -> list[Candidate]:
        """Race each technique against what is kept; the candidates that remain to be combined, best first. Other variants of
        a technique have their turn when every technique had one, or at once where the first gives much; those of a hopeless one
        are left until what is undecided was looked at again."""
        scored: list[tuple[float, Candidate]] = []
        waiting: list[tuple[list[Candidate], Candidate | None]] = []
        grouped = False
        for place, (first, *others) in enumerate(eligible):
            if first.id in {member.id for member in (*self.base, *self.kept)}:
                continue
            if not grouped and self._short_of_time(first, len(eligible) - place, [best for _, best in waiting if best is not None]):
                grouped = True
                waiting = self._add_certain(waiting)
                if time.monotonic() <= self._last_turn():
                    combining.race_rest(self, [variants[0] for variants in eligible[place:]])
                    waiting = [(others, best) for others, best in waiting if best is None or best not in self.kept]
                if first in self.kept:
                    continue
            if first.id in self.racer.noise.steadying and time.monotonic() <= self._last_turn() and self._steady(first):
                continue
            slow = self.promise_of(first) == SLOW
            if slow or first.module.TECHNIQUE.stage == "environment":
                waiting = self._add_certain(waiting, leaning=slow)
            with self._turn(alone=place + 1 == len(eligible)):
                best = self._best_of([first], None)
            if first.id in self.late:
                others = [first]        # once more: what it has compiled is in the cache
            elif first.module.TECHNIQUE.fallbacks:
                best, others = best or self._fallen_back(first, others), []
            if best is not None and self._gives_much(best):
                self.try_to_add(self._best_of(others, best) or best)
            else:
                waiting.append((others, best))
        for others, first_best in waiting:
            if first_best is not None and self._is_hopeless(first_best):
                self._left.append((others, first_best))
                continue
            best = self._best_of(others, first_best)
            if best is None or self._is_hopeless(best):
                continue
            if self._gives_much(best):
                self.try_to_add(best)
            else:
                scored.append((self.screened[best.id].gain, best))
        return [candidate for _, candidate in sorted(scored, key=lambda entry: -entry[0])]

    def _add_certain(self, waiting: list[tuple[list[Candidate], Candidate | None]],
                     leaning: bool = False) -> list[tuple[list[Candidate], Candidate | None]]:
        """Add what is faster beyond doubt, the largest gain first; what still waits. What changes where the work runs depends on the
        work: screened before, it would be raced on top of the kept set once more, in time that a short budget has for one of the two.
        So would what compiles for long, and its turn may leave no time for any other: then what is faster, but perhaps by less than
        counts (`leaning`), has its race first as well."""
        expected = {candidate.id for candidate in combining.disappointing(self)}        # what is not certain is tried in pairs
        screened = sorted(((others, best) for others, best in waiting if best is not None), key=lambda entry: -self.screened[entry[1].id].gain)
        sure = [best for _, best in screened if self.screened[best.id].decision.verdict == "faster"]
        others_too = [best for _, best in screened if best not in sure and best.id not in expected]
        hopeful = [best for _, best in screened if leaning and best not in sure and self.leaning(best)]
        combining.add_at_once(self, [*sure, *others_too])
        added = {best.id for _, best in screened if best in self.kept}
        for wanted in (sure, hopeful):
            for others, best in screened:
                if best not in wanted or best.id in added or time.monotonic() > self.deadline:
                    continue
                self.try_to_add(self._best_of(others, best) or best)
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
                self.keep((candidate,), together, result, f"{in_words(result)[1]} ({result.decision.reason})")
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
        return self.certain(candidate) and (result.gain_ci or (0.0,))[0] >= combining.LARGE

    def _short_of_time(self, first: Candidate, turns: int, waiting: list[Candidate]) -> bool:
        """Whether one more turn begins in time, that of `first`, and neither a second one nor all that are left. A slow one that nothing
        names counts twice: in that time what others have shown is made sure of. Of what is `waiting` beyond doubt, the first must still be verified."""
        left_s = self._last_turn() - time.monotonic()
        slow = self.promise_of(first) == SLOW
        needed = min(turns, 2) + slow
        if not self.verified and any(map(self.certain, waiting)):
            needed = max(needed, 1 + slow + VERIFIES)
        return self.as_before(f"short of time before {first.id} | {key(self.kept)}", 0 < left_s < needed * self.turn_s)

    def _screen_one(self, candidate: Candidate, best: Candidate | None) -> bool:
        """Race one candidate against what is kept; whether it takes the place of `best`, an earlier variant of it."""
        began = time.monotonic()
        self.late.discard(candidate.id)
        clash = conflict(self.kept, candidate)
        if clash:
            self.settle(best or candidate, "not_applicable", clash)      # the same resource, whichever variant
            return False
        together = ordered((*self.kept, candidate))
        question = f"screen {candidate.label()}" + (f" with {self.kept_names()}" if self.kept != self.base else "")
        result = self.race(question, self.kept, together, SCREEN, (candidate,), share_base=True, until=self.until())
        if candidate.id not in self.late:
            self.turn_s = max(self.turn_s, time.monotonic() - began)
        if result is None or (best is not None and not leads(result, self.screened[best.id])):
            return False
        fate, reason = in_words(result)
        fate = "inconclusive" if fate == "kept" else fate       # until it is added and verified
        self.fates[candidate.id] = Fate(fate, reason + self.on_top(), candidate, result.gain, result.gain_ci)
        self.screened[candidate.id], self.against[candidate.id] = result, self.kept
        return True

    def _is_hopeless(self, candidate: Candidate) -> bool:
        return self.screened[candidate.id].gain <= combining.HOPELESS

    def _look_again(self) -> None:
        """Race what is undecided once more, and for longer, what could give most first: time that is left is for this."""
        undecided = [(could_give, fate.candidate) for fate in self.fates.values()
                     if fate.candidate is not None and (could_give := self._could_give(fate)) > 0]
        for _, candidate in sorted(undecided, key=lambda entry: -entry[0]):
            if time.monotonic() > self.last():
                return
            self.try_to_add(candidate, again=True)

    def _could_give(self, fate: Fate) -> float:
        """What a technique may still gain; 0 where nothing is open. Where one pair contradicts the finding that names it, that is open:
        processes of one program may differ by more than any technique gives, and that pair may have had a slow one."""
        candidate = fate.candidate
        if candidate is None or candidate.id in self.verified or fate.gain_ci is None:
            return 0.0
        if fate.is_open(self.racer.threshold):
            return fate.gain_ci[1]
        raced = self.screened.get(candidate.id)
        if fate.fate not in ("slower", "no_difference") or raced is None or len(raced.pairs) > 1 or candidate.module.TECHNIQUE.slow_start:
            return 0.0
        return promised_gain(candidate.id, bound_of(candidate.module, self.facts), self.findings)

    def _try_what_is_left(self) -> None:
        for others, first_best in self._left:
            best = self._best_of(others, first_best)
            if best is not None and not self._is_hopeless(best) and (time.monotonic() <= self.last() or self.certain(best)):
                self.try_to_add(best)

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
                self.curves += verified.curves
                self.settle(candidate, fate, f"{reason}, in the final set")
                self.tell_kept()
            else:
                self.settle(candidate, "kept", f"{reason}, in the final set{_why_it_stays(verified)}")


def _why_it_stays(verified: Verified | str | None) -> str:
    """Why a technique that gives nothing in the final set is in it all the same; `verified` is the set without it, where that was asked."""
    if verified is None:
        return ""
    if isinstance(verified, str):
        return f", which could not be verified without it ({verified})"
    return f", which {'did not verify' if verified.passed is False else 'could not be verified'} without it"
