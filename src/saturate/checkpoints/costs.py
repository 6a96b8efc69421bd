"""Which way of saving costs this training least, measured while it runs.

The cost of a checkpoint is what the training loses by it in total: the time that the script stands in the save (and
in waits for it later), and the slowdown of the steps that run while it is written. Public tools show the first alone;
where the processor or the disk is busy anyway, the second gives all of it back.

Memory has no price in seconds, so it is a bound: where the copy that a background save needs would take more than half of
what is free (`arena`), this checkpoint is written from the live tensors, whatever was cheaper. How much is held is reported.

A checkpoint is everything that is saved between two steps. Costs are compared per byte, because checkpoints differ in
size. Steps with other things in them (an evaluation) are outliers, so medians are compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any

#: Checkpoints smaller than this say nothing about the ways to write.
LEAST_BYTES = 1 << 20
#: Measurements of each way before one is settled on, and how many of the latest count.
TRIED, REMEMBERED = 2, 5
#: After so many checkpoints a way that lost is tried again: what else runs on the machine changes.
RETRY_EVERY = 25
#: Steps without a save that a typical one is taken from.
_TYPICAL_STEPS, _LEAST_STEPS = 64, 3
#: A step that took so many times a typical one had something else in it.
_EVALUATION = 3.0


class Costs:
    """Times are in seconds, by one monotonic clock. `fixed`: the way to save when it is not to be measured."""

    def __init__(self, ways: Iterable[str], fixed: str | None = None):
        self.ways = tuple(ways)
        self.fixed = fixed
        self.per_byte: dict[str, deque[float]] = {way: deque(maxlen=REMEMBERED) for way in self.ways}
        self.checkpoints = self.files = self.bytes = 0
        self.left_alone = 0             # saves into files that the script opened itself
        self.blocked_s = 0.0
        self._typical: deque[float] = deque(maxlen=_TYPICAL_STEPS)
        self._stepped: float | None = None
        self._overlapped = False        # whether something was being written when the latest step ended
        self._way = ""                  # of the checkpoint that is measured, "" while none is
        self._size, self._blocked = 0, 0.0
        self._first: float | None = None        # the step that the checkpoint was saved in, without the save
        self._slowed: list[float] = []          # those after it, while it was written
        self._fresh = False             # the checkpoint's own interval between steps is not over

    # -- what happens ----------------------------------------------------------------------------------------------

    def way(self) -> str:
        """How to save now. All files of one checkpoint go the same way."""
        if self._fresh:
            return self._way
        return self.choose()

    @property
    def over(self) -> bool:
        """Whether a training step has ended since the latest save: what is saved next is another checkpoint."""
        return self._stepped is not None and not self._fresh

    def saved(self, way: str, size: int, blocked_s: float) -> None:
        """A file of `size` bytes was handed over, which took `blocked_s`."""
        if not self._fresh:
            self.settle()
            self._way, self._fresh = way, True
            self.checkpoints += 1
        self.files += 1
        self._size += size
        self.bytes += size
        self.waited(blocked_s)
        if self._stepped is None:       # no optimizer that could tell: every file is a checkpoint
            self.settle()

    def waited(self, seconds: float) -> None:
        """The script had to wait for a save."""
        self._blocked += seconds
        self.blocked_s += seconds

    def step(self, now: float, writing: bool) -> None:
        """A training step has ended; `writing`: something is still being written."""
        before, self._stepped = self._stepped, now
        if before is not None:
            if self._fresh:
                self._first = now - before - self._blocked
            elif self._overlapped:
                self._slowed.append(now - before)
            else:
                self._typical.append(now - before)
        self._overlapped = writing
        self._fresh = False
        if not writing:
            self.settle()

    def settle(self) -> None:
        """The measured checkpoint is over: note what it cost."""
        if self._way and self._size >= LEAST_BYTES:
            self.per_byte.setdefault(self._way, deque(maxlen=REMEMBERED)).append(self._cost() / self._size)
        self._way, self._size, self._blocked, self._first, self._slowed, self._fresh = "", 0, 0.0, None, [], False

    def _cost(self) -> float:
        if len(self._typical) < _LEAST_STEPS:
            return self._blocked
        usual = median(self._typical)
        steps = list(self._slowed)
        if self._first is not None and self._first < _EVALUATION * usual:
            steps.append(self._first)
        slowdown = len(steps) * (median(steps) - usual) if steps else 0.0
        return self._blocked + max(0.0, slowdown)

    # -- what follows ----------------------------------------------------------------------------------------------

    def choose(self) -> str:
        """The cheapest way by what was measured; one that was measured too little or too long ago comes first."""
        if self.fixed:
            return self.fixed
        untried = min(self.ways, key=lambda way: len(self.per_byte[way]))
        if len(self.per_byte[untried]) < TRIED:
            return untried
        best = min(self.ways, key=lambda way: median(self.per_byte[way]))
        if self.checkpoints % RETRY_EVERY == RETRY_EVERY - 1:
            others = [way for way in self.ways if way != best]
            return others[self.checkpoints // RETRY_EVERY % len(others)]
        return best

    def lost_s(self, way: str) -> float | None:
        """Seconds of training that one typical checkpoint costs when it goes that way; None when it never did."""
        if not self.per_byte.get(way) or not self.checkpoints:
            return None
        return median(self.per_byte[way]) * self.bytes / self.checkpoints

    def summary(self) -> dict[str, Any]:
        """What was saved, and by way: how often that was measured, and seconds of training that one typical checkpoint costs."""
        return {"checkpoints": self.checkpoints, "files": self.files, "bytes": self.bytes,
                "ways": {way: {"measured": len(self.per_byte[way]), "lost_s": self.lost_s(way)} for way in self.ways}}

    def describe(self, memory_bytes: int) -> str:
        """One line: what was saved and what it cost. `memory_bytes`: of the buffers that are held for it."""
        alone = f"{self.left_alone} save(s) into files that the script opened itself stayed synchronous" if self.left_alone else ""
        if not self.files:
            return alone
        text = f"{self.checkpoints} checkpoint(s) in {self.files} file(s), {self.bytes / 1e6:,.1f} MB written"
        text += f"; {alone}" if alone else ""
        ways = {way: lost for way in self.ways if (lost := self.lost_s(way)) is not None}
        if not ways:
            return f"{text}, {self.blocked_s:.2f} s waited for them in all"
        best = self.fixed or min(ways, key=lambda way: ways[way])
        if best in ways:
            text += f"; one costs {ways.pop(best):.3f} s of training by {best}"
        if ways:
            text += " (" + ", ".join(f"{lost:.3f} s by {way}" for way, lost in ways.items()) + ")"
        return f"{text}, {memory_bytes / 1e6:,.0f} MB of host memory held" if memory_bytes else text
