"""An analysis or a profile as one self-contained HTML file: no script, nothing loaded, everything escaped."""

from __future__ import annotations

import msgspec

import saturate
from saturate.records.analysis import Analysis, Profile
from saturate.records.comparison import Comparison
from saturate.records.encoding import encoded
from saturate.report import analysis_compare, analysis_style
from saturate.report import analysis_method as method
from saturate.report import analysis_sections as sections
from saturate.report import analysis_words as say
from saturate.report.markup import Markup, tag
from saturate.report.trim import Limits, within, without_values

#: The page stays below this many bytes whatever the analysis holds.
MAX_BYTES = 1_000_000

#: From what a reader expects down to what fits under any circumstances; the first that fits is taken.
LADDER = (Limits(800, 200, 400, 0), Limits(300, 80, 100, 0), Limits(120, 40, 32, 0), Limits(40, 12, 8, 0))

#: Fields whose keys are data.
_MAPPINGS = frozenset({"split", "gap_ns", "edge_ns", "unknown", "ceilings", "annotations"})

# The browser itself refuses to load anything, should a mistake ever let markup through.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render(analysis: Analysis) -> str:
    """The page, less than `MAX_BYTES` in UTF-8. Long texts and lists are cut only as far as the size demands, and the
    page says so. A profile's command stands in it without the values of its arguments."""
    page = ""
    for limits in LADDER:
        flat, cuts = within(msgspec.to_builtins(without_values(analysis) if isinstance(analysis, Profile) else analysis), limits, _MAPPINGS)
        shown = msgspec.convert(flat, type(analysis))
        data = _embedded(shown)
        if limits is not LADDER[-1] and len(data) >= MAX_BYTES:
            continue  # the embedded data alone is too much: do not draw what cannot fit
        page = _page(shown, data, cuts)
        if len(page.encode()) < MAX_BYTES:
            break
    return page


def render_comparison(record: Comparison) -> str:
    """The page of two analyses side by side, with the same promises."""
    page = ""
    for limits in LADDER:
        flat, cuts = within(msgspec.to_builtins(record), limits, frozenset({"unknown"}))
        shown = msgspec.convert(flat, Comparison)
        shown = msgspec.structs.replace(
            shown, notes=[*shown.notes, *(f"Left out of this page for its size: {cut}." for cut in cuts)]
        )
        title = analysis_compare.title(shown)
        page = shell(title, analysis_compare.header(shown), list(analysis_compare.sections(shown)), _embedded(shown))
        if len(page.encode()) < MAX_BYTES:
            break
    return page


def _page(shown: Analysis, data: Markup, cuts: list[str]) -> str:
    body = [(anchor, name, part) for anchor, name, part in sections.every(shown) if part is not None]
    body.append(("method", "Method", method.method(shown, cuts)))
    return shell(say.title(shown), sections.verdict(shown), body, data)


def shell(title: str, top: Markup, body: list[tuple[str, str, Markup]], data: Markup, *, rules: str = "") -> str:
    """A whole page: head, band at the top, navigation, sections, the record. `rules` are added to the style sheet."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"saturate: {title}"),
        tag("style", Markup(analysis_style.sheet() + rules.replace("\n", ""))),
    )
    links = tag("ul", *(tag("li", tag("a", name, href=f"#{anchor}")) for anchor, name, _ in body))
    foot = (
        f"Written by saturate {saturate.__version__}. The record behind this page is embedded as JSON (element "
        "\u201crecord\u201d)."
    )
    contents = tag(
        "body",
        tag("a", "Skip to the contents", href=f"#{body[0][0]}", class_="skip"),
        top,
        tag("nav", links, aria_label="Sections"),
        tag("main", *(part for _, _, part in body)),
        tag("footer", foot),
        tag("script", data, type="application/json", id="record"),
    )
    return "<!doctype html>\n" + tag("html", head, contents, lang="en") + "\n"


def _embedded(shown: msgspec.Struct) -> Markup:
    """The record as JSON that cannot end its own element, nor mean anything else to an HTML or a script parser."""
    text = encoded(shown)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)
