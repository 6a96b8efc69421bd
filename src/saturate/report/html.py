"""The report as one self-contained HTML file: no script runs, nothing is loaded, everything is escaped."""

from __future__ import annotations

import msgspec

from saturate.records.result import StudyRecord
from saturate.report import evidence, sections, style
from saturate.report.markup import Markup, tag
from saturate.report.trim import LADDER, Limits, command_without_values, trim

#: The page stays below this many bytes whatever the record holds.
MAX_BYTES = 1_000_000

_NAVIGATION = (
    ("staircase", "Staircase"),
    ("step", "Step"),
    ("techniques", "Techniques"),
    ("numerics", "Numerics"),
    ("method", "Method"),
    ("time", "Tune time"),
    ("reproduce", "Reproduce"),
)

# The browser itself refuses to load anything, should a mistake ever let markup through.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render(record: StudyRecord) -> str:
    """The page for one study, less than `MAX_BYTES` in UTF-8.

    Long texts, lists and series are cut only as far as the size demands, and the page says so. The command stands in
    it without the values of its arguments, like in every file that is saved.
    """
    command = command_without_values(record.result.command)
    record = msgspec.structs.replace(record, result=msgspec.structs.replace(record.result, command=command))
    page = ""
    for limits in LADDER:
        shown = trim(record, limits)
        if limits is not LADDER[-1] and len(msgspec.json.encode(shown)) >= MAX_BYTES:
            continue  # the embedded data alone is too much: do not draw what cannot fit
        page = _page(record, shown, limits)
        if len(page.encode()) < MAX_BYTES:
            break
    return page


def _page(record: StudyRecord, shown: StudyRecord, limits: Limits) -> str:
    # Curves are drawn from the whole series: which points matter is known only there.
    whole = [
        msgspec.structs.replace(drawn, baseline=full.baseline, candidate=full.candidate, tolerance=full.tolerance)
        for drawn, full in zip(shown.numerics, record.numerics)
    ]
    title = f"saturate: {sections.words.headline(shown).title}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        tag("style", Markup(style.sheet())),
    )
    links = tag("ul", *(tag("li", tag("a", name, href=f"#{anchor}")) for anchor, name in _NAVIGATION))
    body = tag(
        "body",
        tag("a", "Skip to the techniques", href="#techniques", class_="skip"),
        sections.verdict(shown),
        tag("nav", links, aria_label="Sections"),
        tag(
            "main",
            sections.staircase(shown),
            sections.step_split(shown),
            sections.techniques(shown),
            evidence.numerics(shown, whole, limits.points),
            evidence.method(shown),
            evidence.own_time(shown),
            evidence.reproduce(shown),
        ),
        tag(
            "footer",
            "Every number on this page was measured on the machine named at the top. The record behind it is "
            "embedded as JSON (element \u201crecord\u201d).",
        ),
        tag("script", _embedded(shown), type="application/json", id="record"),
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _embedded(record: StudyRecord) -> Markup:
    """The record as JSON that cannot end its own element, nor mean anything else to an HTML or a script parser."""
    text = msgspec.json.encode(record).decode()
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)
