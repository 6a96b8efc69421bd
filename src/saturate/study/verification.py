"""Verification runs: is a set of techniques still the same training as the baseline? The verdict itself is of `verify/`.

A candidate is compared with the baseline on the same data and seed, update by update. Where it may draw other random
numbers and does, it is compared twice: aligned (dropout off, samples seeded by their index, compiled code drawing what eager code draws) and, with its own
randomness, against the spread of several baseline seeds.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from saturate.records.result import NumericsCurve
from saturate.study.bench import Bench
from saturate.study.candidates import Set, key, merging, ordered, weakest
from saturate.study.live import Order, on_side, timed_losses
from saturate.trial.process import Trial, TrialEnded
from saturate.verify import compare as comparison
from saturate.verify.deviation import FIRST_ACTING
from saturate.verify.envelope import envelope
from saturate.verify.series import CaptureDamaged, Series, as_often, read
from saturate.verify.tolerance import Tolerance, informative, repeated, tolerance, unrepeatable, widened

#: Two updates before techniques act, then fifty.
UPDATES = 52
SEED = 20
ENVELOPE_SEEDS = 5

#: Perturbed baseline runs before something is rejected that nearly passed.
TWINS = 3

#: Unchanged repetitions of a baseline on an accelerator that must give its bits before an exact technique is rejected for other ones:
#: there, two that agree may do so by chance.
REPETITIONS = 3

#: Verification runs of a study in which one technique is kept, and as much time again for its races.
RUNS = 8

#: One rounding to the number format that a class may bring in, relative; the other classes may bring in none but the baseline's own
#: (see `Series.coarsest_rounding`). No technique can ask for more.
ROUNDING = {"precision": 2.0**-9, "convergence": 2.0**-9}

#: The study's question whether verification runs take the algorithms that timed ones take.
_ANY_ALGORITHM = "verified with any algorithm"


class Verified(msgspec.Struct, frozen=True):
    """`passed` None: cannot verify, and `reason` says why."""

    passed: bool | None
    reason: str
    curves: list[NumericsCurve] = []


@dataclass(frozen=True)
class Run:
    """One kind of verification run of one set."""

    techniques: Set = ()
    aligned: bool = False
    repetition: int = 0
    perturb: float = 0.0
    seed_offset: int = 0


def too_slow(step_ms: float, budget_s: float) -> str | None:
    """Why nothing can be verified within a budget that not even the updates of one run fit into; None when they do."""
    needed_s = UPDATES * step_ms / 1e3
    if needed_s <= budget_s:
        return None
    return (f"{UPDATES} updates of {step_ms / 1e3:.1f} s take longer than the whole budget of {budget_s:.0f} s; "
            f"give it --budget {budget_needed(step_ms)}, or a smaller configuration")


def budget_needed(step_ms: float, least_s: float = 0.0) -> str:
    """What verifying steps of this length takes, at least `least_s`, for the command line."""
    return f"{math.ceil(max(RUNS * UPDATES * step_ms / 1e3, least_s) / 60)}m"


def first_difference(expected: list[list[float]], found: list[list[float]], allowed: list[float]) -> int | None:
    """The first update whose micro-step losses are of another number, or deviate by more than `allowed`."""
    for update, (ours, theirs, limit) in enumerate(zip(expected, found, allowed)):
        if len(ours) != len(theirs) or any(not abs(a - b) <= limit for a, b in zip(ours, theirs)):
            return update
    return None


class Verifier:
    """Runs and caches verification runs. Baseline runs are shared by all candidates. `at_once`: so many of them may run at once,
    beside what stands frozen; nothing in them is timed, and most of a short one is its start."""

    def __init__(self, bench: Bench, at_once: int = 1):
        self.bench = bench
        self._series: dict[str, Series] = {}
        self.at_once = at_once
        self.reference: Set = ()                # what everything is compared with; the baseline, if that runs
        self.refusal: str | None = None         # why nothing can be verified in this workload
        self.note: str | None = None            # what the user should know of how it was verified

    def verify(self, techniques: Set) -> Verified:
        """Raises TrialEnded when the candidate cannot run, or (its `side` is "a" then) what it is compared with."""
        question = f"verify {key(techniques)}"
        stored = self.bench.store.answer(question)
        if stored is not None:
            return msgspec.convert(stored, Verified)
        found = self._verify(techniques)
        self.bench.store.set_answer(question, msgspec.to_builtins(found))
        return found

    def check_baseline(self) -> str | None:
        """Why this workload cannot be verified, or None. Costs the first baseline runs."""
        if self.bench.store.answer(_ANY_ALGORITHM):
            self._allow_any_algorithm()
        stored = self.bench.store.answer("informative")
        if stored is None:
            try:
                stored = [informative(self._first_series())]
            except TrialEnded as ended:
                if ended.outcome.kind != "too_short":
                    raise
                stored = [f"{ended.outcome.reason}; {UPDATES} updates are needed to verify"]
            self.bench.store.set_answer("informative", stored)
        self.refusal = stored[0]
        return self.refusal

    def _first_series(self) -> Series:
        """That of the baseline, with whatever algorithms it trains if it has no memory for those that repeat themselves bit by bit."""
        try:
            return self.series(Run(self.reference))
        except TrialEnded as ended:
            if ended.outcome.kind != "out_of_memory_device" or self.note is not None:
                raise
        self._allow_any_algorithm()
        found = self.series(Run(self.reference))
        self.bench.store.set_answer(_ANY_ALGORITHM, True)       # not before: when it fails, too, memory was short for another reason
        return found

    def _allow_any_algorithm(self) -> None:
        self.note = ("verified without torch's deterministic algorithms, with which the baseline runs out of the device's memory: "
                     "what it differs from its own repetition is allowed")

    def _verify(self, techniques: Set) -> Verified:
        if self.check_baseline() is not None:
            return Verified(None, str(self.refusal))
        added = [member for member in techniques if member not in self.reference]
        numerics = weakest(tuple(added))
        for member in added:            # in a set with a weaker one, a technique still keeps its own promise
            if member.numerics != numerics and not (alone := self.verify(ordered((*self.reference, member)))).passed:
                return Verified(alone.passed, f"{member.id} alone: {alone.reason}", alone.curves)
        found = self._trains_alike(techniques, numerics)
        otherwise = self._otherwise_when_timed(techniques, self._rounding(numerics)) if found.passed else None
        return found if otherwise is None else Verified(False, otherwise, found.curves)

    def _rounding(self, numerics: str) -> float:
        """One rounding to the coarsest format: that the class may bring in, that the script computes in itself, or that what everything
        is compared with has brought in."""
        brought = [ROUNDING[one] for one in (numerics, *(member.numerics for member in self.reference)) if one in ROUNDING]
        return max([self.series(Run(self.reference)).coarsest_rounding, *brought])

    def _trains_alike(self, techniques: Set, numerics: str) -> Verified:
        baseline = self.series(Run(self.reference))
        subject = " + ".join(c.id for c in techniques)
        rounding = self._rounding(numerics)
        if numerics != "exact":         # which is bit-identical as a rule, and needs nothing else then
            self._prepare(*self._compared(techniques, rounding, aligned=False))
        if comparison.bitwise(baseline, self.series(Run(techniques))):
            return Verified(True, "bit-identical to the baseline", [])
        if numerics == "exact":
            baseline = self._repeated()
            if comparison.bitwise(baseline, self.series(Run(techniques))):
                return Verified(True, "bit-identical to the baseline, as far as that repeats itself", [])
            if self._repeats_bits(baseline):
                return Verified(False, "declared exact, but not bit-identical to the baseline, which repeats itself exactly")
        self.refusal = unrepeatable(baseline, self.series(Run(self.reference, repetition=1)))
        if self.refusal is not None:
            self.bench.store.set_answer("informative", [self.refusal])
            return Verified(None, self.refusal)
        found = self._compare(techniques, rounding, aligned=False)
        if not found.passed and numerics not in ("exact", "reordering"):
            found = self._as_stream(techniques, rounding, found.reason)
        return Verified(found.passed, found.reason, [msgspec.structs.replace(c, subject=subject) for c in found.curves])

    def _repeated(self, aligned: bool = False) -> Series:
        """The baseline without what of its buffers a second run of it has otherwise."""
        return repeated(*(self.series(Run(self.reference, aligned=aligned, repetition=number)) for number in (0, 1)))

    def _repeats_bits(self, baseline: Series) -> bool:
        """One repetition tells most that do not; only then are the others asked for, several at a time."""
        times = 1 if baseline.device in ("", "cpu") else REPETITIONS
        first, *others = [Run(self.reference, repetition=number) for number in range(1, times + 1)]
        if not comparison.bitwise(baseline, self.series(first)):
            return False
        self._prepare(*others)
        return all(comparison.bitwise(baseline, self.series(run)) for run in others)

    def _compare(self, techniques: Set, rounding: float, aligned: bool) -> comparison.Verdict:
        """One twin is enough to pass. Before anything is rejected that nearly passed, there are more: when a training begins to
        amplify rounding (a ReLU's kink) is chance, and one twin may have been late."""
        self._prepare(*self._compared(techniques, rounding, aligned))
        allowed, baseline = self._tolerance(rounding, aligned), self._repeated(aligned)
        subject = self._with_its_micro_steps(Run(techniques, aligned=aligned))
        found = comparison.compare(baseline, subject, allowed)
        if found.nearly:
            found = comparison.compare(baseline, subject, self._tolerance(rounding, aligned, TWINS))
        return found

    def _compared(self, techniques: Set, rounding: float, aligned: bool) -> tuple[Run, ...]:
        """What every comparison needs, the baseline first."""
        return (Run(self.reference, aligned=aligned), Run(techniques, aligned=aligned), Run(self.reference, aligned=aligned, repetition=1),
                Run(self.reference, aligned=aligned, perturb=rounding))

    def _tolerance(self, rounding: float, aligned: bool = False, twins: int = 1) -> Tolerance:
        perturbed = [Run(self.reference, aligned=aligned, perturb=rounding, repetition=number) for number in range(twins)]
        repetitions = [Run(self.reference, aligned=aligned, repetition=number) for number in range(1, REPETITIONS + 1)]
        repetitions = [run for run in repetitions if run.repetition == 1 or self._known(run)]
        runs = [Run(self.reference, aligned=aligned), *repetitions, *perturbed]
        self._prepare(*runs)
        plain, *others = map(self.series, runs)
        plain = repeated(plain, others[0])
        return tolerance(plain, others[:len(repetitions)], others[len(repetitions):], rounding)

    def _otherwise_when_timed(self, techniques: Set, rounding: float) -> str | None:
        """What shows that the timed trials of a set did not train as its verification run did; None when nothing does.

        Only a script that seeds itself can tell: its baseline has the same losses whether it is timed or verified. On an accelerator
        it has not where verification runs have deterministic algorithms and timed ones have others; what that makes of the baseline
        is allowed then.
        """
        timed = [self.bench.store.answer(timed_losses(chosen)) for chosen in (self.reference, techniques)]
        if None in timed:
            return None
        baseline = self.series(Run(self.reference))
        plain, own, fewer = baseline.losses, self.series(Run(techniques)).losses, self._fewer(techniques)
        if all(ours == theirs for ours, theirs in zip(own[FIRST_ACTING:], timed[1][FIRST_ACTING:])):
            return None
        allowed = self._tolerance(rounding).loss
        if first_difference(plain[:1], timed[0][:1], allowed) is not None:
            return None     # nothing has been amplified yet: it draws its own seed, and what that makes of its losses says nothing
        if baseline.device not in ("", "cpu"):
            allowed = widened(allowed, plain, timed[0])
        if first_difference(plain, timed[0], allowed) is not None:
            return None
        own, again = as_often(plain, own, fewer), as_often(plain, timed[1], fewer)
        update = first_difference(own, again, allowed)
        if update is None:
            return None
        return f"it trains otherwise when it is timed: loss {again[update]} in update {update}, {own[update]} in verification"

    def _as_stream(self, techniques: Set, rounding: float, reason: str) -> comparison.Verdict:
        """Other random numbers are allowed: the same training with randomness aligned, and an ordinary one without."""
        aligned = self._compare(techniques, rounding, aligned=True)
        if not aligned.passed:
            return comparison.Verdict(aligned.passed, f"{aligned.reason} (with dropout off and samples aligned)", aligned.curves)
        seeds = [Run(self.reference, seed_offset=offset) for offset in range(ENVELOPE_SEEDS)]
        self._prepare(*seeds)
        inside = envelope([*map(self.series, seeds)], self._with_its_micro_steps(Run(techniques)))
        if not inside.passed:
            return comparison.Verdict(inside.passed, f"{inside.reason}; same seed: {reason}", aligned.curves)
        return comparison.Verdict(True, f"aligned: {aligned.reason}; with its own randomness: {inside.reason}", aligned.curves)

    def _fewer(self, techniques: Set) -> float:
        """How many micro-steps of what everything is compared with may be one."""
        return merging(techniques) / merging(self.reference)

    def _with_its_micro_steps(self, run: Run) -> Series:
        """The recorded run, with as many micro-steps as what it is compared with where its techniques run several of them as one: what
        comes to the backward passes of an update adds up to the same."""
        found, fewer = self.series(run), self._fewer(run.techniques)
        if fewer == 1:
            return found
        return replace(found, losses=as_often(self.series(replace(run, techniques=self.reference)).losses, found.losses, fewer))

    def series(self, run: Run) -> Series:
        """The recorded run, from memory, from the study's folder, or from a fresh process."""
        if not self._known(run):
            self._record(run)
        return self._series[_name(run)]

    def _known(self, run: Run) -> bool:
        """Whether it is in memory; now also if it was in the study's folder."""
        name = _name(run)
        folder = None if name in self._series else self.bench.store.answer(f"series {name}")
        if folder is not None:
            with contextlib.suppress(OSError, CaptureDamaged):      # removed meanwhile, to free space: it is recorded again
                self._series[name] = read(self.bench.folder / folder)
        return name in self._series

    def _prepare(self, *runs: Run) -> None:
        """Record what is not known of these, if several can be recorded at a time; otherwise each has its turn when it is asked for."""
        missing = [run for run in runs if not self._known(run)]
        if self.at_once == 1 or self._order(missing) == "one by one":
            return
        for first in range(0, len(missing), self.at_once):
            if len(together := missing[first:first + self.at_once]) > 1:    # one alone gains nothing by being early, and may not be needed
                self._record(*together)

    def _order(self, runs: Iterable[Run]) -> Order:
        return self.bench.order(UPDATES, tuple(member for run in runs for member in run.techniques))

    def _capture(self, run: Run) -> dict[str, Any]:
        """What the agent is told to record."""
        return {
            "updates": UPDATES, "seed": SEED, "seed_offset": run.seed_offset, "aligned": run.aligned, "deterministic": self.note is None,
            "perturb": {"relative": run.perturb, "seed": 1 + run.repetition} if run.perturb else None,
        }

    def _record(self, *runs: Run) -> None:
        """In fresh processes, which start together."""
        in_turn = self._order(runs) == "in turn"
        with contextlib.ExitStack() as otherwise:
            started: list[Trial] = []
            for run in runs:
                started.append(self.bench.start(_purpose(run), run.techniques, self._capture(run), held=in_turn and bool(started)))
                otherwise.callback(self.bench.abandon, started[-1], run.techniques)
            for run, begun in zip(runs, started):
                trial = on_side("a" if run.techniques == self.reference else "b", partial(self._finished, run, begun))
                self._series[_name(run)] = read(trial.spec.folder)
                self.bench.store.set_answer(f"series {_name(run)}", trial.spec.folder.name)

    def _finished(self, run: Run, begun: Trial) -> Trial:
        trial, hello = self.bench.ready(_purpose(run), run.techniques, self._capture(run), begun)
        try:
            self.bench.check_applied(trial, hello)
            # What may change a bit and steps aside in this run has the baseline's, which says nothing of it. Of the others some act seldom.
            if acting := tuple(one for one in run.techniques if one.numerics != "exact" and one not in self.reference):
                self.bench.prove(trial, acting)
        finally:
            self.bench.finish(trial, run.techniques)
        return trial


def _name(run: Run) -> str:
    return json.dumps([key(run.techniques), run.aligned, run.repetition, run.perturb, run.seed_offset])


def _purpose(run: Run) -> str:
    words = [word for word, on in (("aligned", run.aligned), ("twin", run.perturb), ("seed", run.seed_offset)) if on]
    return " ".join(["verify", " + ".join(c.id for c in run.techniques) or "baseline", *words])
