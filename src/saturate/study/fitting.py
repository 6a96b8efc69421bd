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
        self.rejected: set[str] = set()         # techniques that do not train like the baseline
        self.out_of_time = False                # nothing was found, and the budget ended before everything was tried

    def find(self) -> str | None:
        """Set `search.base` and `search.kept`; or say why no set that keeps the limit was found."""
        variants = self.search.eligible()
        saving = [c for group in variants for c in group if self.search.saves_memory(c)]
        others = [group[0] for group in variants if not self.search.saves_memory(group[0])]
        probes = self._alone(saving)
        while (base := self._choose(probes, others)) is not None:
            if self.bench.starved or self._trains_alike(base):
                self._stand_on(base)
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
        names = " + ".join(c.label() for c in techniques)
        question = f"probe {key(techniques)}"
        stored = self.bench.store.answer(question)
        if stored is not None:
            return self._seen(Probe(techniques, *stored[:2]), added, stored[2])
        step_ms, why = None, ""
        try:
            live = self.bench.live(f"fit {names}", techniques)
            step_ms = live.step_ms
            self.bench.finish_live(live)
        except TrialEnded as ended:
            kind, why = ended.outcome.kind, f"{ended.outcome.kind.replace('_', ' ')}: {ended.outcome.reason}"
            if kind != "over_limit" and kind not in OUT_OF_MEMORY:
                self.rejected.add(added.id)
                self.search.settle(added, FATES.get(kind, "failed"), why)
                self.search.say(f"  {names}: {why}")
                return None
        probe = Probe(techniques, step_ms, self.bench.peaks.of(techniques))
        self.bench.store.set_answer(question, [probe.step_ms, probe.peak_bytes, why])
        return self._seen(probe, added, why)

    def _seen(self, probe: Probe, added: Candidate, why: str) -> Probe:
        if probe.step_ms is None and (self.least is None or probe.need < self.least.need):
            self.least = probe
        if len(probe.techniques) == 1:
            self.search.settle(added, "failed" if why else "not_tried", why or "it fits, but another set was faster by then")
        names = " + ".join(c.label() for c in probe.techniques)
        self.search.say(f"  {names}: " + (why or f"fits with {sizes.show(probe.need)}, step {probe.step_ms:.1f} ms"))
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
        blamed = base[-1]
        for member in base if len(base) > 1 else ():
            alone = search.verify((member,), member)
            if isinstance(alone, str) or not alone.passed:
                blamed, verified = member, alone
                break
        self.rejected.add(blamed.id)
        if not isinstance(verified, str):       # otherwise its fate is known: it failed
            search.curves += verified.curves
            fate = "rejected_numerics" if verified.passed is False else "inconclusive"
            search.settle(blamed, fate, verified.reason if verified.passed is False else f"cannot verify: {verified.reason}")
            search.say(f"  {blamed.label()}: {verified.reason}")
        return False

    def _stand_on(self, base: Set) -> None:
        search = self.search
        names = " + ".join(c.label() for c in base)
        search.say(f"  {names} keeps the limit with {sizes.show(self.bench.peaks.of(base) or 0)}")
        if not self.bench.starved:
            search.fitted = search.race(f"fit {names}", (), base, SCREEN, base[:1], share_base=True)
        search.base = search.kept = base
        for member in base:
            one = search.fitted if len(base) == 1 else None
            search.fates[member.id] = Fate("kept", self._in_words(), member, one.gain if one else None, one.gain_ci if one else None)
        search.tell_kept()

    def _in_words(self) -> str:
        before = self.bench.peaks.too_much(())
        return "needed: without it the training " + (before or "runs out of memory")

    def _why_nothing(self, saving: list[Candidate]) -> str:
        limit = sizes.show(self.bench.peaks.limit_bytes or 0)
        said = f"nothing keeps the limit of {limit}: the baseline " + (
            "runs out of memory" if self.bench.starved else f"needs {sizes.show(self.bench.peaks.of(()) or 0)}")
        if not saving:
            return f"{said}, and no technique that saves memory applies to it"
        if self.least is not None and self.least.peak_bytes is not None:
            said += f", the least was {sizes.show(self.least.need)} with {' + '.join(c.label() for c in self.least.techniques)}"
        self.out_of_time = time.monotonic() > self.search.deadline
        return said + ("; the budget ended first, a longer --budget tries more" if self.out_of_time else "")
