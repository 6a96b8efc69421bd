"""Throughput over batch sizes, measured interleaved in one process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from saturate.machine.telemetry import Sampler
from saturate.measure import knee as knees
from saturate.records.fit import SizeThroughput
from saturate.study.fit_process import SAME_SKIP, Process, Window

#: Sizes, rounds, and the time and the steps of one block.
MOST_SIZES, ROUNDS, LEAST_ROUNDS, BLOCK_S, LEAST_STEPS, MOST_STEPS = 5, 6, 4, 0.3, 2, 50

#: How long devices are watched at the knee, behind as long as the period is over which NVML averages; at most this share of the time left.
WATCHED_S, PERIOD_S, WATCHED_SHARE = 2.0, 1.0, 0.5

TOO_SHORT = "the budget was too short to measure throughput"
CROWDED = "throughput was not measured: the device's allocator had to free memory while batches were timed"


@dataclass
class Throughput:
    """Rates in samples per second by size, one per round; and processor seconds per second beside them."""

    rates: dict[int, list[float]] = field(default_factory=dict)
    shares: dict[int, list[float]] = field(default_factory=dict)
    step_s: dict[int, float] = field(default_factory=dict)      # the latest, by size
    device_share: float | None = None       # of its time a device ran kernels at the knee; None: on a CPU, or it does not tell
    note: str = ""
    running: int | None = None      # the size that is being measured

    def measure(self, process: Process, sizes: list[int], allowed_s: float, say: Callable[[str], None]) -> None:
        """A few rounds of one block of each size; none (`note` says so) where the time does not suffice. Raises TrialEnded."""
        began = time.monotonic()
        steps, round_s = {}, 0.0
        for size in sizes:          # the first visit warms up: other shapes need other kernels
            self.running = size
            step_s = process.turn(size, LEAST_STEPS).step_s
            steps[size] = max(LEAST_STEPS, min(MOST_STEPS, round(BLOCK_S / max(step_s, 1e-6))))
            round_s += (steps[size] + process.turn_steps) * step_s
        rounds = min(ROUNDS, int((allowed_s - (time.monotonic() - began)) / max(round_s, 1e-6)))
        if rounds < LEAST_ROUNDS:
            self.note = TOO_SHORT
            return
        say(f"throughput: batches of {', '.join(map(str, sizes))}, {rounds} rounds")
        crowded = False
        for number in range(rounds):
            before, retries = {size: len(self.rates.get(size, ())) for size in sizes}, 0
            for size in sizes if number % 2 else sizes[::-1]:
                self.running = size
                window = process.turn(size, steps[size])
                self.add(size, window)
                retries += window.retries
            if retries:
                crowded = True
                self._forget_since(before)      # for all sizes, which are compared within rounds
        if crowded and not self.settled():
            self.note = CROWDED

    def watch_devices(self, process: Process, sampler: Sampler, left_s: float) -> None:
        """How busy the devices are at the knee, if that does not take more than a part of what is left. Raises TrialEnded."""
        knee = self.knee
        if knee is None or not process.on_device:
            return
        step_s = self.step_s[knee]
        if WATCHED_SHARE * left_s < PERIOD_S + WATCHED_S + (process.turn_steps + 2 * LEAST_STEPS + 2 * SAME_SKIP) * step_s:
            return
        process.turn(knee, max(LEAST_STEPS, math.ceil(PERIOD_S / step_s)))
        with sampler:
            process.run(knee, max(LEAST_STEPS, math.ceil(WATCHED_S / step_s)), fresh=False, settle=True, skip=SAME_SKIP)
        self.device_share = sampler.busy_share(process.world_size)

    def add(self, size: int, window: Window, samples: int | None = None) -> None:
        samples = window.samples if samples is None else samples
        if samples and window.seconds:
            self.step_s[size] = window.step_s
            self.rates.setdefault(size, []).append(samples / window.seconds)
            self.shares.setdefault(size, []).append(window.cpu_share)

    def _forget_since(self, before: dict[int, int]) -> None:
        for size, rounds in before.items():
            for kept in (self.rates, self.shares):
                del kept.get(size, [])[rounds:]

    def settled(self) -> dict[int, list[float]]:
        """The rates of all sizes that have enough rounds; nothing where a script ended in the midst of them."""
        return {size: rates for size, rates in sorted(self.rates.items()) if len(rates) >= LEAST_ROUNDS}

    @property
    def knee(self) -> int | None:
        found = self.settled()
        return knees.knee(found) if len(found) > 1 else None

    def curve(self) -> list[SizeThroughput]:
        found = []
        for size, rates in self.settled().items():
            centre, low, high = knees.interval(rates)
            found.append(SizeThroughput(micro_batch=size, samples_per_s=centre, ci=(low, high)))
        return found

    def busy_cores(self, size: int) -> float:
        return median(self.shares[size])


def sizes_up_to(best: int, own: int | None) -> list[int]:
    """Sizes worth comparing: the best, halves of it, and what the script uses by itself."""
    found = {best}
    while len(found) < MOST_SIZES and min(found) > 1:
        found.add(min(found) // 2)
    if own and own < best and own not in found:
        if len(found) == MOST_SIZES:
            found.discard(min(found))
        found.add(own)
    return sorted(found)
