"""The timed blocks of a race: how long they are, and whether both sides did the same work in them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean

from saturate.measure import stationary
from saturate.study.candidates import Set, merging
from saturate.study.live import Live, queues
from saturate.study.rates import Window, differ, merged, rate
from saturate.trial.outcome import Outcome
from saturate.trial.process import Block, TrialEnded

#: Longer blocks are shifted by no more than shorter ones of so many steps: each shift costs time.
MOST_SHIFTED = 8

#: What chance makes of few steps: so many standard errors say that it was no chance. Two processes that evaluate in every second step, in
#: turn, differ the more where one step is timed at a time.
SURE_OF_SHARES = 5.0

#: A loader that has made all batches but this share keeps up, as far as a race resolves.
SLACK = 0.02

#: A second process this many times slower or faster than the first is timed over fewer steps: nobody needs to know exactly by
#: how much, and as many steps of the slower one take that many times as long.
FAR = 3.0

#: What is said of a process whose training has diverged while the other one's goes on.
NOT_FINITE = "its parameters are not finite after a timed block"


def run_block(live: Live, skip: int, steps: int, cpus: Sequence[int | None] = ()) -> Block:
    """One block, begun on these CPUs; frozen again afterwards."""
    live.trial.thaw()
    block = live.trial.run_block(skip, steps, cpus=cpus)
    live.trial.freeze()
    return block


def skipped_too(steps: int, draw: random.Random) -> int:
    """How many steps more are skipped before so many are timed, for chance to choose. Blocks of one length would time a step that is
    slow at regular intervals (it logs, it renews a preconditioner) always or never, where the two have a common divisor: and which of
    both differs between two processes of one program, as their warm-ups do."""
    return draw.randrange(min(steps, MOST_SHIFTED) // 2 + 2)


def falls_behind(*lives: Live) -> bool:
    """Whether a loader may have made fewer batches than were taken from it, by more than the one in the making or `SLACK`: then
    the loop will wait for it once what it has in store is used up, and short blocks would not show that."""
    def allowed(live: Live) -> float:
        return max(1.0, SLACK * live.trial.steps)

    return any(live.trial.unmade_batches is None or live.trial.unmade_batches > allowed(live) for live in lives)


def have_workers(*lives: Live) -> bool:
    return any(loader.num_workers for live in lives for loader in live.evidence.loaders)


def means_ms(a: Block, b: Block) -> tuple[float, float]:
    """Milliseconds per step of one block of each side. Either both are without the steps that held an evaluation, or neither is: one side
    with them and the other without would differ by what an evaluation takes."""
    if a.tells_evaluations and b.tells_evaluations:
        return a.mean_ns / 1e6, b.mean_ns / 1e6
    return fmean(a.timed_ns) / 1e6, fmean(b.timed_ns) / 1e6


def begin_alike(first: Live, second: Live) -> bool:
    """Whether two processes had the same loss in their first update, before any technique acts. Those of a script that draws its own
    seed had not."""
    ours, theirs = first.trial.losses[:1], second.trial.losses[:1]
    return not ours or not theirs or ours == theirs


def believe(blocks: dict[str, list[Block]], warm_ups: Sequence[Sequence[Window]], a: Set = (), b: Set = (), alike: bool = True) -> None:
    """Raise TrialEnded of B when B's time is that of other work. `warm_ups`: of the baseline. `a`, `b`: what either side trains with.
    `alike`: see `begin_alike`; else it may be chance that one of both diverges."""
    known = merged([window for one in warm_ups for window in one], merging(a))
    reason = other_work(blocks["a"], blocks["b"], known, merging(b) / merging(a))
    if reason is not None:
        chance = reason == NOT_FINITE and not alike
        ended = TrialEnded(Outcome("diverged", f"{reason}; the script draws its own seed, so that may be chance") if chance
                           else Outcome("trains_otherwise", reason))
        ended.side = "b"
        raise ended


def other_work(a: list[Block], b: list[Block], known: Sequence[Window] = (), fewer: float = 1.0) -> str | None:
    """What shows that the timed blocks of B are not the same work as those of A; None when nothing does. `known`: of other processes
    of A's kind, how often events came, `fewer`: how many backward passes of A may be one of B (see `study.rates`).

    A verification run cannot show what only happens to be done while time is taken. Uneven accumulation at the end of
    an epoch, and a training that diverges by itself, are allowed for.
    """
    ours, theirs = ([(block.steps, block.events) for block in blocks] for blocks in (a, b))
    for token in sorted({token for block in a for token in block.events}):
        if differ(ours, theirs, token, known, fewer):
            what = {"B": "backward ran", "C": "its closure ran"}.get(token, "its optimizer stepped")
            return f"{what} {rate(theirs, token):.2f} times a step while it was timed, in the other process {rate(ours, token):.2f} times"
    timed_a, timed_b = sum(len(block.timed_ns) for block in a), sum(len(block.timed_ns) for block in b)
    expected, found = sum(len(block.evaluated) for block in a) / timed_a, sum(len(block.evaluated) for block in b) / timed_b
    likely = (expected * timed_a + 2) / (timed_a + 4)       # as it may be where few steps, or none, held one by chance
    error = math.sqrt(likely * (1 - likely) * (1 / timed_a + 1 / timed_b))
    if found > expected + 0.15 + 1 / min(timed_a, timed_b) + SURE_OF_SHARES * error:
        return f"{found:.0%} of its steps held an evaluation while they were timed, in the other process {expected:.0%}; these are not counted"
    if not all(map(math.isfinite, b[-1].sample)) and all(map(math.isfinite, a[-1].sample)):
        return NOT_FINITE
    if all(block.moved for block in a) and 2 * sum(block.moved for block in b) <= len(b):
        return "its parameters did not move while it was timed"
    return None


def block_size(first: Live, second: Live, loader_bound: bool = True) -> tuple[int, int]:
    """Steps to skip and to time: the same for both, long enough for the deeper loader queue (`loader_bound`) and the faster
    step, but for a second process that is far behind or far ahead."""
    loaders = [loader for live in (first, second) for loader in live.evidence.loaders if loader.num_workers]
    workers = max((loader.num_workers for loader in loaders), default=0)
    prefetch = max((loader.prefetch_factor or 2 for loader in loaders), default=2)
    behind = second.step_ms > FAR * first.step_ms
    step_ms = second.step_ms if behind else max(min(first.step_ms, second.step_ms), first.step_ms / FAR)
    return stationary.block_steps(step_ms, workers, prefetch, loader_bound=loader_bound, queued=any(queues(live.hello) for live in (first, second)))
