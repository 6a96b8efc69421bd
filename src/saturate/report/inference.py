"""What `saturate optimize` says: a summary of at most twelve lines, the verdict first, the next command last; a
table of every candidate; and which of them no other beats."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from saturate.records.inference import Best, CandidateRecord, OptimizeRecord, ThroughputRow
from saturate.records.sizes import show
from saturate.report import inference_words as say
from saturate.report import words
from saturate.report.cells import cells, cut, fit
from saturate.report.paint import BOLD, GREEN, MIN_WIDTH, YELLOW, labelled_line, paints

MAX_LINES = 12
LABEL = 10  # width of the label column



# -- summary ---------------------------------------------------------------------------------------------------------


def summary(record: OptimizeRecord, *, width: int, color: bool) -> str:
    """The record as plain lines without a trailing newline; `width` in terminal cells, which only paths and the
    command may exceed, so that they can be copied. `color` adds ANSI codes."""
    width = max(width, MIN_WIDTH)
    paint = paints(color)
    room = width - LABEL
    head = paint(
        fit(say.title(record), width),
        BOLD,
        *([GREEN] if say.won(record) else [YELLOW] if record.verdict == "inconclusive" else []),
    )
    tail = [
        labelled_line(label, words.clean(path), LABEL, paint)
        for label, path in (("artifact", record.artifact), ("stored", record.unconfirmed and record.unconfirmed.artifact), ("report", record.report))
        if path
    ]
    if record.given_s is not None:
        tail.append(labelled_line("took", fit(say.took_words(record.seconds, record.given_s, record.phases), room), LABEL, paint))
    tail.append(labelled_line("next", say.next_command(record), LABEL, paint, BOLD))
    lines = [(label, fit(text, room)) for label, text in _facts(record) if text]
    free = MAX_LINES - 1 - len(tail)
    return "\n".join([head, *(labelled_line(label, text, LABEL, paint) for label, text in lines[:free]), *tail])


def _facts(record: OptimizeRecord) -> list[tuple[str, str]]:
    """The lines between the verdict and the paths, the most important first: the last ones go where room ends."""
    notes = record.notes
    count = f"1 of {len(notes)} in the report: " if len(notes) > 1 and record.report else ""
    note = ("note", count + notes[0]) if notes else ("", "")
    counts, reason = say.lost(record)
    if record.best is None:
        return [
            ("so far", say.so_far(record)),
            ("why", "" if record.unconfirmed else say.unfinished(record) or reason or say.why_nothing(record)),
            ("latency", say.latency_words(record.baseline.latency_ms)),
            ("tried", counts),
            note,
        ]
    return [
        ("with", say.kept_words(record)),
        ("samples", throughput_words(record)),
        ("latency", say.change_words(record)),
        ("accuracy", say.accuracy_words(record)),
        ("lossless", say.lossless_words(record)),
        ("memory", say.memory_words(record)),
        note,
        ("others", counts),
        ("", reason),
    ]


# -- table -----------------------------------------------------------------------------------------------------------


def rows(record: OptimizeRecord) -> list[CandidateRecord]:
    """The candidates as tables list them: by fate, the fastest first; the winner with its confirmed numbers."""
    order = list(say.FATES)
    return sorted(
        (_confirmed(one, record.best) for one in record.candidates),
        key=lambda one: (order.index(one.fate), -(one.speedup or 0.0)),
    )


def _confirmed(one: CandidateRecord, best: Best | None) -> CandidateRecord:
    if best is None or one.fate != "kept":
        return one
    found = {
        name: value
        for name in (
            "latency_ms",
            "speedup",
            "speedup_ci",
            "accuracy",
            "accuracy_drop",
            "accuracy_drop_ci",
            "peak_memory_bytes",
            "size_bytes",
        )
        if (value := getattr(best, name)) is not None
    }
    return msgspec.structs.replace(one, **found)


def table(record: OptimizeRecord, *, width: int | None = None) -> str:
    """Baseline and every candidate on one line each: fate, latency, speed-up, drop, memory, size, reason; below them what
    was measured of throughput, and the notes. Lines are cut to `width` terminal cells; None: as wide as they are."""
    head = ("candidate", "fate", "p50 ms", "p99 ms", "speed-up", "drop", "memory", "stored", "reason")
    lines = [
        head,
        _columns(msgspec.structs.replace(record.baseline, speedup=None), "baseline", record.relative),
        *(_columns(one, say.FATES[one.fate], record.relative) for one in rows(record)),
    ]
    shown = aligned(lines, (2, 3))
    if record.throughput:
        shown += ["", *aligned([THROUGHPUT, *throughput_rows(record)], (1, 2, 3))]
    if record.notes:
        shown += ["", *(f"note: {words.one_line(note)}" for note in record.notes)]
    return "\n".join(line if width is None else cut(line, width) for line in shown)


def aligned(lines: Sequence[tuple[str, ...]], numeric: tuple[int, ...]) -> list[str]:
    """Cells in columns, those of `numeric` to the right; the last column is as wide as its cells."""
    last = len(lines[0]) - 1
    widths = [max(cells(row[column]) for row in lines) for column in range(last)] + [0]
    shown = []
    for row in lines:
        padded = [
            " " * (size - cells(cell)) + cell if index in numeric else cell + " " * (size - cells(cell))
            for index, (cell, size) in enumerate(zip(row, widths))
        ]
        shown.append("  ".join(padded).rstrip())
    return shown


#: Columns of what was measured of throughput.
THROUGHPUT = ("throughput of", "batch", "processes", "samples/s", "")


def throughput_rows(record: OptimizeRecord) -> list[tuple[str, ...]]:
    """Every setting of batch and processes, of the model as it is, of the winner and of who came close to it; the best of each is
    marked."""
    most = _most(record).values()
    names = {"baseline": "as it is", "best": "best"}
    found = []
    for one in record.throughput:
        mark = one.over_limit or ("its best" if any(one is other for other in most) else "")
        found.append((names.get(one.of) or words.one_line(one.id), str(one.batch), str(one.processes), f"{one.samples_per_s:,.0f}", mark))
    return found


def _most(record: OptimizeRecord) -> dict[tuple[str, str], ThroughputRow]:
    """The setting of each with the most samples per second, of those within the limits."""
    within = (one for one in record.throughput if one.over_limit is None)
    return {(one.of, one.id): one for one in sorted(within, key=lambda one: one.samples_per_s)}


def throughput_words(record: OptimizeRecord) -> str:
    """ "1,930/s at batch 64 in 2 processes, 410/s as it is at batch 32": each at its best setting."""
    most = {of: one for (of, _), one in _most(record).items()}
    return ", ".join(
        f"{one.samples_per_s:,.0f}/s{said} at batch {one.batch}"
        + (f" in {one.processes} processes" if one.processes > 1 else "")
        for name, said in (("best", ""), ("baseline", " as it is"))
        if (one := most.get(name)) is not None
    )


def _columns(one: CandidateRecord, fate: str, relative: bool) -> tuple[str, ...]:
    times = one.latency_ms
    return (
        words.one_line(one.id),
        fate,
        words.ms(times.p50) if times else "",
        words.ms(times.p99) if times else "",
        words.ratio(one.speedup, one.speedup_ci) if one.speedup is not None else "",
        f"{say.drop(one.accuracy_drop, relative)}{say.drop_interval(one.accuracy_drop_ci, relative)}"
        if one.accuracy_drop is not None
        else "",
        show(one.peak_memory_bytes) if one.peak_memory_bytes is not None else "",
        say.stored_words(one),
        words.one_line(say.reason(one)),
    )


# -- the front -------------------------------------------------------------------------------------------------------


def front(candidates: Sequence[CandidateRecord]) -> list[CandidateRecord]:
    """Those that no other beats in both latency and accuracy, the fastest first. A lossless one without a score has
    lost nothing; what was refused for its behaviour or is over a limit, did not take effect or was not measured, is not on
    it."""
    usable = [
        one
        for one in candidates
        if one.latency_ms is not None
        and place_of(one) is not None
        and one.fate not in ("rejected_behaviour", "over_limit", "not_applied", "not_deployable", "failed")
    ]
    usable.sort(key=lambda one: (one.latency_ms.p50 if one.latency_ms else 0.0, place_of(one) or 0.0))
    found: list[CandidateRecord] = []
    for one in usable:
        if not found or (place_of(one) or 0.0) < (place_of(found[-1]) or 0.0):
            found.append(one)
    return found


def place_of(one: CandidateRecord) -> float | None:
    """Where it stands on the axis of accuracy: its drop, 0 for a lossless one that nobody had to score."""
    if one.accuracy_drop is None and one.numerics in ("exact", "reordering"):
        return 0.0
    return one.accuracy_drop
