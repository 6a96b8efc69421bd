"""`saturate.optimize` and `saturate.load`: what a user calls.

    best = saturate.optimize(model, inputs=loader)                          # lossless search only
    r = saturate.optimize(model, inputs=loader, check=per_sample_correct, budget=saturate.Budget(max_drop=0.01))
    r.best(x); r.best.save("artifact/"); saturate.load("artifact/"); r.table(); r.pick(max_drop=0.002)
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import secrets
import sys
import time as clock
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from saturate.errors import EnvironmentProblem, UsageError, WorkloadFailed
from saturate.inference import confirm, examples, folders, guards, here, leftovers, plan, serving, structure
from saturate.inference.accuracy import Budget, refuse_other
from saturate.inference.artifact import Artifact, load
from saturate.inference.called import signature_of
from saturate.inference.ending import Ending
from saturate.inference.failures import WorkerFailed
from saturate.inference.forkserver import running
from saturate.inference.journal import Journal, rests
from saturate.inference.jury import control
from saturate.inference.lab import Lab, of_the_machine
from saturate.inference.phases import Phases, slack_s
from saturate.inference.result import Result, seconds_of, undecided_lossless
from saturate.inference.search import Search, for_all_s
from saturate.inference.source import Source
from saturate.inference.techniques import _registry
from saturate.inference.techniques._api import Train
from saturate.machine import facts as machine
from saturate.records.inference import ModelFacts
from saturate.records.spelling import suggestion
from saturate.trial.lock import FolderLock

#: Limits that a user may set, with their units in the names.
LIMITS = ("peak_memory_gb", "p50_ms", "p90_ms", "p99_ms")
OBJECTIVES = ("latency", "throughput", "memory")

#: Of the time, this share is kept for storing, confirming and racing the winner.
CONFIRM_SHARE = 0.3

#: A candidate that takes more than this share of the machine's memory is ended.
MOST_MEMORY = 0.8

#: How the folders of searches without a workdir are called, in .saturate.
_UNNAMED = "optimize-"

#: So many lossless candidates may become the second baseline.
LOSSLESS_TURNS = 2


def optimize(model: Any, inputs: Any, *, check: Callable[..., Any] | None = None, budget: Budget | None = None,
             objective: str = "latency", limits: Mapping[str, float] | None = None, time: str | float = "20m",
             train: Train | tuple[Any, Any] | None = None, calibration: Any = None, workdir: str | os.PathLike[str] | None = None,
             threads: int | None = None, only: str | Collection[str] = (), skip: str | Collection[str] = (), resume: bool = True,
             progress: Callable[[str], None] | None = None) -> Result:
    """Find the fastest deployable variant of `model` whose accuracy loss is within the budget, and prove it.

    model: an nn.Module, a method of one, or functools.partial of either. inputs: an iterable of tuples of positional
    inputs, real ones; they define shapes and batch size, and a part of them calibrates quantisation. check(run): the
    user's own score of `run`, which has the model's signature; per-sample values are best (`accuracy`). Without a check
    only candidates are tried that compute the same up to the order of sums. calibration: batches as `inputs`, that calibrate in
    their place. time: "20m", "90s" or seconds; no candidate
    begins after 70 % of it (but to repair what did not hold), nor when the rest is needed to confirm what was found. One that is
    being prepared by then has at least 30 seconds, and the best is stored, loaded and scored in any case: a short time for a large
    model may be overrun, and the last lines say what it took. train: `Train(loader, loss)` or (loader, loss) unlocks recovery, quantisation-aware
    training and distillation. threads: CPU threads that a candidate may use (default: torch's). workdir: where the search
    keeps what it found (a folder that is new, empty, or of an earlier search); the same call goes on there after an interruption.

    Raises UsageError for bad arguments, WorkloadFailed where the model does not run on its inputs, CheckUnusable where
    the check cannot judge. A candidate that fails costs a row in the table, never the search.
    """
    import torch

    began = clock.monotonic()
    seconds = seconds_of(time)
    phases, until_s = Phases(began), began + (1 - CONFIRM_SHARE) * seconds
    if model is None:
        raise UsageError("the model is None", cause="a function that builds it and returns nothing gives None",
                         remedy="return the torch.nn.Module")
    budget = checked(check, budget, objective, limits)
    limits = {name: float(most) for name, most in (limits or {}).items()}       # of numpy, perhaps, which no record holds
    only, skip = _ids(only), _ids(skip)
    registry = known(_registry.load(), only, skip)
    if isinstance(train, tuple) and len(train) != 2:
        raise UsageError(f"`train` is a tuple of {len(train)}", remedy="train=(loader, loss), or saturate.Train(loader, loss, ...)")
    if threads is not None and (not isinstance(threads, numbers.Integral) or isinstance(threads, bool) or threads < 1):
        raise UsageError(f"threads is {threads!r}", remedy="a whole number, at least 1, or None for as many as torch takes")
    trainer = Train(*train) if isinstance(train, tuple) else train
    if workdir is None:
        leftovers.clear_forsaken(Path(".saturate"), _UNNAMED)
    folder = folders.workplace(Path(workdir) if workdir is not None else Path(".saturate") / f"{_UNNAMED}{secrets.token_hex(4)}")
    say = progress or _to_stderr
    with FolderLock(folder, "workdir (--workdir DIR)"), ExitStack() as ends:
        leftovers.clear_away(folder)
        source = Source.write(folder / "source", model, inputs, calibration, trainer)
        for note in source.notes:
            say(note)
        if objective == "throughput":
            refuse_one_size(torch, source)
        lab = Lab(source, folder, int(threads or torch.get_num_threads()), began + seconds, check=check, memory_bytes=memory_limit(source.device),
                  signature=signature_of(model), asked=budget)
        if objective != "memory":           # of a process that has imported more than it needs
            lab.forks = ends.enter_context(running(source, folder / "processes", lab.threads))
        starts = clock.monotonic()
        with running_model():
            worker = lab.baseline()
        start_s = clock.monotonic() - starts - for_all_s(worker.ready.notes)
        try:
            with running_model():
                notes = [*source.notes, *observe_baseline(lab, worker, threads)]
                worker, unknown = lab.probe(worker)
                notes += unknown
            notes += [*here.compare(torch, model, lab), *here.known_differences(torch, model)]
            if lab.forks is not None:
                lab.forks.wait()
            phases.end("start")
            if check is not None and clock.monotonic() < until_s:
                assert budget is not None
                say("check: twice on the baseline, once on noise")
                lab.jury, said = control(check, lab.run_of(worker), budget, source, trainer, lab.deadline_s, until_s)
                for note in said:
                    say(note)
                notes += said
                phases.end("check")
            assert lab.facts is not None
            pool = plan.pool(registry, lab.facts, check=check is not None, only=only, skip=skip)
            notes += pool.notes()
            journal = None
            if check is None or lab.jury is not None:       # else the time is over, and nothing will be measured or judged
                heard = lab.jury.heard if lab.jury is not None else ()
                journal = Journal(folder, lab.key(objective, limits), resume, rests(torch, check, budget, heard))
                lab.remember(journal)
            search = Search(lab, pool, objective, limits, until_s, budget.max_drop if budget else 0.0, say, journal,
                            end_s=lab.deadline_s, check_s=lab.jury.seconds if lab.jury is not None else 0.0, start_s=start_s,
                            afresh_s=lab.forks.saves_s if lab.forks is not None else 0.0)
            ending = Ending(search, lab, notes, began, phases)
            with ending.told():
                search.run(worker)
                phases.end("search")
        finally:
            worker.close()
        search.deadline_s, search.end_s, search.late_s = lab.deadline_s, math.inf, lab.deadline_s + slack_s(seconds)
        with ending.told():
            return conclude(ending, say)


def _ids(given: str | Collection[str] | None) -> tuple[str, ...]:
    """Of techniques; a text is one, and no collection of its letters."""
    return (given,) if isinstance(given, str) else tuple(given or ())


def known(registry: dict[str, Any], only: Collection[str], skip: Collection[str]) -> dict[str, Any]:
    """The registry. Raises UsageError for an id that is not in it."""
    for id in sorted({*only, *skip}):
        if id not in registry:
            raise UsageError(f"there is no inference technique {id!r}",
                             remedy=suggestion(id, list(registry)) or "saturate techniques --inference lists them")
    return registry


@contextmanager
def running_model() -> Iterator[None]:
    """What fails in here is the user's own model (WorkloadFailed), unless a full disk or another program has ended it (EnvironmentProblem)."""
    try:
        yield
    except WorkerFailed as error:
        if error.kind == "disk_full":
            with of_the_machine("the model's process cannot work"):
                raise
        if error.outside:
            raise EnvironmentProblem("the model's process was ended from outside", cause=error.reason, evidence=error.log,
                                     remedy="look for what ends processes here (memory that runs out, other users), and give the same "
                                            "command again") from error
        if error.kind == "timeout":
            raise WorkloadFailed("the model takes too long", cause=error.reason, evidence=error.log,
                                 remedy="give the search more time, or fewer and smaller inputs") from error
        if error.kind == "not_made":
            raise WorkloadFailed("the model cannot be made in a process of its own", cause=error.reason, evidence=error.log,
                                 remedy="other processes import the modules of its classes anew, with this sys.path: what was put into "
                                        "sys.modules or changed in a module by hand has to be where they are imported") from error
        raise WorkloadFailed("the model does not run on its inputs", cause=error.reason, evidence=error.log,
                             remedy="model(*batch) must work for each batch of inputs") from error


def checked(check: Any, budget: Budget | None, objective: str, limits: Mapping[str, float] | None) -> Budget | None:
    """The budget to use. Raises UsageError for arguments that do not go together."""
    if check is None and budget is not None:
        raise UsageError("a budget needs a check", cause="without a check nothing says what a candidate loses",
                         remedy="pass check=lambda run: ..., or leave the budget out: the search is lossless then")
    if check is not None and not callable(check):
        raise UsageError("check is not callable", cause=f"it is a {type(check).__name__}", remedy="check takes run, and returns the score")
    if objective not in OBJECTIVES:
        raise UsageError(f"there is no objective {objective!r}", remedy=f"one of {', '.join(OBJECTIVES)}")
    if not isinstance(limits, Mapping | None):
        raise UsageError(f"limits is a {type(limits).__name__}", remedy='limits={"p99_ms": 15, "peak_memory_gb": 4}')
    for name, most in (limits or {}).items():
        if name not in LIMITS:
            raise UsageError(f"there is no limit {name!r}", remedy=f"one of {', '.join(LIMITS)}")
        if isinstance(most, bool) or not isinstance(most, numbers.Real) or not 0 < most < math.inf:
            raise UsageError(f"the limit {name} is {most!r}", remedy="a positive number; leave out what has no limit")
    refuse_other(budget)
    return Budget(max_drop=0.01) if budget is None and check is not None else budget


def refuse_one_size(torch: Any, source: Source) -> None:
    """Raise UsageError for inputs of which no other number of samples can be made: nobody could say what serves most of them."""
    try:
        known = examples.of_size(torch, source.inputs(torch)[0], 1) is not None
    except structure.NotDescribable as error:
        raise UsageError("the objective throughput needs inputs of which other batch sizes can be made", cause=str(error),
                         remedy='objective="latency", or a model that takes tensors, plain data and containers of them') from error
    if not known:
        raise UsageError("the objective throughput needs inputs with a batch dimension",
                         cause="the tensors of a batch do not share a first dimension, so samples cannot be counted, and there is no other batch size",
                         remedy='objective="latency", or a model that keeps what is no sample in itself (an attribute, functools.partial)')


def memory_limit(device: str) -> int | None:
    """Bytes that a candidate may take on a CPU: it must end before the machine runs out. A GPU's allocator has its own end."""
    total = machine.memory_bytes() if device == "cpu" else None
    return None if total is None else int(MOST_MEMORY * total)


def allowed(facts: ModelFacts, threads: int, *, asked: bool) -> ModelFacts:
    """The facts with the cores that a candidate may use: as many as the `threads` of the search. Where they were not `asked` for
    they are torch's (OMP_NUM_THREADS, or one for each physical core)."""
    if asked:
        return dataclasses.replace(facts, threads=threads, cores=threads)
    return dataclasses.replace(facts, cores=min(facts.cores, threads))


def observe_baseline(lab: Lab, worker: Any, threads: int | None) -> list[str]:
    """The baseline's facts and outputs; what a user must know about them."""
    facts = lab.facts = allowed(worker.ready.facts, lab.threads, asked=threads is not None)
    lab.observe(worker)
    import torch

    notes = []      # what keeps candidates away comes first: a summary has room for one

    if not any(lab.reference):
        raise WorkloadFailed("the model returns no tensor", cause="there is nothing that a candidate's answer could be compared with",
                             remedy="return tensors, alone or inside of tuples, lists, dictionaries and dataclasses")
    missing = guards.missing(lab.reference)
    if missing == 1:
        raise WorkloadFailed("the model's answers hold no number", cause="all that it computes on its inputs is NaN, or empty",
                             remedy="look at the inputs and the weights: model(*batch) must answer with numbers")
    if missing:
        notes.append(f"{100 * missing:.3g} % of what the model answers with is NaN: nothing can be compared there")
    repeated = guards.repeats(torch, lab.reference, lab.again or lab.reference)
    if facts.random or not repeated.passed:
        lab.facts = dataclasses.replace(facts, random=True)
        notes.append(("the model keeps something from call to call: two calls on the same input differ although all random numbers "
                      "are the same" if facts.keeps_state else
                      "the model is random at inference: two calls on the same input differ") +
                     ", so no candidate can be shown to be lossless, and scores scatter more")
    if facts.writes_inputs:
        notes.append("the model writes to its inputs: every call that is measured gets a copy of its own, and a candidate may leave "
                     "its inputs as they are")
    if facts.export_problem:
        notes.append(f"the model cannot be exported: {facts.export_problem}")
    if facts.training_mode:
        notes.append("the model came in training mode: it is measured in evaluation mode")
    return notes


def conclude(ending: Ending, say: Callable[[str], None]) -> Result:
    """Store, confirm and race the best; the result, whatever came of it."""
    search, lab = ending.search, ending.lab
    if confirm.contenders(search):
        say("confirm: store the best, load it in a fresh process, score and race it")
    won, ending.final = confirm.champion(search, lab, lab.deadline_s)
    ending.phases.end("winner")
    served = None
    if search.objective == "throughput":
        served = serving.most(search, lab, won, ending.final)
        won, ending.final = served.won, served.final
        ending.phases.end("throughput")
    ending.won = won
    own = won is not None and won.found.candidate.lossless
    ending.lossless, unraced = (won, "") if own else _best_lossless(search, lab)
    if won is not None and not own and ending.lossless is not None:
        try:
            ending.versus = confirm.against(lab, won.artifact, ending.lossless.artifact, lab.deadline_s)
        except WorkerFailed as error:
            unraced = f"in the race with {ending.lossless.found.candidate.label()}: {error}"
        prefer_lossless(ending)
    ending.unraced = unraced
    if not own and ending.lossless is not None:
        ending.phases.end("lossless")
    if search.objective != "memory" and slower_than_the_model(ending):
        ending.lossless = ending.versus = None
    record = ending.recorded()
    if served is not None:
        record = serving.with_throughput(record, served)
    ending.record = record
    lab.discard(Path(record.artifact) if record.artifact is not None else None)
    return Result.of(record, search, lab)


def prefer_lossless(ending: Ending) -> None:
    """Make the best lossless candidate the answer where the winner is no faster by their race: it has only to be faster than the model by a
    final race of its own."""
    search, lab, won, lossless, versus = ending.search, ending.lab, ending.won, ending.lossless, ending.versus
    assert won is not None and lossless is not None
    if search.objective != "latency" or versus is None or versus.speedup_ci is None or versus.verdict not in ("no_difference", "slower"):
        return
    final = confirm.crowned(lossless, search, lab, lab.deadline_s) if clock.monotonic() < lab.deadline_s else None
    if final is None:
        return
    low, high = versus.speedup_ci
    won.found.fate = "dominated"
    won.found.reason = f"{versus.speedup:.2f}x [{low:.2f}, {high:.2f}] in a race with {lossless.found.candidate.label()}, which loses nothing"
    search.progress(f"{won.found.candidate.label()}: {won.found.reason}")
    ending.won, ending.final, ending.versus = lossless, final, None


def slower_than_the_model(ending: Ending) -> bool:
    """Whether the winner is further ahead of the best lossless candidate than of the model itself. Which is best was chosen by
    screenings, of which the luckiest is above 1 where none helps."""
    known = [race.estimate for race in (ending.versus, ending.final) if race is not None and race.estimate is not None]
    return len(known) == 2 and known[0].log_ratio > known[1].log_ratio


def _best_lossless(search: Search, lab: Lab) -> tuple[confirm.Confirmed | None, str]:
    """The second baseline, stored and loaded like the winner. None: it is the model itself, or not known for a reason."""
    turns = 0
    while (found := search.best(lossless=True)) is not None and search.value(found) > search.beats:
        if search.too_late(found):
            return None, f"the time ended before {found.candidate.label()} was stored and raced"
        if turns == LOSSLESS_TURNS:
            return None, f"{turns} lossless candidates cannot be stored and loaded again, and the others had no turn"
        turns += 1
        survived = confirm.survive(found, lab, search.progress)
        if survived is not None:
            return survived, ""
    return None, undecided_lossless(search)


def _to_stderr(text: str) -> None:
    print(f"saturate: {text}", file=sys.stderr, flush=True)


__all__ = ["LIMITS", "OBJECTIVES", "Artifact", "Result", "load", "optimize"]
