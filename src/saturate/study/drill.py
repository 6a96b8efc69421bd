"""`saturate drill`: kill a training at random moments, start it again, and compare it with one that was left alone.

    reference   the command, uninterrupted, in a cage of its own: which data, which losses, when does it save
    chain       the command again, in a cage that all of its processes share: killed after a checkpoint was written, started
                again, killed again after a checkpoint of its own, started again, and at last killed while it writes one

The first process of the chain and the reference get the same seeds where the script sets none, so they are the same
training. Processes that are started again get other ones: what a script does not seed is drawn anew in real life too.
"""

from __future__ import annotations

import math
import random
import shlex
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from saturate.checkpoints import durable
from saturate.machine.commands import script_of
from saturate.records.command_line import joined, quoted
from saturate.records.drill import Drill, DrillResult, Saved
from saturate.records.encoding import encoded
from saturate.report import trim
from saturate.study import baseline, drill_process, once
from saturate.study.drill_kills import Kills
from saturate.study.drill_process import Chain, Ran
from saturate.study.drill_reference import SEED, Reference, fewest_files, updates_needed
from saturate.study.drill_remedies import remedy_of
from saturate.study.ending import OURS, failure
from saturate.study.resume_option import resume_words, short, source_of
from saturate.trial.process import Workload
from saturate.verify import resume, resume_log

#: What the uninterrupted run may take of the budget: all that comes after it takes about twice as long.
REFERENCE_SHARE = 0.3

#: For how much of the budget, from the first update on, a checkpoint is waited for where the script writes other binary files only.
OTHERS_SHARE = 0.1

#: What may do where the budget ended before all kills were seen, as a multiple of it.
LONGER = 2


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
        given = {"--step": self.step, "--timeout": f"{self.timeout_s!r}s" if self.timeout_s != Request.timeout_s else None,
                 "--dir": str(self.directory) if self.directory != self.cwd / ".saturate" else None}
        return [word for name, value in given.items() if value is not None for word in (name, value)]


def drill(request: Request, say: Callable[[str], None]) -> DrillResult:
    """Carry out all kills and return what they showed. Raises SaturateError, and KeyboardInterrupt with nothing left running."""
    with once.run_folder(request.directory, "drill", request.argv, str(request.cwd)) as folder:
        work = Work(request, folder, say)
        result = work.done()
        try:
            durable.replace_text(work.folder / "drill.json", encoded(as_saved(result, request.resume_args)))
        except OSError as error:        # what was found is told all the same
            say(f"the record could not be written: {error}")
            result = msgspec.structs.replace(result, record="")
        return result


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


class Work:
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
            Kills(self, chain, reference).carry_out()
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
            ran = chain.run(request.argv, SEED, None, self._seen_enough, None, deadline)
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
        if ended is None or ended.kind in drill_process.ENDED_WELL:
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
            unseen = verdict == "no_checkpoint" and reference is not None and reference.cut_short and request.steps is None
            longer = ["--budget", f"{math.ceil(LONGER * request.budget_s / 60)}m"] if self.missing or unseen else []
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
