"""Throughput: which batch size, in how many processes at once, gives the most samples per second.

The user's model and the winner each climb by themselves: the batch doubles while that pays, then processes are added that
share the threads. What they reach races in fresh fleets, so the winner is compared with the best that the user's own model
can do, not with the batch that it happened to come with. A setting whose calls are slower than the user's limits, or that
takes more memory, serves nobody: it is shown, and neither of the two climbs beyond it.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from saturate.inference import racing
from saturate.inference.failures import WorkerFailed
from saturate.inference.lab import Lab
from saturate.inference.limits import decided, over_limit, too_few_calls
from saturate.inference.process import Worker
from saturate.inference.racing import Race
from saturate.inference.source import Source
from saturate.records.inference import OptimizeRecord, ThroughputRow

#: A larger setting must give this much more; less is not worth the latency.
PAYS = 1.05
MOST_BATCH = 4096
_ROUNDS = 5
_ROUND_S = 0.25

#: Batch sizes and processes are searched for at least so long.
_LEAST_S = 20.0


@dataclass(frozen=True)
class Setting:
    batch: int
    processes: int = 1


def _named(who: str, setting: Setting) -> str:
    return f"{who}, batch {setting.batch}, {setting.processes} process(es)"


def _within(setting: Setting) -> str | None:
    return None


def climb(rate: Callable[[Setting], float | None], batch: int, cores: int, time_left: Callable[[], bool],
          over: Callable[[Setting], str | None] = _within) -> Iterator[tuple[Setting, float]]:
    """Settings with their samples per second, as they are measured: the batch first, then processes. `rate` gives None
    where a setting does not run, `over` says of one that was measured which limit it passes."""
    best = Setting(batch)
    most = rate(best)
    if most is None:
        return
    yield best, most

    def grow(settings: Iterator[Setting]) -> Iterator[tuple[Setting, float]]:
        """One after the other, as long as each is worth it; the last that was is `best`."""
        nonlocal best, most
        for grown in settings:
            found = rate(grown) if time_left() else None
            if found is None:
                return
            yield grown, found
            if over(grown) or found < PAYS * most:
                return
            best, most = grown, found

    yield from grow(_doubled(Setting(batch * 2), lambda one: Setting(one.batch * 2), lambda one: one.batch <= MOST_BATCH))
    yield from grow(_doubled(Setting(best.batch, 2), lambda one: Setting(one.batch, one.processes * 2), lambda one: one.processes <= cores))


def _doubled(start: Setting, step: Callable[[Setting], Setting], allowed: Callable[[Setting], bool]) -> Iterator[Setting]:
    while allowed(start):
        yield start
        start = step(start)


class Fleet:
    """Some processes of one program that answer at the same time. A `Racer`: a block's times are nanoseconds per sample."""

    def __init__(self, workers: list[Worker], batch: int, source: Source):
        self.workers, self.batch, self.source = workers, batch, source
        self.cpu: int | None = None         # several: wherever they are
        self.shares = max(1, len(workers)) * batch      # samples that all processes together answer at once
        self.calls_ns: list[int] = []       # of each call, whichever process answered it
        self._pool = ThreadPoolExecutor(max(1, len(workers)))

    def block(self, count: int, *, cpu: int | None = None) -> list[int]:
        """Each process answers `count` batches; the time from the first start to the last end, shared by all samples."""
        began = time.perf_counter_ns()
        blocks = list(self._pool.map(lambda worker: worker.block(count), self.workers))
        taken = time.perf_counter_ns() - began
        for times in blocks:
            self.calls_ns += times
        return [max(1, round(taken / (self.shares * count)))] * count

    def memory_bytes(self) -> int | None:
        """Of all processes together, with the files that they all map counted once; None where one of them does not tell."""
        found = [worker.memory_bytes() for worker in self.workers]
        known = [one for one in found if one is not None]
        if len(known) < len(found):
            return None
        if any(worker.ready.whole_device for worker in self.workers):
            return max(known)           # that of the first, in which is what the others took after it
        files = [worker.file_bytes() for worker in self.workers]
        return sum(known) - (sum(files) - max(files))

    def freeze(self) -> None:
        for worker in self.workers:
            worker.freeze()

    def thaw(self) -> None:
        for worker in self.workers:
            worker.thaw()

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        for worker in self.workers:
            worker.close()
        shutil.rmtree(self.source.folder, ignore_errors=True)       # a copy of the model


class Serving:
    """Fleets of the baseline or of an artifact, at any setting. `limits`: of one call and of memory, as `optimize` has them."""

    def __init__(self, lab: Lab, torch: Any, limits: Mapping[str, float] | None = None):
        self.lab, self.torch, self.limits = lab, torch, dict(limits or {})
        self.stored = lab.source.inputs(torch)[0]
        self.batch = (lab.facts.batch_size if lab.facts else None) or 1
        self.cores = max(1, lab.threads)

    def fleet(self, artifact: Path | None, setting: Setting) -> Fleet:
        """Raises WorkerFailed where it does not run at this size."""
        from saturate.inference import examples

        inputs = examples.of_size(self.torch, self.stored, setting.batch)
        if inputs is None:
            raise WorkerFailed("failed", "its inputs do not share a first dimension, so there is no other batch size")
        lab = self.lab
        name = "baseline" if artifact is None else "artifact"
        source = lab.source.serving(lab.folder / "sources" / f"{name}-{setting.batch}", inputs, model=artifact is None)
        workers: list[Worker] = []
        try:
            for _ in range(setting.processes):
                workers.append(lab.serve(source, artifact, max(1, lab.threads // setting.processes)))
        except BaseException:
            Fleet(workers, setting.batch, source).close()
            raise
        return Fleet(workers, setting.batch, source)

    def rate(self, artifact: Path | None, setting: Setting, until_s: float = math.inf) -> tuple[float, str | None]:
        """Samples per second, the median of some rounds, and which limit is passed. There are more rounds where their calls are too few
        to tell, until `until_s` (`time.monotonic()`). Of what nobody can tell even then the model itself has the benefit, and the
        winner has not: what is claimed is its advantage. Raises WorkerFailed where the setting does not run."""
        fleet = self.fleet(artifact, setting)
        try:
            fleet.block(2)
            typical_s = fleet.shares * fleet.block(1)[0] / 1e9
            count = max(1, round(_ROUND_S / max(typical_s, 1e-6)))
            fleet.calls_ns.clear()          # first calls allocate
            found = 1e9 / median(fleet.block(count)[0] for _ in range(_ROUNDS))
            memory_bytes = fleet.memory_bytes() if "peak_memory_gb" in self.limits else None
            judged = fleet.calls_ns, memory_bytes, self.limits
            if too_few_calls(*judged):
                while not decided(*judged) and time.monotonic() < until_s:
                    fleet.block(count)
            if artifact is None and too_few_calls(*judged):
                return found, None
            return found, over_limit(racing.timing(fleet.calls_ns), memory_bytes, self.limits)
        finally:
            fleet.close()

    def search(self, artifact: Path, progress: Callable[[str], None], deadline_s: float) -> tuple[list[ThroughputRow], list[str], Race | None]:
        """All settings that were measured, of the baseline and of the artifact, which others did not run and why, and the race of the two
        best; None: one of the two ran with none."""
        rows: list[ThroughputRow] = []
        failed: list[str] = []
        best: dict[str, Setting] = {}
        began = time.monotonic()
        for index, (who, what) in enumerate((("baseline", None), ("best", artifact))):
            until = began + (index + 1) * 0.3 * max(0.0, deadline_s - began)
            most = 0.0
            passed: dict[Setting, str | None] = {}

            def rate(one: Setting, who: str = who, what: Path | None = what, passed: dict[Setting, str | None] = passed,
                     until: float = until) -> float | None:
                # The one that it came with stays: the winner was held to the limits there, in its final race; the model
                # itself never was.
                try:
                    found, over = self.rate(what, one, until if passed else 0.0)
                except WorkerFailed as error:
                    failed.append(f"{_named(who, one)} does not run: {error.kind.replace('_', ' ')}: {error.reason}")
                    progress(failed[-1])
                    return None
                passed[one] = over if passed else None
                return found

            for setting, found in climb(rate, self.batch, self.cores, lambda until=until: time.monotonic() < until, passed.__getitem__):
                over = passed[setting]
                progress(f"{_named(who, setting)}: {found:,.0f} samples/s" + (f"; {over}" if over else ""))
                rows.append(ThroughputRow(of=who, batch=setting.batch, processes=setting.processes, samples_per_s=found, over_limit=over))
                if over is None and found > most:
                    best[who], most = setting, found
        if len(best) < 2:
            return rows, failed, None
        return rows, failed, self._race(best["baseline"], artifact, best["best"], deadline_s)

    def _race(self, own: Setting, artifact: Path, best: Setting, deadline_s: float) -> Race:
        """Of the two at their best; once more where a process ends, which nobody else is to blame for. Then nobody knows."""
        reason = ""
        for _ in range(2):
            try:
                return racing.race(lambda: self.fleet(None, own), lambda: self.fleet(artifact, best), deadline_s=deadline_s)
            except WorkerFailed as error:
                reason = f"a process ended in the race: {error.reason}"
        return Race("inconclusive", None, None, None, reason)


def with_throughput(record: OptimizeRecord, lab: Lab, artifact: Path, say: Callable[[str], None]) -> OptimizeRecord:
    """The record with the batch sizes and processes that serve most samples per second."""
    import torch

    rows, failed, race = Serving(lab, torch, record.limits).search(artifact, say, max(lab.deadline_s, time.monotonic() + _LEAST_S))
    record = msgspec.structs.replace(record, throughput=rows, notes=[*record.notes, *failed], throughput_ratio=race.speedup if race else None,
                                     throughput_ratio_ci=race.speedup_ci if race else None)
    return record if race is not None and race.verdict == "faster" else _serves_no_more(record, race, failed)


def _serves_no_more(record: OptimizeRecord, race: Race | None, failed: list[str]) -> OptimizeRecord:
    """The record without a winner: one call answers sooner, but that was not the objective. None: nothing could be raced; what `failed`
    says why."""
    undecided = race is None or race.verdict == "inconclusive"
    ratio = "" if race is None or race.speedup is None else f"{race.speedup:.2f}x "
    if race is None:
        why = "; ".join(["no batch size was served by both, the model and the winner", *failed])
    else:
        why = race.reason if race.speedup is None else race.verdict.replace("_", " ")
    reason = f"{ratio}samples per second, each at its best batch size: {why}"
    rows = [msgspec.structs.replace(one, fate="inconclusive" if undecided else "no_difference", reason=reason) if one.fate == "kept" else one
            for one in record.candidates]
    return msgspec.structs.replace(record, verdict="inconclusive" if undecided else "nothing_helps", best=None, artifact=None, serve="", candidates=rows)
