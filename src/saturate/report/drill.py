"""The summary that a `drill` ends with: at most twelve lines, the verdict first, the next command last."""

from __future__ import annotations

from saturate.records.drill import Drill, DrillResult
from saturate.report.cells import cut, fit, wrap
from saturate.report.paint import BOLD, GREEN, MIN_WIDTH, RED, YELLOW, labelled_line, paints
from saturate.report.words import clean, typed

MAX_LINES = 12
LABEL = 10

TITLES = {
    "resumes_exactly": "This training resumes exactly",
    "resumes_reordered": "This training resumes, but in another order",
    "inconclusive": "Whether this training resumes cannot be told",
    "no_checkpoint": "This training saves no checkpoint in time",
    "ends_early": "This training ends too early when it is resumed",
    "state_not_restored": "This training resumes with another state",
    "skips_data": "This training skips data when it is resumed",
    "repeats_data": "This training repeats data when it is resumed",
    "starts_over": "This training does not resume: it starts over",
    "cannot_load": "This training cannot be resumed after every kill",
}
_COLOURS = {"resumes_exactly": GREEN, "resumes_reordered": YELLOW, "inconclusive": YELLOW}


def summary(result: DrillResult, *, width: int, color: bool) -> str:
    """The record as plain lines without a trailing newline. `width` is in terminal cells; only the path and the command
    may exceed it, so that they can be copied."""
    width = max(width, MIN_WIDTH)
    paint = paints(color)
    head = [paint(cut(TITLES[result.verdict], width), BOLD, _COLOURS.get(result.verdict, RED))]
    head += [labelled_line(label, text, LABEL, paint) for label, text in _lines("", clean(result.reason), width - LABEL)]
    tail = [labelled_line(label, text, LABEL, paint) for label, text in _lines("remedy", clean(result.remedy), width - LABEL)] if result.remedy else []
    tail += [labelled_line("record", clean(result.record), LABEL, paint)] if result.record else []
    tail.append(labelled_line("next", typed(result.next_command), LABEL, paint, BOLD))
    room = MAX_LINES - len(head) - len(tail)
    body = [("killed", fit(_drill(one), width - LABEL)) for one in result.drills]
    if len(body) > room - 1:
        body = [*body[: room - 2], ("", f"and {len(body) - room + 2} more: see the record")]
    if result.saves_seen:
        places = ", ".join(str(save.update) for save in result.saves_seen[:8])
        body.append(("saves", fit(f"update {places} of {result.reference_updates}", width - LABEL)))
    if result.notes and len(body) < room:
        body.append(("note", fit(clean(result.notes[-1]), width - LABEL)))
    return "\n".join(head + [labelled_line(label, text, LABEL, paint) for label, text in body] + tail)


def _lines(label: str, text: str, width: int) -> list[tuple[str, str]]:
    return [(label if number == 0 else "", line) for number, line in enumerate(wrap(text, width, 2))]


def _drill(one: Drill) -> str:
    words = [f"update {one.killed_at_update}" + (", in a save" if one.moment == "save" else "") + f": {one.outcome.replace('_', ' ')}"]
    if one.lost_updates is not None and one.outcome != "starts_over":
        words.append(f"{one.lost_updates} lost")
    if one.recovery_s is not None:
        words.append(f"back in {one.recovery_s:.1f} s")
    return ", ".join(words)
