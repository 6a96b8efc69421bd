"""The processes of a resume drill: each is followed by what it writes down, and killed where the drill wants."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saturate.trial import planning, tree
from saturate.trial.cage import CagePlan
from saturate.trial.layers import discard
from saturate.trial.outcome import Outcome, stalled, unseen
from saturate.trial.process import Trial, TrialSpec, Workload
from saturate.verify import resume_log
from saturate.verify.resume_log import Log, Save, Step, Update

#: Outcomes of a command that ended without a failure.
ENDED_WELL = ("too_short", "never_trained", "ok")

#: Outcomes that say something of this machine, and nothing of the checkpoint.
NO_ROOM = ("disk_full", "out_of_memory_device", "out_of_memory_host", "shared_memory_full")

_POLL_S = 0.002
_TRACEBACK_LINES = 15


@dataclass
class Ran:
    """One process after its end. `ended`: how, if by itself. `late`: the time was over before it got where it should."""

    logs: list[Log]                 # of its ranks, in their order
    step: Step | None
    log: Path
    output: str = ""
    ended: Outcome | None = None
    late: bool = False
    killed_s: float | None = None   # CLOCK_MONOTONIC
    known: list[list[Update]] = field(default_factory=list)

    def updates(self, step: Step) -> list[Update]:
        if not self.logs:
            return []
        if not self.known:
            self.known.append(resume_log.merged([resume_log.updates(log.events, step) for log in self.logs]))
        return self.known[0]

    def saves(self, step: Step, kind: str = "save") -> list[Save]:
        """Of all ranks together: each may write a part. `kind`: see `resume_log.saves`."""
        found: dict[int, list[str]] = {}
        for log in self.logs:
            for save in resume_log.saves(log.events, step, kind):
                found.setdefault(save.update, []).extend(save.paths)
        return [Save(update, tuple(dict.fromkeys(paths))) for update, paths in sorted(found.items())]

    @property
    def read(self) -> bool:
        """Whether it opened a file that an earlier process of its chain had written."""
        return any(event["at"] == "read" for log in self.logs for event in log.events)

    @property
    def loads(self) -> bool:
        """Whether a DataLoader gave batches."""
        return any(event.get("batches") for log in self.logs for event in log.events)

    @property
    def held(self) -> bool:
        return any(log.held for log in self.logs)

    @property
    def interrupted(self) -> list[str]:
        """The file that was open when it was made to stand still."""
        return [log.events[-2]["path"] for log in self.logs if log.held and log.events[-2]["at"] == "save"]


class Chain:
    """Processes one after the other in one cage: each finds what those before it have written, and nothing else does."""

    def __init__(self, workload: Workload, folder: Path, study_dir: Path, step: dict[str, Any] | None, others: bool = False):
        self.workload = workload
        self.folder = folder
        self.step = step
        self.others = others
        self._isolate(planning.plan(workload.cwd, folder, workload.argv, workload.environment, None, study_dir))
        self.started = 0
        self.written: dict[str, None] = {}
        self._trial: Trial | None = None

    def _isolate(self, plan: CagePlan) -> None:
        self.plan = plan
        self.isolation = f"{plan.mode}: {plan.reason}"

    def __enter__(self) -> Chain:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._trial is not None:
            self._trial.stop()
        for events in self.folder.glob("p*/events"):       # they have been read
            shutil.rmtree(events)
        discard(self.folder, self.plan)

    def run(self, argv: list[str], seed: int, hold: dict[str, Any] | None, until: Callable[[Log], bool], step: Step | None,
            deadline: float, wait_s: float = 0.0) -> Ran:
        """Start `argv`, and kill its whole tree `wait_s` after `until` is true of what rank 0 has written down, once it
        ends by itself, or at `deadline`. `hold`: see `agent.drill`."""
        self.started += 1
        folder = self.folder / f"p{self.started}"
        events = folder / "events"
        events.mkdir(parents=True)
        workload = Workload(argv, self.workload.cwd, self.workload.environment, self.workload.timeout_s)
        trial = self._trial = Trial(workload, TrialSpec(
            id=folder.name, purpose="drill", folder=folder, step=self.step, capture={"seed": seed}, cage=self.plan.to_json(),
            redirect=self.plan.redirect, environment=self.plan.environment,
            plan={"drill": {"folder": str(events), "written": list(self.written), "others": self.others, "hold": hold}},
        ))
        ran = _Follower(trial, events, step).follow(until, deadline, wait_s)
        if ran.ended is not None and ran.ended.kind == "cage_refused" and self.plan.mode != "intercept" and self.started == 1:
            discard(self.folder, self.plan)
            self._isolate(planning.as_intercept(self.plan, ran.ended.reason))
            return self.run(argv, seed, hold, until, step, deadline, wait_s)
        self.written.update(dict.fromkeys(event["path"] for log in ran.logs for event in log.events if event["at"] in ("save", "wrote", "moved")))
        return ran


class _Follower:
    """Reads what a process's ranks write down while they do."""

    def __init__(self, trial: Trial, events: Path, step: Step | None):
        self.trial = trial
        self.events = events
        self.step = step
        self.files: dict[Path, tuple[Any, Log]] = {}

    def follow(self, until: Callable[[Log], bool], deadline: float, wait_s: float) -> Ran:
        trial = self.trial
        try:
            ended, late = self._wait(until, deadline)
            if ended is None and not late:
                time.sleep(max(0.0, min(wait_s, deadline - time.monotonic())))
            killed_s = None if ended is not None else time.monotonic()
            if ended is None:
                tree.kill(trial.supervisor.pid)
            trial.end(ended or Outcome("ok", "killed by the drill"))
            self._read()
        finally:
            for file, _ in self.files.values():
                file.close()
        logs = self._ranks()
        found = self.step or (resume_log.step_of(logs[0].events) if logs else None)
        return Ran(logs, found, trial.log, trial.output(), ended, late, killed_s)

    def _wait(self, until: Callable[[Log], bool], deadline: float) -> tuple[Outcome | None, bool]:
        """How it ended by itself, if it did; and whether the time was over."""
        quiet_since, seen = time.monotonic(), 0
        while True:
            grown = self._read()
            for _, log in self.files.values():
                if log.withdrawn is not None:
                    return given_up(log.withdrawn), False
            logs = self._ranks()
            if logs and (until(logs[0]) or any(log.held for log in logs)):
                return None, False
            ended = self.trial.finished()
            if ended is not None:
                return ended, False
            now = time.monotonic()
            if now > deadline:
                return None, True
            printed = self._printed()
            if grown or printed != seen:
                quiet_since, seen = now, printed
            elif now - quiet_since > self.trial.workload.timeout_s:
                return stalled(self.trial.workload.timeout_s, bool(logs), printed > 0, None), False
            time.sleep(_POLL_S)

    def _printed(self) -> int:
        try:
            return self.trial.log.stat().st_size
        except FileNotFoundError:
            return 0                # nothing was started yet

    def _read(self) -> bool:
        """Whether there was anything new."""
        for path in self.events.glob("*.jsonl"):
            if path not in self.files:
                self.files[path] = open(path, "rb"), Log()  # noqa: SIM115 - closed by `follow`
        grown = False
        for file, log in self.files.values():
            data = file.read()
            log.feed(data, self.step)
            grown = grown or bool(data)
        return grown

    def _ranks(self) -> list[Log]:
        """Those that train, by rank. Of several with one rank (a process that forked) the one that trained most."""
        best: dict[int, Log] = {}
        for _, log in self.files.values():
            if log.rank is not None and (log.rank not in best or len(log.events) > len(best[log.rank].events)):
                best[log.rank] = log
        return [best[rank] for rank in sorted(best)]


def given_up(event: dict[str, Any]) -> Outcome:
    """Why nothing more is seen of a process, from what its agent wrote last."""
    if "no_step" in event:
        return unseen(**event["no_step"])
    return Outcome("agent_failed", "saturate's own code failed inside the workload")


def last_lines(output: str) -> str:
    """The end of what a process printed, from its last traceback on."""
    start = output.rfind("Traceback (most recent call last)")
    return "\n".join(output[max(0, start):].strip().splitlines()[-_TRACEBACK_LINES:])
