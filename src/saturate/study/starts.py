"""What comes before the steady state: starting, warming up, compiling; and after how many steps a recipe has paid for it."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from saturate.measure import breakeven
from saturate.records.result import StepTime
from saturate.report import words
from saturate.study.candidates import Set
from saturate.study.state import Study

Trials = list[dict[str, Any]]


def comparable(study: Study, techniques: Set) -> tuple[Trials, Trials]:
    """Starts of the baseline and of this very set that can be compared: a training that starts beside another one on the same cores takes
    longer. The study's first start, which may have found nothing in the machine's caches, is one of several or none;
    where there is nothing else, the baseline's shortest: then a recipe pays back later than it may, not sooner."""
    labels = {candidate.label() for candidate in techniques}
    timed = [trial for trial in study.store.trials() if trial["startup_s"] is not None]
    plain = [trial for trial in timed if not trial["techniques"]]
    plain = [trial for trial in plain if trial.get("settling_s") is not None] or plain
    tuned = [trial for trial in timed if set(trial["techniques"]) == labels]
    if not labels:
        return plain, plain
    for beside, least in ((False, 2), (True, 1)):
        both = [[trial for trial in trials if trial.get("beside", False) is beside] for trials in (plain, tuned)]
        if len(both[0]) >= least and both[1]:
            return both[0], both[1]
    return sorted(plain, key=lambda trial: trial["startup_s"])[:1], tuned


def step_time(step_ms: float | None, trials: Trials) -> StepTime:
    """A steady state with what came before it in these trials."""

    def each(name: str) -> list[Any]:
        return [trial[name] for trial in trials if trial.get(name) is not None]

    compiling = each("compile_s")
    return StepTime(
        step_ms, startup_s=median(each("startup_s") or [None]), warmup_s=median(each("warmup_s") or [None]),
        compile_s=max(compiling, default=None), recompiles=max(each("recompiles"), default=0 if compiling else None))


def why_no_break_even(study: Study, steps: int | None) -> str:
    """Why nobody knows when the recipe has paid for its start, or that it never has."""
    if steps is not None:
        return ""
    if not (study.search and study.search.kept):
        return "nothing is kept"
    if study.starved:
        return "the baseline does not run in this memory, so there is nothing to compare with"
    if not study.final:
        return "the study ended before the final race"
    if study.final.b_ms >= study.final.a_ms:
        return words.NEVER
    least_s = _extra_start_s(study, lambda trial: _settling_at_least_s(trial, study.final.b_ms))
    least = breakeven.steps(study.final.a_ms, study.final.b_ms, least_s) if least_s is not None else None
    if least:
        return words.not_before(least, study.final.b_ms)
    return "no start of the baseline, or none of the final set, was timed until its steps were steady"


def break_even(study: Study) -> int | None:
    """Steps until the recipe has paid for its slower start, the first time on a machine with cold caches.

    Starts vary from run to run, so medians are compared, of starts that can be (see `comparable`). The steps of a warm-up train as well: it costs
    what they took longer than those after it. Compiling is paid once where a cache keeps it; its cold cost is the longest that any
    trial of these techniques took.
    """
    if not (study.final and study.search and study.search.kept) or study.starved:
        return None
    extra_s = _extra_start_s(study, lambda trial: trial.get("settling_s"))
    return None if extra_s is None else breakeven.steps(study.final.a_ms, study.final.b_ms, extra_s)


def _extra_start_s(study: Study, settling_s: Callable[[dict[str, Any]], float | None]) -> float | None:
    """How much longer the final set starts than the baseline; None where that is not known. `settling_s`: of a trial of it, what its
    warm-up took longer than its steps take; None: not known."""
    assert study.search is not None
    plain, tuned = comparable(study, study.search.kept)
    labels = {c.label() for c in study.search.kept}
    of_set = [t for t in study.store.trials() if t["startup_s"] is not None and t["techniques"] and set(t["techniques"]) <= labels]
    cold = [t["startup_s"] + t["settling_s"] for t in plain if t.get("settling_s") is not None]
    warm = [t["startup_s"] + settling - (t["compile_s"] or 0.0) for t in tuned if (settling := settling_s(t)) is not None]
    if not cold or not warm:
        return None
    return median(warm) + max(t["compile_s"] or 0.0 for t in of_set) - median(cold)


def _settling_at_least_s(trial: dict[str, Any], step_ms: float) -> float | None:
    """What the warm-up of a trial whose steps never were steady took longer than they take, at least: it had no more of them than the
    whole trial. None of an older study, which did not tell."""
    return float(trial["warmup_s"] - trial["steps"] * step_ms / 1e3) if "settling_s" in trial else None
