"""`saturate profile`, from the command to the record: one run of the workload, looked at in a few windows.

    time       steps without a profiler: what is slow is decided from these
    sample     input, collector pauses, memory, with nothing but a clock and a sampling thread
    record     a short trace by torch.profiler, the same on every rank
    modules    time, operations and memory by module

Then the workload is ended, and the trace is read and explained (`study.diagnose`).
"""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from saturate.checkpoints import durable
from saturate.errors import EnvironmentProblem, SaturateError
from saturate.machine import ceilings, telemetry
from saturate.measure import stationary
from saturate.records.analysis import Analysis, Finding, Integrity, Problem, Profile
from saturate.records.ceilings import Ceilings
from saturate.records.command_line import joined
from saturate.records.encoding import encoded
from saturate.records.facts import Facts
from saturate.report import words
from saturate.study import baseline, loadercost, nsight, once
from saturate.study.bench import Bench
from saturate.study.live import Live
from saturate.study.seen import Seen
from saturate.study.state import Request, Study
from saturate.techniques import _registry
from saturate.trial import meter
from saturate.trial.process import Trial, TrialEnded, Workload

#: Recorded steps, unless the user wants another number: at least five, more where they are so short that what else runs
#: on the machine would show; and the longest recording.
LEAST_RECORDED, MOST_RECORDED = 5, 40
RECORDED_MS, MOST_RECORDED_MS = 400.0, 3000.0

#: Windows without a profiler last about this long.
_TIMED_MS = 1500.0
_LEAST_TIMED, _MOST_TIMED = 6, 200
#: ... and hold fewer steps where one takes longer than this: somebody is waiting.
_VERY_LONG_STEP_MS, _LEAST_OF_LONG = 5000.0, 3

#: Mean and median of the timed steps that differ by more than this share: the next window is twice as long.
UNEVEN = 0.1

#: What `tune` gives for a diagnosis of its baseline, of its budget; how long it waits at least for each half of one that takes longer
#: than was expected, in seconds; and how much longer a step is taken to last meanwhile.
GLANCE_SHARE = 0.1
GLANCE_WAIT_S = 15.0
PROFILED_IS_SLOWER = 2

#: With a step longer than this, modules are timed in one step instead of two.
_LONG_STEP_MS = 1000.0


def profile(request: Request, steps: int | None, say: Callable[[str], None], nsys: bool = False, synthetic: bool = False) -> Profile:
    """Run the workload once and say where its time goes. Writes trace, record and report into a run folder. `synthetic`:
    also measure what the loader costs, by steps that replay one batch.

    Raises SaturateError; KeyboardInterrupt when the user ends it (nothing is left running then).
    """
    if find_spec("numpy") is None:
        raise EnvironmentProblem("reading traces needs numpy", remedy="pip install 'saturate[trace]'")
    with once.run_folder(request.directory, "profile", request.argv, str(request.cwd)) as folder, once.study_file(folder) as store:
        study = Study(request, folder, store, _registry.load(), say)
        return _finished(study, _watch(study, steps, nsight.find() if nsys else None, synthetic))


def _finished(study: Study, seen: Seen | None) -> Profile:
    from saturate.report import analysis_html, trim
    from saturate.study import diagnose

    if seen is None or not seen.traces:
        problem = seen.record.get("problem") if seen else None
        reason = study.refusal or problem or "the workload ended before it was recorded"
        return nothing(study.request, reason, _following(study))
    study.say("reading the trace")
    found = diagnose.diagnose(study.request, seen, _applicable(study, seen.facts))
    if found is None:
        return nothing(study.request, diagnose.EMPTY, _following(study))
    found = msgspec.structs.replace(found, report=str(study.report_path))
    try:
        durable.replace_text(study.folder / "profile.json", encoded(trim.without_values(found)))
        durable.replace_text(study.report_path, analysis_html.render(found))
    except OSError as error:        # what was found is told all the same
        study.say(f"the report could not be written: {error}")
        return msgspec.structs.replace(found, report="")
    return found


def _applicable(study: Study, facts: Facts) -> frozenset[str]:
    """The ids of techniques that apply to this workload. One that cannot say is left in: `tune` says what is wrong with it."""
    def applies(module: ModuleType) -> bool:
        try:
            return bool(module.eligible(facts))
        except Exception:  # noqa: BLE001 - third-party code may raise anything
            return True

    return frozenset(identity for identity, module in study.registry.items() if applies(module))


def _following(study: Study) -> str:
    """What to type where the same command would end the same; "" where it may not."""
    if study.needs_budget:
        return _again(study.request, "--budget", study.needs_budget)
    return f"saturate explain {study.refused}" if study.refused else ""


def _again(request: Request, *options: str) -> str:
    return joined(["saturate", "profile", *request.options(), *options, "--", *request.argv])


def nothing(request: Request, reason: str, following: str = "") -> Profile:
    """The record where nothing could be seen. `following`: what to type next, if not the same."""
    unmeasured = Problem(id="nothing-measured", message=reason, blocks=["steps"])
    unseen = Analysis(devices=[], integrity=Integrity(ok=False, problems=[unmeasured]), verdict="unknown", findings=[],
                      unknown={"verdict": reason})
    empty = Profile(**msgspec.structs.asdict(unseen), command=request.argv, next_command=following or _again(request))
    memory = msgspec.structs.replace(empty.memory, unknown=dict.fromkeys(_missing(empty.memory), reason))
    return msgspec.structs.replace(empty, memory=memory, unknown={**dict.fromkeys(_missing(empty), reason), **empty.unknown})


def _missing(record: msgspec.Struct) -> list[str]:
    """The fields that hold nothing, and need a reason for it."""
    return [name for name, value in msgspec.structs.asdict(record).items() if value is None]


# -- watching ----------------------------------------------------------------------------------------------------------


def _watch(study: Study, steps: int | None, nsys: Path | None, synthetic: bool) -> Seen | None:
    """Run the workload through all windows; None where it cannot be measured (`study.refusal` says why)."""
    request = study.request
    stem = study.folder / "t001" / "nsys"        # in the folder of the first trial, where a workload may write
    argv = nsight.record(nsys, request.argv, stem) if nsys else request.argv
    bench = Bench(Workload(argv, request.cwd, request.environment, request.timeout_s),
                  study.folder, request.directory, study.store, request.budget_s, study.say)
    bench.step = baseline.step_override(request.step)
    bench.writes_itself = "nsys keeps its own files in /tmp" if nsys else ""
    try:
        try:
            live = bench.live("profile", ())
            try:
                seen = _look(study, live, steps, "nsys" if nsys else "torch", synthetic)
                if nsys is None and not seen.traces and seen.ended is not None and seen.ended.kind == "too_short":
                    study.say(f"{seen.ended.reason}, before they were recorded; looking again, at fewer of them")
                    bench.finish_live(live)
                    live = bench.live("profile", ())
                    seen = _look(study, live, steps, "torch", synthetic, briefly=True)
                if nsys and not seen.record.get("problem"):
                    seen.traces = [_exported(study, nsys, stem, live)]
            finally:
                bench.finish_live(live)
        except TrialEnded as ended:
            baseline.failed(study, ended.outcome)       # raises, unless it merely is too short
            return None
        if seen.ended is not None and not _recorded_before_our_failure(seen):
            baseline.failed(study, seen.ended)
        if seen.traces:
            _measure_ceilings(study, seen)      # the device is free again
        return seen
    finally:
        bench.close()


def _look(study: Study, live: Live, steps: int | None, recorder: str, synthetic: bool, briefly: bool = False) -> Seen:
    stored = baseline.observe(study, live)
    live.trial.thaw()
    seen = Seen(msgspec.convert(stored["facts"], Facts), resident_bytes=meter.in_use(live.trial.supervisor.pid))
    study.say(f"step {live.step_ms:.1f} ms ({seen.facts.motif}); it was found after {live.startup_s:.1f} s")
    if not live.stationary:
        seen.notes["step_ms"] = "the step time was still drifting when it was measured"
    try:
        _windows(study, live, seen, steps, recorder, synthetic, briefly)
    except TrialEnded as ended:
        seen.ended = ended.outcome
        if _recorded_before_our_failure(seen):
            seen.notes["modules"] = f"saturate's own code failed behind the recording: {ended.outcome.reason}"
            study.say(seen.notes["modules"])
        else:
            seen.notes["windows"] = f"the workload ended before everything was seen: {ended.outcome.reason}"
    return seen


def _recorded_before_our_failure(seen: Seen) -> bool:
    """Whether our own code failed in a window behind the recording: what was seen until then is no less true for it."""
    recorded = bool(seen.record) and not seen.record.get("problem")        # nsys writes its trace only after the last window
    return recorded and seen.ended is not None and seen.ended.kind == "agent_failed"


def glance(study: Study, live: Live, facts: Facts, reached: dict[str, Any]) -> list[Finding]:
    """What a brief look at a warm baseline finds, for `tune`. `reached`: what `agent.ceilings.measure` says of its process. A note of the
    study says why where nothing can be seen.

    Leaves the process such that nothing should be timed in it any more.
    """
    if find_spec("numpy") is None:
        study.notes.append("the baseline was not diagnosed: reading traces needs numpy (pip install 'saturate[trace]')")
        return []
    seen = Seen(facts, step_ns=[round(live.step_ms * 1e6)], ceilings=_roofs(facts, reached))
    skip, period = _queue(facts, live.step_ms, queued=False)
    many, few = _whole(_LEAST_TIMED, period), _whole(recorded_steps(None, live.step_ms), period)
    cost_s = (2 * skip + many + PROFILED_IS_SLOWER * few) * live.step_ms / 1e3
    if cost_s > GLANCE_SHARE * study.request.budget_s:
        study.notes.append(f"the baseline was not diagnosed: a look at it would take some {cost_s:.0f} s of the budget")
        return []
    from saturate.study import diagnose

    # Steps may meet what none before them did, an episode of play or an evaluation of minutes.
    patience_s = max(GLANCE_WAIT_S, GLANCE_SHARE * study.request.budget_s)
    try:
        seen.sample = live.trial.look("sample", skip, many, patience_s)
        seen.record = live.trial.look("record", skip, few, patience_s, folder=str(live.trial.spec.folder), step_ms=live.step_ms)
        _keep_traces(study, live.trial.spec.folder, seen)
        found = diagnose.diagnose(study.request, seen, _applicable(study, facts)) if seen.traces else None
    except TrialEnded as ended:         # what comes next starts a fresh process, and says what is wrong if it ends as well
        study.notes.append(f"the baseline was not diagnosed: {ended.outcome.reason}")
        return []
    except SaturateError as error:
        study.notes.append(f"the baseline was not diagnosed: {error.message}")
        return []
    finally:
        for trace in seen.traces:
            trace.unlink()              # `profile` keeps it; here it only steers the search
    if found is None:
        study.notes.append(f"the baseline was not diagnosed: {seen.record.get('problem') or diagnose.EMPTY}")
        return []
    for finding in found.findings[:3]:
        study.say(f"diagnosis: {finding.title}" + (f", worth {words.bound(finding.bound)}" if finding.bound else ""))
    return found.findings


def _roofs(facts: Facts, reached: dict[str, Any]) -> Ceilings | None:
    """What a process reached itself, as ceilings; None where one of both is missing. Caches are faster than the one copy that was
    measured: of what they serve, too little time counts as lost, and never too much."""
    rates = {name: reached[name] for name in ("float32", "bfloat16") if reached.get(name)}
    if not rates or not reached.get("copy"):
        return None
    return Ceilings(device=facts.device, device_name=facts.device_name, torch=facts.torch, rates=rates, bandwidth={"copy": [(1, reached["copy"])]})


def _windows(study: Study, live: Live, seen: Seen, steps: int | None, recorder: str, synthetic: bool, briefly: bool) -> None:
    """`briefly`: for a script that ends soon, windows as short as they may be."""
    trial, facts = live.trial, seen.facts
    if recorder == "nsys" and facts.device != "cuda":
        raise EnvironmentProblem(f"this workload trains on {facts.device}, and Nsight Systems records CUDA devices",
                                 remedy="profile without --with nsys")
    skip, period = _queue(facts, live.step_ms, queued=False)
    lead, _ = _queue(facts, live.step_ms, queued=facts.device != "cpu")
    lead = max(skip, min(lead, _LEAST_TIMED)) if briefly else lead
    usual = _timed_steps(live.step_ms, briefly)
    many = _whole(usual, period)
    few = _whole(recorded_steps(steps or (LEAST_RECORDED if briefly else None), live.step_ms), period)
    with telemetry.Sampler(study.request.environment) as sampler:
        study.say(f"timing {many} steps")
        seen.step_ns = trial.run_block(lead, many).step_ns
        if not briefly and uneven(seen.step_ns):
            many = _whole(2 * usual, period)        # of long waits that are rare, more than one has to be seen
        study.say(f"sampling {many} steps")
        seen.sample = trial.look("sample", skip, many)
        seen.telemetry = sampler.seen(seen.sample.get("device_uuid", "") if facts.world_size == 1 else "")
    if synthetic:
        _without_loader(study, live, seen)
    else:
        seen.notes["loader_cost"] = "measured with --synthetic-input only"
    study.say(f"recording {few} steps")
    began = time.monotonic()
    seen.record = trial.look("record", skip, few, folder=str(trial.spec.folder), step_ms=live.step_ms, recorder=recorder)
    _keep_traces(study, trial.spec.folder, seen)
    if seen.record.get("problem"):
        study.say(seen.record["problem"])
    else:
        study.say(f"recorded in {time.monotonic() - began:.1f} s")
    if facts.compiles:
        seen.notes["modules"] = "the script compiles something itself, and hooks on modules would compile it again"
    else:
        seen.modules = _modules(trial, live.step_ms)


def _modules(trial: Trial, step_ms: float) -> dict[str, Any]:
    """What each module costs. The counted step may hold an evaluation: windows of two lengths in turn meet a training step at
    the third at the latest, unless every step evaluates."""
    few, other = (2, 3) if step_ms > _LONG_STEP_MS else (3, 2)
    found: dict[str, Any] = {}
    for steps in (few, other, few):
        found = trial.look("modules", 1, steps)
        if not found["evaluated"]:
            break
    return found


def _without_loader(study: Study, live: Live, seen: Seen) -> None:
    """Steps with one batch replayed beside ordinary ones: what the loader costs."""
    study.say("timing steps with one batch replayed")
    cost = loadercost.measure(live.trial, seen.facts, live.step_ms)
    if isinstance(cost, str):
        seen.notes["loader_cost"] = cost
    else:
        seen.loader_cost = cost


def _exported(study: Study, nsys: Path, stem: Path, live: Live) -> Path:
    """The database of nsys's report, which it writes once its capture range has ended, while the workload stands."""
    deadline = time.monotonic() + study.request.timeout_s
    reports = [stem.with_name(stem.name + ending) for ending in nsight.REPORT_ENDINGS]
    while not any(path.exists() for path in reports) and time.monotonic() < deadline:
        time.sleep(0.5)
    return nsight.export(nsys, nsight.report(stem, live.trial.output()), study.folder / "trace.sqlite")


def _measure_ceilings(study: Study, seen: Seen) -> None:
    facts = seen.facts
    try:
        seen.ceilings = ceilings.obtain(seen.sample["python"], facts.device, device_name=facts.device_name or None,
                                        torch=facts.torch, threads=facts.threads if facts.device == "cpu" else None,
                                        environment=study.request.environment, index=seen.sample.get("device_index", 0),
                                        say=study.say)
    except EnvironmentProblem as problem:
        seen.notes["mfu_achievable"] = f"{problem.message}: {problem.cause or problem.remedy}"


def _queue(facts: Facts, step_ms: float, queued: bool) -> tuple[int, int]:
    """Steps to let pass before a block or a window, because loader workers got ahead at the gate; and the period of the steps.
    `queued`: also until the host is ahead of an accelerator, of no use before a window that begins by draining it."""
    loader = max(facts.loaders, key=lambda one: one.num_workers, default=None)
    if loader is None or not loader.num_workers:
        return stationary.lead_steps(step_ms, queued), 1
    skip, _ = stationary.block_steps(step_ms, loader.num_workers, loader.prefetch_factor or 2, queued=queued)
    return skip, loader.num_workers


def _timed_steps(step_ms: float, briefly: bool) -> int:
    """Steps of a window without a profiler."""
    if step_ms > _VERY_LONG_STEP_MS:
        return _LEAST_OF_LONG
    return _LEAST_TIMED if briefly else min(_MOST_TIMED, max(_LEAST_TIMED, math.ceil(_TIMED_MS / step_ms)))


def recorded_steps(wanted: int | None, step_ms: float) -> int:
    """How many steps to record: two at least, because one proves nothing."""
    usual = min(MOST_RECORDED, max(LEAST_RECORDED, math.ceil(RECORDED_MS / step_ms)))
    return max(2, min(wanted or usual, int(MOST_RECORDED_MS / step_ms)))


def uneven(step_ns: list[int]) -> bool:
    """Whether a few steps are so long that the median says nothing about the mean."""
    median = statistics.median(step_ns)
    return abs(statistics.fmean(step_ns) - median) > UNEVEN * median


def _whole(steps: int, period: int) -> int:
    """Whole turns of the loader's workers, whose batches come in bursts."""
    return math.ceil(steps / period) * period


def _keep_traces(study: Study, run_dir: Path, seen: Seen) -> None:
    """Move the traces out of the trial's folder, each with the number of its rank; none where rank 0's recording has a problem: it is
    the one that is explained. A rank whose trace is missing is said."""
    if seen.record.get("problem"):
        for path in run_dir.glob("trace-rank*.json*"):
            path.unlink(missing_ok=True)
        return
    found = {int(path.name[10:].partition(".")[0]): path for path in run_dir.glob("trace-rank*.json.gz")}
    for rank, path in sorted(found.items()):
        target = study.folder / ("trace.json.gz" if len(found) == 1 else f"trace-rank{rank}.json.gz")
        seen.traces.append(Path(shutil.move(path, target)))
    missing = {rank: why for rank, why in seen.record.get("others", {}).items() if rank not in found}
    if missing:
        seen.notes["ranks"] = "; ".join(f"rank {rank} was not recorded: {why}" for rank, why in missing.items())
        study.say(seen.notes["ranks"])
