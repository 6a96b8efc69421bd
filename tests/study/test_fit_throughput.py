"""Throughput over sizes, on a simulated device whose allocator keeps blocks of every size that ran, up to its limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from saturate.study import fit_throughput
from saturate.study.fit_process import Asking, Process, Window
from saturate.study.fit_search import Search
from saturate.study.fit_state import Proof
from saturate.study.fit_throughput import CROWDED, LEAST_ROUNDS, ROUNDS, Throughput
from saturate.trial.outcome import Outcome
from saturate.trial.process import TrialEnded

#: Seconds of a sample, of freeing the cache, for which the device has to wait, and by how much each of the first two steps behind an
#: emptied cache is longer: in one the host asks the driver for memory, in the other it is not ahead of the device yet.
SAMPLE_S, FREEING_S, EMPTIED_S = 0.001, 0.1, 0.05
SIZES = [16, 32, 64]


class Simulated(Process):
    """`queue` batches of the size before come first, as where loader workers have prepared them. `crowded`: in these calls of
    `turn` the allocator frees its cache, whatever is in it."""

    def __init__(self, limit: int, queue: int = 0, on_device: bool = True, crowded: tuple[int, ...] = ()):
        self.asking = Asking(queue=queue)
        self.trial: Any = SimpleNamespace(gates=[{"fit": {"device": {} if on_device else None}}])
        self.limit, self.crowded, self.turns, self.behind = limit, crowded, 0, 0
        self.size, self.retries, self.cache = SIZES[-1], 0, {SIZES[-1]}
        self.calls: list[tuple[int, int, dict[str, Any]]] = []

    def turn(self, size: int, steps: int) -> Window:
        self.turns += 1
        return super().turn(size, steps)

    def run(self, size: Any, steps: int, **options: Any) -> Window:
        self.calls.append((size, steps, options))
        if options.get("fresh", True):
            self.retries, self.cache, self.behind = int(self.turns in self.crowded), set(), 2
        same = "skip" in options
        skip = options.get("skip", self.skip)
        seconds = 0.0
        for index in range(skip + steps):
            old = index < self.asking.queue and not same
            took = self._step(self.size if old else size)
            seconds += took if index >= skip else 0.0
        self.size = size
        return Window(0, 0, self.retries, steps, steps, seconds, steps * size, size, 0, 0, 1.0)

    def _step(self, size: int) -> float:
        took = SAMPLE_S * size + (EMPTIED_S if self.behind else 0.0)
        self.behind = max(0, self.behind - 1)
        if size not in self.cache and sum(self.cache) + size > self.limit:
            self.cache, took, self.retries = set(), took + FREEING_S, self.retries + 1
        self.cache.add(size)
        return took


def measured(process: Process) -> Throughput:
    found = Throughput()
    found.measure(process, SIZES, 1e9, lambda line: None)
    return found


@pytest.mark.parametrize("queue", [0, 1, 8])
def test_blocks_of_other_sizes_are_not_freed_while_a_size_is_timed(queue):
    """The largest size fills the device: beside it there is no room for blocks of another one."""
    found = measured(Simulated(SIZES[-1], queue))
    assert {size: len(rates) for size, rates in found.settled().items()} == dict.fromkeys(SIZES, ROUNDS)
    assert all(rate == pytest.approx(1 / SAMPLE_S) for rates in found.rates.values() for rate in rates)
    assert found.knee == SIZES[0] and not found.note


def test_a_round_in_which_the_allocator_freed_its_cache_is_left_out_for_all_sizes():
    """They are compared within rounds."""
    second = len(SIZES) + 1 + len(SIZES)
    found = measured(Simulated(SIZES[-1], crowded=(second,)))
    assert {size: len(rates) for size, rates in found.settled().items()} == dict.fromkeys(SIZES, ROUNDS - 1)
    assert {size: len(shares) for size, shares in found.shares.items()} == dict.fromkeys(SIZES, ROUNDS - 1)
    assert not found.note and found.knee


def test_where_most_rounds_are_left_out_nothing_is_measured():
    found = measured(Simulated(SIZES[-1], crowded=tuple(range(len(SIZES) + 1, 99))))
    assert found.settled() == {} and found.knee is None and found.curve() == [] and found.note == CROWDED


def test_on_a_cpu_sizes_follow_each_other():
    process = Simulated(1 << 30, on_device=False)
    found = measured(process)
    assert len(process.calls) == len(SIZES) * (1 + ROUNDS)
    assert all(options == {"fresh": False, "settle": True} for _, _, options in process.calls)
    assert process.turn_steps == process.skip and len(found.settled()) == len(SIZES)


def test_the_time_of_a_round_on_a_device_is_foreseen(monkeypatch):
    """What is allowed holds the fewest rounds, but not with the steps that make room for another size."""
    process = Simulated(SIZES[-1])
    monkeypatch.setattr(fit_throughput, "BLOCK_S", 0.0)
    step_s = SAMPLE_S * sum(SIZES)
    found = Throughput()
    found.measure(process, SIZES, LEAST_ROUNDS * step_s * (fit_throughput.LEAST_STEPS + process.skip), lambda line: None)
    assert found.note == fit_throughput.TOO_SHORT


def test_devices_are_watched_at_the_knee_and_not_before_their_period_is_over():
    class Sampled:
        def __enter__(self):
            self.entered = len(process.calls)

        def __exit__(self, *exception):
            self.left = len(process.calls)

        def busy_share(self, used):
            assert used == process.world_size
            return 0.83

    process, sampler = Simulated(SIZES[-1]), Sampled()
    found = measured(process)
    found.watch_devices(process, sampler, 5.0)  # type: ignore[arg-type]
    assert found.device_share is None, "that would take most of the time that is left"
    found.watch_devices(process, sampler, 60.0)  # type: ignore[arg-type]
    assert found.device_share == 0.83 and sampler.left == sampler.entered + 1
    step_s = found.step_s[found.knee]
    assert [(size, round(steps * step_s)) for size, steps, _ in process.calls[-2:]] == [(found.knee, 1), (found.knee, 2)]
    found.step_s[found.knee], found.device_share = 10.0, None
    found.watch_devices(process, sampler, 60.0)  # type: ignore[arg-type]
    assert found.device_share is None, "a few of such steps take longer"
    on_cpu = measured(Simulated(1 << 30, on_device=False))
    on_cpu.watch_devices(Simulated(1 << 30, on_device=False), sampler, 60.0)  # type: ignore[arg-type]
    assert on_cpu.device_share is None


def search(device: str) -> Search:
    meter = SimpleNamespace(exceeded_bytes=None, late=False)
    made = Search(bench=SimpleNamespace(meter=meter), memory_bytes=None, target="memory", asked_most=None, accelerated=True, budget_s=1.0,     # type: ignore[arg-type]
                  deadline=1.0, say=lambda line: None, limit_bytes=1000, facts={"device": device})
    made.proofs = {64: Proof(50, 900, [], [])}
    made.throughput.running = 64
    made.throughput.rates = {64: [1.0]}
    return made


def test_a_proof_outlives_memory_that_ran_out_behind_other_sizes():
    made = search("cuda")
    ended = TrialEnded(Outcome("out_of_memory_device", "CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert made._lost_measuring(ended) is None
    assert made.best == 64 and made.failed == [] and "Tried to allocate" in made.throughput.note


@pytest.mark.parametrize(("device", "kind"), [("cpu", "out_of_memory_device"), ("cuda", "out_of_memory_host")])
def test_host_memory_that_ran_out_is_the_size_s_own(device, kind):
    made = search(device)
    made._propose = lambda: None        # type: ignore[method-assign]
    made._lost_measuring(TrialEnded(Outcome(kind, "killed")))
    assert made.best is None and made.failed == [64]
