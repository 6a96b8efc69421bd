"""Applying techniques at their stage, and moving a session from discovery to its active phase."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import traceback
from collections.abc import Collection
from pathlib import Path
from posix import getpid
from typing import Any

from saturate import notices
from saturate.agent import facts, observe, override, sample, succession
from saturate.agent.ending import uncaught
from saturate.agent.inspection import Inspection
from saturate.techniques._api import NotApplied

# Not at the exit: whatever is imported there may hide a Ctrl-C from the shell.
from saturate.techniques._interrupts import from_signal_handler
from saturate.techniques._out_of_memory import out_of_memory

#: Entries per parameter that are looked at whenever a trial stands at the gate.
WATCHED_ENTRIES = 16

#: Steps behind which a technique of a `run` that has nothing to show for itself is named. What watches first, or is compiled, takes some.
JUDGED_STEPS = 20

#: Before the reason why a technique is not applied to what takes over in a training.
_GONE_ON = "the training goes on with another model or optimizer, and there "


def on_wake(session: Any) -> None:
    """First sign of training: stages `environment` and `import`, and what listens to losses."""
    from saturate.agent import early

    capture = session.plan.get("capture")
    if capture and session.capture is None:
        from saturate.agent.capture import Capture

        session.capture = Capture(capture, times_algorithms=any(map(_times_algorithms, session.plan["techniques"])))
        session.capture.hold_algorithms(session.torch)
        session.context.gradient_norms = {}     # techniques that free gradients leave their norms here
    if session.plan["mode"] == "run":
        from saturate.agent.watchdog import Watchdog

        session.watchdog = Watchdog(session.plan.get("on_divergence", "warn"), adds_up=any(map(_merges, session.plan["techniques"])))
        session.ending.call(session.guard, session.watchdog.finish, session)
        session.ending.call(session.guard, _report_end, session)
    if "ended" in session.plan:
        session.ending.call(session.guard, _leave_word, session)
    early.install(session, apply_stage)
    if session.plan.get("fit") is not None:
        from saturate.agent import batching

        batching.install(session)
    apply_stage(session, "environment")
    apply_stage(session, "import")


def _times_algorithms(entry: dict[str, Any]) -> bool:
    """Whether this technique has cuDNN choose its algorithms by a measurement."""
    technique = _technique(entry)
    return technique is not None and any(touch.resource == "cudnn-benchmark" for touch in technique.touches)


def _merges(entry: dict[str, Any]) -> bool:
    """Whether this technique makes several micro-steps one."""
    technique = _technique(entry)
    return technique is not None and bool(technique.merges)


def _technique(entry: dict[str, Any]) -> Any:
    """What a technique of the plan says about itself; None where it does not load, which is reported when its stage comes."""
    from saturate.errors import TechniqueError
    from saturate.techniques import _registry

    try:
        return _registry.load_one(entry["module"], entry.get("path")).TECHNIQUE
    except TechniqueError:
        return None


def advance(session: Any) -> None:
    """Called at a step boundary before the session is active."""
    if session.phase == "discover" and not session.unsettled():
        session.inspection = Inspection(session)
        session.phase = "inspect"
    elif session.phase == "inspect":
        session.inspection.finish()
        session.context.device = session.inspection.device
        session.context.differentiates_gradients = session.inspection.differentiates_gradients
        if not session.placed:          # later a technique's own autocast may be what is seen
            session.context.autocast = session.inspection.autocast
            session.context.steps_in_forward = session.inspection.steps_in_forward
        place(session, session.inspection.modules, tuple(session.optimizers.living()))
        session.phase = "active"
        session.loaders_known = session.plan["mode"] == "run"
        report_run(session)
        if session.plan["mode"] != "run":
            _connect(session)


def place(session: Any, modules: tuple[Any, ...], optimizers: tuple[Any, ...]) -> None:
    """Apply the techniques of stage "model" to what is trained; those that acted on what was trained before are moved."""
    context = session.context
    if session.placed:
        moving = _outdated(session, not context.trains(modules))
        context.undo(moving)
        session.applied = [(entry, problem) for entry, problem in session.applied if entry["id"] not in moving]
    context.modules, context.optimizers = modules, optimizers
    apply_stage(session, "model")
    session.placed += 1
    session.placed_at = session.boundaries
    if session.plan["mode"] == "run":
        session.next_look, session.shown = session.boundaries + JUDGED_STEPS, None


def _outdated(session: Any, other_modules: bool) -> set[str]:
    """The techniques that must be applied anew to other optimizers, and modules where those are others as well."""
    from saturate.techniques import _registry

    found = set()
    for entry, _ in session.applied:
        technique = _registry.load_one(entry["module"], entry.get("path")).TECHNIQUE
        if technique.stage == "model" and (technique.acts_on == "optimizers" or (technique.acts_on == "modules" and other_modules)):
            found.add(entry["id"])
    return found


def hello_of(session: Any) -> dict[str, Any]:
    """What a rank says when it comes to the gate for the first time, and when any of it has changed."""
    return {
        "rank": observe.rank(),
        "world_size": observe.world_size(),
        "step": {"token": session.step.token, "count": session.step.count, "tokens": list(session.step.tokens)},
        "motif": session.inspection.describe(),
        "steps_so_far": session.steps_seen,
        "held_ns": session.held_ns,
        "device": session.context.device,
        "applied": [{"id": entry["id"], "problem": problem} for entry, problem in session.applied],
        "changes": session.context.changes,
    }


def _connect(session: Any) -> None:
    from saturate.agent.gate import Gate

    hello = hello_of(session)
    if session.gate is None:        # a motif that changed keeps its connection
        session.gate = Gate(session.plan, hello, session.timeline, session.clock, session.drain,
                            lambda order: answer(session, order), lambda: standing(session))
        session.ending.call(_farewell, session)
    else:
        session.gate.greet(hello)
    if session.capture is not None:
        session.capture.on_done = lambda: session.gate.boundary(False)
    else:
        session.gate.boundary(False)
        session.released()


def _farewell(session: Any) -> None:
    """The script has ended by itself: say after how many steps, and whether by an exception. A profiler that still runs when the
    interpreter goes down takes the process with it."""
    if session.asleep:
        return
    if session.window is not None:
        session.guard(session.window.withdraw)
    try:
        session.gate.tell({"at": "ended", "steps": session.steps_seen, "raised": uncaught() is not None, **_batches(session)})
    except OSError:
        pass        # the controller is gone: nobody is left to tell


def _leave_word(session: Any) -> None:
    """The script has ended before it came to the gate: say what was seen until then, in a file. Helpers end so, too, while the
    training goes on; to the gate, each would look like the end of a rank."""
    if session.asleep or session.gate is not None or not session.counts:
        return
    optimizers = [count for token, count in session.counts.items() if token != "B"]
    word = {"steps": max(optimizers, default=session.counts.get("B", 0)), "recognised": session.step is not None and not session.awaited,
            "events": " ".join(session.tokens[-20:]), "wrong_step": _wrong_step(session)}
    with contextlib.suppress(OSError):      # a full disk: what is left of the word is none, and is passed over
        Path(f"{session.plan['ended']}-{getpid()}.json").write_text(json.dumps(word), encoding="utf-8")


def _wrong_step(session: Any) -> str:
    """Why the step that the user named is none, or ""."""
    return override.complaint(session.step, session.counts) if session.awaited else ""


def report_no_step(session: Any, replayed: bool = False) -> None:
    """No step was found in this process, or none will be seen any more (`replayed`: from a CUDA graph): tell the controller, or the user."""
    if session.plan["mode"] == "run":
        if observe.rank() == 0:
            why = "the script replays a CUDA graph of whole steps" if replayed else "no training step was recognised"
            then = "its losses are not watched any more" if session.placed else "the recipe's model techniques are not applied"
            notices.tell(f"saturate: {why}; {then}\n")
        return
    seen = {"events": " ".join(session.tokens[-20:]), "wrong_step": _wrong_step(session), "replayed": replayed}
    if session.plan.get("drill"):       # its controller reads what is written down, and no gate
        session.capture.withdraw(no_step=seen)
        return
    from saturate.agent.gate import Gate

    hello = {"rank": observe.rank(), "world_size": observe.world_size(), "steps_so_far": 0}
    gate = session.gate or Gate(session.plan, hello, session.timeline, session.clock, session.drain, lambda order: None)
    gate.tell({"at": "no_step", **seen})


def report_failure(session: Any, text: str, how: str = "failed") -> None:
    """The agent failed, or `how` it ended, before it came to the gate: tell the user, and the controller, who would wait for it in vain."""
    notices.tell(f"saturate: the agent {how} and withdrew; the run goes on without it\n{text}")
    if session.phase == "asleep" and "ended" in session.plan:      # it may never train: a word that is read where nobody greets
        Path(f"{session.plan['ended']}-stayed-out-{getpid()}.json").write_text(json.dumps({"failed": text}), encoding="utf-8")
    if session.plan["mode"] == "run" or session.phase == "asleep" or not session.plan.get("socket"):
        return
    from saturate.agent.gate import Gate

    hello = {"rank": observe.rank(), "world_size": observe.world_size(), "steps_so_far": 0}
    Gate(session.plan, hello, session.timeline, session.clock, session.drain, lambda order: None).tell({"at": "agent_failed", "error": text})


def standing(session: Any) -> dict[str, Any]:
    """What a rank says whenever it comes to the gate: events since the start by token, losses that were not reported
    yet, a few entries of a few parameters, and how far the loader is behind. A step must stay what it was, and training must go on."""
    early, session.early = session.early, []
    if session.succeeded:
        session.watched = sample.few(succession.at_work(session))
    elif session.watched is None:
        session.watched = sample.few(observe.trained_parameters(session))
    return {"counts": session.counts, "device_peak_bytes": facts.reserved_bytes(session),
            "losses": _losses(early),
            "sample": [value for row in sample.all_strided(session.watched, WATCHED_ENTRIES) for value in row],
            "unmade_batches": observe.unmade_batches(session),
            **_batches(session)}


def _losses(updates: list[list[Any]]) -> list[list[float]]:
    """Of each micro-step of these updates."""
    known = iter(sample.totals([loss for update in updates for loss in update]))
    return [[next(known) for _ in update] for update in updates]


def _batches(session: Any) -> dict[str, Any]:
    return {"fit": session.batching.standing()} if session.batching is not None else {}


def answer(session: Any, order: dict[str, Any]) -> Any:
    """Serve a question of the controller while standing at the gate."""
    if order["do"] == "facts":
        return facts.facts(session)
    if order["do"] == "evidence":
        return facts.evidence(session)
    if order["do"] == "seen":
        return session.seen
    if order["do"] in ("fit", "extents"):
        return session.batching.answer(order["do"])
    if order["do"] == "sources":
        from saturate.agent import sources

        return sources.own()
    if order["do"] == "ceilings":
        from saturate.agent import ceilings

        return ceilings.measure(session.torch, session.context.device, next(iter(session.inspection.devices), None))
    raise ValueError(f"unknown order {order['do']!r}")


def apply_stage(session: Any, stage: str, before_training: bool = False) -> None:
    """Apply the plan's techniques of one stage, in the plan's order. A failure is reported, never raised.

    `before_training`: only those that want it (see `agent.early`); what cannot be applied yet has its turn later.
    """
    from saturate.techniques import _registry

    for entry in session.plan["techniques"]:
        if any(done["id"] == entry["id"] for done, _ in session.applied):
            continue        # the motif changed after techniques were on
        module = None
        problem = ""
        try:
            module = _registry.load_one(entry["module"], entry.get("path"))
            options = module.Options(**entry["options"])
            if stage == "import" and module.TECHNIQUE.stage == "model" and hasattr(module, "prepare"):
                # Under another name: it stays when `apply` is taken back because the training goes on with another model.
                module.prepare(session.context.of(f"{entry['id']} at construction"), options)
            if module.TECHNIQUE.stage != stage or (before_training and not getattr(module, "EARLY", False)):
                continue
            module.apply(session.context.of(entry["id"]), options)
        except NotApplied as refusal:
            if before_training:
                session.context.undo({entry["id"]})
                continue
            problem = f"not_applied: {_GONE_ON if session.placed else ''}{refusal}"
        except Exception as error:  # third-party code: named in the report, the run goes on
            if from_signal_handler(error):
                raise
            problem = f"failed: {type(error).__name__}: {error}\n{traceback.format_exc()}"
        if problem:             # what raised may have begun to act
            session.context.undo({entry["id"]})
            session.context.forget(entry["id"])
        session.applied.append((entry, problem))


def rewrite_loader(session: Any, loader: Any, init: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let techniques see a DataLoader's arguments, defaults filled in, and change some before it is built."""
    signature = inspect.signature(init)
    try:
        bound = signature.bind(loader, *args, **kwargs)
    except TypeError:
        return args, kwargs     # as torch will say itself, to a script that may expect it
    given = set(bound.arguments)
    bound.apply_defaults()
    arguments = {name: value for name, value in bound.arguments.items() if name != "self"}
    arguments.update(arguments.pop("kwargs", {}))
    changed: dict[str, Any] = {}
    for rewrite in session.context.loader_rewrites:
        changed.update(rewrite(arguments["dataset"], {**arguments, **changed}, frozenset(given)))
    if not changed:
        return args, kwargs
    final = {name: arguments[name] for name in given if name in arguments}
    return (), {**final, **changed}


def report_run(session: Any) -> None:
    """In `run` mode there is no controller: say on stderr what did not take effect, once, from rank 0."""
    if session.plan["mode"] != "run" or observe.rank() != 0:
        return
    for entry, problem in session.applied:
        line = f"saturate: {entry['id']} did not take effect: {problem.partition(chr(10))[0]}\n"
        if problem and line not in session.told:
            session.told.add(line)
            notices.tell(line)


def _report_end(session: Any) -> None:
    """The script of a `run` has trained, and ended: say which techniques had no turn, or nothing to act on."""
    tried = {entry["id"] for entry, _ in session.applied}
    late = [entry["id"] for entry in session.plan["techniques"] if entry["id"] not in tried]
    short = _died_of_memory(session)
    if late and (session.counts or short) and getpid() == session.pid and observe.rank() == 0:
        why = "the script ended within the few steps that show what one is"
        if short:
            why = ("the script ran out of memory within the first steps; such techniques act once those have shown what a "
                   "step is, about from the fifth on, and `saturate fit` finds a batch that fits")
        notices.tell(f"saturate: {', '.join(late)} did not take effect: {why}\n")
        report_run(session)
    if session.boundaries > session.placed_at and getpid() == session.pid and observe.rank() == 0:
        uncalled = session.context.never_called() if not session.inspection.compiled else {}
        for owner, names in uncalled.items():
            notices.tell(f"saturate: {owner} did not take effect: the script trains without calling the forward of "
                         f"{', '.join(sorted(names))}, which it acts on\n")
        if session.boundaries - session.placed_at >= JUDGED_STEPS:
            _report_unproved(session, uncalled)


def _report_unproved(session: Any, told: Collection[str]) -> None:
    """What was applied and has nothing to show for itself by now, or has stopped to act. What the script has dropped by now is judged
    by the latest look at it."""
    from saturate.techniques import _registry

    seen = facts.shown(session)
    if session.context.some_gone() and session.shown is not None:
        then = session.shown
        seen = dataclasses.replace(seen, optimizers=then.optimizers, channels_last=then.channels_last,
                                   grads_none_after_zero=then.grads_none_after_zero)
    workers = sum(len(entry["workers"]) for entry in session.loaders.values())
    seen = dataclasses.replace(seen, live_workers=workers)      # those of the last pass have ended with it
    for entry, problem in session.applied:
        if problem or entry["id"] in told:
            continue
        try:
            module = _registry.load_one(entry["module"], entry.get("path"))
            proof = module.active(seen, module.Options(**entry["options"]))
        except Exception as error:  # third-party code: the script has ended, and nothing is to be saved
            if from_signal_handler(error):
                raise
            continue
        if not proof.active:
            notices.tell(f"saturate: {entry['id']} was not in effect when the script ended: {proof.evidence}\n")


def _died_of_memory(session: Any) -> bool:
    error = uncaught()
    return error is not None and out_of_memory(error, session.torch)
