"""The timed blocks of a race: how long they are, and whether both sides did the same work in them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from saturate.measure import stationary
from saturate.study.bench import Live, queues
from saturate.trial.outcome import Outcome
from saturate.trial.process import Block, TrialEnded

#: A loader that has made all batches but this share keeps up, as far as a race resolves.
SLACK = 0.02

#: A second process this many times slower or faster than the first is timed over fewer steps: nobody needs to know exactly by
#: how much, and as many steps of the slower one take that many times as long.
FAR = 3.0


def run_block(live: Live, skip: int, steps: int, cpus: Sequence[int | None] = ()) -> Block:
    """One block, begun on these CPUs; frozen again afterwards."""
    live.trial.thaw()
    block = live.trial.run_block(skip, steps, cpus=cpus)
    live.trial.freeze()
    return block


def falls_behind(*lives: Live) -> bool:
    """Whether a loader may have made fewer batches than were taken from it, by more than the one in the making or `SLACK`: then
    the loop will wait for it once what it has in store is used up, and short blocks would not show that."""
    def allowed(live: Live) -> float:
        return max(1.0, SLACK * live.trial.steps)

    return any(live.trial.unmade_batches is None or live.trial.unmade_batches > allowed(live) for live in lives)


def have_workers(*lives: Live) -> bool:
    return any(loader.num_workers for live in lives for loader in live.evidence.loaders)


def believe(blocks: dict[str, list[Block]]) -> None:
    """Raise TrialEnded of B when B's time is that of other work."""
    reason = other_work(blocks["a"], blocks["b"])
    if reason is not None:
        ended = TrialEnded(Outcome("trains_otherwise", reason))
        ended.side = "b"
        raise ended


def other_work(a: list[Block], b: list[Block]) -> str | None:
    """What shows that the timed blocks of B are not the same work as those of A; None when nothing does.

    A verification run cannot show what only happens to be done while time is taken. Uneven accumulation at the end of
    an epoch, and a training that diverges by itself, are allowed for.
    """
    steps_a, steps_b = sum(block.steps for block in a), sum(block.steps for block in b)
    for token in sorted({token for block in a for token in block.events}):
        expected = sum(block.events.get(token, 0) for block in a) / steps_a
        found = sum(block.events.get(token, 0) for block in b) / steps_b
        if abs(found - expected) > 0.15 * expected + 1.0 / min(steps_a, steps_b):
            what = {"B": "backward ran", "C": "its closure ran"}.get(token, "its optimizer stepped")
            return f"{what} {found:.2f} times a step while it was timed, in the other process {expected:.2f} times"
    if not all(map(math.isfinite, b[-1].sample)) and all(map(math.isfinite, a[-1].sample)):
        return "its parameters are not finite after a timed block"
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
