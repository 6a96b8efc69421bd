"""HTML whose text is escaped by construction: a plain `str` is always text, only `Markup` is markup."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape as _escape

from saturate.report.words import clean

_VOID = frozenset({"meta", "rect", "line", "circle", "path", "col", "br"})


class Markup(str):
    """A string that is already HTML."""

    __slots__ = ()


def escape(value: object) -> Markup:
    """`value` as HTML text; safe in an attribute between double quotes, too."""
    return value if isinstance(value, Markup) else Markup(_escape(clean(str(value))))


def join(parts: Iterable[object]) -> Markup:
    """The parts one after the other, each escaped unless it is markup."""
    return Markup("".join(escape(part) for part in parts))


def tag(element: str, *children: object, **attributes: object) -> Markup:
    """An element. `class_` gives `class`, `aria_label` gives `aria-label`; an attribute of None is left out and
    one of True has no value."""
    text = "".join(
        f" {name.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(value)}"')
        for name, value in attributes.items()
        if value is not None
    )
    if element in _VOID:
        # A slash closes the elements of an inline SVG, and HTML ignores it.
        return Markup(f"<{element}{text}/>")
    return Markup(f"<{element}{text}>{join(children)}</{element}>")


def with_interval(ratio: str) -> Markup:
    """A ratio with its interval on a line of its own: side by side they are wider than a column."""
    value, _, interval = ratio.partition(" ")
    return join([value, tag("span", interval, class_="sub") if interval else ""])


def table(
    columns: list[str],
    rows: list[list[object]],
    *,
    label: str,
    numeric: Iterable[int] = (),
    short: Iterable[int] = (),
    foot: list[object] | None = None,
    class_: str = "stacked",
) -> Markup:
    """A table, whose rows turn into labelled blocks on a narrow screen if `stacked`; another one scrolls in its own box where
    it is too wide. `numeric` columns are set to the right, `short` ones keep their words whole."""
    css = {**dict.fromkeys(short, "short"), **dict.fromkeys(numeric, "num")}

    def cell(index: int, content: object) -> Markup:
        # One child per cell: on a narrow screen the cell becomes a grid of its label and this child.
        inner = [tag("div", content)] if content else []
        return tag("td", *inner, data_label=columns[index], class_=css.get(index))

    head = tag("tr", *(tag("th", name, scope="col", class_=css.get(index)) for index, name in enumerate(columns)))
    body = [tag("tr", *(cell(index, content) for index, content in enumerate(row))) for row in rows]
    end = [tag("tfoot", tag("tr", *(cell(index, content) for index, content in enumerate(foot))))] if foot else []
    made = tag("table", tag("thead", head), tag("tbody", *body), *end, aria_label=label, class_=class_)
    if "stacked" in class_.split():
        return made
    # What scrolls has to be reached by the keyboard as well.
    return tag("div", made, class_="scroll", role="region", aria_label=label, tabindex="0")
