"""The summary that a `tune` ends with: at most twelve lines, the verdict first, the next command last."""

from __future__ import annotations

from saturate.records.result import StudyRecord, TechniqueOutcome
from saturate.report import words
from saturate.report.cells import cells, cut, fit, wrap
from saturate.report.paint import BOLD, GREEN, MIN_WIDTH, YELLOW, Paint, labelled, labelled_line, paints

MAX_LINES = 12
MAX_KEPT = 4
LABEL = 10  # width of the label column

_TITLE_CODES = {
    "win": (BOLD, GREEN),
    "fits": (BOLD, GREEN),
    "fits_unverified": (BOLD, YELLOW),
    "too_big": (BOLD, YELLOW),
    "unverified": (BOLD, YELLOW),
    "cannot_verify": (BOLD, YELLOW),
    "noisy": (BOLD, YELLOW),
    "inconclusive": (BOLD, YELLOW),
    "slower": (BOLD, YELLOW),
    "nothing": (BOLD,),  # never green: nothing was gained
}


def summary(record: StudyRecord, *, width: int, color: bool) -> str:
    """The record as plain lines without a trailing newline.

    `width` is in terminal cells; only paths and commands may exceed it, so that they can be copied. `color` adds
    ANSI codes, which do not count as width.
    """
    width = max(width, MIN_WIDTH)
    answer = words.headline(record)
    paint = paints(color)

    head = _headline(answer, width, paint)
    tail = [
        labelled_line("recipe", words.clean(record.result.recipe), LABEL, paint),
        labelled_line("report", words.clean(record.result.report), LABEL, paint),
        labelled_line("next", words.typed(words.next_command(record)), LABEL, paint, BOLD),
    ]
    payback = words.break_even(record)
    if payback:
        tail.insert(0, labelled_line("pays back", fit(payback, width - LABEL), LABEL, paint))
    body = _body(record, answer, width - LABEL, MAX_LINES - len(head) - len(tail))
    return "\n".join(head + [labelled_line(label, text, LABEL, paint) for label, text in body] + tail)


def _headline(answer: words.Headline, width: int, paint: Paint) -> list[str]:
    """One line where it fits, else the numbers below the title."""
    codes = _TITLE_CODES[answer.kind]
    title, detail = fit(answer.title, width), fit(answer.detail, width)
    if not detail:
        return [paint(title, *codes)]
    if cells(title) + 2 + cells(detail) <= width:
        return [paint(title, *codes) + ": " + detail]
    return [paint(title, *codes), detail]


def _body(record: StudyRecord, answer: words.Headline, width: int, room: int) -> list[tuple[str, str]]:
    """At most `room` labelled lines of `width` cells between the headline and the paths; the kept techniques fold
    first."""
    if answer.kind == "win":
        # One part that can be read says more than two of which the second is cut.
        moved = [words.moved(record, parts) for parts in (2, 1)]
        why = labelled("why", [fit(moved[cells(moved[0]) > width], width)] if moved[0] else [])
    else:
        why = labelled("why", wrap(answer.why, width, 2))
    counts, reason = words.dropped(record)
    rest = labelled("not kept", [_fold(counts, width)] if counts else [])
    if reason:
        rest.append(("", fit(reason, width)))
    if record.notes:
        more = f" (+{len(record.notes) - 1} in the report)" if len(record.notes) > 1 else ""
        rest.append(("note", fit(record.notes[0], width - len(more)) + more))
    change = words.memory_change(record) if answer.kind == "win" else ""
    memory = labelled("memory", [fit(change, width)] if change else [])
    kept = _kept(words.kept(record), width, room - len(why) - len(memory) - len(rest), record.result.baseline_peak_bytes)
    return why + memory + labelled("kept", kept) + rest


def _fold(parts: list[str], width: int) -> str:
    """As many parts as fit on one line, and how many fates are left."""
    for shown in range(len(parts), 1, -1):
        more = [f"+{len(parts) - shown} more"] if shown < len(parts) else []
        text = ", ".join(parts[:shown] + more)
        if cells(text) <= width:
            return text
    return fit(", ".join(parts), width)


def _kept(outcomes: list[TechniqueOutcome], width: int, room: int, before_bytes: int | None) -> list[str]:
    """One line per kept technique, the rest folded into the last one, at most `room` lines."""
    most = min(MAX_KEPT, room)
    shown = outcomes if len(outcomes) <= most else outcomes[: most - 1]
    rows = [(words.one_line(o.id), words.gain(o.gain), words.gain_interval(o.gain_ci), words.memory(o.peak_bytes, before_bytes), o.numerics)
            for o in shown]
    rows = rows if any(row[3] for row in rows) else [(*row[:3], row[4]) for row in rows]
    columns = len(rows[0]) if rows else 0
    widths = [max(cells(row[column]) for row in rows) for column in range(columns)]
    # Rather a column less on every line than a ragged edge: numerics goes first, then memory, then the interval.
    while columns > 2 and sum(widths[:columns]) + 2 * (columns - 1) > width:
        columns -= 1
    lines = []
    for row in rows:
        texts = [row[0] + " " * (widths[0] - cells(row[0])), row[1].rjust(widths[1])]
        texts += [row[column].ljust(widths[column]) for column in range(2, columns)]
        lines.append(cut("  ".join(texts).rstrip(), width))
    if len(outcomes) > len(shown):
        rest = outcomes[len(shown) :]
        lines.append(fit(f"+{len(rest)} more: " + ", ".join(outcome.id for outcome in rest), width))
    return lines
