"""What a fit knows so far: limits, the loader that feeds the training, sizes that ran and how they ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from saturate.errors import EnvironmentProblem, UsageError
from saturate.machine import facts as machine_facts
from saturate.measure import memory_growth, memory_model
from saturate.measure.memory_growth import Growth
from saturate.measure.memory_model import Point
from saturate.records import sizes
from saturate.records.fit import SizeTried
from saturate.study.fit_process import MeteredBench, Process, verdict_of
from saturate.study.fit_throughput import Throughput
from saturate.trial.process import TrialEnded

#: A machine keeps the rest of what it has available for itself.
GUARD = 0.95

#: Upper end where neither the dataset nor the user gives one.
UNBOUNDED = 1 << 20


class Refused(Exception):
    """There is nothing that can be searched; the text says why."""


@dataclass(frozen=True)
class Proof:
    """A size that ran below the goal. `whole`: to the script's own end."""

    steps: int
    peak_bytes: int
    seen: list[str]
    not_seen: list[str]
    predicted_bytes: int | None = None
    whole: bool = False


@dataclass
class State:
    """What is known so far. Sizes are batches of the loader that feeds the training, of one rank."""

    bench: MeteredBench
    memory_bytes: int | None
    target: str
    asked_most: int | None
    accelerated: bool                   # the machine has an accelerator: what the limit is of, only the process can tell
    budget_s: float
    deadline: float
    say: Callable[[str], None]
    own: int | None = None              # the script's own size
    most: int = UNBOUNDED
    reads: int = 1                      # batches of the loader in an update
    loader: dict[str, Any] = field(default_factory=dict)
    feeding: list[dict[str, Any]] = field(default_factory=list)     # all loaders that a step reads, the one above first
    facts: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    extents: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    limit_bytes: int | None = None
    heaps: list[tuple[Point, float]] = field(default_factory=list)  # of one process: sizes, and its heaps' peak until then
    points: list[Point] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    idle_bytes: float | None = None
    tried: list[SizeTried] = field(default_factory=list)
    proofs: dict[int, Proof] = field(default_factory=dict)
    measured: dict[int, Proof] = field(default_factory=dict)        # sizes that ran for a few steps only
    trail: list[tuple[int, float]] = field(default_factory=list)    # of the latest proof: steps so far, and the peak until then
    growth: dict[int, Growth] = field(default_factory=dict)         # by size, where the peak rose from step to step
    trials: int = 0
    proof_s: float = 0.0                # what the latest proof took
    throughput: Throughput = field(default_factory=Throughput)
    proof_blocks: int = 16              # a proof is cut into about so many, to see whether its peak goes on rising
    exact: bool = True                  # memory that processes share was counted once
    notes: list[str] = field(default_factory=list)

    # -- limits ----------------------------------------------------------------------------------------------------

    @property
    def margin_bytes(self) -> int:
        assert self.limit_bytes is not None
        heap = 0.0
        if self.facts.get("device") == "cpu" and self.idle_bytes is not None:
            heap = max(0.0, memory_model.heap_share(self.heaps) * (self.limit_bytes - self.idle_bytes))
        return memory_model.margin_bytes(self.limit_bytes, heap)

    @property
    def goal_bytes(self) -> int:
        """What an answer's peak may be."""
        assert self.limit_bytes is not None
        return self.limit_bytes - self.margin_bytes

    @property
    def best(self) -> int | None:
        """The largest proved size."""
        return max(self.proofs, default=None)

    @property
    def likely(self) -> int | None:
        """The largest size that ran for a few steps. No answer: what a proof finds (memory that grows, a long sample, an
        evaluation) was not looked for."""
        return max(self.measured, default=None)

    def growth_of(self, size: int | None) -> Growth | None:
        """How memory grows from step to step with this size (None: with the smallest size that told); None: as far as anybody
        saw, it does not, or the script's own end came first."""
        if not self.growth or (size in self.proofs and self.proofs[size].whole):
            return None
        return memory_growth.at(list(self.growth.values()), self.idle_bytes or 0.0, size or min(self.growth))

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def _guard(self) -> None:
        """Before anything is known: no process may endanger the machine, nor pass a limit that can only be the host's."""
        available = machine_facts.available_bytes()
        asking = self.bench.asking
        asking.deadline = self.deadline
        asking.limit_bytes = GUARD * available if available else float("inf")
        if self.memory_bytes is not None and not self.accelerated:
            _check_available(self.memory_bytes)
            asking.limit_bytes = self.limit_bytes = self.memory_bytes

    def _set_limit(self, process: Process) -> None:
        device, wanted = self.facts["device"], self.memory_bytes
        if device == "cuda":
            room = process.device_limit_bytes()
            if wanted is not None and wanted > room:
                raise EnvironmentProblem(f"--memory asks for {sizes.show(wanted)}, and the device has {sizes.show(room)} to give now",
                                         remedy="end other programs on it, or ask for less")
            self.limit_bytes = self.bench.asking.device_limit_bytes = wanted or room
        elif device == "cpu":
            if wanted is None:
                raise without_limit()
            _check_available(wanted)
            self.limit_bytes = wanted
            self.bench.asking.limit_bytes = process.meter.limit_bytes = wanted
        else:
            raise Refused(f"the memory of a device of type {device} cannot be measured")

    # -- what the process tells ------------------------------------------------------------------------------------

    def _choose(self, loaders: list[dict[str, Any]]) -> None:
        if not loaders:
            raise Refused("its training does not read from a DataLoader")
        loader = loaders[0]
        if not loader["collates"]:
            raise Refused(f"its DataLoader does no batching: the dataset {loader['dataset']} makes the batches itself")
        if loader["batch_size"] is None:
            made = ", ".join(map(str, sorted(loader["sizes"])[:4]))
            raise Refused(f"its batch sampler has no batch size (it made batches of {made} samples)")
        self._take_loaders(loaders)

    def _take_loaders(self, loaders: list[dict[str, Any]]) -> None:
        """Where a step reads several loaders, all keep their proportion to the first."""
        self.loader = loaders[0]
        self.feeding = [one for one in loaders if one["batch_size"]]
        first = self.loader["batch_size"]
        self.bench.asking.loaders = [(one["description"], one["batch_size"] / first) for one in loaders if one["batch_size"]]
        self.bench.asking.queue = max(loader["queue"] for loader in loaders)

    def _know_own(self) -> None:
        """The first process may not have lived long enough to say its size."""
        for index, one in enumerate(self.tried):
            if one.micro_batch is None and self.own is not None:
                self.tried[index] = _with_size(one, self.own)
                self._fails(self.own)

    def _spared(self, size: int) -> int:
        """This size, or the next one below it with which no pass ends with a batch of one sample: BatchNorm cannot train on that."""
        length, own = self.loader.get("length"), self.own
        norms = any(module["batch_norms"] for module in self.facts.get("modules", ()))
        if not length or not norms or self.loader.get("drop_last", True) or (own and length % own == 1):
            return size
        while size > 2 and length % size == 1:
            size -= 1
        return size

    def _learn_reads(self, size: int, samples: int, steps: int) -> None:
        """A pass must have as many batches as an update reads: a loop that counts its micro-steps anew in each pass would never come to
        one."""
        self.reads = max(1, round(samples / max(1, steps * size * self.world_size)))
        if self.reads > 1 and self.loader.get("length"):
            self.most = min(self.most, max(self.own or 1, self.loader["length"] // self.reads))

    def _really(self, size: int, delivered: int) -> int:
        """The batch that came where `size` was asked for. A pass over an iterable dataset, or a worker's part of it, may hold fewer."""
        if not self.loader.get("iterable") or not 0 < delivered < size:
            return size
        self.most = min(self.most, delivered)
        return delivered

    def _scan(self, process: Process) -> None:
        """Find the largest samples, so that a batch of them is among those that count."""
        if not self.extents and self.bench.asking.loaders:
            self.extents = process.trial.ask("extents")
            self.bench.asking.largest = self.extents["largest"]

    # -- keeping ---------------------------------------------------------------------------------------------------

    def _count(self, purpose: str) -> None:
        self.trials += 1
        self.say(f"process {self.trials}: {purpose}")

    def _note(self, size: int | None, outcome: str, purpose: str, began: float, steps: int = 0, peak: int | None = None,
              reason: str = "") -> None:
        seconds = round(time.monotonic() - began, 3)
        self.tried.append(SizeTried(micro_batch=size, outcome=outcome, peak_bytes=peak, seconds=seconds, trial=self.trials,     # type: ignore[arg-type]
                                    purpose=purpose, steps=steps, reason=reason))                                           # type: ignore[arg-type]
        words = outcome.replace("_", " ") + (f", peak {sizes.show(peak)}" if peak else "") + (f": {reason}" if reason else "")
        self.say(f"  batch {'as it is' if size is None else size}: {words}")
        if size is not None and outcome in ("out_of_memory", "allocator_retries"):
            self._fails(size)
        elif size is not None and peak is not None and outcome in ("fits", "too_close"):
            self.points.append(Point(size, peak))

    def _fails(self, size: int) -> None:
        """It ran out of memory once: whatever it did before, it is no answer, and nothing above it is."""
        def below(by_size: dict[int, Any]) -> dict[int, Any]:
            return {one: seen for one, seen in by_size.items() if one < size}

        self.failed.append(size)
        self.points = [point for point in self.points if point.micro_batch < size]
        self.proofs, self.measured = below(self.proofs), below(self.measured)
        timed = self.throughput
        timed.rates, timed.shares, timed.step_s = below(timed.rates), below(timed.shares), below(timed.step_s)

    def _learn_growth(self, size: int, steps: int, rises: int = memory_growth.RISES) -> None:
        """From the trail of a proof, which was to take `steps`."""
        assert self.limit_bytes is not None
        least = memory_growth.LEAST_SHARE * self.limit_bytes / steps
        found = memory_growth.growth(size, self.trail, rises, least)
        expected = self.growth_of(size)
        if found is None and expected is not None and expected.step_bytes > 2 * least and len(self.trail) > memory_growth.RISES == rises:
            self.growth = {}        # it would have been seen: another size ended for something else
        if found is not None:
            self.growth[size] = found
            self.say(f"  batch {size}: memory grows by {sizes.show(round(found.step_bytes))} a step")

    def _lost(self, size: int | None, purpose: str, began: float, ended: TrialEnded, steps: int = 0) -> str:
        """Keep how a process ended that was not meant to; the outcome. Raises Refused where only this size breaks it."""
        watch = self.bench.meter
        outcome, reason = verdict_of(ended, watch)
        self._note(size, outcome, purpose, began, steps, peak=watch.exceeded_bytes if watch is not None else None, reason=reason)
        others = any(point.micro_batch != self.own for point in self.points)
        if outcome == "failed" and ended.outcome.kind != "too_short" and size is not None and size != self.own and not others:
            raise Refused(f"it does not work with a batch of {size} instead of {self.own or 'its own'}: {ended.outcome.reason}")
        return outcome

    def _judged(self, peak: int, retries: int) -> str:
        return "allocator_retries" if retries else "fits" if peak <= self.goal_bytes else "too_close"

    def utilisation(self) -> tuple[float | None, str]:
        """At the knee, and of what."""
        knee = self.throughput.knee
        if knee is None:
            return None, ""
        if self.facts.get("device") != "cpu":
            share = self.throughput.device_share
            return share, "the device's time" if share is not None else ""
        quota = machine_facts.cpu_count()
        return min(1.0, self.throughput.busy_cores(knee) / quota), f"{quota:g} cores"


def without_limit() -> UsageError:
    return UsageError("saturate fit: on a CPU, say how much memory the command may use", remedy="saturate fit --memory 4GiB -- COMMAND")


def in_proportion(size: int, factor: float) -> int:
    """The batch of another loader, as `agent.batching` makes it."""
    return max(1, round(size * factor))


def _check_available(wanted: int) -> None:
    available = machine_facts.available_bytes()
    if available is not None and wanted > GUARD * available:
        raise EnvironmentProblem(
            f"--memory asks for {sizes.show(wanted)}, and this machine has {sizes.show(available)} to give now",
            cause="sizes are tried for real, up to the limit", remedy="end other programs, or ask for less")


def _with_size(one: SizeTried, size: int) -> SizeTried:
    return msgspec.structs.replace(one, micro_batch=size)
