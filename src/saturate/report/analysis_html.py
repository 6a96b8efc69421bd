"""An analysis or a profile as one self-contained HTML file: no script, nothing loaded, everything escaped."""

from __future__ import annotations

import msgspec

import saturate
from saturate.records.analysis import Analysis, Profile
from saturate.records.comparison import Comparison
from saturate.report import analysis_compare, analysis_style
from saturate.report import analysis_method as method
from saturate.report import analysis_sections as sections
from saturate.report import analysis_words as say
from saturate.report.markup import Markup
from saturate.report.page import Drawn, document, embedded, fitted
from saturate.report.trim import Limits, within, without_values

#: From what a reader expects down to what fits under any circumstances; the first that fits is taken.
LADDER = (Limits(800, 200, 400, 0), Limits(300, 80, 100, 0), Limits(120, 40, 32, 0), Limits(40, 12, 8, 0))

#: Fields whose keys are data.
_MAPPINGS = frozenset({"split", "gap_ns", "edge_ns", "window_gap_ns", "unknown", "ceilings", "annotations"})


def render(analysis: Analysis) -> str:
    """The page, less than `page.MAX_BYTES` in UTF-8. Long texts and lists are cut only as far as the size demands, and the
    page says so. A profile's command stands in it without the values of its arguments."""
    whole = msgspec.to_builtins(without_values(analysis) if isinstance(analysis, Profile) else analysis)

    def draw(limits: Limits) -> Drawn:
        flat, cuts = within(whole, limits, _MAPPINGS)
        shown = msgspec.convert(flat, type(analysis))
        return embedded(shown), lambda data: _page(shown, data, cuts)

    return fitted(LADDER, draw)


def render_comparison(record: Comparison) -> str:
    """The page of two analyses side by side, with the same promises."""
    whole = msgspec.to_builtins(record)

    def draw(limits: Limits) -> Drawn:
        flat, cuts = within(whole, limits, frozenset({"unknown"}))
        shown = msgspec.convert(flat, Comparison)
        shown = msgspec.structs.replace(
            shown, notes=[*shown.notes, *(f"Left out of this page for its size: {cut}." for cut in cuts)]
        )
        title, top = analysis_compare.title(shown), analysis_compare.header(shown)
        return embedded(shown), lambda data: shell(title, top, list(analysis_compare.sections(shown)), data)

    return fitted(LADDER, draw)


def _page(shown: Analysis, data: Markup, cuts: list[str]) -> str:
    body = [(anchor, name, part) for anchor, name, part in sections.every(shown) if part is not None]
    body.append(("method", "Method", method.method(shown, cuts)))
    return shell(say.title(shown), sections.verdict(shown), body, data)


def shell(title: str, top: Markup, body: list[tuple[str, str, Markup]], data: Markup, *, rules: str = "") -> str:
    """A whole page: head, band at the top, navigation, sections, the record. `rules` are added to the style sheet."""
    foot = (
        f"Written by saturate {saturate.__version__}. The record behind this page is embedded as JSON (element "
        "\u201crecord\u201d)."
    )
    return document(
        title, analysis_style.sheet() + rules.replace("\n", ""), top, [(anchor, name) for anchor, name, _ in body],
        (part for _, _, part in body), foot, data, skip=(body[0][0], "Skip to the contents"),
    )
