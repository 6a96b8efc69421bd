"""Throughput: which batch size, in how many processes at once, gives the most samples per second.

The user's model and the winner each climb by themselves: the batch doubles while that pays, then processes are added that
share the threads. What they reach races in fresh fleets, so the winner is compared with the best that the user's own model
can do, not with the batch that it happened to come with.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from saturate.inference import racing
from saturate.inference.lab import Lab
from saturate.inference.process import Worker, WorkerFailed
from saturate.inference.racing import Race
from saturate.inference.source import Source
from saturate.records.inference import ThroughputRow

#: A larger setting must give this much more; less is not worth the latency.
PAYS = 1.05
MOST_BATCH = 4096
_ROUNDS = 5
_ROUND_S = 0.25


@dataclass(frozen=True)
class Setting:
    batch: int
    processes: int = 1


def climb(rate: Callable[[Setting], float | None], batch: int, cores: int, time_left: Callable[[], bool]) -> Iterator[tuple[Setting, float]]:
    """Settings with their samples per second, as they are measured: the batch first, then processes. `rate` gives None
    where a setting does not run."""
    best = Setting(batch)
    first = rate(best)
    if first is None:
        return
    yield best, first
    most = first
    for grown in _doubled(Setting(batch * 2), lambda one: Setting(one.batch * 2), lambda one: one.batch <= MOST_BATCH):
        found = rate(grown) if time_left() else None
        if found is None:
            break
        yield grown, found
        if found < PAYS * most:
            break
        best, most = grown, found
    for grown in _doubled(Setting(best.batch, 2), lambda one: Setting(one.batch, one.processes * 2), lambda one: one.processes <= cores):
        found = rate(grown) if time_left() else None
        if found is None:
            break
        yield grown, found
        if found < PAYS * most:
            break
        most = found


def _doubled(start: Setting, step: Callable[[Setting], Setting], allowed: Callable[[Setting], bool]) -> Iterator[Setting]:
    while allowed(start):
        yield start
        start = step(start)


class Fleet:
    """Some processes of one program that answer at the same time. A `Racer`: a block's times are nanoseconds per sample."""

    def __init__(self, workers: list[Worker], batch: int, source: Source):
        self.workers, self.batch, self.source = workers, batch, source
        self.cpu: int | None = None         # several: wherever they are
        self._pool = ThreadPoolExecutor(max(1, len(workers)))

    def block(self, count: int, *, cpu: int | None = None) -> list[int]:
        """Each process answers `count` batches; the time from the first start to the last end, shared by all samples."""
        began = time.perf_counter_ns()
        list(self._pool.map(lambda worker: worker.block(count), self.workers))
        taken = time.perf_counter_ns() - began
        return [max(1, round(taken / (len(self.workers) * self.batch * count)))] * count

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
    """Fleets of the baseline or of an artifact, at any setting."""

    def __init__(self, lab: Lab, torch: Any):
        self.lab, self.torch = lab, torch
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
        model = lab.source.model(self.torch) if artifact is None else None
        source = Source.write(lab.folder / "sources" / f"{'baseline' if model is not None else 'artifact'}-{setting.batch}", model,
                              [inputs], [inputs], device=lab.source.device, switches=lab.source.switches)
        workers: list[Worker] = []
        try:
            for _ in range(setting.processes):
                workers.append(lab.serve(source, artifact, max(1, lab.threads // setting.processes)))
        except BaseException:
            Fleet(workers, setting.batch, source).close()
            raise
        return Fleet(workers, setting.batch, source)

    def rate(self, artifact: Path | None, setting: Setting) -> float | None:
        """Samples per second, the median of some rounds; None where the setting does not run."""
        try:
            fleet = self.fleet(artifact, setting)
        except WorkerFailed:
            return None
        try:
            fleet.block(2)
            typical_s = fleet.block(1)[0] * setting.batch * setting.processes / 1e9
            count = max(1, round(_ROUND_S / max(typical_s, 1e-6)))
            return 1e9 / median(fleet.block(count)[0] for _ in range(_ROUNDS))
        except WorkerFailed:
            return None
        finally:
            fleet.close()

    def search(self, artifact: Path, progress: Callable[[str], None], deadline_s: float) -> tuple[list[ThroughputRow], Race | None]:
        """All settings that were measured, of the baseline and of the artifact, and the race of the two best."""
        rows: list[ThroughputRow] = []
        best: dict[str, Setting] = {}
        began = time.monotonic()
        for index, (who, what) in enumerate((("baseline", None), ("best", artifact))):
            until = began + (index + 1) * 0.3 * max(0.0, deadline_s - began)
            most = 0.0
            for setting, rate in climb(lambda one, what=what: self.rate(what, one), self.batch, self.cores,
                                       lambda until=until: time.monotonic() < until):
                progress(f"{who}, batch {setting.batch}, {setting.processes} process(es): {rate:,.0f} samples/s")
                rows.append(ThroughputRow(of=who, batch=setting.batch, processes=setting.processes, samples_per_s=rate))
                if rate > most:
                    best[who], most = setting, rate
        if len(best) < 2:
            return rows, None
        race = self._race(best["baseline"], artifact, best["best"], deadline_s)
        return rows, race

    def _race(self, own: Setting, artifact: Path, best: Setting, deadline_s: float) -> Race:
        """Of the two at their best; once more where a process ends, which nobody else is to blame for. Then nobody knows."""
        reason = ""
        for _ in range(2):
            try:
                return racing.race(lambda: self.fleet(None, own), lambda: self.fleet(artifact, best), deadline_s=deadline_s)
            except WorkerFailed as error:
                reason = f"a process ended in the race: {error.reason}"
        return Race("inconclusive", None, None, None, reason)
