"""One process of a fit: the workload under a meter, running windows of steps with batches of chosen sizes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from saturate.study.bench import Bench
from saturate.trial import meter
from saturate.trial.outcome import OUT_OF_MEMORY
from saturate.trial.process import Trial, TrialEnded

#: Outcomes of a trial that mean: this size does not fit.
_MEMORY = (*OUT_OF_MEMORY, "shared_memory_full")

#: Of steps that go on with the same size, the first after a gate is not timed.
SAME_SKIP = 1

#: Of those behind an emptied cache, the first asks the driver for everything again, for which the host waits, and in the second
#: it gets ahead of the device.
EMPTIED_SKIP = 2


@dataclass
class Asking:
    """What every process of a fit is told, as far as it is known."""

    limit_bytes: float = float("inf")       # of the process tree
    device_limit_bytes: int | None = None   # of the allocator of each rank's device
    deadline: float = float("inf")          # time.monotonic
    loaders: list[tuple[str, float]] | None = None
    largest: list[int] = field(default_factory=list)
    queue: int = 0                          # batches that loader workers are ahead
    own: int | None = None                  # the batch of the script's loader
    hold: bool = True                       # no pass ends before it is to; False: they end as they do by themselves


class MeteredBench(Bench):
    """A workbench whose trials are watched from their first moment on."""

    asking: Asking
    meter: meter.Meter | None = None

    def start(self, purpose: str, techniques: Any, capture: dict[str, Any] | None = None, **more: Any) -> Trial:
        self.close_meter()
        trial = super().start(purpose, techniques, capture, **more)
        self.meter = meter.Meter(trial.supervisor.pid, self.asking.limit_bytes, self.asking.deadline)
        return trial

    def close_meter(self) -> None:
        if self.meter is not None:
            self.meter.close()


@dataclass(frozen=True)
class Window:
    """What some steps of one size showed. `peak_bytes`: of the tree on a CPU, of the neediest rank's allocator on a device."""

    peak_bytes: int
    idle_bytes: int
    retries: int
    steps: int
    timed: int                      # steps that were timed: evaluations left out
    seconds: float                  # of them
    samples: int                    # of the timed steps, all ranks
    delivered: int                  # the largest batch that a rank got
    evaluations: int                # since the start of the process
    saves: int
    cpu_share: float                # processor seconds per second
    heap_bytes: int | None = None   # of all ranks: the most that came from the C library's heaps so far; None: not known

    @property
    def step_s(self) -> float:
        return self.seconds / max(1, self.timed)


class Process:
    """Starts at construction and waits for the first gate. Every method that waits raises TrialEnded."""

    def __init__(self, bench: MeteredBench, purpose: str, size: int | None = None):
        self.bench, self.asking = bench, bench.asking
        bench.agent_plan = {"fit": {"size": size, "loaders": self.asking.loaders, "largest": self.asking.largest, "own": self.asking.own,
                                    "bounded": not self.asking.hold}}
        self.trial, self.hello = bench.ready(purpose, ())
        assert bench.meter is not None
        self.meter = bench.meter
        self.steps_so_far = self.trial.steps
        self._settled = False

    @property
    def skip(self) -> int:
        """Steps before a window: what loader workers and a framework have fetched ahead, and one after the gate."""
        return self.asking.queue + 2

    @property
    def world_size(self) -> int:
        return len(self.trial.gates)

    @property
    def on_device(self) -> bool:
        """Whether the allocator of a device serves the batches, within a limit. As of the latest gate."""
        return any(gate["fit"]["device"] is not None for gate in self.trial.gates)

    @property
    def turn_steps(self) -> int:
        """Steps of `turn` before those that are timed."""
        return self.skip + (1 + EMPTIED_SKIP if self.on_device else 0)

    def turn(self, size: int, steps: int) -> Window:
        """Time `steps` steps of `size` behind steps of another size. The allocator of a device keeps blocks of those, and frees them
        where it reaches its limit, for which the device has to wait: so its cache is emptied first, and once more when the
        batches that loader workers had prepared are used up."""
        if not self.on_device:
            return self.run(size, steps, fresh=False, settle=True)
        self.run(size, 1, settle=True)
        return self.run(size, steps, settle=True, skip=EMPTIED_SKIP)

    def run(self, size: int | None, steps: int, *, first: bool = False, end: bool = False, fresh: bool = True,
            settle: bool = False, skip: int | None = None) -> Window:
        """`steps` steps of `size` samples (None: the script's own), behind those that the loader's workers have prepared
        already (they are of this size, too: behind `skip`). `first`: a batch of the largest samples among them. `end`: the epoch
        ends before they come. `fresh`: the peak begins anew. `settle`: `idle_bytes` is what is in use, not what allocators keep."""
        asking, trial = self.asking, self.trial
        order: dict[str, Any] = {"size": size, "own": asking.own, "hold": asking.hold, "bounded": not asking.hold,
                                 "first": first and bool(asking.largest), "end": end, "fresh": fresh, "settle": settle}
        if asking.loaders is not None:
            order["loaders"] = asking.loaders
        if first:
            order["largest"] = asking.largest
        if asking.device_limit_bytes is not None:
            order["limit_bytes"] = asking.device_limit_bytes
        if fresh:
            self._begin_window()
        self._settled = settle
        skip = self.skip if skip is None else skip
        pid = trial.supervisor.pid
        cpu, wall = meter.cpu_seconds(pid), time.monotonic()
        trial.run_block(skip, steps, fit=order)
        cpu, wall = meter.cpu_seconds(pid) - cpu, time.monotonic() - wall
        return self._window(skip, steps, cpu / wall)

    def _begin_window(self) -> None:
        """The peak begins anew, from what is in use: what an allocator keeps of a larger size would count for this one."""
        if not self._settled:
            self.trial.run_block(0, 1, fit={"settle": True})
        self.meter.begin()

    def _window(self, skip: int, steps: int, cpu_share: float) -> Window:
        gates = self.trial.gates
        told = [gate["fit"] for gate in gates]
        seconds, samples, timed = 0.0, 0, _timed(gates, skip)
        for index in timed:
            seconds += max(gate["stamps"][index + 1] - gate["stamps"][index] for gate in gates) / 1e9
            samples += sum(one["samples"][index] for one in told if index < len(one["samples"]))
        devices = [one["device"] for one in told if one["device"] is not None]
        if devices:
            peak, idle = max(one["reserved_bytes"] for one in devices), max(one["idle_bytes"] for one in devices)
        else:
            peak, idle = self.meter.peak_bytes(), self.meter.idle_bytes()
        heaps = [one["heap_bytes"] for one in told]
        return Window(
            heap_bytes=None if None in heaps else sum(heaps),
            peak_bytes=peak, idle_bytes=idle, retries=sum(one["retries"] for one in devices), steps=steps, timed=len(timed), seconds=seconds,
            samples=samples, delivered=max(one["delivered"] for one in told), evaluations=max(one["evaluations"] for one in told),
            saves=max(one["saves"] for one in told), cpu_share=cpu_share,
        )

    def went_on(self) -> bool:
        """Whether a pass over its loader was held open where it would have been over."""
        told = [*(gate["fit"] for gate in self.trial.gates), *(notice["fit"] for notice in self.trial.server.notices if "fit" in notice)]
        return any(one["held"] for one in told)

    def device_limit_bytes(self) -> int:
        """What the allocator of the fullest device can have: what it holds, and what nobody does."""
        return min(gate["fit"]["device"]["room_bytes"] for gate in self.trial.gates)

    def at_its_end(self, window: Window | None) -> Window:
        """`window` as it was when the script ended by itself, by what its ranks said and the meter saw. A rank may have left without a
        word, so nothing becomes less than it was."""
        told = [notice["fit"] for notice in self.trial.server.notices if "fit" in notice]
        devices = [one["device"] for one in told if one["device"] is not None]
        before = window or Window(0, 0, 0, 0, 0, 0.0, 0, 0, 0, 0, 0.0)
        peaks = [device["reserved_bytes"] for device in devices] or [self.meter.peak_bytes()]
        return replace(before, peak_bytes=max(before.peak_bytes, *peaks),
                       retries=max(before.retries, sum(device["retries"] for device in devices)),
                       evaluations=max(before.evaluations, *(one["evaluations"] for one in told), 0),
                       saves=max(before.saves, *(one["saves"] for one in told), 0))

    def steps_at_its_end(self) -> int:
        """Steps since the start of the process, as its ranks said when they ended."""
        return max((notice["steps"] for notice in self.trial.server.notices if notice["at"] == "ended"), default=0)

    def finish(self) -> None:
        self.bench.finish(self.trial, ())
        self.bench.close_meter()


def _timed(gates: list[dict[str, Any]], skip: int) -> list[int]:
    """Steps that count: behind the skipped ones, without an evaluation, unless all have one (a teacher in eval mode)."""
    every = range(skip, len(gates[0]["stamps"]) - 1)
    evaluated = {index for gate in gates for index in gate["evaluations"]}
    return [index for index in every if index not in evaluated] or list(every)


def verdict_of(ended: TrialEnded, watch: meter.Meter | None) -> tuple[str, str]:
    """How a size ended that did not come back to the gate, in the words of `records.fit.SizeOutcome`, and why."""
    from saturate.records import sizes

    if watch is not None and watch.exceeded_bytes is not None:
        return "out_of_memory", f"killed at {sizes.show(watch.exceeded_bytes)}, above the limit of {sizes.show(watch.limit_bytes)}"
    if watch is not None and watch.late:
        return "out_of_time", "the budget ended"
    outcome = ended.outcome
    if outcome.kind in _MEMORY:
        return "out_of_memory", outcome.reason
    return "failed", f"{outcome.kind.replace('_', ' ')}: {outcome.reason}"
