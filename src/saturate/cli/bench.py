"""Measure an artifact of `saturate optimize` at several batch sizes, alone or against another one.

Each size runs in a process of its own, on the inputs that the artifact holds, repeated to the size. Against another
artifact the two are raced: blocks of calls take turns, in fresh pairs of processes, and the ratio has an interval.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from saturate.cli._output import paint, show_json, table
from saturate.cli._running import Progress, one_signal_interrupts
from saturate.errors import EnvironmentProblem, UsageError, clean
from saturate.records.bench import BatchRow, BenchRecord, Measured

#: Time of one measurement without a race, in blocks of about an eighth of a second; at least so many blocks.
_MEASURE_S = 3.0
_FEWEST_BLOCKS = 5

#: Until a process has to have loaded the artifact and answered once; compiling again takes most of it.
_PREPARE_S = 600.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=Path, metavar="ARTIFACT", help="the folder that saturate optimize wrote")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another artifact to race it against")
    parser.add_argument("--batch", type=sizes, metavar="N,N,...", help="batch sizes: 1,8,32 (default: as stored)")
    parser.add_argument(
        "--threads", type=threads, metavar="N", help="CPU threads (default: those it was measured with)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on standard output")


def execute(arguments: argparse.Namespace) -> int:
    problem: BaseException | None = None
    record = BenchRecord(
        artifact=str(arguments.artifact), against=str(arguments.against) if arguments.against else None
    )

    def keep(found: BenchRecord) -> None:
        nonlocal record
        record = found

    with one_signal_interrupts() as signals:
        try:
            bench(arguments.artifact, arguments.against, arguments.batch, arguments.threads, Progress(sys.stderr), keep)
            problem = _without_answer(arguments, record)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - shown below, after the record
            import msgspec

            problem = error
            interrupted = isinstance(error, KeyboardInterrupt)
            reason = "interrupted" if interrupted else getattr(error, "message", f"saturate itself failed: {error}")
            record = msgspec.structs.replace(record, reason=reason)
        signals.enough()  # what was found is told whole
        if arguments.json:
            show_json(record)
        elif record.rows:
            print(shown(record))
    if problem is not None:
        raise problem
    return 0


def _without_answer(arguments: argparse.Namespace, record: BenchRecord) -> EnvironmentProblem | None:
    if all(row.artifact.latency_ms is None for row in record.rows):
        return EnvironmentProblem(
            "the artifact ran at none of these batch sizes",
            cause=record.rows[0].artifact.reason,
            remedy="leave --batch out: then it runs at the size that it was made with",
        )
    if arguments.against is not None and all(row.verdict is None for row in record.rows):
        return EnvironmentProblem(
            f"the two were raced at none of these batch sizes: there is no answer to --against {arguments.against}",
            cause=_unraced(record.rows[0]),
            remedy="give artifacts of models that take the same inputs, and sizes that both of them take (--batch)",
        )
    return None


def _unraced(row: BatchRow) -> str:
    """Why there was no race."""
    theirs = row.against.reason if row.against is not None else ""
    return row.reason or theirs or row.artifact.reason


def bench(
    folder: Path,
    other: Path | None,
    sizes: list[int] | None,
    threads: int | None,
    progress: Callable[[str], None],
    keep: Callable[[BenchRecord], None],
) -> None:
    """Measure and race; `keep` gets what is known after each size. Raises ArtifactDamaged, and EnvironmentProblem where the artifact
    holds no inputs."""
    from saturate.inference import artifact, folders
    from saturate.report import words

    manifest = artifact.checked(folder)
    manifest_other = artifact.checked(other) if other is not None else None
    if not manifest.examples:
        raise EnvironmentProblem(
            f"the artifact {folder} holds no inputs to run it on",
            cause=manifest.no_examples,
            remedy="load it with saturate.load, and time it on inputs of your own",
        )
    for stored in filter(None, (manifest, manifest_other)):
        fixed = artifact.fixed_threads(stored)
        if threads is not None and fixed is not None and threads > fixed:
            raise UsageError(
                f"the program of {stored.candidate} runs on {words.count(fixed, 'thread')}, and on no more, whatever --threads says",
                remedy="leave --threads out, or run saturate optimize with more --threads",
            )
    own = [artifact.fixed_threads(stored) or stored.made_on.threads for stored in filter(None, (manifest, manifest_other))]
    if threads is None and len(set(own)) > 1:
        raise UsageError(
            f"{folder} runs on {words.count(own[0], 'thread')}, {other} on {own[1]}",
            cause="a race between them would compare the threads, not the programs",
            remedy="--threads N for both, or artifacts that saturate optimize made with the same --threads",
        )
    threads = threads or own[0]
    place = artifact.place_of(artifact.require_torch(), manifest.made_on)
    rows = []
    for size in sizes or [None]:
        with folders.scratch("saturate-bench-") as work:
            rows.append(_row(work, folder, other, size, threads, place, progress))
        keep(
            BenchRecord(
                artifact=str(folder),
                against=str(other) if other is not None else None,
                candidate=manifest.candidate,
                candidate_against=manifest_other.candidate if manifest_other is not None else "",
                threads=threads,
                rows=list(rows),
            )
        )


def _row(
    work: Path,
    folder: Path,
    other: Path | None,
    size: int | None,
    threads: int,
    device: str,
    progress: Callable[[str], None],
) -> BatchRow:
    from saturate.inference import artifact, examples, racing
    from saturate.inference.batches import samples
    from saturate.inference.failures import WorkerFailed

    torch = artifact.require_torch()
    stored, _ = artifact.examples_of(torch, folder)[0]
    try:
        inputs = stored if size is None else examples.of_size(torch, stored, size)
        start = _starter(work, inputs, threads, device) if inputs is not None else None
    except (RuntimeError, MemoryError, EnvironmentProblem) as error:  # RuntimeError: what torch says where memory ends
        why = error.cause if isinstance(error, EnvironmentProblem) else " ".join(str(error).split())[:200]
        return BatchRow(batch=size, artifact=Measured(reason=f"a batch of this size cannot be made here: {why}"))
    if inputs is None or start is None:
        return BatchRow(
            batch=size,
            artifact=Measured(reason="its inputs do not share a first dimension, so there is no other batch size"),
        )
    size = size or samples(torch, stored)
    words = f"batch {size}" if size else "as stored"
    progress(f"{words}: {folder}")
    ours = _measured(lambda: start(folder), size)
    if other is None:
        return BatchRow(batch=size, artifact=ours)
    progress(f"{words}: {other}")
    theirs = _measured(lambda: start(other), size)
    if ours.latency_ms is None or theirs.latency_ms is None:
        return BatchRow(batch=size, artifact=ours, against=theirs)
    progress(f"{words}: a race")
    try:
        race = racing.race(lambda: start(other), lambda: start(folder))
    except WorkerFailed as failure:
        return BatchRow(batch=size, artifact=ours, against=theirs, reason=f"the race failed: {failure.reason}")
    return BatchRow(
        batch=size,
        artifact=ours,
        against=theirs,
        verdict=race.verdict,
        speedup=race.speedup,
        speedup_ci=race.speedup_ci,
    )


def _starter(work: Path, inputs: tuple[Any, ...], threads: int, device: str) -> Callable[[Path], Any]:
    """Starts a process that serves an artifact on this batch. The one place that knows how processes are made."""
    from saturate.inference.api import memory_limit
    from saturate.inference.process import Worker
    from saturate.inference.source import Source

    source = Source.write(work / "source", None, [inputs], [inputs], device=device)
    return lambda folder: Worker(
        source,
        Path(folder).absolute(),
        folder=Path(tempfile.mkdtemp(dir=work)),
        threads=threads,
        memory_bytes=memory_limit(device),  # a batch that is too large must not end the machine's other programs
        prepare_s=_PREPARE_S,
    )


def _measured(start: Callable[[], Any], size: int | None) -> Measured:
    """Latency and memory of one artifact; a reason where it does not run."""
    from saturate.inference import racing
    from saturate.inference.failures import WorkerFailed

    try:
        with racing.lane(start) as lane:
            until = time.monotonic() + _MEASURE_S
            blocks = 0
            while blocks < _FEWEST_BLOCKS or time.monotonic() < until:
                lane.run()
                blocks += 1
            lane.worker.thaw()
            timing, memory = racing.timing(lane.times_ns), lane.worker.memory_bytes()
            load_s = lane.worker.ready.prepare_s + lane.worker.ready.first_call_s
    except WorkerFailed as failure:
        return Measured(reason=f"{failure.kind.replace('_', ' ')}: {failure.reason}")
    rate = 1000 * size / timing.p50 if timing is not None and size else None
    return Measured(latency_ms=timing, throughput_per_s=rate, memory_bytes=memory, load_s=load_s)


def shown(record: BenchRecord) -> str:
    """The record for a person."""
    from saturate.records.sizes import show
    from saturate.report import words

    def cells(label: str, one: Measured) -> list[str]:
        times = one.latency_ms
        if times is None:
            return [label, "", "", "", "", "", one.reason]
        rate = f"{one.throughput_per_s:,.0f}" if one.throughput_per_s is not None else ""
        return [
            label,
            words.ms(times.p50),
            words.ms(times.p90),
            words.ms(times.p99),
            rate,
            show(one.memory_bytes) if one.memory_bytes else "",
            "",
        ]

    lines = [["batch", "p50 ms", "p90 ms", "p99 ms", "samples/s", "memory", ""]]
    for row in record.rows:
        size = str(row.batch) if row.batch is not None else "as stored"
        lines.append(cells(size, row.artifact))
        if row.against is not None:
            lines.append(cells(f"{size}, against", row.against))
        if row.speedup is not None and row.verdict is not None:
            ratio = f"{words.ratio(row.speedup, row.speedup_ci)}, {row.verdict.replace('_', ' ')}"
            lines.append([*[""] * 6, ratio])
        elif row.reason:
            lines.append([*[""] * 6, row.reason])
    head = [paint(clean(f"{record.candidate}, {words.count(record.threads or 1, 'thread')}"), "bold")]
    if record.against:
        head.append(clean(f"against {record.against}: {record.candidate_against}"))
    return "\n".join([*head, clean(table(lines))])


def sizes(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d{0,6}(,[1-9]\d{0,6})*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of batch sizes such as 1,8,32")
    return list(dict.fromkeys(map(int, text.split(","))))


def threads(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of threads")
    return int(text)
