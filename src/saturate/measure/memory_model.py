"""How the peak memory of a training step grows with its batch, and which size to try next. Pure functions.

    peak(b) = fixed + b * per sample

Parameters, gradients, optimizer state and libraries are the fixed part; what a forward pass keeps for its backward pass
grows with the samples. Two things bend the line: below some size another moment of the step is the highest (an optimizer's
temporaries), and allocators take memory in steps. So a line is never laid through the middle of all points: what is
extrapolated is the *steepest* line through the largest size that was measured, which no bend below it can flatten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Two sizes closer than this factor say nothing about a slope: the noise of a peak would be taken for growth.
SEPARATION = 1.25

#: A size is at most this many times as large as the largest that ran: a slope may be a guess, or hidden below another moment.
MOST_GROWTH = 8

#: Measured sizes are meant to reach this share of the room between the fixed part and the limit. Beyond it the risk of
#: running into the limit buys little: what is left to extrapolate is less than half of what was seen.
FIRST_REACH, REACH, ENOUGH_REACH = 0.40, 0.70, 0.55

#: A size that is proposed after a single measurement reaches this share of that room.
ENOUGH_GUESSED = 0.85

#: Measured sizes in one process, at most.
MOST_PROBES = 6

#: A size that is larger by less than this share is not worth another proof.
WORTHWHILE = 0.03

#: A size is proposed as if each sample took this much more than the line says: the first time all of them (a proof that
#: fails costs a process, one that leaves room is continued upwards in its own), then those beyond the largest that fits.
FIRST_CARE, CARE = 1.03, 1.05

#: Slopes that differ by no more than this share are one line, if three sizes lie on it. Then only what lies beyond the largest
#: of them can be wrong, and a first proposal takes each of those samples to need more by what the slopes
#: differ, and by the second share at least.
ALIGNED, ALIGNED_CARE = 0.02, 0.003

#: The margin below the limit is this share of it (the peaks of eight processes of `bench/fit.py`'s script with one size lay
#: within 0.02 % over 60 steps, within 0.07 % over 20: LOG.md), or this share of what the batch may take from the C library's heaps,
#: whichever is more. Heaps keep and split what was freed, and each process does so differently: twelve with one size and
#: seed had peaks with a standard deviation of 6 % of what the batch took (LOG.md). A proof and a later run differ by 1.4 times that.
MARGIN_SHARE, HEAP_SHARE = 0.005, 0.15


@dataclass(frozen=True)
class Point:
    """The peak of one size, bytes. Where several processes share the work, `micro_batch` is the batch of one of them."""

    micro_batch: int
    peak_bytes: float


@dataclass(frozen=True)
class Line:
    """`sample_bytes` is never negative. With 0 the memory does not grow with the batch as far as anybody has seen."""

    fixed_bytes: float
    sample_bytes: float

    def peak_bytes(self, micro_batch: float) -> float:
        return self.fixed_bytes + micro_batch * self.sample_bytes

    def capacity(self, limit_bytes: float, most: int) -> int:
        """The largest size whose predicted peak is not above the limit, and not above `most`; 0 when none is."""
        room = limit_bytes - self.fixed_bytes
        if room < 0:
            return 0
        if self.sample_bytes * most <= room:
            return most
        return int(room / self.sample_bytes * (1 + 1e-12))      # a peak exactly at the limit still fits


def highest(points: Iterable[Point]) -> list[Point]:
    """One point per size, the highest of its peaks; by size."""
    found: dict[int, float] = {}
    for point in points:
        found[point.micro_batch] = max(point.peak_bytes, found.get(point.micro_batch, 0.0))
    return [Point(size, found[size]) for size in sorted(found)]


def line(points: Sequence[Point], idle_bytes: float | None = None) -> Line:
    """The steepest line through the largest size. `idle_bytes`: resident between two steps, which stands for a size of 0
    where only one size was measured. Raises ValueError without points."""
    known = highest(points)
    if not known:
        raise ValueError("no size was measured")
    top = known[-1]
    idle = Point(0, min(idle_bytes if idle_bytes is not None else 0.0, top.peak_bytes))
    return _through(top, max(0.0, *(_slopes(known) or [_slope(idle, top)])))


def _slopes(known: Sequence[Point]) -> list[float]:
    """Between the largest size and each of those that are far enough from it to tell."""
    top = known[-1]
    return [_slope(point, top) for point in known if point.micro_batch * SEPARATION <= top.micro_batch]


def _slope(lower: Point, upper: Point) -> float:
    return (upper.peak_bytes - lower.peak_bytes) / (upper.micro_batch - lower.micro_batch)


def _through(point: Point, sample_bytes: float) -> Line:
    return Line(point.peak_bytes - sample_bytes * point.micro_batch, sample_bytes)


def ceiling(points: Sequence[Point], idle_bytes: float) -> Line:
    """A line that the peak stays below as long as memory grows in proportion to the samples: from what is resident between
    steps through the largest size. It holds even where a bend below that size hides the slope."""
    top = highest(points)[-1]
    idle = min(idle_bytes, top.peak_bytes)
    return Line(idle, (top.peak_bytes - idle) / top.micro_batch)


def next_probe(points: Sequence[Point], idle_bytes: float, limit_bytes: float, most: int) -> int | None:
    """The next size to measure in a process that is running, or None when the sizes seen suffice to extrapolate.

    Larger than all before, but one: where already the first size comes near the limit, half of it. Sizes are meant to
    stay clear of the limit, because a process that passes it is lost.
    """
    known = highest(points)
    top = known[-1]
    found = line(known, idle_bytes)
    room = limit_bytes - found.fixed_bytes
    if len(known) >= MOST_PROBES or room <= 0:
        return None
    reached = (top.peak_bytes - found.fixed_bytes) / room
    if len(known) > 1 and (reached >= ENOUGH_REACH or top.micro_batch >= most):
        return None
    reach = FIRST_REACH if len(known) == 1 else REACH
    wanted = min(found.capacity(found.fixed_bytes + reach * room, most),
                 ceiling(known, idle_bytes).capacity(idle_bytes + 0.85 * (limit_bytes - idle_bytes), most),
                 top.micro_batch * MOST_GROWTH)
    if wanted >= SEPARATION * top.micro_batch:
        return wanted
    if len(known) == 1:
        half = top.micro_batch // 2
        return half if half >= 1 else None
    return None


def first_proposal(points: Sequence[Point], idle_bytes: float, limit_bytes: float, most: int) -> int:
    """The size to prove first."""
    known = highest(points)
    found, top = line(known, idle_bytes), known[-1]
    most = min(most, top.micro_batch * MOST_GROWTH)
    if len(known) == 1:
        return found.capacity(found.fixed_bytes + ENOUGH_GUESSED * (limit_bytes - found.fixed_bytes), most)
    slopes = _slopes(known)
    if len(slopes) > 1 and min(slopes) * (1 + ALIGNED) >= max(slopes):
        care = max(1 + ALIGNED_CARE, max(slopes) / min(slopes)) if min(slopes) > 0 else 1.0
        return _through(top, care * found.sample_bytes).capacity(limit_bytes, most)
    return Line(found.fixed_bytes, FIRST_CARE * found.sample_bytes).capacity(limit_bytes, most)


def propose(points: Sequence[Point], failed: Sequence[int], limit_bytes: float, most: int, idle_bytes: float | None = None) -> int | None:
    """The size to prove next, or None when no other size can change the answer.

    `points`: sizes that ran, with their peaks, those above the limit included. `failed`: sizes that ran out of memory. The
    answer so far is the largest point not above the limit. Where the line holds a size that has failed for possible, it is
    wrong, and the gap between success and failure is halved.
    """
    known = highest(points)
    if not known:
        return None
    bad = min([*failed, *(point.micro_batch for point in known if point.peak_bytes > limit_bytes)], default=None)
    found = line(known, idle_bytes)
    top = max((point for point in known if point.peak_bytes <= limit_bytes), key=lambda point: point.micro_batch,
              default=Point(0, found.fixed_bytes))
    best = top.micro_batch
    candidate = _through(top, CARE * found.sample_bytes).capacity(limit_bytes, min(most, known[-1].micro_batch * MOST_GROWTH))
    if bad is not None and candidate >= bad:
        candidate = best + (bad - best) // 2
    if candidate <= best or candidate - best < WORTHWHILE * best:
        return None
    return candidate


def heap_share(measured: Sequence[tuple[Point, float]]) -> float:
    """Of the memory that a larger batch takes, the part that comes from heaps: 0 to 1. `measured`: sizes in the order in
    which one process ran them, and the most that its heaps had until then, bytes. 1 where nothing is known."""
    if not measured:
        return 1.0
    (first, heap_before), (last, heap) = measured[0], measured[-1]
    if last.micro_batch >= SEPARATION * first.micro_batch and last.peak_bytes > first.peak_bytes:
        return min(1.0, max(0.0, heap - heap_before) / (last.peak_bytes - first.peak_bytes))
    return min(1.0, heap / last.peak_bytes)


def margin_bytes(limit_bytes: float, heap_bytes: float = 0.0) -> int:
    """What an answer stays below the limit by. `heap_bytes`: what the batch may take from heaps."""
    return math.ceil(max(MARGIN_SHARE * limit_bytes, HEAP_SHARE * heap_bytes))
