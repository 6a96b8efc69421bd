"""The report as one self-contained HTML file: no script runs, nothing is loaded, everything is escaped."""

from __future__ import annotations

import msgspec

from saturate.records.result import StudyRecord
from saturate.report import evidence, sections, style
from saturate.report.markup import Markup
from saturate.report.page import Drawn, document, embedded, fitted
from saturate.report.trim import LADDER, Limits, command_without_values, trim

_NAVIGATION = (
    ("staircase", "Staircase"),
    ("step", "Step"),
    ("techniques", "Techniques"),
    ("numerics", "Numerics"),
    ("method", "Method"),
    ("time", "Tune time"),
    ("reproduce", "Reproduce"),
)


def render(record: StudyRecord) -> str:
    """The page for one study, less than `page.MAX_BYTES` in UTF-8.

    Long texts, lists and series are cut only as far as the size demands, and the page says so. The command stands in
    it without the values of its arguments, like in every file that is saved.
    """
    command = command_without_values(record.result.command)
    record = msgspec.structs.replace(record, result=msgspec.structs.replace(record.result, command=command))

    def draw(limits: Limits) -> Drawn:
        shown = trim(record, limits)
        return embedded(shown), lambda data: _page(record, shown, data, limits)

    return fitted(LADDER, draw)


def _page(record: StudyRecord, shown: StudyRecord, data: Markup, limits: Limits) -> str:
    # Curves are drawn from the whole series: which points matter is known only there.
    whole = [
        msgspec.structs.replace(drawn, baseline=full.baseline, candidate=full.candidate, tolerance=full.tolerance)
        for drawn, full in zip(shown.numerics, record.numerics)
    ]
    parts = (
        sections.staircase(shown),
        sections.step_split(shown),
        sections.techniques(shown),
        evidence.numerics(shown, whole, limits.points),
        evidence.method(shown),
        evidence.own_time(shown),
        evidence.reproduce(shown),
    )
    foot = (
        "Every number on this page was measured on the machine named at the top. The record behind it is "
        "embedded as JSON (element \u201crecord\u201d)."
    )
    return document(
        sections.words.headline(shown).title, style.sheet(), sections.verdict(shown), _NAVIGATION, parts, foot, data,
        skip=("techniques", "Skip to the techniques"),
    )
