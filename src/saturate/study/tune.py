"""`saturate tune`, from the command to the study record.

    baseline   start the workload alone: does it train, what is a step, what is there to gain
    noise      race the baseline against itself, in fresh processes
    fit        with --fit, and a baseline that needs more: find a set that keeps the limit
    search     screen, add, ablate; every kept set is verified
    confirm    race the final set against the baseline in fresh pairs
    write      recipe, record
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

from saturate.errors import (
    EnvironmentProblem,
    SaturateError,
    StudyDamaged,
    TechniqueError,
    TooNoisy,
)
from saturate.measure import race
from saturate.measure.race import Limits
from saturate.records.facts import Facts
from saturate.records.result import StudyRecord
from saturate.report import words
from saturate.study import baseline, confirming, deadline, memory_limit, profile, sources, summary
from saturate.study.bench import Bench
from saturate.study.candidates import Set
from saturate.study.ending import OURS, Interrupted, failed_again, in_our_words
from saturate.study.racing import Racer, Result
from saturate.study.search import Search
from saturate.study.standing import CannotVerify, LimitPassed, passed_limit
from saturate.study.state import Request, Study
from saturate.study.store import Store, StudyLock, find_unfinished, new_run
from saturate.study.verification import Verifier, budget_needed, too_slow
from saturate.techniques import _registry
from saturate.trial import planning
from saturate.trial.process import TrialEnded, Workload

AA = Limits(max_pairs=2, min_rounds=6, max_rounds=10)

#: A machine on which even the same program differs this much between two runs decides nothing. That is not said after one
#: pair with few rounds, while there is time for more.
HOPELESS_NOISE = 0.30
PATIENT_AA = Limits(max_pairs=5, min_rounds=6, max_rounds=30)

#: Shares of the budget after which no second A/A pair is begun, and after which hope is given up.
NOISE_SHARE = 0.1
PATIENCE_SHARE = 0.4

#: Share of a step from which a training counts as waiting for its input.
WAITS = 0.01

#: Share of the budget that the search leaves for the final race.
RESERVE = 0.25


def tune(request: Request, say: Callable[[str], None],
         on_end: Callable[[float], None] | None = None) -> tuple[StudyRecord, SaturateError | None]:
    """Run or resume a study. Returns its record, and the error that ended it early if one did. `on_end` is told when its budget ends
    (time.monotonic), which for a resumed one is sooner.

    Raises Interrupted, and SaturateError when there is not even a study to tell of.
    """
    registry = _registry.load()
    _known(registry, {*(request.only or ()), *request.skip})
    lock = StudyLock(request.directory)
    try:
        with in_our_words(request.directory):
            study = _open(request, registry, say)
            study.on_end = on_end
        try:
            return _work(study)
        finally:
            study.store.close()
    finally:
        lock.release()


def _open(request: Request, registry: dict[str, ModuleType], say: Callable[[str], None]) -> Study:
    """The unfinished study of the same request, or a new one."""
    notes: list[str] = []
    passed_by: list[str] = []

    def unreadable(problem: EnvironmentProblem) -> None:
        notes.append(f"{problem.message} ({problem.cause or problem.remedy}); it was left as it is and not used")
        say(f"warning[{problem.code}] {notes[-1]}")

    surroundings = request.surroundings()

    def unchanged(store: Store) -> bool:
        then = store.meta("surroundings") or {}
        other = [name for name, digest in surroundings.items() if then.get(name) != digest]
        other = other or sources.changed((store.answer("baseline") or {}).get("sources", {}))
        if other:
            passed_by.append(f"an interrupted study was not gone on with: {', '.join(other[:3])} changed since")
        return not other

    identity = request.identity()
    folder = find_unfinished(request.directory, identity, unreadable, unchanged)
    resumed = folder is not None
    folder = folder or new_run(request.directory, identity)
    store = Store(folder)
    store.set_meta("identity", identity)
    store.set_meta("surroundings", surroundings)
    if resumed:
        notes.append("resumed: measurements made before an interruption were used")
        say(f"resuming {folder.name}")
    elif passed_by:
        notes.append(passed_by[0])      # the newest one's
        say(notes[-1])
    study = Study(request, folder, store, registry, say, script=request.script(), notes=notes)
    summary.write_recipe(study)     # it exists from the first moment on, empty
    return study


def _work(study: Study) -> tuple[StudyRecord, SaturateError | None]:
    request, store = study.request, study.store
    bench = Bench(Workload(request.argv, request.cwd, request.environment, request.timeout_s),
                  study.folder, request.directory, store, request.budget_s, study.say, request.limit_bytes)
    interrupted = False
    try:
        with in_our_words(request.directory):
            try:
                _measure(study, bench)
            finally:
                bench.close()
    except KeyboardInterrupt:
        interrupted = True
    except SaturateError as error:
        study.error = error
    study.isolation = bench.isolation
    try:
        with in_our_words(request.directory):
            bench.book()
    except KeyboardInterrupt:
        interrupted = True
    except SaturateError as error:
        study.error = study.error or error
    try:
        record = _conclude(study, interrupted)
    except KeyboardInterrupt:       # what was measured is told of all the same: that takes a moment
        interrupted, record = True, _conclude(study, interrupted=True)
    if interrupted:
        raise Interrupted(record)
    return record, study.error


def _conclude(study: Study, interrupted: bool) -> StudyRecord:
    """Make the record, write recipe and report, and only then call the study finished: the same command would begin another one."""
    try:
        record = summary.record_of(study)
    except SaturateError as error:
        raise study.error or error from None     # there is nothing left to tell of
    try:
        with in_our_words(study.request.directory):
            summary.write(study, record)
            # Asked again, what failed is tried again from the start; where the machine was at fault, it goes on.
            if not interrupted and (isinstance(study.error, StudyDamaged) or not isinstance(study.error, EnvironmentProblem)):
                study.store.set_meta("finished", True)
                planning.forget_samples(study.request.directory)
    except SaturateError as error:
        study.error = study.error or error
    return record


def _known(registry: dict[str, ModuleType], ids: set[str]) -> None:
    from saturate.records.spelling import suggestion

    for identity in sorted(ids):
        if identity not in registry:
            raise TechniqueError(f"there is no technique {identity!r}", remedy=suggestion(identity, list(registry))
                                 or "saturate techniques lists them")


def _measure(study: Study, bench: Bench) -> None:
    request = study.request
    used = sum(seconds for name, seconds in study.store.phases() if name == "total")
    end = study.started + max(request.budget_s - used, 0.3 * request.budget_s)
    bench.ends = end
    if study.on_end is not None:
        study.on_end(end)

    with _phase(study, "baseline"):
        if not baseline.establish(study, bench, profile.glance):
            return
    assert study.facts is not None
    racer = study.racer = racer_of(study, bench)
    verifier = Verifier(bench)
    if request.race_mode == "auto":
        racer.on_crowded = partial(_one_at_a_time, study, racer, verifier)
    search = Search(
        study.registry, study.facts, racer, verifier, end - RESERVE * request.budget_s, study.say,
        request.only, request.skip, request.allow_convergence, tuple(study.findings), end, on_kept=lambda search: summary.write_recipe(study),
    )
    if not study.starved and not _is_measurable(study, verifier, racer, (), end):
        return
    if study.aa is not None:
        study.facts = search.facts = seen_by_all(study.facts, study.aa)
    verifier.at_once = baseline.at_once(study, racer.mode, bench.pace)      # the look at the noise may have changed the mode
    study.search = search
    too_much = "runs out of memory" if study.starved else bench.peaks.too_much(())
    if too_much:
        with _phase(study, "fit"):
            study.say(f"fit: the baseline {too_much}")
            _fit(study, search)
            racer.drop_base()
        if study.refusal is not None:
            study.say(study.refusal)
            return
    try:
        if study.starved:
            verifier.reference = bench.reference = search.base
            if not _is_measurable(study, verifier, racer, search.base, end):
                study.notes.append(f"nothing was added to what was needed to fit: {study.refusal}")
                study.refusal, study.out_of_time = None, False
                return
        with _phase(study, "search"):
            study.say("search:")
            search.run()
    except CannotVerify as refused:
        study.refusal = f"cannot verify: {refused}"
    except LimitPassed as passed:
        study.refusal = memory_limit.let_go(search, str(passed))
    racer.drop_base()
    if study.refusal is not None:
        study.say(study.refusal)
        return
    if search.kept and not (study.starved and search.kept == search.base):
        with _phase(study, "confirm"):
            confirming.confirm(study, racer, end)


def _fit(study: Study, search: Search) -> None:
    """Find what keeps the memory limit; `study.refusal` says why nothing does."""
    fitter = memory_limit.Fitting(search)
    try:
        study.refusal = fitter.find()
    except CannotVerify as refused:
        study.refusal = f"cannot verify: {refused}"
        return
    study.nothing_fits = study.refusal is not None and not (fitter.out_of_time or fitter.unfit)
    if fitter.out_of_time:
        study.needs_budget = f"{math.ceil(deadline.LONGER * study.request.budget_s / 60)}m"


def racer_of(study: Study, bench: Bench) -> Racer:
    """What races this workload as its baseline needs it; its baseline is known."""
    facts = study.facts
    assert facts is not None
    racer = Racer(bench, study.request.threshold, baseline.race_mode(study))
    racer.in_turns = facts.device == "cpu"
    racer.warm_ups = bench.warm_ups
    racer.waits = facts.input_wait_ms >= WAITS * facts.step_ms
    return racer


def _one_at_a_time(study: Study, racer: Racer, verifier: Verifier, why: str) -> None:
    """From now on two processes of this command never live at once."""
    baseline.alternate(study, why)
    racer.alternate()
    verifier.at_once = 1


def _is_measurable(study: Study, verifier: Verifier, racer: Racer, base: Set, end: float) -> bool:
    """Whether what everything is compared with can be verified and timed; `study.refusal` says why not."""
    began, resumed = time.monotonic(), study.store.answer("informative") is not None
    with _phase(study, "can it be verified"):
        slow = None if base else too_slow(study.baseline["step_ms"], study.request.budget_s)
        if slow:
            study.needs_budget = budget_needed(study.baseline["step_ms"])
        refusal = slow or (None if base else deadline.too_late(study, end)) or verifier.check_baseline()
        if verifier.note is not None and verifier.note not in study.notes:
            study.notes.append(verifier.note)
            study.say(verifier.note)
        if refusal is not None:
            study.refusal = f"cannot verify: {refusal}"
            study.say(study.refusal)
            return False
    study.refusal = deadline.out_of_time(study, end, None if resumed else time.monotonic() - began)
    if study.refusal is not None:
        study.say(f"cannot measure: {study.refusal}")
        return False
    with _phase(study, "noise"):
        return _noise(study, racer, base, end)


def _noise(study: Study, racer: Racer, base: Set, end: float) -> bool:
    study.say("noise: " + ("what fits" if base else "the baseline") + " against itself")
    began, budget_s = time.monotonic(), study.request.budget_s
    try:
        study.aa = racer.run("A/A", base, base, AA, min(end, began + NOISE_SHARE * budget_s), share_base=True)
        patience = min(end, began + PATIENCE_SHARE * budget_s)
        for most in range(AA.max_pairs + 1, PATIENT_AA.max_pairs + 1):
            if _floor(study.aa) <= HOPELESS_NOISE or time.monotonic() > patience or not deadline.time_for_another(study.aa, end):
                break
            study.say(f"  {_floor(study.aa):.0%}, which may be chance: more pairs")
            study.aa = racer.run("A/A", base, base, replace(PATIENT_AA, max_pairs=most), patience, min_pairs=most)
    except TrialEnded as ended:
        if ended.outcome.kind == "too_short":
            study.refusal = f"{ended.outcome.reason}; {ended.outcome.remedy}"
            return False
        if racer.mode == "concurrent" and study.request.race_mode == "auto" and ended.outcome.kind not in (*OURS, "over_limit"):
            # A lock, a port, a device that serves one process: what fails beside another of its kind may run alone.
            baseline.alternate(study, f"it failed beside another of its kind ({ended.outcome.reason})")
            racer.alternate()
            return _noise(study, racer, base, end)
        if passed_limit(ended, base):
            raise LimitPassed(ended.outcome.reason) from ended
        raise failed_again(ended) from ended
    racer.noise.learn(study.aa.pairs, study.aa.work)
    floor = _floor(study.aa)
    study.say(f"  two runs of the same program: {study.aa.gain:+.1%}; differences below {floor:.1%} are not resolved in one race")
    if floor > HOPELESS_NOISE:
        longer = ", or give it a longer --budget for more pairs" if len(study.aa.pairs) < PATIENT_AA.max_pairs else ""
        raise TooNoisy("this machine is too noisy to decide anything",
                       evidence=f"after {words.count(len(study.aa.pairs), 'pair')} of the same program, differences below {floor:.0%} are not resolved",
                       remedy=f"stop other programs, or try again on a quiet machine{longer}")
    return True


def seen_by_all(facts: Facts, aa: Result) -> Facts:
    """The facts, with what the kernel did for the processes of the first race: it may differ from one to the next, and the one
    that was diagnosed is not the only one."""
    seen = [(work.page_faults, work.ms) for pair in aa.work for work in pair if math.isfinite(work.page_faults)]
    if not seen:
        return facts
    (faults, kernel_ms), (least, _) = max(*seen, (facts.page_faults, facts.kernel_ms)), min(seen)
    return replace(facts, page_faults=faults, kernel_ms=kernel_ms, least_page_faults=min(least, facts.page_faults))


def _floor(aa: Result) -> float:
    return race.noise_floor(aa.pairs) if aa.pairs else float("inf")


class _phase:
    """Adds the time spent inside to the study's phases."""

    def __init__(self, study: Study, name: str):
        self.study, self.name = study, name

    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(self, *exception: Any) -> None:
        self.study.store.add_seconds(self.name, time.monotonic() - self.began)


def environment_of_user() -> dict[str, str]:
    """The environment that the command would have without saturate."""
    return {name: value for name, value in os.environ.items() if name != "SATURATE_PLAN"}
