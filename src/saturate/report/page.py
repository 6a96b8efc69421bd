"""The frame of every page: one self-contained HTML document in which no script runs and nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from saturate.records.encoding import encoded
from saturate.report.markup import Markup, tag

#: A page stays below this many bytes whatever its record holds.
MAX_BYTES = 1_000_000

#: The data that stand in a page (`embedded`), and what makes the page around them.
Drawn = tuple[Markup, Callable[[Markup], str]]

Step = TypeVar("Step")

# The browser itself refuses to load anything, should a mistake ever let markup through.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def document(
    title: str,
    style: str,
    top: Markup,
    navigation: Sequence[tuple[str, str]],
    parts: Iterable[object],
    foot: str,
    data: Markup,
    *,
    skip: tuple[str, str],
) -> str:
    """The whole page. `navigation` and `skip`, the link that a keyboard reaches first: (anchor, text). `data`: of `embedded`."""
    anchor, text = skip
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"saturate: {title}"),
        tag("style", Markup(style)),
    )
    links = tag("ul", *(tag("li", tag("a", name, href=f"#{target}")) for target, name in navigation))
    body = tag(
        "body",
        tag("a", text, href=f"#{anchor}", class_="skip"),
        top,
        tag("nav", links, aria_label="Sections"),
        tag("main", *parts),
        tag("footer", foot),
        tag("script", data, type="application/json", id="record"),
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def fitted(ladder: Sequence[Step], draw: Callable[[Step], Drawn]) -> str:
    """The page of the first step of the ladder with which it has less than `MAX_BYTES` in UTF-8, else that of the last."""
    page = ""
    for step in ladder:
        data, around = draw(step)
        if step is not ladder[-1] and len(data) >= MAX_BYTES:
            continue    # too much by itself: do not draw what cannot fit
        page = around(data)
        if len(page.encode()) < MAX_BYTES:
            break
    return page


def embedded(record: msgspec.Struct) -> Markup:
    """The record as JSON that cannot end its own element, nor mean anything else to an HTML or a script parser."""
    text = encoded(record)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)
