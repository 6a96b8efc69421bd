"""What a study says: its record, its recipe and its report. Works at any moment, also when the study ended early."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec

import saturate
from saturate.checkpoints import durable
from saturate.errors import SaturateError, TooNoisy, VerificationFailed
from saturate.machine import fingerprint
from saturate.measure import race
from saturate.records import recipe as recipes
from saturate.records import sizes
from saturate.records.result import (
    NumericsCurve,
    Phase,
    StairStep,
    StudyRecord,
    TechniqueOutcome,
    TrialRecord,
    TuneResult,
)
from saturate.report import html, words
from saturate.study import starts
from saturate.study.candidates import Candidate, Set, key, ordered
from saturate.study.peaks import Peaks
from saturate.study.racing import Result
from saturate.study.state import Study


def write(study: Study, record: StudyRecord) -> None:
    """Write recipe and report. Raises EnvironmentProblem or OSError when the disk does not allow it."""
    write_recipe(study, record.result)
    durable.replace_text(study.report_path, html.render(record))


def record_of(study: Study) -> StudyRecord:
    """All that the report shows, as far as the study has come."""
    result = result_of(study)
    racer, search = study.racer, study.search
    raced = [study.aa, *(search.results if search else ()), study.final]      # the last may be one of the others
    results = list({id(r): r for r in raced if r is not None}.values())
    return StudyRecord(
        result=result,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        saturate=saturate.__version__,
        machine=_machine(study),
        workload=_workload(study),
        staircase=_staircase(study, result),
        split_before=study.tuned.get("before") or study.baseline.get("split", {}),
        split_after=study.tuned.get("split", {}),
        numerics=_curves(study),
        races=[r.record for r in results],
        trials=[_convert(TrialRecord, trial) for trial in study.store.trials()],
        phases=[Phase(name=name, seconds=seconds) for name, seconds in study.store.phases() if name != "total"],
        notes=[*_unfinished(study), *_at_the_ceiling(study), *study.notes, *([study.isolation] if study.isolation else [])],
        threshold=racer.threshold if racer else study.request.threshold,
        budget_s=study.request.budget_s,
        findings=study.findings,
        out_of_time=study.out_of_time and study.error is None,
        titles={identity: module.TECHNIQUE.title for identity, module in study.registry.items()},
        options=[*study.request.options(), *(["--budget", study.needs_budget] if study.needs_budget else [])],
    )


def result_of(study: Study) -> TuneResult:
    """What `--json` prints, as far as the study has come. What was not measured is None."""
    kept = study.search.kept if study.search else ()
    final = study.final if kept else None
    estimate = final.decision.estimate if final and not study.starved else None
    baseline_ms = None if study.starved else final.a_ms if final else study.baseline.get("step_ms")
    peaks = Peaks(study.store, study.request.limit_bytes)
    verified, verified_reason = _verified(study)
    break_even = starts.break_even(study)
    plain, tuned = starts.comparable(study, kept)
    return TuneResult(
        run=study.folder.name,
        command=study.request.argv,
        baseline=starts.step_time(baseline_ms, plain),
        tuned=starts.step_time(final.b_ms if final else _probed_ms(study, kept) if kept else baseline_ms, tuned),
        speedup=estimate.speedup if estimate else (1.0 if baseline_ms and not kept and not study.refusal and not study.error else None),
        speedup_ci=estimate.speedup_ci if estimate else None,
        verdict=_verdict(study),
        verified=verified,
        verified_reason=verified_reason,
        noise_floor=_floor(study),
        break_even_steps=break_even,
        break_even_reason=starts.why_no_break_even(study, break_even),
        techniques=_techniques(study),
        recipe=str(study.recipe_path),
        report=str(study.report_path),
        peak_bytes=peaks.of(kept),
        baseline_peak_bytes=peaks.of(()),
        limit_bytes=peaks.limit_bytes,
        fits=_fits(study, peaks, kept),
    )


def _probed_ms(study: Study, kept: Set) -> float | None:
    """The step of a set that was only tried for its memory."""
    stored = study.store.answer(f"probe {key(kept)}")
    return stored[0] if stored else None


def _fits(study: Study, peaks: Peaks, kept: Set) -> bool | None:
    """Whether the final set keeps the limit; None when there is none, or when nobody knows. That the baseline does not keep it
    says nothing before sets were looked for that do."""
    if study.error is not None:
        return None
    if study.nothing_fits:
        return False
    if peaks.limit_bytes is None or peaks.of(kept) is None:
        return None
    return peaks.too_much(kept) is None or (False if kept else None)


def _verdict(study: Study) -> Any:
    if study.refusal or study.error or study.starved or study.search is None:
        return "inconclusive"
    if not study.search.kept:
        open_ends = any(fate.is_open(study.request.threshold) for fate in study.search.fates.values())
        return "inconclusive" if open_ends or _out_of_budget(study) else "no_difference"
    return study.final.decision.verdict if study.final else "inconclusive"


def _out_of_budget(study: Study) -> list[str]:
    """The techniques that could have helped and never had their turn."""
    fates = study.search.fates if study.search else {}
    return [identity for identity, fate in fates.items() if fate.fate == "not_tried" and fate.candidate is not None]


def _unfinished(study: Study) -> list[str]:
    """A note about what the budget did not reach."""
    waiting = _out_of_budget(study)
    if not waiting:
        return []
    return [f"the budget ended before {', '.join(waiting)} had a turn; a longer --budget tries {'it' if len(waiting) == 1 else 'them'}"]


def _verified(study: Study) -> tuple[bool | None, str]:
    if study.error is not None:
        return None, study.error.message
    if study.refusal:
        return None, study.refusal.removeprefix("cannot verify: ")      # None says it already
    if study.search is None:
        return None, "the study ended before anything could be verified"
    if study.deviated:
        return False, study.deviated
    if not study.search.kept:
        return True, "nothing was changed"
    if study.starved and study.search.kept == study.search.base:
        return None, "the baseline does not run in this memory, so there is nothing to compare with"
    stored = study.store.answer(f"verify {key(study.search.kept)}")
    if stored is None:
        return None, "the study ended before the final set was verified"
    if study.starved:
        return None, f"the baseline does not run in this memory; like the set that was needed to fit, it trains: {stored['reason']}"
    return stored["passed"], stored["reason"]


def _floor(study: Study) -> float | None:
    return race.noise_floor(study.aa.pairs) if study.aa and study.aa.pairs else None


def _techniques(study: Study) -> list[TechniqueOutcome]:
    why = study.refusal or (study.error.message if study.error else "the study ended before its turn")
    peaks = Peaks(study.store)
    found = []
    for identity, module in study.registry.items():
        fate = study.search.fates.get(identity) if study.search else None
        if fate is None:
            found.append(TechniqueOutcome(id=identity, fate="not_tried", reason=why, numerics=module.TECHNIQUE.numerics))
        else:
            peak = peaks.of(_measured_in(study.search.base, fate.candidate)) if fate.candidate else None
            found.append(msgspec.structs.replace(fate.outcome(identity, module.TECHNIQUE.numerics), peak_bytes=peak))
    return found


def _measured_in(base: Set, candidate: Candidate) -> Set:
    """The set in which a technique was tried: with what was needed to fit, which itself was tried alone."""
    return (candidate,) if candidate in base else ordered((*base, candidate))


def _staircase(study: Study, result: TuneResult) -> list[StairStep]:
    """Baseline, then the kept techniques in the order they were added.

    Each was raced against the set below it, in a race of its own, so the steps between the first and the last are a chain of
    measured ratios; the interval of each is that of its own race. The last is the final set against the baseline."""
    if not result.baseline.step_ms:
        return []
    steps = [StairStep(label="baseline", step_ms=result.baseline.step_ms, speedup=1.0, speedup_ci=(1.0, 1.0))]
    if not study.search:
        return steps
    fitted = study.search.fitted
    if fitted:
        label = " + ".join(c.label() for c in study.search.base)
        steps.append(_stair(f"+ {label} (to fit)", steps[-1], fitted, result.baseline.step_ms))
    for added, raced in study.search.stairs:
        kept = [candidate.label() for candidate in added if candidate in study.search.kept]
        if not kept:
            continue
        steps.append(_stair(f"+ {' + '.join(kept)}", steps[-1], raced, result.baseline.step_ms))
    if study.final and len(steps) > 1 and result.tuned.step_ms and result.speedup:
        steps[-1] = StairStep(label=steps[-1].label, step_ms=result.tuned.step_ms, speedup=result.speedup,
                              speedup_ci=result.speedup_ci)
    return steps


def _stair(label: str, below: StairStep, raced: Result, baseline_ms: float) -> StairStep:
    speedup = below.speedup * (1.0 + raced.gain)
    interval = raced.gain_ci and (below.speedup * (1.0 + raced.gain_ci[0]), below.speedup * (1.0 + raced.gain_ci[1]))
    return StairStep(label=label, step_ms=baseline_ms / speedup, speedup=speedup, speedup_ci=interval)


def _curves(study: Study) -> list[NumericsCurve]:
    if not study.search:
        return []
    final = " + ".join(c.id for c in study.search.kept)
    return [_renamed(curve, "final set") if curve.subject == final else curve for curve in study.search.curves]


def _renamed(curve: NumericsCurve, subject: str) -> NumericsCurve:
    return msgspec.structs.replace(curve, subject=subject)


def _machine(study: Study) -> dict[str, str]:
    facts = study.facts
    if facts is None:
        return {}
    machine = facts.machine
    found = {
        "device": facts.device_name or machine.cpu_name or facts.device,
        "cores": f"{machine.cpu_count:g}",
        "torch": facts.torch,
        "python": facts.python,
    }
    if machine.memory_bytes:
        found["memory"] = f"{machine.memory_bytes / 2**30:.0f} GiB"
    if facts.device == "cpu":
        found["native bf16"] = "yes" if machine.cpu_bf16_native else "no"
    return found


def _workload(study: Study) -> dict[str, str]:
    facts = study.facts
    if facts is None:
        return {}
    found = {"step": facts.motif, "processes": str(facts.world_size)}
    ceiling = _ceiling(study)
    if ceiling:
        found["arithmetic"] = ceiling
    if facts.modules:
        found["trained modules"] = ", ".join(f"{m.kind} ({m.parameters:,} parameters)" for m in facts.modules[:4])
    if facts.loaders:
        found["loader workers"] = ", ".join(dict.fromkeys(str(loader.num_workers) for loader in facts.loaders))
    if facts.autocast:
        found["autocast in the script"] = facts.autocast
    return found


def _at_the_ceiling(study: Study) -> list[str]:
    """When nothing helps, what is left to gain is the answer."""
    if study.search is None or study.search.kept:
        return []
    parts = [f"{label} {ms / sum(study.baseline['split'].values()):.0%}" for label, ms in study.baseline["split"].items() if ms > 0]
    ceiling = _ceiling(study)
    split = [f"where the step goes: {', '.join(parts)}"] if parts else []
    return [*([f"ceiling: {ceiling}"] if ceiling else []), *split]


def _ceiling(study: Study) -> str:
    """How near the baseline, and the tuned run, come to the fastest matrix product measured on this device."""
    facts, rates = study.facts, study.baseline.get("ceilings")
    if facts is None or not facts.flops_per_step or not rates:
        return ""
    known = {name: rates[name] for name in ("float32", "bfloat16") if name in rates}
    missing = [f"{name}: {why}" for name, why in rates.get("unknown", {}).items() if name != "copy"]
    unknown = f"; not measured: {'; '.join(missing)}" if missing else ""
    if not known:
        return f"{sizes.decimal(facts.flops_per_step, 'FLOP')} a step{unknown}"
    name, best = max(known.items(), key=lambda entry: entry[1])
    reached = []
    for label, step_ms in (("before", study.baseline["step_ms"]), ("after", study.final.b_ms if study.final else None)):
        if step_ms:
            rate = facts.flops_per_step / (step_ms / 1e3)
            reached.append(f"{label} {sizes.decimal(rate, 'FLOP')}/s ({_share(rate / best)})")
    return (f"{sizes.decimal(facts.flops_per_step, 'FLOP')} a step; {', '.join(reached)} of {sizes.decimal(best, 'FLOP')}/s, "
            f"the fastest matrix product measured here ({name}){unknown}")


def _share(part: float) -> str:
    """
    >>> _share(0.43), _share(0.0012), _share(1e-7)
    ('43 %', '0.1 %', 'less than 0.1 %')
    """
    if part < 0.001:
        return "less than 0.1 %"
    return f"{100 * part:.{0 if part >= 0.01 else 1}f} %"


def write_recipe(study: Study, result: TuneResult | None = None) -> None:
    """Write the best set so far. With no result yet: what is kept up to now, or an empty recipe."""
    if study.search is None or not study.search.kept or study.facts is None:
        if not study.recipe_path.exists() or result is not None:
            recipes.write(study.recipe_path, recipes.Recipe())
        return
    result = result or result_of(study)
    recipes.write(study.recipe_path, recipes.Recipe(
        made_for=fingerprint.of(study.facts, study.script),
        evidence=recipes.MeasuredEvidence(
            baseline_ms=result.baseline.step_ms, tuned_ms=result.tuned.step_ms, speedup=result.speedup,
            speedup_ci=_finite(result.speedup_ci), verified=result.verified, noise_floor=result.noise_floor,
            break_even_steps=result.break_even_steps, peak_bytes=result.peak_bytes,
            baseline_peak_bytes=result.baseline_peak_bytes, limit_bytes=result.limit_bytes,
        ),
        techniques=[
            recipes.Entry(id=c.id, options=c.options_dict(), gain=_finite(study.search.fates[c.id].gain),
                          gain_ci=_finite(study.search.fates[c.id].gain_ci), numerics=c.numerics, why=study.search.fates[c.id].reason)
            for c in study.search.kept
        ],
    ))


def _finite(value: Any) -> Any:
    """The number or interval, or None where it holds something that TOML cannot."""
    numbers = value if isinstance(value, (tuple, list)) else [value]
    return value if value is not None and all(map(math.isfinite, numbers)) else None


def _convert(kind: type, value: Any) -> Any:
    return msgspec.convert(value, kind)


def verdict_error(record: StudyRecord) -> SaturateError | None:
    """The error of a study whose final set does not verify (the search keeps none such), or which noise left undecided; None of any other."""
    if record.result.verified is False:
        return VerificationFailed("the final set does not train like the baseline", cause=record.result.verified_reason,
                                  remedy="saturate run works with the empty recipe; see the report for what deviated")
    answer = words.headline(record)
    if answer.kind == "noisy":
        return TooNoisy("other load on this machine hides what was asked about", evidence=f"{answer.detail}; {answer.why}",
                        remedy="stop other programs, or give it a longer --budget for more pairs")
    return None
