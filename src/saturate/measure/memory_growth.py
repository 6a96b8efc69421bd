"""Memory that grows from step to step: how fast, how many steps a limit lasts, and which size lasts long enough. Pure functions.

A script that keeps what it should forget has no batch that fits for ever. Its peaks rise with every block of a proof, where
those of any other script stay what they were after the first steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

#: The last blocks of a proof rise, every one: at least so many. One that was killed at the limit has risen once more. That so
#: many peaks in a row are the highest so far is chance in 1 of 10,000 proofs of a dozen blocks.
RISES = 4

#: Growth is told from this share of the limit on, over the steps of a proof: heaps creep by less.
LEAST_SHARE = 0.002


@dataclass(frozen=True)
class Growth:
    """Of one size. `start_bytes`: what its peak would be without growth."""

    micro_batch: int
    step_bytes: float
    start_bytes: float

    def peak_bytes(self, steps: float) -> float:
        return self.start_bytes + steps * self.step_bytes

    def lasts_steps(self, limit_bytes: float) -> int:
        """Steps until the limit is passed."""
        return max(0, int((limit_bytes - self.start_bytes) / self.step_bytes))


def growth(micro_batch: int, trail: Sequence[tuple[int, float]], rises: int, least_bytes: float) -> Growth | None:
    """`trail`: steps so far, and the highest peak until then, bytes. None where the last `rises` blocks did not all rise, or by
    less than `least_bytes` a step."""
    slopes: list[float] = []
    for (before, low), (after, high) in zip(reversed(trail[:-1]), reversed(trail)):
        if high <= low:
            break
        slopes.append((high - low) / (after - before))
    if len(slopes) < rises or median(slopes) < least_bytes:
        return None
    steps, peak = trail[-1]
    return Growth(micro_batch, median(slopes), peak - steps * median(slopes))


def at(known: Sequence[Growth], idle_bytes: float, size: int) -> Growth:
    """Of any size, from the nearest known one: what is above `idle_bytes`, and what it grows by, in proportion to the batch."""
    nearest = min(known, key=lambda one: abs(one.micro_batch - size))
    share = size / nearest.micro_batch
    return Growth(size, share * nearest.step_bytes, idle_bytes + share * (nearest.start_bytes - idle_bytes))


def lasting(known: Sequence[Growth], idle_bytes: float, limit_bytes: float, steps: float) -> int:
    """The largest size whose peak after `steps` is not above the limit, below the smallest known size: what is above
    `idle_bytes` is taken to shrink in proportion to the batch. 0 when none is."""
    least = min(known, key=lambda one: one.micro_batch)
    taken = least.peak_bytes(steps) - idle_bytes
    if taken <= 0:
        return least.micro_batch
    return min(least.micro_batch, max(0, int(least.micro_batch * (limit_bytes - idle_bytes) / taken)))
