"""Racing two sets of techniques: fresh pairs of processes, one block of each per round, never both running at once.

Two modes:

    concurrent   both processes of a pair live, one frozen while the other runs its block, in the order A B, B A, A B; on a CPU a block is
                 cut into short turns
    alternate    for when memory does not hold two: each process runs all its rounds alone, A B, B A by pairs; its n-th block is compared
                 with the other's n-th

A process that runs out of memory beside the other one is run again, alone: only what it needs itself counts against it. The same goes for
A where it fails: it stands still while B starts and runs, for minutes where B compiles, and connections are closed meanwhile. An A that
several races share is replaced by a young one before that.
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean, median

from saturate.measure import stationary
from saturate.measure.race import Decision, Limits
from saturate.records.result import RaceRecord
from saturate.study.bench import Bench
from saturate.study.candidates import Set, key, names
from saturate.study.live import Live, on_side
from saturate.study.race_blocks import (
    begin_alike,
    believe,
    block_size,
    falls_behind,
    have_workers,
    means_ms,
    run_block,
    skipped_too,
)
from saturate.study.race_noise import Noise, usable
from saturate.study.race_pair import (
    LEAST_ROUNDS,
    LONG_ROUND_S,
    KernelWork,
    Pair,
    end_question,
    pair_seconds,
    stored_pairs,
    work_question,
    work_so_far,
)
from saturate.study.rates import Window
from saturate.trial.outcome import Outcome, ran_out_of_memory
from saturate.trial.process import Block, TrialEnded, joined

#: Screening asks whether a technique is promising; adding and the final race settle how much it gives.
SCREEN = Limits(max_pairs=1, min_rounds=4, max_rounds=10)
ADD = Limits(max_pairs=5, min_rounds=4, max_rounds=12)

#: What the user is told when a process that shared the memory is run again.
ONCE_MORE = "  out of memory beside another process of its kind: once more, alone"

#: Ends of what trained before, and stood still for longer than its connections, or a watchdog of its own, allow.
STOOD_STILL = ("crashed", "exited", "killed_by_signal", "hung")

#: Rounds of a pair in alternate mode, where none can be added later.
ALTERNATE_ROUNDS = 10

#: Steps that take so many times what they took in the warm-ups, because something else came upon the machine, are timed over blocks of
#: another size from then on, where a round takes long.
SLOWED = 3.0

#: How a race ends whose shared process was no measure, where the budget is over.
NO_TIME_FOR_ANOTHER = Outcome("not_in_time", "the older process that it was compared with did not stay as it was, and the budget has no time "
                              "for a fresh pair", "give it a longer --budget")


@dataclass(frozen=True)
class Result:
    """A finished race of A against B. Times are milliseconds per step in its typical round, as far apart as the race says."""

    decision: Decision
    pairs: list[list[float]]
    a_ms: float
    b_ms: float
    record: RaceRecord
    work: list[tuple[KernelWork, KernelWork]] = field(default_factory=list)     # of A and B, by pair
    pair_s: float = 0.0         # how long a pair took, most of which is starting: the mean, also of those that a killed study ran

    @property
    def gain(self) -> float:
        """Speed-up of B over A, minus one."""
        return math.expm1(self.decision.estimate.log_ratio) if self.decision.estimate else 0.0

    @property
    def gain_ci(self) -> tuple[float, float] | None:
        found = self.decision.estimate
        return (math.expm1(found.low), math.expm1(found.high)) if found else None


class Racer:
    """Asks "is B faster than A?". Everything measured goes into the store round by round."""

    def __init__(self, bench: Bench, threshold: float, mode: str = "concurrent"):
        self.bench = bench
        self.threshold = threshold
        self.noise = Noise(threshold)
        self.mode = mode
        self.waits = True                   # whether the baseline waits for its loader, as far as is known
        self.in_turns = True                # whether a block may be cut into short turns: an accelerator drains at the end of each
        self.warm_ups: list[list[Window]] = []      # of the baseline's processes, see `Bench`
        self.pair_s = 0.0                   # how long the longest pair of two fresh processes took
        self.on_pair: Callable[[Live, Live], None] | None = None       # told of A and B when their rounds are over, while both live
        self.on_crowded: Callable[[str], None] | None = None    # told why two cannot live at once; None: whoever asked wants them to
        self._base: Live | None = None      # a frozen baseline that screening races share
        self._base_ms: dict[bool, list[float]] = {}     # its blocks, by whether they show that it waits for its loader

    # -- the baseline that screening shares ------------------------------------------------------------------------

    def base(self, techniques: Set) -> Live | None:
        """The living process of `techniques`, if there is one."""
        base = self._base
        return base if base and key(base.techniques) == key(techniques) and base.trial.ended is None else None

    @property
    def has_base(self) -> bool:
        """Whether a frozen process stands beside whatever else runs."""
        return self._base is not None

    def drop_base(self) -> None:
        if self._base is not None:
            self.bench.finish_live(self._base)
            self._base, self._base_ms = None, {}

    def _base_drifts(self) -> bool:
        """Whether it becomes slower or faster as it goes on: what is compared with it then is so by being younger."""
        return any(map(stationary.drifts, self._base_ms.values()))

    def alternate(self) -> None:
        """From now on two processes never live at once."""
        self.drop_base()
        self.mode = "alternate"

    def may_be_crowded(self, ended: TrialEnded) -> bool:
        """Whether what ended so beside another process may run alone."""
        return self.mode == "concurrent" and self.on_crowded is not None and ran_out_of_memory(ended.outcome)

    def tell_crowded(self, outcome: Outcome) -> None:
        """It ended so beside another process, and has run alone since."""
        assert self.on_crowded is not None
        self.on_crowded(f"one ran out of memory beside another, and not alone ({outcome.reason})")

    # -- racing ----------------------------------------------------------------------------------------------------

    def run(self, question: str, a: Set, b: Set, limits: Limits, deadline: float, share_base: bool = False,
            min_pairs: int = 1) -> Result:
        """Race until `measure.race` says stop, or `deadline` (time.monotonic seconds) passes.
        At least `min_pairs` are run, time permitting.

        `share_base` lets the first pair use the shared process for A. Raises TrialEnded of B when B cannot run, of A
        when A cannot; the exception's `side` attribute tells which.
        """
        full_question = f"{question} | {key(a)} | {key(b)}"
        rounds = stored_pairs(self.bench.store, full_question)
        cut_short = len(rounds) - len(pair_seconds(self.bench.store, full_question, len(rounds)))
        finished = f"{full_question} | {limits.max_pairs} pairs"      # a later question may ask for more pairs
        limits = replace(limits, max_pairs=limits.max_pairs + cut_short)       # what a kill cut short comes on top
        least = cut_short + max(1, min_pairs)       # a pair that ended says that both run as they should
        pairs = [[ratio for _, _, ratio in pair] for pair in rounds]
        times = [(a_ms, b_ms) for pair in rounds for a_ms, b_ms, _ in pair]
        between_sd = self.noise.between(a, b)
        decision = self.noise.decide(pairs, limits, between_sd)
        while (self.bench.store.answer(finished) is None and len(pairs) < limits.max_pairs
               and (decision.action != "stop" or len(pairs) < least)
               and (len(pairs) == cut_short or time.monotonic() < deadline)):
            # Pairs of processes that are gone get no more rounds: a resumed race goes on with a fresh pair.
            try:
                self._pair(full_question, a, b, pairs, times, limits, deadline, share_base and len(pairs) == cut_short, between_sd)
            except TrialEnded as ended:
                if ended.outcome.kind != "not_in_time" or not usable(pairs):
                    raise
                break           # as when the deadline had passed before it
            decision = self.noise.decide(pairs, limits, between_sd)
        self.bench.store.set_answer(finished, True)
        if decision.action != "stop":
            decision = self.noise.decide(pairs, limits, between_sd, over=True)
        work = self._work_of(full_question, pairs)
        if self.noise.steady(b) and not self.noise.steady(a):
            decision = self.noise.by_state(pairs, work, limits) or decision
        took_s = pair_seconds(self.bench.store, full_question, len(pairs))
        self.pair_s = max(self.pair_s, *took_s, 0.0)        # one that shared the baseline took less
        return replace(self._result(question, a, b, decision, pairs, times, work), pair_s=mean(took_s) if took_s else 0.0)

    def _work_of(self, question: str, pairs: list[list[float]]) -> list[tuple[KernelWork, KernelWork]]:
        """Of the pairs that count, in their order. Of those that were not counted to their end nothing is known."""
        stored = [self.bench.store.answer(work_question(question, number)) for number, pair in enumerate(pairs) if len(pair) >= LEAST_ROUNDS]
        unknown = [(math.nan, math.nan)] * 2
        return [(KernelWork(*a), KernelWork(*b)) for a, b in (found or unknown for found in stored)]

    def _pair(self, question: str, a: Set, b: Set, pairs: list[list[float]], times: list[tuple[float, float]],
              limits: Limits, deadline: float, share_base: bool, between_sd: float) -> None:
        """One fresh pair of processes, until its rounds decide or stop helping."""
        pair = Pair(self.bench.store, question, len(pairs), times, limits, deadline,
                     lambda patient: self.noise.decide(pairs, patient, between_sd).action == "more_rounds")
        pairs.append(pair.ratios)
        try:
            self._rounds(a, b, share_base, pair)
        except TrialEnded:
            pair.forget()           # what ended so may have been no measurement before
            raise
        self.bench.store.set_answer(end_question(question, pair.number), time.monotonic() - pair.asked)

    def _rounds(self, a: Set, b: Set, share_base: bool, pair: Pair) -> None:
        if self.mode == "alternate":
            self.drop_base()
            self._alternate(a, b, pair)
            return
        if self._base_drifts():
            self.drop_base()
        older = share_base and self.base(a) is not None
        try:
            self._beside(a, b, share_base, pair, older)
            again = older and self._base_drifts()
        except TrialEnded as ended:
            # The shared process ran out of steps in somebody else's race, has not lived through standing still for so long, or has come
            # to a part of the training that is other work than what a young one does: start another one.
            again = older or ended.outcome.kind == "too_short" if ended.side == "a" else older and ended.outcome.kind == "trains_otherwise"
            again = again and share_base
            if not again:
                raise
        if again:
            pair.forget()
            self.drop_base()
            if older and time.monotonic() >= pair.deadline:
                # What there is is not kept instead: it would call a technique faster, or slower, for being younger than the other one.
                # No result is better than that, and says what it is.
                raise TrialEnded(NO_TIME_FOR_ANOTHER)
            self._beside(a, b, share_base, pair)

    def _beside(self, a: Set, b: Set, share_base: bool, pair: Pair, older: bool = False) -> None:
        """The pair with both processes living; once more, one at a time, where one ran out of memory, or where A failed, which runs without
        B. `older`: A has stood still for longer than beside this B, and a young one may live."""
        try:
            self._concurrent(a, b, share_base, pair)
        except TrialEnded as ended:
            if self.may_be_crowded(ended):
                self._alone(ended, a, b, pair, ONCE_MORE)
                self.tell_crowded(ended.outcome)
                return
            # Against itself it was raced before, which the study looks at by itself.
            stood_still = ended.side == "a" and not older and key(a) != key(b) and ended.outcome.kind in STOOD_STILL
            if not stood_still or self.mode != "concurrent" or self.on_crowded is None:
                raise
            self._alone(ended, a, b, pair, f"  {names(a)} failed beside another process of its kind ({ended.outcome.reason}): once more, alone")
            self.on_crowded(f"it failed beside another of its kind ({ended.outcome.reason})")

    def _alone(self, ended: TrialEnded, a: Set, b: Set, pair: Pair, why: str) -> None:
        """The pair once more, one process at a time, first the one that ended so. Raises TrialEnded where that one fails by itself as
        well: then others may still live side by side."""
        pair.forget()
        self.bench.say(why)
        self.drop_base()
        self._alternate(a, b, pair, ended.side)

    def _concurrent(self, a: Set, b: Set, share_base: bool, pair: Pair) -> None:
        first, second = self._both(a, b, share_base)
        try:
            turn, draw = 0, random.Random(pair.number)
            sized = first, second       # with the step times that blocks are sized by
            blocks: dict[str, list[Block]] = {"a": [], "b": []}
            try:
                # What a loader has ready hides how fast it is. Of a baseline that never waits, nothing is hidden from itself.
                hides = (self.waits or key(a) != key(b)) and have_workers(first, second)
                loader_bound = hides and falls_behind(first, second)
                skip, steps = block_size(first, second, loader_bound)
                lives = {"a": first, "b": second}
                before = {side: work_so_far(live) for side, live in lives.items()}
                pair.began()
                if loader_bound or not hides:
                    pair.count_rounds()
                while turn == 0 or pair.more():
                    cut = self._turns(*sized, skip, steps, loader_bound)
                    for side, parts in _alternately(first, second, turn, *cut, draw).items():
                        blocks[side].append(joined(parts))
                    turn += cut[0]
                    if b:
                        believe(blocks, self.warm_ups, a, b, begin_alike(first, second))
                    a_ms, b_ms = means_ms(blocks["a"][-1], blocks["b"][-1])
                    pair.keep(a_ms, b_ms)
                    if share_base:
                        self._base_ms.setdefault(loader_bound, []).append(a_ms)
                    if hides and not loader_bound and falls_behind(first, second):
                        loader_bound = True
                        skip, steps = block_size(*sized)
                        pair.forget()
                        pair.count_rounds()
                        self._base_ms.pop(False, None)
                    elif _too_large(blocks["a"][-1], blocks["b"][-1], (a_ms, b_ms), sized):
                        # A round is a ratio of times per step, of however many steps.
                        sized = _at(first, a_ms), _at(second, b_ms)
                        skip, steps = block_size(*sized, loader_bound)
                pair.count(before, lives)
                on_side("b", partial(self.bench.prove_still, second))
                if self.on_pair is not None:
                    self.on_pair(first, second)
            except TrialEnded as ended:
                # A short script that simply ends is not a failure: its pair counts with the rounds it has.
                if ended.outcome.kind != "too_short" or len(pair.ratios) < LEAST_ROUNDS:
                    raise
            finally:
                self.bench.finish_live(second)
        finally:
            if not share_base:
                self.bench.finish_live(first)

    def _turns(self, first: Live, second: Live, skip: int, steps: int, loader_bound: bool) -> tuple[int, int, int]:
        """How a block is cut: turns, and of each the steps to skip and to time. What a loader has ready would be free in all."""
        if loader_bound or not self.in_turns:
            return 1, skip, steps
        return stationary.in_turns(min(first.step_ms, second.step_ms), steps)

    def _both(self, a: Set, b: Set, share_base: bool) -> tuple[Live, Live]:
        """The two processes of a pair, warm."""
        if not share_base:
            return self.bench.live_pair("race A", a, "race B", b)
        base = self.base(a)
        if base is not None:
            return base, on_side("b", lambda: self.bench.live("race B", b))
        self.drop_base()        # of another set, or ended
        self._base, second = self.bench.live_pair("reference", a, "race B", b)
        return self._base, second

    def _alternate(self, a: Set, b: Set, pair: Pair, first: str = "") -> None:
        order = (("a", a), ("b", b)) if (first or "ab"[pair.number % 2]) == "a" else (("b", b), ("a", a))
        lives: dict[str, Live] = {}
        blocks: dict[str, list[Block]] = {}
        most, until = ALTERNATE_ROUNDS, (time.monotonic() + pair.deadline) / 2        # the other half is for the other one
        for side, techniques in order:
            lives[side] = on_side(side, partial(self.bench.live, f"race {side.upper()} alone", techniques))
            blocks[side] = self._blocks_alone(side, lives[side], pair, most, until)
            most, until = len(blocks[side]), pair.deadline
        if b:
            believe(blocks, self.warm_ups, a, b, begin_alike(lives["a"], lives["b"]))
        for of_a, of_b in zip(blocks["a"], blocks["b"]):
            pair.keep(*means_ms(of_a, of_b))

    def _blocks_alone(self, side: str, live: Live, pair: Pair, most: int, until: float) -> list[Block]:
        """At most so many, and fewer where the time is over, or the script. Ends the process."""
        found: list[Block] = []

        def run(loader_bound: bool) -> None:
            skip, steps = block_size(live, live, loader_bound)
            draw = random.Random(pair.number)       # the n-th blocks of both sides skip as many
            found.clear()
            began = time.monotonic()
            while len(found) < most and pair.takes_more(len(found), time.monotonic() - began, until):
                found.append(on_side(side, partial(run_block, live, skip + skipped_too(steps, draw), steps)))

        try:
            before = falls_behind(live)
            run(before)
            if falls_behind(live) and not before:
                run(True)
            on_side(side, partial(self.bench.prove_still, live))
        except TrialEnded as ended:
            # As with two at once: a short script that simply ends is not a failure.
            if ended.outcome.kind != "too_short" or len(found) < LEAST_ROUNDS:
                raise
        finally:
            self.bench.finish_live(live)
        return found

    def _result(self, question: str, a: Set, b: Set, decision: Decision, pairs: list[list[float]],
                times: list[tuple[float, float]], work: list[tuple[KernelWork, KernelWork]]) -> Result:
        found = decision.estimate
        counted = usable(pairs)
        # The median round of A and that of B need not be the same one: how long a step takes is that of the typical round of both.
        typical = median([math.sqrt(a_ms * b_ms) for a_ms, b_ms in times]) if times else 0.0
        apart = math.exp(found.log_ratio / 2) if found else 1.0
        record = RaceRecord(
            question=question, a=[c.label() for c in a], b=[c.label() for c in b], pairs=len(counted),
            rounds=sum(map(len, counted)), speedup=found.speedup if found else 1.0,
            speedup_ci=found.speedup_ci if found else (0.0, math.inf), verdict=decision.verdict, log_ratios=counted,
        )
        return Result(decision, counted, typical * apart, typical / apart, record, work)


def _too_large(a: Block, b: Block, step_ms: tuple[float, float], sized: tuple[Live, Live]) -> bool:
    """Whether blocks are too large for steps that take so long, having been `sized` for others. Short ones are as good as any: rare
    long steps are no reason."""
    a_ms, b_ms = step_ms
    long = a.steps * a_ms + b.steps * b_ms > 1e3 * LONG_ROUND_S
    return long and a_ms + b_ms > SLOWED * sum(live.step_ms for live in sized)


def _at(live: Live, step_ms: float) -> Live:
    """The same process, with the step time that it has by now."""
    found = copy.copy(live)
    found.step_ms = step_ms
    return found


def _alternately(first: Live, second: Live, turn: int, turns: int, rest: int, each: int, draw: random.Random) -> dict[str, list[Block]]:
    """The parts of a block of each side: so many turns, of which this is the first. Who begins one changes; of each, `rest` steps are
    skipped and `each` timed."""
    parts: dict[str, list[Block]] = {"a": [], "b": []}
    for number in range(turn, turn + turns):
        order = ((first, "a"), (second, "b")) if number % 2 == 0 else ((second, "b"), (first, "a"))
        more = skipped_too(each, draw)
        cpus: Sequence[int | None] = ()
        for live, side in order:
            parts[side].append(on_side(side, partial(run_block, live, rest + more, each, cpus)))
            cpus = live.trial.cpus      # the other begins there: one CPU may be slower than its neighbour
    return parts
