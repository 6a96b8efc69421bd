"""One fresh pair of processes in a race: its rounds, what the kernel did for either side, and whether more rounds help."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

from saturate.measure.race import FEW_ROUNDS, Limits
from saturate.study.live import Live
from saturate.study.store import Store
from saturate.trial import meter

#: Rounds of a pair at most, where they cost so little beside its start that the usual number would be thrift at the wrong end.
MOST_ROUNDS = 60

#: A pair says nothing with fewer rounds, and a round of so long is not added to those once the deadline has passed: with slow steps
#: behind several loader workers, six rounds take minutes.
LEAST_ROUNDS = 2
LONG_ROUND_S = 5.0


@dataclass(frozen=True)
class KernelWork:
    """What the kernel did for the training process in each step of a race."""

    page_faults: float
    ms: float           # of processor time, all threads


class Pair:
    """The rounds of one fresh pair of processes: log-ratios here, and in the study as they come. `undecided` says, of limits,
    whether more rounds help."""

    def __init__(self, store: Store, question: str, number: int, times: list[tuple[float, float]], limits: Limits, deadline: float,
                 undecided: Callable[[Limits], bool]):
        self.store, self.question, self.number, self.times = store, question, number, times
        self.limits, self.deadline, self.undecided = limits, deadline, undecided
        self.ratios: list[float] = []
        self.asked = time.monotonic()
        self.running = math.inf             # since when both processes run

    def began(self) -> None:
        """Both processes run."""
        self.running = time.monotonic()
        self.store.set_answer(open_question(self.question, self.number), False)

    def count_rounds(self) -> None:
        """From now on they count as they come: nothing that shows later can make them no measurement."""
        self.store.set_answer(open_question(self.question, self.number), True)

    def keep(self, a_ms: float, b_ms: float) -> None:
        self.ratios.append(math.log(a_ms / b_ms))
        self.times.append((a_ms, b_ms))
        self.store.add_round(self.question, self.number, len(self.ratios), a_ms, b_ms, self.ratios[-1])

    def count(self, before: dict[str, tuple[int, int, float]], lives: dict[str, Live]) -> None:
        """Keep what the kernel did for either process since `before` (see `work_so_far`)."""
        work = []
        for side in "ab":
            (steps, faults, seconds), (was, faults_were, seconds_were) = work_so_far(lives[side]), before[side]
            many = max(1, steps - was)
            work.append(KernelWork((faults - faults_were) / many, 1e3 * (seconds - seconds_were) / many))
        self.store.set_answer(work_question(self.question, self.number), [astuple(one) for one in work])

    def forget(self) -> None:
        """These rounds were no measurement."""
        self.store.drop_rounds(self.question, self.number)
        del self.times[len(self.times) - len(self.ratios):], self.ratios[:]

    def more(self) -> bool:
        now = time.monotonic()
        rounds, ran_s = len(self.ratios), now - self.running
        if rounds < self.limits.min_rounds:
            return self.takes_more(rounds, ran_s, self.deadline)
        # Rounds that scatter are repeated for as long as it took to start the pair: a fresh one would cost as much.
        most = self.limits.max_rounds if ran_s >= self.running - self.asked else max(self.limits.max_rounds, MOST_ROUNDS)
        return now < self.deadline and self.undecided(replace(self.limits, max_rounds=most))

    def takes_more(self, rounds: int, ran_s: float, until: float) -> bool:
        """Whether so many rounds, which ran for so long, are too few. Beyond `until` those must do whose scatter is known, and of rounds that
        take long two: what they show is uncertain, and says so."""
        if time.monotonic() < until or rounds < LEAST_ROUNDS:
            return True
        return rounds < min(self.limits.min_rounds, FEW_ROUNDS) and ran_s < LONG_ROUND_S * rounds


def work_question(question: str, pair: int) -> str:
    return f"{question} | kernel work of pair {pair}"


def open_question(question: str, pair: int) -> str:
    """Answered where the rounds of this pair count as they come, so that a kill costs the running one only."""
    return f"{question} | rounds of pair {pair} count"


def end_question(question: str, pair: int) -> str:
    return f"{question} | end of pair {pair}"


def work_so_far(live: Live) -> tuple[int, int, float]:
    """Steps, page faults and seconds in the kernel of a process since its start."""
    return live.trial.steps, *meter.kernel_work(live.hello["pid"])


def stored_pairs(store: Store, question: str) -> list[list[tuple[float, float, float]]]:
    """The stored rounds by pair (see `Store.rounds`). Those of the last one are dropped where a kill ended it so early that they say
    nothing, or before it was certain that they are a measurement."""
    rounds = store.rounds(question)
    last = len(rounds) - 1
    if rounds and store.answer(end_question(question, last)) is None and (
            len(rounds[last]) < LEAST_ROUNDS or not store.answer(open_question(question, last))):
        store.drop_rounds(question, last)
        rounds.pop()
    return rounds


def pair_seconds(store: Store, question: str, pairs: int) -> list[float]:
    """How long each of the first so many pairs took, of those that were counted to their end."""
    ends = (store.answer(end_question(question, number)) for number in range(pairs))
    return [float(seconds) for seconds in ends if seconds is not None]
