"""The chain of a resume drill: kill, start again, compare, as often as was asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from saturate.records.drill import Drill
from saturate.study import drill_process
from saturate.study.drill_process import Chain, Ran
from saturate.study.drill_reference import MOST_TAIL, SEED, Reference
from saturate.verify import resume, resume_log
from saturate.verify.resume_log import Save, Update


class Kills:
    """What was killed so far, and what its successors are compared with. `work`: of `study.drill`."""

    def __init__(self, work: Any, chain: Chain, reference: Reference):
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
            if not reference.saves and found.outcome != "no_checkpoint":
                self.work.notes.append("no save was seen, so there was one kill and none in the middle of a save: what other processes, or "
                                       "libraries of C, write is not seen")
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
        return self.chain.run(argv, SEED + seed, hold, until, step, self.work.deadline, wait_s)

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
            return self.chain.run(argv, SEED + number, hold, lambda log: log.held or log.updates(reference.step) >= most,
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
            traceback=drill_process.last_lines(ran.output) if outcome == "cannot_load" else "",
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
        if ran.ended.kind in drill_process.ENDED_WELL:
            return resume.Continuation("ends_early", "it ended by itself without an update")
        if ran.ended.kind in drill_process.NO_ROOM:
            return resume.Continuation("inconclusive", f"there was no room to start it again: {ran.ended.reason}")
        if ran.ended.kind == "no_step":
            return resume.Continuation("inconclusive", ran.ended.reason)
        return resume.Continuation("cannot_load", ran.ended.reason)

    def _ended(self, found: resume.Continuation, ran: Ran, at: int) -> tuple[str, str]:
        """The outcome, unless how the process ended is worse."""
        if ran.ended is None or ran.ended.kind in (*drill_process.NO_ROOM, "no_step") or found.outcome in ("cannot_load", "ends_early", "starts_over"):
            return found.outcome, found.reason
        if ran.ended.kind not in drill_process.ENDED_WELL:
            return "cannot_load", f"it failed after update {at}: {ran.ended.reason}"
        if at < len(self.reference.updates):
            return "ends_early", f"it ended by itself after update {at}, the uninterrupted run did not"
        return found.outcome, found.reason


def _names(saves: list[Save], most: int = 3) -> str:
    names = list(dict.fromkeys(Path(path).name for save in saves for path in save.paths))
    return ", ".join([*names[:most], *([f"{len(names) - most} more"] if names[most:] else [])])
