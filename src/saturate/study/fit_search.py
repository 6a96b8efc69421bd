"""The search of `saturate fit`: measure a few sizes in one process, predict, prove the prediction in a fresh one.

At most `MOST_TRIALS` processes. The first measures sizes that stay clear of the limit; each of the others begins with a
proposed size, proves it, goes on from there to a better one if there is room, and measures throughput. The answer is always
a size that was proved: the last process is kept for one that is safe, and without a proof there is no answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from saturate.machine.telemetry import Sampler
from saturate.measure import memory_growth, memory_model
from saturate.measure.memory_model import Point
from saturate.study.fit_process import SAME_SKIP, Process, Window, verdict_of
from saturate.study.fit_state import UNBOUNDED, Proof, Refused, State
from saturate.study.fit_throughput import TOO_SHORT, Throughput, sizes_up_to
from saturate.trial.process import TrialEnded

MOST_TRIALS = 4

#: Steps of a proof, where the budget allows; of a measurement; and the longest that a block goes without a look at the clock.
PROOF_STEPS, PROBE_STEPS, BLOCK_S = 50, 3, 5.0

#: A proof that the budget ended counts from so many steps on; with fewer, its size was only measured.
LEAST_PROOF_STEPS = 10

#: Where memory grows from step to step, a proposed size lasts this many times the steps of a proof.
LASTING = 1.3

#: A measurement goes on for up to so many steps, if they take no longer than this.
MORE_STEPS, MORE_S = 9, 2.0

#: Sizes that one process proves, one after the other.
MOST_PROOFS = 3

#: Shares of the budget: what throughput may take; what is left when a proof is cut short.
THROUGHPUT_SHARE, RESERVE = 0.4, 0.25

#: What a process answers that did not bear how it was driven.
AGAIN = "again"

NOT_PROVED = "anything but a few steps: it was measured, not proved"
NONE_LEFT = "throughput was not measured: the last process ended before it came to that"
GROWS = "memory grows from step to step: throughput was not measured in what is left"


@dataclass
class Search(State):
    """The search in the script's own DataLoader."""

    def run(self) -> None:
        """Raises Refused, SaturateError, and TrialEnded where the workload fails without our changing anything."""
        self._guard()
        self._measure()
        self._prove_all()

    # -- what differs where the script's own argument is searched (fit_knob) -----------------------------------------

    def _start(self, purpose: str, size: int | None) -> Process:
        """A fresh process of this size (None: as the script has it)."""
        self._count(purpose)
        return Process(self.bench, purpose, size)

    def _rounded(self, size: int) -> int:
        """A size that is worth a process: the loader takes any."""
        return self._spared(size)

    def _asked_of(self, size: int) -> int | None:
        """What the loader is asked for."""
        return size

    def _look(self, process: Process, start: int | None) -> int:
        """Learn which loader feeds the training, and set the limit; the size to measure first. Raises Refused."""
        if not self.facts:
            self.facts = process.trial.ask("facts")
            self._set_limit(process)
        seen = process.trial.ask("fit")
        self.kinds, self.world_size = seen["kinds"], process.world_size
        self._choose(seen["loaders"])
        self.own = self.bench.asking.own = self.loader["batch_size"]
        self._know_own()
        self.most = min(self.loader["length"] or UNBOUNDED, self.asked_most or UNBOUNDED)
        return start or min(self.own or 1, self.most)

    # -- measuring -------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        """The first process; further ones only where the script's own size, and then a small one, does not even start."""
        start: int | None = None
        while True:
            outcome = self._measure_from(start)
            if outcome == AGAIN and not self.points:
                continue
            if outcome != "out_of_memory" or self.points or start == 1 or self.trials >= MOST_TRIALS:
                return
            start = self._smaller() if start is None else 1

    def _smaller(self) -> int:
        """Where to begin when the script's own size does not start. Not at one: BatchNorm cannot train on a single sample."""
        return 2

    def _measure_from(self, start: int | None) -> str:
        began, size, process, self.heaps = time.monotonic(), start, None, []
        try:
            process = self._start("measure" if start is None else f"measure from a batch of {start}", start)
            self.exact = process.meter.exact
            next_size: int | None = self._look(process, start)
            process.run(self._asked_of(next_size), 1, settle=True)       # type: ignore[arg-type] - makes the loaders known
            self._scan(process)
            while next_size is not None:
                size, began = next_size, time.monotonic()
                window = self._probe(process, size)
                self._check_delivered(window, size)
                size = self._really(size, window.delivered)
                self._learn_reads(size, window.samples, window.timed)
                self._keep_measured(size, window, began)
                next_size = self._next_probe() if self.left_s() > 20 * window.step_s else None
        except TrialEnded as ended:
            watch = self.bench.meter
            if self._lets_go(process, ended):
                return AGAIN
            if not self.points and start is None and verdict_of(ended, watch)[0] == "failed":
                raise
            return self._lost(size, "measure", began, ended)
        finally:
            if process is not None:
                process.finish()
        return "fits"

    def _probe(self, process: Process, size: int) -> Window:
        """A few steps, and some more where they are short: what an allocator keeps needs a few to settle."""
        window = process.run(self._asked_of(size), PROBE_STEPS, first=True)
        more = max(1, min(MORE_STEPS, int(MORE_S / max(window.step_s, 1e-6))))
        later = process.run(self._asked_of(size), more, fresh=False, settle=True)
        return replace(later, steps=PROBE_STEPS + more, delivered=max(window.delivered, later.delivered))

    def _keep_measured(self, size: int, window: Window, began: float) -> None:
        idle = window.idle_bytes
        self.idle_bytes = idle if self.idle_bytes is None else min(self.idle_bytes, idle)
        if window.heap_bytes is not None:
            self.heaps.append((Point(size, window.peak_bytes), window.heap_bytes))
        outcome = self._judged(window.peak_bytes, window.retries)
        self._note(size, outcome, "measure", began, window.steps, window.peak_bytes)
        if outcome == "fits":
            self.measured.setdefault(size, Proof(window.steps, window.peak_bytes, [], [NOT_PROVED]))

    def _next_probe(self) -> int | None:
        if not self.points or self.idle_bytes is None:
            return None
        size = memory_model.next_probe(self.points, self.idle_bytes, self.goal_bytes, self.most)
        return None if size is None else self._rounded(size)

    def _check_delivered(self, window: Window, size: int) -> None:
        if not window.delivered or not window.samples:
            raise Refused("its training does not read a batch for every step")
        if window.delivered < size and not self.loader.get("iterable"):
            raise Refused(f"its DataLoader was asked for batches of {size} and made batches of {window.delivered}")

    # -- proving ---------------------------------------------------------------------------------------------------

    def _prove_all(self) -> None:
        """Fresh processes that begin with the proposed size, until no other size can change the answer."""
        if not self.points:
            return
        size: int | None = self._rounded(max(1, memory_model.first_proposal(self.points, self.idle_bytes, self.goal_bytes, self.most)))
        if self.failed and size is not None and size >= min(self.failed):
            size = self._propose() or self.likely
        while self.trials < MOST_TRIALS and self._time_for_another():
            size = size or self._unfinished()
            if size is None:
                break
            size = self._prove_from(size)
        if self.proofs and not self.throughput.rates and not self.throughput.note:
            self.throughput.note = NONE_LEFT if self.trials >= MOST_TRIALS else TOO_SHORT

    def _unfinished(self) -> int | None:
        """The best size once more where throughput is missing, which is measured behind a proof; without a proof, the largest
        that ran."""
        if not self.proofs:
            return self.likely
        missing = not self.throughput.rates and not self.throughput.note
        return self.best if self._in_place() and missing else None

    def _propose(self) -> int | None:
        size = self._proposed()
        size = None if size is None else self._rounded(size)
        return None if size is None or size <= (self.best or 0) else size

    def _proposed(self) -> int | None:
        last = self.trials + 1 >= MOST_TRIALS
        lost = any(one.purpose == "prove" and one.outcome == "out_of_memory" for one in self.tried)
        if not self.proofs and (self.growth or lost or (last and self.failed)):
            return self._safe(last)
        return memory_model.propose(self.points, self.failed, self.goal_bytes, self.most, self.idle_bytes)

    def _safe(self, last: bool) -> int | None:
        """A size that no failed proof speaks against. Those tell more than the line through sizes that ran for a few steps: how
        memory grows with the steps; and where that could not be seen, that the line promises too much. From a proved size on,
        the same process can go upwards again."""
        too_close = [point.micro_batch for point in self.points if point.peak_bytes > self.goal_bytes]
        bad = min([*self.failed, *too_close, *self.growth])
        if self.growth:
            size = memory_growth.lasting(list(self.growth.values()), self.idle_bytes or 0.0, self.goal_bytes, LASTING * PROOF_STEPS)
        else:
            size = int(bad / (2 if last else memory_model.SEPARATION))
        size = min(size, bad - 1, self.likely or bad)
        return size if size >= 1 else None

    def _prove_from(self, size: int) -> int | None:
        """Prove sizes in one fresh process. The next size for another one, or None."""
        began, process, measuring = time.monotonic(), None, False
        again: int | None = None
        self.trail = []
        try:
            process = self._start(f"prove a batch of {size}", size)
            for attempt in range(MOST_PROOFS):
                began = time.monotonic() if attempt else began
                over = self._prove(process, size, fresh=attempt > 0, began=began)
                again = self._propose()
                self.proof_s = time.monotonic() - began
                grows = size in self.growth         # what it holds already would count for the next size
                enough = attempt + 1 == MOST_PROOFS or (bool(self.proofs) and self.trials >= MOST_TRIALS)
                if over or grows or again is None or enough or not self._in_place() or not self._time_for_another():
                    break
                size, again = again, None
            measuring = True
            if self.trials >= MOST_TRIALS or not self._time_for_another():
                again = None
            if grows and self.proofs:
                again, self.throughput.note = None, GROWS
            elif not over and again is None and self.proofs:
                self._throughput(process)
        except TrialEnded as ended:
            if measuring:
                return self._lost_measuring(ended)
            if self._lets_go(process, ended):
                return size
            if self._lost(size, "prove", began, ended, steps=self.trail[-1][0] if self.trail else 0) != "out_of_memory":
                return None
            self._learn_growth(size, PROOF_STEPS, memory_growth.RISES - 1)
            return self._propose()
        finally:
            if process is not None:
                process.finish()
        return again

    def _lets_go(self, process: Process | None, ended: TrialEnded) -> bool:
        """Whether the process may have ended by itself because a pass over its loader was held open (a list that is as long as the pass, a
        schedule of so many steps). Then none is held any more."""
        asking = self.bench.asking
        if process is None or not asking.hold or self.trials >= MOST_TRIALS or ended.outcome.kind == "too_short" \
                or verdict_of(ended, self.bench.meter)[0] != "failed" or not process.went_on():
            return False
        asking.hold = False
        self.notes.append(f"the script does not bear a pass over its loader that goes on ({ended.outcome.reason}): passes end as they do by themselves")
        self.say(f"  {self.notes[-1]}")
        return True

    def _lost_measuring(self, ended: TrialEnded) -> int | None:
        """The process ended while throughput was measured. For its memory: then the size that ran is no answer after all. Not so on
        a device, where what other sizes leave in the allocator is in the way of a size that fits by itself."""
        size = self.throughput.running
        outcome, reason = verdict_of(ended, self.bench.meter)
        if outcome == "out_of_time":        # we ended it ourselves
            self.throughput.note = self.throughput.note if self.throughput.settled() else TOO_SHORT
            return None
        if outcome != "out_of_memory" or size is None:
            what = "the knee was proved" if self.throughput.settled() else "throughput was measured"
            self.throughput.note = f"the script ended while {what} ({reason})"
            return None
        if self.facts.get("device") == "cuda" and ended.outcome.kind == "out_of_memory_device":
            self.throughput.note = f"the device's memory ran out while batches of several sizes were timed in turns ({reason})"
            return None
        self.throughput = Throughput()
        self._lost(size, "throughput", time.monotonic(), ended)
        return self._propose()

    def _time_for_another(self) -> bool:
        """Whether the budget holds one more proof; what throughput may take is left to it once there is an answer."""
        reserve = THROUGHPUT_SHARE * self.budget_s if self.proofs and not self.throughput.rates else 0.0
        return self.left_s() > max(self.proof_s + reserve, 0.0)

    def _in_place(self) -> bool:
        """Whether a process can go on with another size."""
        return True

    def _prove(self, process: Process, size: int, fresh: bool, began: float) -> bool:
        """Run one size for the steps of a proof, with the largest samples, and with an evaluation and a checkpoint where the
        script has them. Whether the script has ended meanwhile."""
        predicted = round(memory_model.line(self.points, self.idle_bytes).peak_bytes(size))
        steps, delivered = 0 if fresh else process.steps_so_far, 0
        window, over, whole, self.trail = None, False, False, []
        try:
            while window is None or steps < PROOF_STEPS:       # a process may have run as many before its first gate
                block, same = self._block(steps, window), window is not None
                window = process.run(self._asked_of(size), block, first=not same, fresh=fresh and not same,
                                     skip=SAME_SKIP if same else None)
                self._saw_block(size, window)
                delivered = max(delivered, window.delivered)
                steps += block + (SAME_SKIP if same else 0)
                self.trail.append((steps, window.peak_bytes))
                if self._judged(window.peak_bytes, window.retries) != "fits" or self.left_s() < RESERVE * self.budget_s:
                    break
            assert window is not None
            if self._judged(window.peak_bytes, window.retries) == "fits":
                window, over = self._end_epoch(process, size, window)
        except TrialEnded as ended:
            if ended.outcome.kind != "too_short":
                raise
            window, over, whole = process.at_its_end(window), True, not fresh
            steps = max(steps, process.steps_at_its_end() if not fresh else 0)
        size = self._really(size, delivered)
        outcome = self._judged(window.peak_bytes, window.retries)
        self._note(size, outcome, "prove", began, steps, window.peak_bytes)
        if not whole:
            self._learn_growth(size, PROOF_STEPS)
        if outcome != "fits":           # whatever it did before
            self.measured = {one: proof for one, proof in self.measured.items() if one < size}
        elif whole or steps >= min(LEAST_PROOF_STEPS, PROOF_STEPS):
            self.proofs[size] = Proof(steps, window.peak_bytes, *self._seen(window, steps, whole), predicted_bytes=predicted, whole=whole)
        else:
            self.measured[size] = Proof(steps, window.peak_bytes, [], [NOT_PROVED])
        return over

    def _block(self, steps: int, window: Window | None) -> int:
        """Steps of the next block of a proof that has run `steps`."""
        if window is None:
            return PROBE_STEPS
        most = min(int(BLOCK_S / max(window.step_s, 1e-6)), PROOF_STEPS // self.proof_blocks)
        return max(1, min(PROOF_STEPS - steps - SAME_SKIP, most))

    def _saw_block(self, size: int, window: Window) -> None:
        """A block of a proof has run."""

    def _end_epoch(self, process: Process, size: int, window: Window) -> tuple[Window, bool]:
        """Let the running epoch end, so that evaluation and checkpoint come; and whether the script is over then."""
        try:
            return process.run(self._asked_of(size), 2, end=True, fresh=False), False
        except TrialEnded as ended:
            outcome = verdict_of(ended, process.meter)[0]
            if outcome == "out_of_time":
                self.notes.append("the budget ended before the epoch of the proof did: neither evaluation nor checkpoint was seen")
                return window, True
            if ended.outcome.kind == "too_short" or outcome != "failed":
                raise
            self.notes.append(f"the script does not bear an epoch that ends early ({ended.outcome.reason}): neither evaluation nor "
                              "checkpoint was seen")
            return window, True

    def _seen(self, window: Window, steps: int, whole: bool) -> tuple[list[str], list[str]]:
        seen, unseen = ["the script's own end"] if whole else [], []
        if steps < PROOF_STEPS and not whole:
            unseen.append(f"{PROOF_STEPS} steps: the budget held {steps}")
        extents = self.extents
        if extents.get("varies"):
            some = "" if extents["looked_at"] == extents["of"] else f" (of {extents['looked_at']:,} looked at, of {extents['of']:,})"
            seen.append(f"a batch of the largest samples{some}")
        elif extents.get("varies") is None:
            unseen.append(f"the largest samples: {extents.get('reason', 'they were not looked for')}")
        for name, count in (("an evaluation", window.evaluations), ("a checkpoint", window.saves)):
            (seen if count else unseen).append(name if count else f"{name}: the script made none within the steps that were run")
        return seen, unseen

    def _throughput(self, process: Process) -> None:
        """Samples per second at a few sizes up to the best; a knee below it is proved where it is to be the answer."""
        assert self.best is not None
        sizes = sorted({self._rounded(size) for size in sizes_up_to(self.best, self.own)})
        self.throughput.measure(process, sizes,
                                min(THROUGHPUT_SHARE * self.budget_s, 0.8 * self.left_s()), self.say)
        knee = self.throughput.knee
        if self.target == "throughput" and knee is not None and knee != self.best:
            self.say(f"from {knee} on, larger batches are no faster")
            self.throughput.running = knee
            self._prove(process, knee, fresh=True, began=time.monotonic())
        try:
            self.throughput.watch_devices(process, Sampler(self.bench.workload.environment), self.left_s())
        except TrialEnded as ended:
            if verdict_of(ended, self.bench.meter)[0] == "out_of_memory":
                raise
            # All else was measured and proved before: what stays unknown is how busy they are.
