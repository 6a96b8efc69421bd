"""`saturate drill`: kill a training at random moments, start it again, and compare it with one that was left alone.

    reference   the command, uninterrupted, in a cage of its own: which data, which losses, when does it save
    chain       the command again, in a cage that all of its processes share: killed after a checkpoint was written, started
                again, killed again after a checkpoint of its own, started again, and at last killed while it writes one

The first process of the chain and the reference get the same seeds where the script sets none, so they are the same
training. Processes that are started again get other ones: what a script does not seed is drawn anew in real life too.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shlex
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

import saturate
from saturate.checkpoints import durable
from saturate.machine.fingerprint import script_of
from saturate.records.command_line import joined, quoted
from saturate.records.drill import Drill, DrillResult, Saved
from saturate.records.encoding import encoded
from saturate.report import trim
from saturate.study import baseline, drilling
from saturate.study.drill_remedies import remedy_of
from saturate.study.drilling import Chain, Ran
from saturate.study.ending import OURS, failure, in_our_words
from saturate.study.resume_option import resume_words, short, source_of
from saturate.study.store import StudyLock, new_run
from saturate.trial.process import Workload
from saturate.verify import resume, resume_log
from saturate.verify.resume_log import Save, Step, Update

#: What the uninterrupted run may take of the budget: all that comes after it takes about twice as long.
REFERENCE_SHARE = 0.3

#: Updates that are compared behind the last checkpoint, unless the script saves so often that fewer lie between two.
LEAST_TAIL, MOST_TAIL = 8, 40

#: For how much of the budget, from the first update on, a checkpoint is waited for where the script writes other binary files only.
OTHERS_SHARE = 0.1

#: What may do where the budget ended before all kills were seen, as a multiple of it.
LONGER = 2

_SEED = 20


@dataclass(frozen=True)
class Request:
    """What the user asked for. `steps` None: until enough checkpoints were seen. `seed` chooses the moments of the kills."""

    argv: list[str]
    cwd: Path
    environment: dict[str, str]
    directory: Path
    resume_args: list[str] = field(default_factory=list)
    kills: int = 2
    steps: int | None = None
    budget_s: float = 600.0
    timeout_s: float = 300.0
    step: str | None = None
    seed: int = 0

    def options(self, resume_args: list[str]) -> list[str]:
        """What makes `drill` ask the same question again, with these arguments to resume with; how long it may take is left out."""
        given = {
            "--kills": str(self.kills) if self.kills != Request.kills else None,
            "--steps": str(self.steps) if self.steps is not None else None,
            "--seed": str(self.seed) if self.seed != Request.seed else None,
        }
        words = [word for name, value in given.items() if value is not None for word in (name, value)]
        return [*([f"--resume-args={shlex.join(resume_args)}"] if resume_args else []), *words, *self.common_options()]

    def common_options(self) -> list[str]:
        """Those that other verbs understand as well."""
        given = {"--step": self.step, "--dir": str(self.directory) if self.directory != self.cwd / ".saturate" else None}
        return [word for name, value in given.items() if value is not None for word in (name, value)]


@dataclass
class Reference:
    """The uninterrupted run. `others`: it wrote no checkpoint that could be told as one, and `saves` are its other binary files.
    `files`: the fewest that one process wrote in a save."""

    updates: list[Update]
    saves: list[Save]
    step: Step
    step_s: float
    others: bool = False
    loads: bool = True          # a DataLoader gave batches
    files: int = 1
    cut_short: bool = False     # for want of time

    @property
    def gap(self) -> int:
        """Updates from one checkpoint to the next."""
        places = [0, *(save.update for save in self.saves)]
        return max(1, round(statistics.median(b - a for a, b in zip(places, places[1:])))) if self.saves else 1


def updates_needed(places: list[int], kills: int) -> int | None:
    """How long the uninterrupted run must be, by the updates after which it saved; None: it has saved too seldom yet.

    >>> updates_needed([6, 12, 18], kills=2), updates_needed([6, 12], kills=2)
    (26, None)
    """
    if len(places) < kills + 1:
        return None
    places = [0, *places[: kills + 1]]
    gap = max(b - a for a, b in zip(places, places[1:]))
    return places[-1] + max(LEAST_TAIL, min(gap, MOST_TAIL))


def fewest_files(logs: list[resume_log.Log], kind: str) -> int:
    """How many files each process that saves has in each of its saves at least: of a checkpoint in parts, every rank writes its own. A
    save is what lies between two tokens, as for the agent (`hold` of `agent.drill.Drill`); one that no token follows may have been cut
    short. `kind`: see `resume_log.saves`."""
    whole: list[int] = []
    last: list[int] = []
    for log in logs:
        files = 0
        for event in log.events:
            if resume_log.is_token(event):
                whole, files = [*whole, *([files] if files else [])], 0
            files += event["at"] == kind
        last += [files] if files else []
    return min(whole or last, default=1)


def drill(request: Request, say: Callable[[str], None]) -> DrillResult:
    """Carry out all kills and return what they showed. Raises SaturateError, and KeyboardInterrupt with nothing left running."""
    lock = StudyLock(request.directory)
    try:
        with in_our_words(request.directory):
            asked = json.dumps(["drill", request.argv, str(request.cwd), saturate.__version__])
            identity = hashlib.sha256(asked.encode()).hexdigest()
            work = _Work(request, new_run(request.directory, identity), say)
            result = work.done()
            try:
                durable.replace_text(work.folder / "drill.json", encoded(as_saved(result, request.resume_args)))
            except OSError as error:        # what was found is told all the same
                say(f"the record could not be written: {error}")
                result = msgspec.structs.replace(result, record="")
            return result
    finally:
        lock.release()


def as_saved(result: DrillResult, resume_args: list[str]) -> DrillResult:
    """The record without the values of arguments: neither of the command's own, nor of those that are added to resume it."""
    saved = trim.without_values(result)
    shown = trim.command_without_values([*result.command, *resume_args])
    saved = msgspec.structs.replace(saved, resume_command=shown)
    if not resume_args:
        return saved
    added = " ".join(shown[len(result.command):])
    following = saved.next_command.replace(quoted(f"--resume-args={shlex.join(resume_args)}"), f'--resume-args="{added}"')
    return msgspec.structs.replace(saved, next_command=following, remedy=saved.remedy.replace(shlex.join(resume_args), added))


class _Work:
    """One drill from its beginning to its record."""

    def __init__(self, request: Request, folder: Path, say: Callable[[str], None]):
        self.request = request
        self.folder = folder
        self.say = say
        self.deadline = time.monotonic() + request.budget_s
        self.random = random.Random(request.seed)
        self.workload = Workload(request.argv, request.cwd, request.environment, request.timeout_s)
        self.step = baseline.step_override(request.step)
        self.notes: list[str] = []
        self.drills: list[Drill] = []
        self.isolation = ""
        self.repeatable: bool | None = None
        self.cut_short: list[Drill] = []                # of which the budget ended before anything could be told
        self.missing = ""                               # what the budget did not hold
        self.first_update_s: float | None = None        # when it was seen, of the uninterrupted run

    def done(self) -> DrillResult:
        reference, problem = self._reference()
        if reference is None:
            return self._result(None, "inconclusive", problem)
        places = [str(save.update) for save in reference.saves]
        self.say(f"uninterrupted: {len(reference.updates)} updates, {1e3 * reference.step_s:.1f} ms each; "
                 f"{'other files, and no checkpoint,' if reference.others else 'checkpoints'} after update "
                 f"{', '.join([*places[:6], *(['...'] if places[6:] else [])]) or '(none)'}")
        if len(reference.updates) < 2:
            return self._result(reference, "inconclusive", self._too_late("one update only") if reference.cut_short else "fewer than two updates were seen")
        with Chain(self.workload, self.folder / "chain", self.request.directory, self.step, reference.others) as chain:
            _Kills(self, chain, reference).carry_out()
        told = [one for one in self.drills if one not in self.cut_short]
        worst = max(told or self.drills, key=lambda one: resume.OUTCOMES.index(one.outcome), default=None)
        if worst is None:
            return self._result(reference, "inconclusive", self.notes[-1] if self.notes else "nothing was killed")
        reason = f"{worst.reason}; {self.missing}" if told and self.missing else worst.reason
        return self._result(reference, worst.outcome, reason, unfinished=worst.moment == "save")

    # -- the uninterrupted run -----------------------------------------------------------------------------------------

    def _reference(self) -> tuple[Reference | None, str]:
        request = self.request
        deadline = time.monotonic() + REFERENCE_SHARE * request.budget_s
        with Chain(self.workload, self.folder / "reference", request.directory, self.step) as chain:
            ran = chain.run(request.argv, _SEED, None, self._seen_enough, None, deadline)
            self.isolation = chain.isolation
        self.failed_by_itself(ran)
        step = ran.step
        if step is None or not ran.updates(step):
            return None, ran.ended.reason if ran.ended else self._too_late("no update")
        updates = ran.updates(step)
        saves = ran.saves(step)
        others = [] if saves else ran.saves(step, "wrote")
        needed = updates_needed([save.update for save in others], request.kills) if request.steps is None else None
        updates = updates[:needed]          # what came while a checkpoint was waited for is not compared
        times = [b.t_ns - a.t_ns for a, b in zip(updates, updates[1:])]
        cut_short = ran.ended is None and needed is None
        saves = [save for save in saves or others if save.update < len(updates) or cut_short]
        return Reference(updates, saves, step, statistics.median(times) / 1e9 if times else 0.0, bool(others), ran.loads,
                         fewest_files(ran.logs, "wrote" if others else "save"), ran.late), ""

    def _too_late(self, seen: str) -> str:
        """Why nothing could be killed: the uninterrupted run was over for want of time."""
        share_s = REFERENCE_SHARE * self.request.budget_s
        self.missing = f"{seen} was seen in {share_s:.0f} s, the {REFERENCE_SHARE:.0%} of the budget that an uninterrupted run has"
        return f"{self.missing}: give it more, --budget TIME"

    def _seen_enough(self, log: resume_log.Log) -> bool:
        done = log.updates(log.step)
        if self.request.steps is not None:
            return done >= self.request.steps
        if done and self.first_update_s is None:
            self.first_update_s = time.monotonic()
        waited = self.first_update_s is not None and time.monotonic() - self.first_update_s > OTHERS_SHARE * self.request.budget_s
        needed = updates_needed(log.others if waited and not log.saves else log.saves, self.request.kills)
        return needed is not None and done >= needed

    def failed_by_itself(self, ran: Ran) -> None:
        """An uninterrupted run that fails is reported before anything else."""
        ended = ran.ended
        if ended is None or ended.kind in drilling.ENDED_WELL:
            return
        self.we_failed(ran)
        problem = "no step is seen at which the command could be killed" if ended.kind == "no_step" else "the command fails by itself; nothing was killed"
        raise failure(ended, problem, "make the command work without saturate first", str(ran.log))

    def we_failed(self, ran: Ran) -> None:
        """Raise what is no fault of the command."""
        ended = ran.ended
        if ended is not None and ended.kind in OURS:
            raise failure(ended, "", "", str(ran.log))

    # -- the record ----------------------------------------------------------------------------------------------------

    def _result(self, reference: Reference | None, verdict: str, reason: str, unfinished: bool = False) -> DrillResult:
        request = self.request
        again = [*request.argv, *request.resume_args]
        saves = reference.saves if reference and not (reference.others and verdict == "no_checkpoint") else []
        missing = verdict == "starts_over" and not unfinished and not request.resume_args
        if verdict == "resumes_exactly" and not self.missing:
            following = ["saturate", "tune", *request.common_options(), "--", *request.argv]
        else:
            files = [[short(path, request.cwd) for path in save.paths] for save in saves]
            words = resume_words(source_of(script_of(request.argv, request.cwd)), files) if missing else request.resume_args
            longer = ["--budget", f"{math.ceil(LONGER * request.budget_s / 60)}m"] if self.missing else []
            following = ["saturate", "drill", *request.options(words), *longer, "--", *request.argv]
        remedy = remedy_of(verdict, reason, unfinished, reference is None or reference.loads, request.resume_args)
        if self.missing and not remedy:
            remedy = "a longer drill sees the other kills: --budget TIME"
        return DrillResult(
            run=self.folder.name, command=request.argv, resume_command=again, verdict=verdict, reason=reason,  # type: ignore[arg-type]
            remedy=remedy, drills=self.drills, reference_updates=len(reference.updates) if reference else 0,
            step_s=reference.step_s if reference else None,
            saves_seen=[Saved(update=save.update, files=list(save.paths)) for save in saves],
            first_save_at_update=saves[0].update if saves else None, repeatable=self.repeatable, isolation=self.isolation,
            notes=self.notes, record=str(self.folder / "drill.json"), next_command=joined(following),
        )


def _names(saves: list[Save], most: int = 3) -> str:
    names = list(dict.fromkeys(Path(path).name for save in saves for path in save.paths))
    return ", ".join([*names[:most], *([f"{len(names) - most} more"] if names[most:] else [])])


class _Kills:
    """The chain: kill, start again, compare, as often as was asked."""

    def __init__(self, work: _Work, chain: Chain, reference: Reference):
        self.work, self.chain, self.reference = work, chain, reference
        #: What a process is compared with that goes on from behind the first number: what the process did that saved there.
        self.truths = [(-1, reference.updates)]
        self.noise = 0.0
        self.at = 0                             # updates that the process which was killed last had made, in all
        self.weights: dict[str, list[int]] = {}
        self.saved: list[int] = []

    def carry_out(self) -> None:
        request, reference = self.work.request, self.reference
        last = len(reference.updates)
        first = reference.saves[0].update if reference.saves else None
        kill_at = self._between(first + 1, first + reference.gap) if first is not None else self._between(last // 2, last - 1)
        kill_at = max(1, min(kill_at, last - 1))
        ran = self._run(request.argv, "the first process", kill_at, lambda log: log.updates(reference.step) >= kill_at)
        self.work.we_failed(ran)
        updates = self._account(ran, 0)
        if ran.ended is not None or ran.late or not updates:
            reason = ran.ended.reason if ran.ended else "the budget is used up"
            self.work.notes.append(f"the same command did not get as far as update {kill_at} when it was run again: {reason}")
            return
        self._same_as_reference(updates)
        moment = "update"
        for number in range(1, request.kills + 2):
            final = number > request.kills          # after the kill in a save: nothing is killed any more
            saving = number == request.kills        # the process that is killed in its first save
            killed = ran
            ran = self._again(number, saving, final)
            self.work.we_failed(ran)
            found = self._judge(ran, killed, moment)
            self.work.drills.append(found)
            if ran.late and found.outcome == "inconclusive":
                self.work.cut_short.append(found)
                self.work.missing = f"the budget ended before it could be told of kill {number}" + (", in a save" if moment == "save" else "")
            self.work.say(f"killed after update {found.killed_at_update}" + (" while it saved" if moment == "save" else "")
                          + f": {found.outcome.replace('_', ' ')}; {found.reason}")
            if final or found.outcome in ("cannot_load", "starts_over", "no_checkpoint", "ends_early") or not reference.saves:
                return
            if ran.ended is not None or ran.late:
                self.work.notes.append(f"kill {number + 1} was left out: " + (ran.ended.reason if ran.ended else "the budget is used up"))
                if ran.late:
                    self.work.missing = self.work.missing or f"the budget ended before kill {number + 1}"
                return
            if saving and not ran.held:
                why = "its save had fewer files than those before" if ran.saves(reference.step) else "it did not save again within the compared updates"
                self.work.notes.append(f"no kill in the middle of a save: {why}")
                return
            moment = "save" if saving else "update"

    # -- processes -----------------------------------------------------------------------------------------------------

    def _between(self, low: int, high: int) -> int:
        return self.work.random.randint(low, max(low, high))

    def _run(self, argv: list[str], what: str, hold_after: int, until: Callable[[resume_log.Log], bool], seed: int = 0) -> Ran:
        """A process that is killed a random moment after `until`, at the latest after the update behind `hold_after`."""
        step = self.reference.step
        hold = {"token": step.token, "count": (hold_after + 1) * step.count}
        self.work.say(f"{what} runs")
        wait_s = self.work.random.uniform(0.0, self.reference.step_s)
        return self.chain.run(argv, _SEED + seed, hold, until, step, self.work.deadline, wait_s)

    def _again(self, number: int, saving: bool, final: bool) -> Ran:
        """Start it again: to the end of the comparison, into its first save, or to a while after that."""
        request, reference = self.work.request, self.reference
        argv = [*request.argv, *request.resume_args]
        what = f"resume {number}"
        expected = self.saved[-1] if self.saved else 0
        left = max(1, len(reference.updates) - expected)
        if final or not reference.saves:
            return self._run(argv, what, left, lambda log: log.updates(reference.step) >= left, number)
        most = min(left, 2 * reference.gap + MOST_TAIL)
        if saving:
            hold = {"save": 1, "file": self._between(0, reference.files - 1)}
            self.work.say(f"{what} runs into its next save")
            return self.chain.run(argv, _SEED + number, hold, lambda log: log.held or log.updates(reference.step) >= most,
                                  reference.step, self.work.deadline)
        more = self._between(1, reference.gap)
        return self._run(argv, what, most, lambda log: (
            log.updates(reference.step) >= (log.saves[0] + more if log.saves else most)), number)

    # -- what they did -------------------------------------------------------------------------------------------------

    def _account(self, ran: Ran, offset: int) -> list[Update]:
        """Take a process's updates and checkpoints into what is known of the chain. `offset`: where it began."""
        step = self.reference.step
        updates = ran.updates(step)
        for number, update in enumerate(updates):
            if update.before is not None:
                self.weights.setdefault(update.before, []).append(offset + number)
        if updates and updates[-1].after is not None:
            self.weights.setdefault(updates[-1].after, []).append(offset + len(updates))
        done = [save for save in ran.saves(step) if save.update < len(updates)]     # the next update was reached after it
        self.saved += [offset + save.update for save in done]
        self.at = offset + len(updates)
        return updates

    def _same_as_reference(self, updates: list[Update]) -> None:
        found = resume.deviation(self.reference.updates, updates)
        self.work.repeatable = found is not None
        if found is None:
            self.truths = [(-1, updates)]
            self.work.notes.append("two uninterrupted runs of this command have other data, so the resumed ones are compared "
                                   "with what the killed one did: the fewer updates lie between a checkpoint and a kill, the less shows")
        else:
            self.noise = found

    def _judge(self, ran: Ran, killed: Ran, moment: str) -> Drill:
        """Compare a process that was started again with the uninterrupted run, and take it into account."""
        before, saved = self.at, tuple(self.saved)
        left = resume.Killed(before, {key: tuple(places) for key, places in self.weights.items()}, saved)
        updates = ran.updates(self.reference.step)
        if updates:
            found = resume.compare(self._truth(resume.placed(updates, left, ran.read)), updates, left, ran.read, self.noise)
        else:
            found = self._without_update(ran)
        resumed_at = found.resumed_at
        offset = resumed_at if resumed_at is not None else (saved[-1] if saved else 0)
        self._account(ran, offset)
        outcome, reason = self._ended(found, ran, offset + len(updates))
        if found.outcome != "resumes_exactly":
            self._went_another_way(updates, offset, found.outcome == "state_not_restored" and self.work.repeatable is True)
        if outcome == "starts_over" and not saved:
            first = self.reference.saves[0].update if self.reference.saves else None
            outcome, reason = "no_checkpoint", (f"nothing was saved within {before} updates" if first is None else
                                                f"nothing was saved before the kill: the first save comes after {first} updates")
        elif outcome == "starts_over" and self.reference.others and not ran.read:
            outcome, reason = "no_checkpoint", (f"no checkpoint was seen within {before} updates: {_names(self.reference.saves)}, which "
                                                "it wrote, was not read when it was started again")
        if moment == "save" and outcome in ("cannot_load", "starts_over") and killed.interrupted:
            reason = f"killed while it wrote {Path(killed.interrupted[0]).name}: {reason}"
        return Drill(
            moment=moment, killed_at_update=before, resumed_at_update=resumed_at,  # type: ignore[arg-type]
            lost_updates=None if resumed_at is None else max(0, before - resumed_at),
            recovery_s=(updates[0].t_ns / 1e9 - killed.killed_s) if updates and killed.killed_s else None,
            outcome=outcome, reason=reason, compared_updates=found.compared,  # type: ignore[arg-type]
            interrupted_files=killed.interrupted if moment == "save" else [], log=str(ran.log),
            traceback=drilling.last_lines(ran.output) if outcome == "cannot_load" else "",
        )

    def _truth(self, at: int | None) -> list[Update]:
        return next(updates for begun, updates in reversed(self.truths) if at is None or begun < at)

    def _went_another_way(self, updates: list[Update], offset: int, same_data: bool) -> None:
        """What goes on from a checkpoint that this process saved is compared with what this one did; behind its end, with the
        data of the uninterrupted run where they are still due, and with no losses."""
        before = self._truth(offset)
        rest = [replace(one, losses=()) for one in before[offset + len(updates):]] if same_data else []
        self.truths.append((offset, [*before[:offset], *updates, *rest]))

    def _without_update(self, ran: Ran) -> resume.Continuation:
        if ran.ended is None:
            return resume.Continuation("inconclusive", "it made no update before the budget was used up")
        if ran.ended.kind in drilling.ENDED_WELL:
            return resume.Continuation("ends_early", "it ended by itself without an update")
        if ran.ended.kind in drilling.NO_ROOM:
            return resume.Continuation("inconclusive", f"there was no room to start it again: {ran.ended.reason}")
        if ran.ended.kind == "no_step":
            return resume.Continuation("inconclusive", ran.ended.reason)
        return resume.Continuation("cannot_load", ran.ended.reason)

    def _ended(self, found: resume.Continuation, ran: Ran, at: int) -> tuple[str, str]:
        """The outcome, unless how the process ended is worse."""
        if ran.ended is None or ran.ended.kind in (*drilling.NO_ROOM, "no_step") or found.outcome in ("cannot_load", "ends_early", "starts_over"):
            return found.outcome, found.reason
        if ran.ended.kind not in drilling.ENDED_WELL:
            return "cannot_load", f"it failed after update {at}: {ran.ended.reason}"
        if at < len(self.reference.updates):
            return "ends_early", f"it ended by itself after update {at}, the uninterrupted run did not"
        return found.outcome, found.reason
