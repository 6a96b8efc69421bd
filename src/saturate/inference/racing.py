"""Is candidate B faster than A? Blocks of calls in fresh pairs of processes, one running while the other is frozen.

The engine is `saturate.measure.race`, as in `tune`: per-round log-ratios of the blocks' medians, A B, B A, A B; pairs of
fresh processes, because two processes of one program differ by a constant that more rounds never remove; sequential
stopping. `screen` is the cheap form for two processes that already live.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from saturate.measure import race as statistics
from saturate.measure.race import Estimate, Limits, Verdict
from saturate.measure.stats import quantile
from saturate.records.inference import Timing

#: A block lasts about so long (at least two calls): long beside the switch between processes, short beside the drift of
#: a shared machine.
BLOCK_S = 0.12
_FEWEST_CALLS = 2
_MOST_CALLS = 2000

#: How much a race may cost, unless it is told.
USUAL = Limits(max_pairs=3, max_rounds=20)

#: Rounds of a screening: enough to order candidates that differ by 10 %, not more.
SCREEN_ROUNDS = 5


class Racer(Protocol):
    """What a race needs of `process.Worker`."""

    cpu: int | None         # on which it ended its latest block; None: not told, or several
    shares: int             # what a block tells is one of so many equal shares of each call's time

    def block(self, count: int, *, cpu: int | None = None) -> list[int]:
        """Who calls several inputs in turn says how many (`in_turn`), and takes `start` and `among` as well: which comes first, and how
        many take turns."""

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class Lane:
    """One process in a race, frozen unless it runs. `calls` per block follow from its first calls. `broken`: a block of it failed:
    of two in a race, it was this one."""

    worker: Any
    calls: int
    times_ns: list[int] = field(default_factory=list)
    broken: bool = False
    blocks: int = 0

    @staticmethod
    def of(worker: Racer) -> Lane:
        """Warm, measured once, and frozen."""
        worker.block(_FEWEST_CALLS)                     # the first calls allocate, and may still compile
        typical = worker.shares * median(worker.block(_FEWEST_CALLS + 1)) / 1e9
        worker.freeze()
        return Lane(worker, max(_FEWEST_CALLS, min(_MOST_CALLS, round(BLOCK_S / max(typical, 1e-6)))))

    @property
    def inputs(self) -> int:
        """How many inputs are called in turn."""
        return getattr(self.worker, "in_turn", 1)

    def turns(self, index: int, most: int) -> dict[str, int]:
        """`start` and `among` (see `Racer`) of block number `index`, in which no more than `most` take turns."""
        among = min(most, self.inputs)
        return {"start": among * spread(index, math.ceil(self.inputs / among)), "among": among} if self.inputs > 1 else {}

    def run(self, cpu: int | None = None, turns: dict[str, int] | None = None) -> float:
        """One block, begun on `cpu`: the median call, ns. A first call is thrown away: caches are cold after the other's block. Each of
        the inputs that take turns in it is met as often as the others."""
        turns = self.turns(self.blocks, self.calls) if turns is None else turns
        calls = self.calls - self.calls % turns.get("among", 1)
        self.blocks += 1
        self.broken = True
        self.worker.thaw()
        try:
            times = self.worker.block(calls + 1, cpu=cpu, **turns)[1:]
        finally:
            self.worker.freeze()
        self.broken = False
        self.times_ns += times
        return median(times)

    def renew(self, start: Callable[[], Racer]) -> None:
        """Another process in the place of one that ended."""
        self.worker.close()
        self.worker = start()
        self.calls, self.broken = Lane.of(self.worker).calls, False


@dataclass(frozen=True)
class Race:
    """What a race found. `estimate` is ln(time A / time B), None where time ended before anything was known: `reason` says so.
    `times_a`, `times_b`: of each call, ns."""

    verdict: Verdict
    estimate: Estimate | None
    a: Timing | None
    b: Timing | None
    reason: str
    times_b: tuple[int, ...] = ()
    times_a: tuple[int, ...] = ()

    @property
    def speedup(self) -> float | None:
        return None if self.estimate is None else self.estimate.speedup

    @property
    def speedup_ci(self) -> tuple[float, float] | None:
        return None if self.estimate is None else self.estimate.speedup_ci


def round_of(a: Lane, b: Lane, index: int) -> float:
    """ln(time A / time B) of one round; who goes first alternates, and the other begins where that one was: one CPU may be slower
    than its neighbour. Both meet the same inputs, each of them equally often: a longer one takes longer, and whoever is faster makes more
    calls in the time of a block."""
    first, second = (b, a) if index % 2 else (a, b)
    turns = a.turns(index, min(a.calls, b.calls))
    ahead = first.run(turns=turns)
    behind = second.run(first.worker.cpu, turns)
    return math.log(behind / ahead) if index % 2 else math.log(ahead / behind)


def spread(index: int, places: int) -> int:
    """The place that has the turn number `index`: all have one, and neighbours not one after the other, for inputs may be sorted by length.

    >>> [spread(index, 5) for index in range(6)], [spread(index, 1) for index in range(2)]
    ([0, 3, 1, 4, 2, 0], [0, 0])
    """
    step = next(step for step in range(max(1, round(0.618 * places)), places + 1) if math.gcd(step, places) == 1)
    return index * step % places


def screen(a: Lane, b: Lane) -> float:
    """The speed-up of B over A from a few rounds of two living processes."""
    return math.exp(median(round_of(a, b, index) for index in range(SCREEN_ROUNDS)))


def race(start_a: Callable[[], Racer], start_b: Callable[[], Racer], *, limits: Limits = USUAL,
         threshold: float = 0.02, deadline_s: float = math.inf, between_sd: float = statistics.PRIOR_BETWEEN_SD) -> Race:
    """Race two candidates in fresh pairs of processes, until decided, out of pairs, or past the deadline (`time.monotonic()`), which cuts no
    start short: another pair begins where it starts in time if it does as those before. Nor does it cut the first rounds, before which
    nothing can be said, while they take no longer than the start did. Whatever `start_*` or a block raises ends the race; both processes are
    closed."""
    pairs: list[list[float]] = []
    times_a: list[int] = []
    times_b: list[int] = []
    start_s = rounds_s = 0.0
    decision = statistics.next_action(pairs, between_sd, threshold, limits)
    while decision.action != "stop" and (not pairs or time.monotonic() + start_s < deadline_s):
        pairs.append([])
        started = time.monotonic()
        with pair(start_a, start_b) as (a, b):
            ready = time.monotonic()
            start_s = max(start_s, ready - started)
            decision = statistics.next_action(pairs, between_sd, threshold, limits)
            while decision.action == "more_rounds":
                few = sum(map(len, pairs)) < limits.min_rounds
                if len(pairs[-1]) >= 2 and time.monotonic() >= (max(deadline_s, ready + start_s) if few else deadline_s):
                    break
                pairs[-1].append(round_of(a, b, len(pairs[-1])))
                decision = statistics.next_action(pairs, between_sd, threshold, limits)
            rounds_s += time.monotonic() - ready
            times_a += a.times_ns
            times_b += b.times_ns
    if decision.action == "stop":
        return Race(decision.verdict, decision.estimate, timing(times_a), timing(times_b), decision.reason, tuple(times_b), tuple(times_a))
    usable = [rounds for rounds in pairs if len(rounds) > 1]        # the time ended first: what is known then counts
    answer, found, reason = cut_off(usable, limits, between_sd, threshold, start_s, rounds_s)
    return Race(answer, found, timing(times_a), timing(times_b), reason, tuple(times_b), tuple(times_a))


def cut_off(pairs: statistics.Pairs, limits: Limits, between_sd: float, threshold: float, start_s: float,
            rounds_s: float) -> tuple[Verdict, Estimate | None, str]:
    """What a race knows that time ended, whose pairs took `start_s` to start, and whose rounds took `rounds_s` in all. A few rounds cannot show
    how far they scatter: before the first look is due only what leaves no doubt counts, and the interval of anything else would say nothing."""
    rounds = sum(map(len, pairs))
    if rounds >= limits.min_rounds:
        found = statistics.estimate(pairs, between_sd)
        return statistics.verdict(found, threshold), found, "the time ended first"
    found = statistics.estimate(pairs, between_sd, 1 - statistics.EARLY_LEVEL)
    answer = statistics.verdict(found, threshold)
    if answer in ("faster", "slower"):
        return answer, found, f"the time ended after {rounds} rounds, and they leave no doubt"
    needed_s = math.ceil(start_s + rounds_s * limits.min_rounds / rounds)
    return "inconclusive", None, (f"the time ended after {rounds} of at least {limits.min_rounds} rounds, which take about {needed_s} s: "
                                  "give it more time")


@contextmanager
def pair(start_a: Callable[[], Racer], start_b: Callable[[], Racer]) -> Iterator[tuple[Lane, Lane]]:
    """Two fresh processes, ready and frozen; closed at the end, whatever happens."""
    with lane(start_a) as a, lane(start_b) as b:
        yield a, b


@contextmanager
def lane(start: Callable[[], Racer]) -> Iterator[Lane]:
    """A fresh process, ready and frozen; closed at the end."""
    found = Lane(start(), 0)
    try:
        found.calls = Lane.of(found.worker).calls
        yield found
    finally:
        found.worker.close()        # another one, perhaps


def timing(times_ns: list[int]) -> Timing | None:
    """Percentiles in milliseconds per call; None without calls."""
    if not times_ns:
        return None
    ms = [value / 1e6 for value in times_ns]
    return Timing(p50=quantile(ms, 0.5), p90=quantile(ms, 0.9), p99=quantile(ms, 0.99), calls=len(ms))
