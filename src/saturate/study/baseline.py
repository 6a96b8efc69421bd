"""The baseline of a study: does the command train by itself, what is a step, where does its time go."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from saturate.machine import facts as machine_facts
from saturate.measure import stationary
from saturate.records import sizes
from saturate.records.analysis import Finding
from saturate.records.facts import Facts
from saturate.study import bench as benches
from saturate.study import ending, sources
from saturate.study.bench import Bench
from saturate.study.candidates import Set, key
from saturate.study.live import Live, Pace, queues
from saturate.study.state import Study
from saturate.study.verification import UPDATES
from saturate.trial import meter
from saturate.trial.outcome import OUT_OF_MEMORY, Outcome
from saturate.trial.process import TrialEnded

#: The study's question whose answer is why two processes of the command cannot live at once.
ALTERNATES = "two at once"

#: What a process takes of a CUDA device besides what torch's allocator holds: its context, the kernels that it loaded, the libraries' own.
CONTEXT_BYTES = 600 << 20

#: Verification runs at once: all that a comparison needs (the baseline, its repetition, a twin, the candidate) on an accelerator, where most
#: of such a run is its start, which takes a core or two; on a CPU the trainings themselves share the cores, unless they train in turn: then
#: all but the baseline, which is recorded before.
MOST_AT_ONCE = 4
MOST_AT_ONCE_ON_CPU, MOST_IN_TURN = 2, 3
CORES_TO_START = 2

#: A baseline whose step took this many times as long as those of the last race (a process may stay slow as long as it lives) is no
#: picture of where their time goes.
APART = 1.3


def establish(study: Study, bench: Bench, diagnose: Callable[[Study, Live, Facts, dict[str, Any]], list[Finding]]) -> bool:
    """Start the workload unchanged; False when it cannot be measured (then `study.refusal` says why). With a memory limit, one
    that runs out of memory is `study.starved`: all that is known then is what showed before its first forward.

    `diagnose` looks at the warm baseline before it is ended; nothing is timed in that process afterwards.
    """
    bench.step = step_override(study.request.step)
    bench.longest_step_s = study.request.budget_s / UPDATES
    stored = study.store.answer("baseline")
    if stored is None:
        try:
            study.say("baseline: starting the command as it is")
            cold = bench.cold("baseline", ())
            study.say(f"  it trains; what a step is was found after {cold.trial.first_gate_s or 0.0:.1f} s; waiting until steps are steady")
            live = bench.warm(cold)
            try:
                stored = {**observe(study, live), "warm_ups": bench.warm_ups}
                live.trial.thaw()
                stored["ceilings"] = live.trial.ask("ceilings")
                stored["sources"] = sources.digests(live.trial.ask("sources"), study.request.argv, study.request.cwd)
                found = diagnose(study, live, msgspec.convert(stored["facts"], Facts), stored["ceilings"])
                stored["findings"] = msgspec.to_builtins(found)
            finally:
                bench.finish_live(live)
        except TrialEnded as ended:
            stored = starved(study, ended.outcome)
            if stored is None:
                return failed(study, ended.outcome)
        study.store.set_answer("baseline", stored)
    study.baseline = stored
    study.facts = dataclasses.replace(msgspec.convert(stored["facts"], Facts), memory_limit_bytes=study.request.limit_bytes)
    study.findings = msgspec.convert(stored["findings"], list[Finding])
    if stored.get("starved"):
        study.starved, bench.starved = stored["starved"], True
        study.say(f"baseline: {study.starved}")
        return True
    bench.step = stored["step"]
    bench.reference_events = stored["events"]
    bench.warm_ups = [[(steps, events) for steps, events in one] for one in stored.get("warm_ups", [])]     # not of an older study
    bench.pace = pace(study.facts, stored["startup_s"])
    bench.sources = stored.get("sources", {})
    if (bench.folder / "caches").is_dir():
        bench.caches = bench.folder / "caches"
    peak = bench.peaks.of(())
    study.say(f"baseline: step {stored['step_ms']:.1f} ms ({study.facts.motif})" + (f"; peak {sizes.show(peak)}" if peak else ""))
    if not stored["stationary"]:
        study.notes.append("the baseline's step time was still drifting when measuring began")
    return True


def starved(study: Study, outcome: Outcome) -> dict[str, Any] | None:
    """What is known of a baseline that ran out of memory in a study with a memory limit; None: it failed otherwise, or before
    its first training forward."""
    left = study.folder / study.store.trials()[-1]["id"] / benches.EARLY_FACTS
    if study.request.limit_bytes is None or outcome.kind not in OUT_OF_MEMORY or not left.exists():
        return None
    facts = json.loads(left.read_text(encoding="utf-8"))
    with_machine(study, facts)
    return {"facts": facts, "starved": f"{outcome.kind.replace('_', ' ')}: {outcome.reason}", "findings": [], "split": {}}


def step_override(text: str | None) -> dict[str, Any] | None:
    """What `--step` says, in the agent's terms (see `agent.motif.Step`). `told`: there may be no such step."""
    if text is None:
        return None
    kind, _, number = text.partition(":")
    if kind == "backward":
        return {"token": "B", "count": int(number), "tokens": ["B"] * int(number), "told": True}
    token = f"S{int(number)}"
    return {"token": token, "count": 1, "tokens": [token], "told": True}


def observe(study: Study, live: Live) -> dict[str, Any]:
    """Facts and the split of a step, from a warm baseline."""
    live.trial.thaw()
    least = 1 if live.too_long else 4
    steps = max(least, min(50, int(1000 / max(live.step_ms, 1e-3))))
    faults, kernel_s = meter.kernel_work(live.hello["pid"])
    skip = stationary.lead_steps(live.step_ms, queues(live.hello))
    block = live.trial.run_block(skip, steps, split=True)
    faults_after, kernel_after_s = meter.kernel_work(live.hello["pid"])
    facts = live.trial.ask("facts")
    live.trial.freeze()
    # Shares of this block, as parts of the step that all else is told of: under load, one may take many times as long as the other.
    parts = {name: ns * live.step_ms / block.mean_ns / steps for name, ns in block.parts.items()}
    split = _split(parts, live.step_ms)
    with_machine(study, facts)
    waited_ms, exposed_ms = _input_ms(parts)
    facts.update(step_ms=live.step_ms, input_wait_ms=waited_ms, input_exposed_ms=exposed_ms,
                 backward_ms=split.get("backward", 0.0), optimizer_ms=split.get("optimizer", 0.0),
                 gc_ms_per_step=split.get("garbage collector", 0.0),
                 page_faults=(faults_after - faults) / (skip + steps), kernel_ms=1e3 * (kernel_after_s - kernel_s) / (skip + steps))
    return {"facts": facts, "step": live.hello["step"], "step_ms": live.step_ms, "split": split,
            "startup_s": live.startup_s, "warmup_s": live.warmup_s, "stationary": live.stationary, "events": live.events,
            "memory_bytes": live.trial.resident_bytes(), "ports": live.trial.ports()}


def tuned_question(kept: Set) -> str:
    """Of a set: a study that was interrupted in its last race may go on searching, and end with another."""
    return f"tuned {key(kept)}"


def observe_raced(study: Study, untuned: Live, tuned: Live) -> None:
    """`observe_tuned` by the processes of a pair of the final race, once: then none has to start for it."""
    question = tuned_question(tuned.techniques)
    if study.store.answer(question) is not None:
        return
    try:
        stored = observe(study, tuned)
        before = {} if study.starved else observe(study, untuned)["split"]
    except TrialEnded:
        return                  # the race stands; others are started for this
    if apart(study.baseline["split"], sum(before.values())):
        stored["before"] = before
    study.store.set_answer(question, stored)


def observe_tuned(study: Study, bench: Bench, kept: Set) -> dict[str, Any]:
    """What `observe` says of the final set; with "before", the split of a step of a baseline that ran as fast as those of
    the final race, where the first one did not. Empty where a process failed: the result stands without."""
    stored = study.store.answer(tuned_question(kept))
    if stored is None:
        try:
            stored = _observed(study, bench, "tuned", kept)
            if not study.starved and study.final and apart(study.baseline["split"], study.final.a_ms):
                stored["before"] = _observed(study, bench, "baseline, once more", ())["split"]
        except TrialEnded as ended:
            study.notes.append(f"where the time of a step went is not known in full: {ended.outcome.reason}")
        study.store.set_answer(tuned_question(kept), stored or {})
    return stored or {}


def _observed(study: Study, bench: Bench, purpose: str, techniques: Set) -> dict[str, Any]:
    live = bench.live(purpose, techniques)
    try:
        return observe(study, live)
    finally:
        bench.finish_live(live)


def apart(split: Mapping[str, float], step_ms: float | None) -> bool:
    """Whether the parts of a step are those of a process that ran at another speed than `step_ms`."""
    total = sum(split.values())
    return bool(total and step_ms) and not 1 / APART <= total / step_ms <= APART


def with_machine(study: Study, facts: dict[str, Any]) -> None:
    """Complete what the agent saw by what is seen from here."""
    machine = machine_facts.observe(study.request.argv[0])
    seen = facts["machine"]
    facts["machine"] = {**msgspec.to_builtins(machine), "cpu_bf16_native": seen["cpu_bf16_native"] or machine.cpu_bf16_native,
                        "cpu_fp16_native": seen["cpu_fp16_native"] or machine.cpu_fp16_native}


def _split(parts: Mapping[str, float], step_ms: float) -> dict[str, float]:
    """A step by part, milliseconds; "forward and rest" is what the seams do not see."""
    names = {"input": "input wait", "backward": "backward", "optimizer": "optimizer", "gc": "garbage collector"}
    split = {label: parts.get(name, 0.0) for name, label in names.items() if name != "gc"}
    rest = step_ms - sum(split.values())
    collector = parts.get("gc", 0.0)
    return {**split, "garbage collector": collector, "forward and rest": max(0.0, rest - collector)}


def _input_ms(parts: Mapping[str, float]) -> tuple[float, float | None]:
    """How long the host waits for input in a step, and of that what an accelerator had nothing to do; None: nothing hides it."""
    exposed = parts.get("input", 0.0)
    return (parts["fetch"], exposed) if "fetch" in parts else (exposed, None)


def failed(study: Study, outcome: Outcome) -> bool:
    """A baseline that fails by itself is reported before anything else; one that merely is too short is no error."""
    log = study.folder / study.store.trials()[-1]["log"]
    if outcome.kind == "not_in_time":
        study.needs_budget = f"{math.ceil(2 * study.request.budget_s / 60)}m"
    if outcome.kind in ("too_short", "never_trained", "no_step", "several_trainings", "ranks_apart", "not_in_time"):
        study.refusal, study.refused = f"{outcome.reason}; {outcome.remedy}", outcome.kind
        study.say(f"cannot measure: {study.refusal}")
        return False
    raise ending.failure(outcome, "the command fails by itself; nothing else was tried", "make the command work without saturate first", str(log))


def race_mode(study: Study) -> str:
    """Whether two processes of the workload can live at once: memory may not hold them, or they may ask for one TCP port."""
    if study.starved and study.request.race_mode == "auto":
        return "alternate"
    if study.request.race_mode != "auto":
        return study.request.race_mode
    assert study.facts is not None
    why = study.store.answer(ALTERNATES) or _why_not_both(study.baseline, study.facts)
    if why is None:
        return "concurrent"
    alternate(study, why)
    return "alternate"


def alternate(study: Study, why: str) -> None:
    """Note for the user, and for who resumes the study, that two processes of this command cannot live at once."""
    study.store.set_answer(ALTERNATES, why)
    study.notes.append(f"fresh runs alternate: {why}")
    study.say(f"fresh runs alternate: {why}")


def pace(facts: Facts, startup_s: float) -> Pace:
    threads = facts.threads * facts.world_size
    return Pace(facts.step_ms / 1e3, startup_s, crowded=facts.device == "cpu" and 2 * threads > facts.machine.cpu_count)


def at_once(study: Study, mode: str, pace: Pace | None) -> int:
    """How many verification runs are to be started at once, while the baseline that screening races share stands frozen.
    What they record needs memory too, as much as one more; and under a limit each may need all of it."""
    facts = study.facts
    assert facts is not None
    order = "one by one" if pace is None else pace.order(UPDATES)
    if mode != "concurrent" or study.request.limit_bytes is not None or order == "one by one":
        return 1
    most = MOST_IN_TURN if order == "in turn" else MOST_AT_ONCE_ON_CPU
    if facts.device != "cpu":
        most = max(most, min(MOST_AT_ONCE, facts.machine.cpu_count // CORES_TO_START))
    return next((runs for runs in range(most, 1, -1) if _too_small(study.baseline, facts, runs + 2) is None), 1)


def _too_small(seen: dict[str, Any], facts: Facts, processes: int) -> str | None:
    """Which memory does not hold so many processes of the workload at once; None: all do."""
    if facts.machine.memory_bytes and (processes + 0.5) * seen["memory_bytes"] > facts.machine.memory_bytes:
        return "memory"
    room = facts.device_room_bytes          # while one of them ran, with a context of its own
    if room is not None and 1.1 * processes * facts.device_reserved_bytes + (processes - 1) * CONTEXT_BYTES > room:
        return "what is free of the device's memory"
    return None


def _why_not_both(seen: dict[str, Any], facts: Facts) -> str | None:
    """What is known to keep two processes of the workload from living at once; None: nothing."""
    too_small = _too_small(seen, facts, 2)
    if too_small is not None:
        return f"{too_small} does not hold two processes of this workload"
    if seen.get("ports"):
        return f"the command listens on port {', '.join(map(str, seen['ports']))}, which two of it cannot share"
    return None
