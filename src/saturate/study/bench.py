"""The workbench: starts trials in their cages, warms them up, and knows what they cost."""

from __future__ import annotations

import contextlib
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from saturate.measure import stationary
from saturate.records.facts import Evidence
from saturate.records.result import TrialRecord
from saturate.study import sources
from saturate.study.candidates import Set, merging
from saturate.study.live import FIRST_STEPS, WARM_STEPS, Cold, Live, Order, Pace, on_side, queues, timed_losses
from saturate.study.peaks import Peaks
from saturate.study.rates import Window, differ, rate
from saturate.study.store import Store
from saturate.trial import planning
from saturate.trial.layers import clear_away, collect_caches, discard, left_behind
from saturate.trial.outcome import OUT_OF_MEMORY, SHOWN_BY, Outcome
from saturate.trial.process import Trial, TrialEnded, TrialSpec, Workload

#: Longest warm-up, as a share of the budget: a recipe that takes longer to settle is measured as it is then.
WARM_UP_SHARE = 0.2

#: A first step is waited for at least this long, however small the budget.
LEAST_PATIENCE_S = 60.0

#: A process with techniques that stands at no gate is waited for until the budget is over, but for at least this long, and so many times
#: what a start and a verification run of the baseline take: what was begun in time should not be lost to the last seconds.
LEAST_WAIT_S, WAITED_FOR = 30.0, 4

#: When it is said that a first step is still waited for, and how often then.
FIRST_WORD_S, NEXT_WORD_S = 30.0, 120.0

#: What the baseline leaves in its folder in a study with a memory limit.
EARLY_FACTS = "early_facts.json"

_WORDS = {"B": "backward runs", "S": "its optimizer steps", "C": "its closure runs"}


class Bench:
    """Starts and ends every process of a study. `say` tells the user one line."""

    def __init__(self, workload: Workload, folder: Path, study_dir: Path, store: Store, budget_s: float, say: Callable[[str], None],
                 limit_bytes: int | None = None):
        self.workload = workload
        self.folder = folder
        self.study_dir = study_dir
        self.store = store
        self.budget_s = budget_s
        self.peaks = Peaks(store, limit_bytes)
        self.longest_step_s = math.inf                  # where the budget does not hold a verification run of such steps
        self.ends = math.inf                            # when the budget is over (time.monotonic)
        self.reference: Set = ()                        # what everything is compared with: without it there is no study
        self.starved = False                            # the baseline itself runs out of memory
        self.say = say
        self.step: dict[str, Any] | None = None         # the baseline's motif, once known: what a step is may not change
        self.reference_events: dict[str, float] | None = None     # per step, of the baseline
        self.warm_ups: list[list[Window]] = []          # of each of its processes, block by block
        self.pace: Pace | None = None                   # of the baseline; as long as it is not known, trials start one by one
        self.sources: Mapping[str, str] = {}            # SHA-256 of the files that the baseline ran, see `study.sources`
        self.caches: Path | None = None
        self.intercept: str | None = None               # why overlays cannot be used, once that is known
        self._trains = False                            # whether any trial has come to its first gate
        self.isolation = ""
        self.writes_itself = ""                         # why the command's own program must write where trials may not
        self.living: list[Trial] = []
        self._count = self._clear_away({trial["id"] for trial in store.trials()})
        self.agent_plan: dict[str, Any] = {}            # more for the agent of the trials that start from now on
        self._plans: dict[str, Any] = {}
        self._sets: dict[str, Set] = {}                 # of the living, by id
        self._booked = time.monotonic()

    def _clear_away(self, known: set[str]) -> int:
        """Remove what a killed study left of trials that it never finished; the highest number that a trial has had."""
        for folder in self.folder.glob("t[0-9]*"):
            if folder.name not in known:
                clear_away(folder)
                shutil.rmtree(folder)
        return max((int(identity[1:]) for identity in known), default=0)

    # -- starting --------------------------------------------------------------------------------------------------

    def start(self, purpose: str, techniques: Set, capture: dict[str, Any] | None = None, held: bool = False) -> Trial:
        """A fresh process group. `held`: it trains only when it is waited for. Raises TrialEnded when it does not come up."""
        self._count += 1
        identity = f"t{self._count:03d}"
        run_dir = self.folder / identity
        plan = planning.plan(self.workload.cwd, run_dir, self.workload.argv, self.workload.environment,
                             self.caches, self.study_dir)
        if self.intercept is not None and plan.mode != "intercept":
            plan = planning.as_intercept(plan, self.intercept)
        if self.writes_itself:
            plan = planning.unguarded(plan, self.writes_itself)
        self.isolation = f"trials wrote to {plan.reason}, not to your files" if plan.mode == "overlay" else plan.reason
        if capture is not None:
            capture = {**capture, "folder": str(run_dir)}
        spec = TrialSpec(
            id=identity, purpose=purpose, folder=run_dir, techniques=[c.chosen() for c in techniques],
            step=self.step, capture=capture, cage=plan.to_json(), redirect=plan.redirect, environment=plan.environment,
            plan={**self.agent_plan, **self._memory_plan(run_dir, techniques, capture is not None)},
            limit_bytes=self.peaks.allowed(techniques) if capture is None else None, held=held,
            **(self._patience(techniques, capture) if techniques != self.reference else {}),
        )
        try:
            trial = Trial(self.workload, spec)
        except BaseException:           # nobody else knows of it
            clear_away(run_dir)
            raise
        self._plans[identity], self._sets[identity] = plan, techniques
        self.living.append(trial)
        return trial

    def _patience(self, techniques: Set, capture: dict[str, Any] | None) -> dict[str, float]:
        """How long a process of a candidate is waited for. What such a one takes to start is known where one has."""
        labels = [c.label() for c in techniques]
        started = [trial["startup_s"] for trial in self.store.trials() if trial["techniques"] == labels and trial.get("startup_s")]
        steps = capture["updates"] if capture else FIRST_STEPS
        pace = self.pace or Pace(0.0, 0.0, crowded=False)
        return {"until": self.ends, "least_s": max(LEAST_WAIT_S, WAITED_FOR * (max([pace.startup_s, *started]) + steps * pace.step_s))}

    def ready(self, purpose: str, techniques: Set, capture: dict[str, Any] | None = None,
              started: Trial | None = None) -> tuple[Trial, dict[str, Any]]:
        """Start a trial, unless it is `started`, and wait for its first gate, in the second isolation mode when the first is
        refused. Raises TrialEnded, and EnvironmentProblem where it ran, or failed with, other code than the baseline."""
        trial = started or self.start(purpose, techniques, capture)
        try:
            trains = self._trains or capture is not None        # nothing is verified that has not trained before
            with contextlib.nullcontext() if trains else self._said_that_it_waits():
                hello = trial.wait_ready(math.inf if trains else max(LEAST_PATIENCE_S, self.budget_s))
            self._trains = True
            self._check_sources()
            return trial, hello
        except TrialEnded as ended:
            self.finish(trial, techniques)
            self._check_sources()
            if ended.outcome.kind != "cage_refused" or trial.spec.redirect is not None:
                raise
            if self.intercept is None:      # else the other one of a pair was refused before
                self.intercept = ended.outcome.reason
                self.say(f"isolation by overlay was refused, writes are intercepted instead: {self.intercept}")
            return self.ready(purpose, techniques, capture)

    def _check_sources(self) -> None:
        problem = sources.problem(self.sources)
        if problem is not None:
            raise problem

    @contextlib.contextmanager
    def _said_that_it_waits(self) -> Iterator[None]:
        """Whoever waits for a first step for long wants to know what for."""
        come = threading.Event()

        def tell() -> None:
            began, pause_s = time.monotonic(), FIRST_WORD_S
            while not come.wait(pause_s):
                self.say(f"  no training step was seen to repeat in {time.monotonic() - began:.0f} s ({SHOWN_BY}); a step ends with loss.backward() "
                         "and an optimizer's step or an update by hand")
                pause_s = NEXT_WORD_S

        thread = threading.Thread(target=tell, name="waiting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            come.set()
            thread.join()

    def _memory_plan(self, run_dir: Path, techniques: Set, verifies: bool) -> dict[str, Any]:
        """What the agent is told of the limit. The baseline need not keep it; should it run out of memory, it has left what is
        known before the first forward. Otherwise verification runs begin as the baseline does, and need its memory."""
        limit = self.peaks.limit_bytes
        if limit is None:
            return {}
        if not techniques:
            return {"early_facts": str(run_dir / EARLY_FACTS)}
        return {} if verifies and not self.starved else {"device_limit_bytes": limit, "early": True}

    def live(self, purpose: str, techniques: Set, started: Trial | None = None) -> Live:
        """A trial, warm and frozen. Raises TrialEnded."""
        return self.warm(self.cold(purpose, techniques, started))

    def cold(self, purpose: str, techniques: Set, started: Trial | None = None) -> Cold:
        """A trial at its first gate. Raises TrialEnded."""
        self.check_memory(techniques)
        trial, hello = self.ready(purpose, techniques, started=started)
        try:
            self.check_applied(trial, hello)
        except TrialEnded:
            self.finish(trial, techniques)
            raise
        # One that was held has trained alone; that others were starting when it did makes its start look longer, if anything.
        beside = started is not None and not trial.spec.held and self.pace is not None and self.pace.crowded
        return Cold(purpose, trial, techniques, hello, beside)

    def live_pair(self, purpose_a: str, a: Set, purpose_b: str, b: Set) -> tuple[Live, Live]:
        """Two trials, warm and frozen. They start together where that is sooner, for nothing of a start is compared, and warm
        up one by one.

        Raises TrialEnded of either, whose `side` is "a" or "b"; the other is ended then.
        """
        order = self.order(WARM_STEPS, (*a, *b))
        with contextlib.ExitStack() as otherwise:
            cold: list[Cold] = []
            started: list[Trial] | list[None] = [None, None]
            if order != "one by one":
                on_side("a", partial(self.check_memory, a))
                on_side("b", partial(self.check_memory, b))
                started = [self.start(purpose_a, a), self.start(purpose_b, b, held=order == "in turn")]
                for trial, techniques in zip(started, (a, b)):
                    otherwise.callback(self.abandon, trial, techniques)
            if order == "side by side":
                for side, purpose, techniques, trial in zip("ab", (purpose_a, purpose_b), (a, b), started):
                    cold.append(on_side(side, partial(self.cold, purpose, techniques, trial)))
                    otherwise.callback(self.abandon, cold[-1].trial, techniques)       # another one if its cage was refused
                on_side("b", cold[1].trial.freeze)
            first = on_side("a", partial(self.warm, cold[0]) if cold else partial(self.live, purpose_a, a, started[0]))
            otherwise.callback(self.abandon, first.trial, a)
            second = on_side("b", partial(self.warm, cold[1]) if cold else partial(self.live, purpose_b, b, started[1]))
            otherwise.pop_all()
        return first, second

    def order(self, steps: int, techniques: Set) -> Order:
        """In which order processes of these techniques start, which train so many steps each."""
        if self.pace is None or any(one.module.TECHNIQUE.starts_alone for one in techniques):
            return "one by one"
        return self.pace.order(steps)

    def abandon(self, trial: Trial, techniques: Set) -> None:
        """End a trial unless that has been done."""
        if trial in self.living:
            self.finish(trial, techniques)

    def check_memory(self, techniques: Set) -> None:
        """Raise TrialEnded where it is known that a set needs more memory than there may be."""
        too_much = self.peaks.too_much(techniques)
        if techniques and too_much:
            raise TrialEnded(Outcome("over_limit", too_much))

    def warm(self, cold: Cold) -> Live:
        """Run a trial until its steps are steady; frozen then. Raises TrialEnded."""
        try:
            cold.trial.thaw()
            return self._warm(cold)
        except TrialEnded:
            self.finish(cold.trial, cold.techniques)
            raise

    def why_not_fit(self, techniques: Set) -> str | None:
        """What keeps this set from running within the memory limit, found out in a trial if it is not known; None: nothing."""
        if self.peaks.limit_bytes is None:
            return None
        if self.peaks.of(techniques) is None:
            try:
                self.finish_live(self.live("memory", techniques))
            except TrialEnded as ended:
                kind = ended.outcome.kind
                return "runs out of memory" if kind in OUT_OF_MEMORY else ended.outcome.reason
        return self.peaks.too_much(techniques)

    def check_applied(self, trial: Trial, hello: dict[str, Any]) -> None:
        """Raise TrialEnded unless every technique was applied, on every rank. `hello`: rank 0's greeting."""
        for greeting in (hello, *trial.greetings()[1:]):
            where = f" on rank {greeting['rank']}" if greeting["rank"] else ""
            for applied in greeting["applied"]:
                if applied["problem"]:
                    kind, _, reason = applied["problem"].partition(": ")
                    outcome = "not_applied" if kind == "not_applied" else "failed_to_apply"
                    raise trial.end(Outcome(outcome, f"{applied['id']}{where}: {reason.strip().splitlines()[0]}"))

    def _warm(self, cold: Cold) -> Live:
        """Run until the step time is stationary, however many steps that takes."""
        trial, techniques, hello = cold.trial, cold.techniques, cold.hello
        began = time.monotonic()
        steps: list[int] = []
        windows: list[Window] = []
        size = 2
        settled: int | None = None
        while settled is None:
            block = trial.run_block(0, size)
            steps += stationary.with_lead(block.step_ns) if queues(hello) else block.step_ns
            windows.append((size, block.events))
            settled = stationary.warmed_up(steps)
            too_long = not techniques and stationary.surely_longer(steps, 1e9 * self.longest_step_s)
            if too_long:
                break
            if time.monotonic() - began > WARM_UP_SHARE * self.budget_s and len(steps) >= 4:
                break
            size = min(16, size * 2) if sum(steps[-size:]) < 2e9 else size
        if techniques:
            self._check_events(trial, windows, merging(techniques))
        else:
            self.warm_ups.append(windows)       # whatever it does: that is the training
        evidence = self.prove(trial, techniques)
        trial.freeze()
        self._note_losses(trial, techniques)        # a process that races share lives long: what it says is asked for before it ends
        startup_s = trial.first_gate_s or 0.0
        first = settled if settled is not None else len(steps) // 2
        step_ms = stationary.typical_ms(steps[first:])
        record = TrialRecord(
            id=trial.spec.id, purpose=cold.purpose, techniques=[c.label() for c in techniques], outcome="ok",
            log=str(trial.log.relative_to(self.folder)), startup_s=startup_s, warmup_s=sum(steps[:first]) / 1e9,
            settling_s=sum(steps[:first]) / 1e9 - first * step_ms / 1e3 if settled is not None else None,
            compile_s=evidence.compile_s or None, recompiles=evidence.recompiles or None, beside=cold.beside, steps=trial.steps,
        )
        return Live(trial, techniques, hello, evidence, startup_s, sum(steps[:first]) / 1e9,
                    step_ms, settled is not None, {token: rate(windows, token) for token in windows[-1][1]}, record, too_long)

    def prove(self, trial: Trial, techniques: Set) -> Evidence:
        """Raise TrialEnded unless every technique shows that it took effect, on rank 0: some act there only, as where that one saves."""
        evidence = msgspec.convert(trial.ask("evidence"), Evidence)
        for candidate in techniques:
            try:
                proof = candidate.module.active(evidence, candidate.options)
            except Exception as error:  # third-party code may raise anything; it becomes this technique's fate
                raise trial.end(Outcome("failed_to_apply", f"{candidate.id}: active() raised {error!r}")) from error
            if not proof.active:
                raise trial.end(Outcome("not_active", f"{candidate.id}: {proof.evidence}"))
        return evidence

    def prove_still(self, live: Live) -> None:
        """Raise TrialEnded unless every technique is still in effect: the training may have gone on with another model since."""
        live.trial.thaw()
        self.check_applied(live.trial, live.trial.greeting())
        self.prove(live.trial, live.techniques)

    def _check_events(self, trial: Trial, windows: list[Window], fewer: int = 1) -> None:
        """A step must consist of the same events as the baseline's: what skips backward passes or reports steps that
        did not happen is no speed-up. As far as a warm-up of the baseline went: later, it may accumulate more by a schedule. `fewer`: so
        many of the baseline's backward passes may be one, whose losses verification adds up."""
        known = self.reference_events or {}
        longest = max(map(len, self.warm_ups), default=len(windows))
        expected = [window for one in self.warm_ups for window in one] or [(1000, {token: 1000 * often for token, often in known.items()})]
        found = windows[:longest]
        for token in known:
            if differ(expected, found, token, fewer=fewer):
                raise trial.end(Outcome("motif_differs", f"{_WORDS[token[0]]} {rate(found, token):.2f} times a step, "
                                                         f"in the baseline {rate(expected, token):.2f} times"))

    # -- ending ----------------------------------------------------------------------------------------------------

    def finish(self, trial: Trial, techniques: Set, record: TrialRecord | None = None) -> None:
        """End a trial, keep what it was in the study, and throw its writes away."""
        outcome = trial.stop()
        if trial in self.living:
            self.living.remove(trial)
        self._sets.pop(trial.spec.id, None)
        if record is None:
            record = TrialRecord(id=trial.spec.id, purpose=trial.spec.purpose, techniques=[c.label() for c in techniques],
                                 outcome=outcome.kind, reason=outcome.reason, log=str(trial.log.relative_to(self.folder)))
        peak = trial.peak_bytes if trial.spec.capture is None else None     # recording takes memory of its own
        if peak:
            self.peaks.note(techniques, peak)
        record = msgspec.structs.replace(record, outcome=outcome.kind, reason=outcome.reason, steps=trial.steps, peak_bytes=peak)
        self.store.set_trial(trial.spec.id, msgspec.to_builtins(record))
        self._note_losses(trial, techniques)
        plan = self._plans.pop(trial.spec.id, None)
        if plan is not None:
            if self.caches is None and trial.steps and not techniques:
                self.caches = collect_caches(trial.spec.folder, self.folder, plan)
            discard(trial.spec.folder, plan)
        self.book()

    def book(self) -> None:
        """Add what has passed to the time that the study took: one that is killed, again and again, has its budget once."""
        now = time.monotonic()
        self.store.add_seconds("total", now - self._booked)
        self._booked = now

    def _note_losses(self, trial: Trial, techniques: Set) -> None:
        if trial.losses:
            self.store.set_answer(timed_losses(techniques), trial.losses)

    def finish_live(self, live: Live) -> None:
        self.finish(live.trial, live.techniques, live.record)

    def close(self) -> None:
        """End everything that is still alive: first all processes, then what they leave, which may fail on a full disk."""
        for trial in self.living:
            trial.stop()
        for trial in list(self.living):
            self.finish(trial, self._sets[trial.spec.id])
        for folder in self.folder.glob("t[0-9]*"):      # an interruption may have come while one was being cleared away
            if left_behind(folder):
                clear_away(folder)
