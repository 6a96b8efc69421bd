"""Finding a set of techniques that keeps a memory limit which the baseline does not keep.

    alone      every technique that is only worth a trial under a limit, each in a trial of its own
    together   where none keeps the limit alone: those that save most are added until the set does
    verified   it must train like the baseline; where that runs out of memory itself, nothing can be compared

The fastest set that keeps the limit alone is taken: by the time of its steps, and by a race where that leaves a
doubt. The search then stands on this set: it adds what is faster and still fits, and drops what is not needed any
more.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from saturate.records import sizes
from saturate.study.candidates import Candidate, Set, conflict, key, ordered
from saturate.study.fates import FATES, Fate
from saturate.study.racing import SCREEN
from saturate.study.search import Search
from saturate.study.standing import CannotVerify
from saturate.trial.outcome import OUT_OF_MEMORY
from saturate.trial.process import TrialEnded

#: Times of steps in different trials that differ less than this do not tell which is faster.
DOUBT = 1.25

#: A technique that lowers the peak by less than this share is not added to a set that does not fit yet.
LEAST_SAVING = 0.005


@dataclass(frozen=True)
class Probe:
    """What one trial of a set showed. `step_ms` None: it does not keep the limit; `peak_bytes` None: it ran out of memory."""

    techniques: Set
    step_ms: float | None
    peak_bytes: int | None

    @property
    def need(self) -> float:
        return float("inf") if self.peak_bytes is None else self.peak_bytes


class Fitting:
    """Looks for `search.base`. `probes` are the single techniques that run."""

    def __init__(self, search: Search):
        self.search = search
        self.bench = search.racer.bench
        self.least: Probe | None = None         # the set that came nearest
        self.rejected: set[str] = set()         # techniques that do not train like the baseline, or fit only now and then
        self.unfit: list[str] = []              # of sets that kept the limit, why they are not taken
        self.out_of_time = False                # nothing was found, and the budget ended before everything was tried

    def find(self) -> str | None:
        """Set `search.base` and `search.kept`; or say why no set that keeps the limit was found. Raises CannotVerify."""
        variants = self.search.eligible()
        saving = [c for group in variants for c in group if self.search.saves_memory(c)]
        others = [group[0] for group in variants if not self.search.saves_memory(group[0])]
        probes = self._alone(saving)
        while (base := self._choose(probes, others)) is not None:
            if (self.bench.starved or self._trains_alike(base)) and self._stand_on(base):
                return None
        for identity, fate in self.search.fates.items():
            if fate.fate == "not_tried" and fate.candidate is not None:
                self.search.fates[identity] = Fate("not_tried", "nothing keeps the memory limit, so there was nothing to add it to")
        return self._why_nothing(saving)

    def _choose(self, probes: list[Probe], others: list[Candidate]) -> Set | None:
        probes = [p for p in probes if p.techniques[0].id not in self.rejected]
        found = self._fastest(probes) or self._together(probes)
        if found is None:
            more = self._alone([c for c in others if c.id not in self.rejected])
            found = self._fastest(more) or self._together([*probes, *more])
        return found

    # -- trials ----------------------------------------------------------------------------------------------------

    def _alone(self, candidates: list[Candidate]) -> list[Probe]:
        """One trial of each; those that do not run for another reason than memory get their fate."""
        found = []
        for candidate in candidates:
            if time.monotonic() > self.search.deadline:
                break
            probe = self._probe((candidate,), candidate)
            if probe is not None:
                found.append(probe)
        return found

    def _probe(self, techniques: Set, added: Candidate) -> Probe | None:
        """None, and a fate for `added`, when the set fails for another reason than its memory."""
        question = f"probe {key(techniques)}"
        stored = self.bench.store.answer(question)
        if stored is not None:
            return self._seen(Probe(techniques, *stored[:2]), added, stored[2])
        step_ms, why = None, ""
        try:
            live = self.bench.live(f"fit {_labels(techniques)}", techniques)
            step_ms = live.step_ms
            self.bench.finish_live(live)
        except TrialEnded as ended:
            kind, why = ended.outcome.kind, f"{ended.outcome.kind.replace('_', ' ')}: {ended.outcome.reason}"
            if kind != "over_limit" and kind not in OUT_OF_MEMORY:
                self.rejected.add(added.id)
                self.search.settle(added, FATES.get(kind, "failed"), why)
                self.search.say(f"  {_labels(techniques)}: {why}")
                return None
        probe = Probe(techniques, step_ms, self.bench.peaks.of(techniques))
        self.bench.store.set_answer(question, [probe.step_ms, probe.peak_bytes, why])
        return self._seen(probe, added, why)

    def _seen(self, probe: Probe, added: Candidate, why: str) -> Probe:
        if probe.step_ms is None and (self.least is None or probe.need < self.least.need):
            self.least = probe
        if len(probe.techniques) == 1:
            self.search.settle(added, "failed" if why else "not_tried", why or "it fits, but another set was faster by then")
        self.search.say(f"  {_labels(probe.techniques)}: " + (why or f"fits with {sizes.show(probe.need)}, step {probe.step_ms:.1f} ms"))
        return probe

    def _together(self, probes: list[Probe]) -> Set | None:
        """Add the techniques, those that need least alone first, until the set keeps the limit."""
        chosen: Probe | None = None
        for single in sorted(probes, key=lambda p: p.need):
            if chosen is None:
                chosen = single
                continue
            if conflict(chosen.techniques, single.techniques[0]):
                continue
            if time.monotonic() > self.search.deadline:
                break
            both = self._probe(ordered((*chosen.techniques, *single.techniques)), single.techniques[0])
            if both is None:
                continue
            if both.step_ms is not None:
                return both.techniques
            if both.peak_bytes is None or both.need < chosen.need * (1 - LEAST_SAVING):
                chosen = both
        return None

    # -- choosing --------------------------------------------------------------------------------------------------

    def _fastest(self, probes: list[Probe]) -> Set | None:
        """Of those that fit."""
        fitting = sorted((p.step_ms, index) for index, p in enumerate(probes) if p.step_ms is not None)
        if not fitting:
            return None
        first_ms, best = fitting[0][0], probes[fitting[0][1]].techniques
        for step_ms, index in fitting[1:3]:
            other = probes[index]
            if step_ms > DOUBT * first_ms or time.monotonic() > self.search.deadline:
                break
            question = f"fit {other.techniques[0].label()} or {best[0].label()}"
            result = self.search.race(question, best, other.techniques, SCREEN, other.techniques[:1])
            if result is not None and result.decision.verdict == "faster":
                best = other.techniques
        return best

    def _trains_alike(self, base: Set) -> bool:
        """Whether it verifies; if not, what is to blame is rejected."""
        search = self.search
        verified = search.verify(base, base[-1])
        if not isinstance(verified, str) and verified.passed:
            search.curves += verified.curves
            return True
        if search.verifier.refusal is not None:     # of any set
            raise CannotVerify(search.verifier.refusal)
        blamed = base[-1]
        for member in base if len(base) > 1 else ():
            alone = search.verify((member,), member)
            if isinstance(alone, str) or not alone.passed:
                blamed, verified = member, alone
                break
        if isinstance(verified, str):           # its fate is known: it failed
            self._reject(base, blamed, verified)
            return False
        search.curves += verified.curves
        fate, reason = "inconclusive", f"cannot verify: {verified.reason}"
        if verified.passed is False:
            fate, reason = "rejected_numerics", verified.reason
        search.settle(blamed, fate, reason)
        search.say(f"  {blamed.label()}: {verified.reason}")
        self._reject(base, blamed, reason)
        return False

    def _reject(self, base: Set, blamed: Candidate, reason: str) -> None:
        """Take another set than this one, which kept the limit."""
        self.rejected.add(blamed.id)
        self.unfit.append(f"{_labels(base)} kept it with {sizes.show(self.bench.peaks.of(base) or 0)}, but {blamed.id}: {reason}")

    def _stand_on(self, base: Set) -> bool:
        """Whether it keeps the limit in a race as well: peaks of one program differ from run to run."""
        search = self.search
        search.say(f"  {_labels(base)} keeps the limit with {sizes.show(self.bench.peaks.of(base) or 0)}")
        if not self.bench.starved:
            search.fitted = search.race(f"fit {_labels(base)}", (), base, SCREEN, base[:1], share_base=True)
            if too_much := self.bench.peaks.too_much(base):
                search.settle(base[-1], "failed", f"over limit: {too_much} (in a later run)")
                self._reject(base, base[-1], f"it {too_much} in a later run")
                return False
        search.base = search.kept = base
        for member in base:
            one = search.fitted if len(base) == 1 else None
            search.fates[member.id] = Fate("kept", self._in_words(), member, one.gain if one else None, one.gain_ci if one else None)
        search.tell_kept()
        return True

    def _in_words(self) -> str:
        before = self.bench.peaks.too_much(())
        return "needed: without it the training " + (before or "runs out of memory")

    def _why_nothing(self, saving: list[Candidate]) -> str:
        limit = sizes.show(self.bench.peaks.limit_bytes or 0)
        said = f"nothing {'that can be taken ' if self.unfit else ''}keeps the limit of {limit}: the baseline " + (
            "runs out of memory" if self.bench.starved else f"needs {sizes.show(self.bench.peaks.of(()) or 0)}")
        if not saving:
            return f"{said}, and no technique that saves memory applies to it"
        if self.unfit:
            return "; ".join([said, *self.unfit])
        if self.least is not None and self.least.peak_bytes is not None:
            said += f", the least was {sizes.show(self.least.need)} with {_labels(self.least.techniques)}"
        self.out_of_time = time.monotonic() > self.search.deadline
        return said + ("; the budget ended first, a longer --budget tries more" if self.out_of_time else "")


def let_go(search: Search, reason: str) -> str:
    """Nothing is kept, since what was needed to fit did not fit again, for this `reason`; in words."""
    for member in search.base:
        search.settle(member, "failed", f"over limit in a later run: {reason}")
    said = f"{_labels(search.base)} kept the limit at first, and not in a later run: {reason}. Ask for less than there is with --fit"
    search.base = search.kept = ()
    search.tell_kept()
    return said


def _labels(techniques: Set) -> str:
    return " + ".join(c.label() for c in techniques)
