"""`saturate checkpoint advise -- COMMAND`: what a checkpoint costs this training, and how soon it trains again after a kill.

    as it is     the command, until it has saved: how long it stands in its saves
    async        the command with async-checkpoint, until each way to write had its turns: blocked time and slower steps
    recovery     the command, killed behind its first save, and started again where it left its files

Each runs in a process and a cage of its own. Seconds are compared per byte, because checkpoints of one training differ in size.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from saturate.checkpoints import shards
from saturate.checkpoints.costs import TRIED
from saturate.errors import UsageError
from saturate.machine.commands import script_of
from saturate.records.checkpoint import SaveCosts, SaveWay
from saturate.records.facts import Facts
from saturate.study import baseline, ending, once
from saturate.study.bench import Bench
from saturate.study.candidates import Candidate, Set
from saturate.study.drill_process import ENDED_WELL, Chain, Ran
from saturate.study.resume_option import PATH, resume_words, short, source_of
from saturate.study.state import Request
from saturate.study.store import Store
from saturate.techniques import _registry, async_checkpoint
from saturate.trial.outcome import Outcome
from saturate.trial.process import Trial, TrialEnded, Workload
from saturate.verify import resume_log

#: Of the budget: when the watching of the command as it is ends, and when that of async-checkpoint does.
AS_IT_IS, ASYNC = 0.3, 0.75

#: Calls of torch.save that are enough to know what one takes.
ENOUGH_SAVES = 4

#: Between two questions to the training. At the gate it stands still, and so rarely comes there.
_BLOCK_S = 2.0

#: Files that torch.save wrote, and those that async-checkpoint did, are not the same where they differ in size by this factor.
UNLIKE = 2.0

#: What writes files of these names: other functions than torch.save, whose time is not seen.
OTHERS = {".safetensors": "safetensors", shards.ENDING: "torch.distributed.checkpoint"}

_SEED = 20


@dataclass
class Watched:
    """What a watched process last told, and the seconds of its steps. `ended`: how, where it did so before that was enough."""

    told: dict[str, Any]
    steps_s: list[float]
    ended: Outcome | None = None


@dataclass
class Recovery:
    """Seconds from a kill to the first update after it, what the next process was started with, and whether it read what was saved.
    `others`: which of OTHERS the killed one saved with as well."""

    seconds: float | None
    words: list[str]
    read: bool | None
    unknown: str = ""
    others: str = ""


def measure(request: Request, resume_args: list[str] | None, say: Callable[[str], None]) -> SaveCosts:
    """Run the command three times; what to resume it with is read from its source where `resume_args` is None. Raises UsageError where it saves
    nothing in time, and SaturateError where it fails by itself."""
    with once.run_folder(request.directory, "save costs", request.argv, str(request.cwd)) as folder, once.study_file(folder) as store:
        return _Work(request, resume_args, folder, store, say).done()


class _Work:
    def __init__(self, request: Request, resume_args: list[str] | None, folder: Path, store: Store, say: Callable[[str], None]):
        self.request, self.resume_args, self.folder, self.say = request, resume_args, folder, say
        self.began = time.monotonic()
        self.workload = Workload(request.argv, request.cwd, request.environment, request.timeout_s)
        self.bench = Bench(self.workload, folder, request.directory, store, request.budget_s, say)
        self.bench.step = baseline.step_override(request.step)
        self.log = ""                   # of the process that ended by itself last

    def done(self) -> SaveCosts:
        technique = Candidate(_registry.load()[async_checkpoint.TECHNIQUE.id], async_checkpoint.Options())
        try:
            self.say("as the script saves: running it until it has saved a few times")
            plain = self._watch((), "facts", AS_IT_IS, lambda told: told["saves"] >= ENOUGH_SAVES)
            if plain.ended is not None and (plain.ended.kind not in ENDED_WELL or not plain.told):
                raise self._failed(plain.ended)
            facts = msgspec.convert(plain.told, Facts)
            self.say("with async-checkpoint: running it until each way to save was measured")
            tried = self._watch((technique,), "evidence", ASYNC, lambda told: _each_measured(costs_of(told)))
        finally:
            self.bench.close()
        costs = costs_of(tried.told)
        if not costs["checkpoints"] and not facts.saves:
            raise _no_save(facts, plain)
        self.say("recovery: killing it behind a save, and starting it again")
        return record_of(self.request.argv, facts, plain, tried, costs, self._recovery(), self.folder.name)

    def _deadline(self, share: float) -> float:
        return self.began + share * self.request.budget_s

    # -- watching ------------------------------------------------------------------------------------------------------

    def _watch(self, techniques: Set, question: str, share: float, enough: Callable[[dict[str, Any]], bool]) -> Watched:
        """Ask a training again and again, until that is `enough`, its share of the budget has passed, or it ends."""
        deadline = self._deadline(share)
        seen = Watched({}, [])
        trial: Trial | None = None
        try:
            trial = self.bench.cold("saves", techniques).trial
            steps = 1
            while not seen.told or not (enough(seen.told) or time.monotonic() > deadline):
                block = trial.run_block(0, steps)
                seen.steps_s += [t / 1e9 for t in block.step_ns]
                seen.told = trial.ask(question)
                # What is seen in a block that the script ends in is lost: it is a small part of what was seen before.
                steps = max(1, min(len(seen.steps_s) // 4, int(_BLOCK_S * 1e9 / block.mean_ns)))
        except TrialEnded as ended:
            seen.ended = ended.outcome
            self.log = str(ended.log or "")
        finally:
            if trial is not None:
                self.bench.abandon(trial, techniques)
        return seen

    def _failed(self, outcome: Outcome) -> Exception:
        if outcome.kind in (*ENDED_WELL, "no_step", "several_trainings", "ranks_apart", "not_in_time"):
            return UsageError("what a save costs is not known", cause=outcome.reason, remedy=outcome.remedy or "give it with --save-cost")
        return ending.failure(outcome, "the command fails by itself; nothing was measured", "make the command work without saturate first", self.log)

    # -- recovery ------------------------------------------------------------------------------------------------------

    def _recovery(self) -> Recovery:
        request, deadline = self.request, self._deadline(1.0)
        with Chain(self.workload, self.folder / "recovery", request.directory, self.bench.step) as chain:
            killed = chain.run(request.argv, _SEED, None, _saved, None, deadline)
            words = self.resume_args if self.resume_args is not None else self._words(killed)
            others = _others(_paths(killed, "save", "wrote"))
            if killed.step is None or killed.ended is not None or killed.late:
                return Recovery(None, words, None, _why(killed, "it was not seen to save once more"), others)
            # The second update: when rank 0 makes it, all ranks have made their first.
            again = chain.run([*request.argv, *words], _SEED + 1, None, lambda log: log.updates(log.step or killed.step) >= 2, killed.step, deadline)
        updates = again.updates(killed.step)
        if not updates or killed.killed_s is None:
            return Recovery(None, words, None, _why(again, "it made no update"), others)
        read = bool(_paths(killed, "save", "moved") & _paths(again, "read"))
        return Recovery(updates[0].t_ns / 1e9 - killed.killed_s, words, read, others=others)

    def _words(self, killed: Ran) -> list[str]:
        """What to resume with, by the script's source; of files that are named anew at each save, the newest that is whole, or the
        folder that it is."""
        if killed.step is None:
            return []
        done = len(killed.updates(killed.step))
        saves = [[short(path, self.request.cwd) for path in save.paths] for save in killed.saves(killed.step) if save.update < done]
        words = resume_words(source_of(script_of(self.request.argv, self.request.cwd)), saves)
        newest = _one(saves[-1]) if saves else None
        if PATH in words and newest is None:
            return []
        return [newest if word == PATH and newest else word for word in words]


def record_of(command: list[str], facts: Facts, plain: Watched, tried: Watched, costs: dict[str, Any], recovery: Recovery, run: str) -> SaveCosts:
    """What was seen, as it is told."""
    unknown: dict[str, str] = {}
    size = files = None
    if costs["checkpoints"]:
        size, files = costs["bytes"] / costs["checkpoints"], costs["files"] / costs["checkpoints"]
    elif facts.saves and facts.save_bytes:
        size, files = facts.save_bytes / facts.saves, 1.0       # how many belong together, only async-checkpoint sees
    if size is None or files is None:
        unknown["checkpoint_bytes"] = unknown["checkpoint_files"] = "no file was seen to be saved"
    before_s, why = _before(facts, size or 0.0, files or 1.0, recovery.others)
    if before_s is None:
        unknown["before_s"] = why
    lost = {way: one["lost_s"] for way, one in costs["ways"].items() if one["lost_s"] is not None}
    best = min(lost, key=lambda way: lost[way], default=None)
    if best is None:
        unknown["after_s"] = unknown["best_way"] = _why_not_after(tried.ended)
    if recovery.seconds is None:
        unknown["recovery_s"] = unknown["resumed"] = recovery.unknown
    return SaveCosts(
        command=command, checkpoint_bytes=None if size is None else round(size), checkpoint_files=files, before_s=before_s,
        after_s=lost[best] if best else None, best_way=best,
        ways=[SaveWay(way=way, lost_s=one["lost_s"], measured=one["measured"]) for way, one in costs["ways"].items()],
        step_s=statistics.median(plain.steps_s), recovery_s=recovery.seconds, resume_command=[*command, *recovery.words],
        resumed=recovery.read, unknown=unknown, run=run,
    )


def _why_not_after(ended: Outcome | None) -> str:
    if ended is not None and ended.kind not in ENDED_WELL:
        return f"with async-checkpoint the command ended: {ended.reason}"
    return "no checkpoint of 1 MiB or more was seen to its end " + ("in the time that there was" if ended is None else "before the script ended")


def _before(facts: Facts, size: float, files: float, others: str) -> tuple[float | None, str]:
    """Seconds that the script's own saves of one checkpoint take, or why that is not known."""
    if not facts.save_bytes:
        opened = "; it saves into files that it opened itself" if facts.saves_into_files else ""
        return None, f"torch.save was not seen to write a file in the steps watched{opened}"
    if facts.saves_into_memory:
        return None, "the script saves into memory, and something else writes that to the disk"
    if others:
        return None, f"files are saved by {others} as well, whose time is not seen"
    if not 1 / UNLIKE < facts.save_bytes / facts.saves / (size / files) < UNLIKE:
        return None, "files are saved in other ways than by torch.save as well"
    return facts.save_s / facts.save_bytes * size, ""


def _no_save(facts: Facts, plain: Watched) -> UsageError:
    opened = (f"; {facts.saves_into_files} save(s) went into files that the script opened itself, which async-checkpoint leaves alone"
              if facts.saves_into_files else "")
    ended = "; then it ended by itself, and what it saves at its end is not seen" if plain.ended is not None else ""
    return UsageError("what a save costs is not known", cause=f"no checkpoint was saved in the {len(plain.steps_s)} steps watched{ended}{opened}",
                      remedy="let the command save sooner and train longer, give it a longer --budget, or say what a save costs with --save-cost")


def costs_of(evidence: dict[str, Any]) -> dict[str, Any]:
    """`checkpoints.costs.Costs.summary`, as the technique noted it."""
    text = evidence.get("notes", {}).get(async_checkpoint.COSTS_NOTE)       # no evidence: it ended before it was asked
    return json.loads(text) if text else {"checkpoints": 0, "files": 0, "bytes": 0, "ways": {}}


def _each_measured(costs: dict[str, Any]) -> bool:
    return bool(costs["ways"]) and all(way["measured"] >= TRIED for way in costs["ways"].values())


def _saved(log: resume_log.Log) -> bool:
    """Whether a checkpoint is complete: an update came after it."""
    return bool(log.saves) and log.updates(log.step) > log.saves[0]


def _one(paths: list[str]) -> str | None:
    """What the files of one save are together: the file, or their folder where it has a number, as `checkpoint-500` and `step_20` of
    Hugging Face's libraries have."""
    if len(paths) == 1:
        return paths[0]
    try:
        folder = os.path.commonpath(paths)
    except ValueError:          # one below the working directory, one elsewhere
        return None
    return folder if any(map(str.isdecimal, os.path.basename(folder))) else None


def _paths(ran: Ran, *kinds: str) -> set[str]:
    return {event["path"] for log in ran.logs for event in log.events if event["at"] in kinds}


def _others(paths: set[str]) -> str:
    return " and ".join(name for ending, name in OTHERS.items() if any(path.endswith(ending) for path in paths))


def _why(ran: Ran, otherwise: str) -> str:
    ended: Outcome | None = ran.ended
    if ended is None:
        return f"{otherwise} before the budget was used up"
    return ended.reason if ended.kind not in ENDED_WELL else f"{otherwise}: it ended by itself"
