"""Throughput: which batch size, in how many processes at once, gives the most samples per second.

The user's model, the winner by latency and one or two that came close to it each climb by themselves: the batch doubles while
that pays, then processes are added that share the threads. Who serves most then races the model in fresh fleets, each at its best,
so it is compared with the best that the user's own model can do, not with the batch that it happened to come with. A setting whose
calls are slower than the user's limits, or that takes more memory, serves nobody: it is shown, and nobody climbs beyond it.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from saturate.errors import EnvironmentProblem
from saturate.inference import confirm, racing
from saturate.inference.confirm import Confirmed
from saturate.inference.failures import WorkerFailed
from saturate.inference.lab import Lab
from saturate.inference.limits import decided, over_limit, too_few_calls
from saturate.inference.process import Worker
from saturate.inference.racing import Race
from saturate.inference.search import Search
from saturate.inference.source import Source
from saturate.records.inference import OptimizeRecord, ThroughputRow

#: A larger setting must give this much more; less is not worth the latency.
PAYS = 1.05
MOST_BATCH = 4096
_ROUNDS = 5
_ROUND_S = 0.25

#: Batch sizes and processes are searched for at least so long.
_LEAST_S = 20.0


#: Of the time that is left, so much goes into storing and confirming others than the winner, and so much of the rest into looking for
#: everybody's best setting; the last race has what remains.
_STORING, _CLIMBING = 0.3, 0.6

BASELINE = "baseline"


@dataclass(frozen=True)
class Setting:
    batch: int
    processes: int = 1


@dataclass
class Climbs:
    """What was measured of each, which setting was its best with how many samples per second, and what did not run. `cut_short`: of
    somebody nothing was measured, for want of time. `stopped`: whose next setting had no time."""

    rows: list[ThroughputRow] = field(default_factory=list)
    best: dict[str, tuple[Setting, float]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    cut_short: bool = False
    stopped: set[str] = field(default_factory=set)

    def fair(self, setting: Setting) -> bool:
        """Whether the model itself was tried so far, or need not be: where its time ended first, it might serve more there as well."""
        own = [row for row in self.rows if row.of == "baseline"]
        return BASELINE not in self.stopped or (setting.batch <= max(row.batch for row in own) and setting.processes <= max(row.processes for row in own))


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
        lab, source = self.lab, self._source(artifact is None, setting.batch)
        workers: list[Worker] = []
        try:
            for _ in range(setting.processes):
                workers.append(lab.serve(source, artifact, max(1, lab.threads // setting.processes)))
        except BaseException:
            Fleet(workers, setting.batch, source).close()
            raise
        return Fleet(workers, setting.batch, source)

    def _source(self, model: bool, batch: int) -> Source:
        """Of the model, or for an artifact. Raises WorkerFailed where there can be no batch of this size, and EnvironmentProblem where even
        that which the model came with finds no room: that a larger one does not is no reason to end the search."""
        from saturate.inference import examples

        folder = self.lab.folder / "sources" / f"{'baseline' if model else 'artifact'}-{batch}"
        try:
            inputs = examples.of_size(self.torch, self.stored, batch)
            if inputs is None:
                raise WorkerFailed("failed", "its inputs do not share a first dimension, so there is no other batch size")
            return self.lab.source.serving(folder, inputs, model=model)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, EnvironmentProblem) and batch == self.batch:
                raise
            if isinstance(error, (EnvironmentProblem, RuntimeError, MemoryError)):      # RuntimeError: what torch says where memory ends
                cause = error.cause if isinstance(error, EnvironmentProblem) else " ".join(str(error).split())[:200]
                raise WorkerFailed("failed", f"a batch of this size cannot be made here: {cause}") from error
            raise

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

    def search(self, entrants: Mapping[str, Path | None], progress: Callable[[str], None], deadline_s: float) -> Climbs:
        """Every setting of each that was measured, by name, within its share of the time. The first is the model itself (None). Who comes
        behind the second has no turn where others have taken the time."""
        found, began = Climbs(), time.monotonic()
        for index, (who, what) in enumerate(entrants.items()):
            until = began + (index + 1) * _CLIMBING / len(entrants) * max(0.0, deadline_s - began)
            if index > 1 and time.monotonic() > until:
                found.cut_short = True
                found.failed.append(f"{who}: the time ended before its best batch size was looked for")
                continue
            passed: dict[Setting, str | None] = {}

            def rate(one: Setting, who: str = who, what: Path | None = what, passed: dict[Setting, str | None] = passed,
                     until: float = until) -> float | None:
                # The one that it came with stays: the winner was held to the limits there, in its final race; the model
                # itself never was.
                if not found.fair(one):
                    return None
                try:
                    given, over = self.rate(what, one, until if passed else 0.0)
                except WorkerFailed as error:
                    found.failed.append(f"{_named(who, one)} does not run: {error.kind.replace('_', ' ')}: {error.reason}")
                    progress(found.failed[-1])
                    return None
                passed[one] = over if passed else None
                return given

            def time_left(who: str = who, until: float = until) -> bool:
                left = time.monotonic() < until
                found.stopped |= set() if left else {who}
                return left

            for setting, given in climb(rate, self.batch, self.cores, time_left, passed.__getitem__):
                over = passed[setting]
                progress(f"{_named(who, setting)}: {given:,.0f} samples/s" + (f"; {over}" if over else ""))
                found.rows.append(ThroughputRow(of="baseline" if what is None else "rival", id="" if what is None else who, batch=setting.batch,
                                                processes=setting.processes, samples_per_s=given, over_limit=over))
                if over is None and given > found.best.get(who, (setting, 0.0))[1]:
                    found.best[who] = setting, given
            if who in found.stopped:
                found.failed.append(f"{who}: the time ended before its best setting was found" +
                                    (", so nobody was tried beyond those that it had a turn at" if what is None else ""))
        return found

    def race(self, own: Setting, artifact: Path, best: Setting, deadline_s: float) -> Race:
        """Of the two at their best; once more where a process ends, which nobody else is to blame for. Then nobody knows."""
        reason = ""
        for _ in range(2):
            try:
                return racing.race(lambda: self.fleet(None, own), lambda: self.fleet(artifact, best), deadline_s=deadline_s)
            except WorkerFailed as error:
                reason = f"a process ended in the race: {error.reason}"
        return Race("inconclusive", None, None, None, reason)


@dataclass
class Served:
    """Who serves most samples per second, its final race at the batch size that the model came with, and the race with the model, each at
    its best setting. None: nobody, or nobody knows. `looked`: all that came close had their turn."""

    climbs: Climbs
    looked: bool = True
    won: Confirmed | None = None
    final: Race | None = None
    race: Race | None = None


def most(search: Search, lab: Lab, won: Confirmed | None, final: Race | None) -> Served:
    """The winner by latency (None: there is none), or one that came close to it and serves more at another batch size. All rows of the
    search say what they serve at most."""
    import torch

    now = time.monotonic()
    deadline_s = max(lab.deadline_s, now + _LEAST_S)
    close, looked = confirm.rivals(search, lab, won, now + _STORING * (deadline_s - now))
    entrants = {one.found.candidate.label(): one for one in (*([] if won is None else [won]), *close)}
    if not entrants:
        return Served(Climbs(), looked)
    serving = Serving(lab, torch, search.limits)
    search.progress(f"samples per second: the best batch size of the model, {', '.join(entrants)}")
    climbs = serving.search({BASELINE: None, **{label: one.artifact for label, one in entrants.items()}}, search.progress, deadline_s)
    looked = looked and not climbs.cut_short
    left, own = {label: climbs.best[label] for label in entrants if label in climbs.best}, climbs.best.get(BASELINE)
    first = "" if won is None else won.found.candidate.label()
    for label, (setting, rate) in left.items():
        entrants[label].found.reason += f"; at most {rate:,.0f} samples/s, at batch {setting.batch}"
    while left and own is not None:
        label = chosen({label: rate for label, (_, rate) in left.items()}, first)
        one, (setting, _) = entrants[label], left.pop(label)
        found = final if one is won else _final(one, search, lab)
        if found is None:
            continue
        if won is not None and one is not won:
            won.found.fate = "dominated"
        one.found.fate = "kept"
        return Served(climbs, looked, one, found, serving.race(own[0], one.artifact, setting, deadline_s))
    return Served(climbs, looked, won, final)


def chosen(rates: Mapping[str, float], first: str) -> str:
    """Who serves most; another one than the `first` only where that is worth it.

    >>> chosen({"a": 100.0, "b": 104.0}, "a"), chosen({"a": 100.0, "b": 106.0}, "a"), chosen({"b": 7.0}, "a")
    ('a', 'b', 'b')
    """
    best = max(rates, key=lambda label: rates[label])
    return first if first in rates and rates[best] < PAYS * rates[first] else best


def _final(one: Confirmed, search: Search, lab: Lab) -> Race | None:
    """The final race of one that did not win by latency: how fast it is at the batch size that the model came with, and whether it keeps
    the limits there. None: it does not, or nobody knows; its row says why."""
    try:
        final = confirm.once_more(lambda: confirm.against(lab, one.artifact, None, lab.deadline_s))
        search.hear(final.times_a)
        instead = confirm.outcome(final, search, one) == "keeps_limits"
        said = "keeps_limits" if instead else "faster"      # perhaps only at its best setting, which is raced later
        final = confirm.once_more(lambda: confirm.with_enough_calls(one, final, lab, search.limits, lab.deadline_s, said))
    except WorkerFailed as error:
        one.found.fail(error, f"in the final race, {error}")
        return None
    over, serves = confirm.refused(one, final, said, search.limits), one.found.reason.rpartition("; ")[2]
    if over is not None:
        one.found.fate, one.found.reason = over
        return None
    confirm.settle(one, final, "faster" if final.estimate is not None else "inconclusive")
    one.found.reason += f"; {serves}"
    return final if final.estimate is not None else None


def with_throughput(record: OptimizeRecord, served: Served) -> OptimizeRecord:
    """The record of who serves most, with the batch sizes and processes of all."""
    race, climbs, label = served.race, served.climbs, "" if served.won is None else served.won.found.candidate.label()
    rows = [msgspec.structs.replace(one, of="best") if one.id == label else one for one in climbs.rows]
    record = msgspec.structs.replace(record, throughput=rows, notes=[*record.notes, *climbs.failed], throughput_ratio=race.speedup if race else None,
                                     throughput_ratio_ci=race.speedup_ci if race else None)
    if served.won is not None and (race is None or race.verdict != "faster"):
        instead = record.baseline.fate == "over_limit" and race is not None and race.speedup is not None    # of a model that is no choice
        record = msgspec.structs.replace(record, verdict="keeps_limits") if instead else _serves_no_more(record, race, climbs.failed)
    unknown = record.verdict == "nothing_helps" and not served.looked
    return msgspec.structs.replace(record, verdict="inconclusive") if unknown else record


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
