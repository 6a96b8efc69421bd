"""HTML pages as tests read them: elements, attributes and text, what makes one stand alone, and the contrast of its colours."""

from __future__ import annotations

import html.parser
import re

VOID = {"meta", "br"}


class Page(html.parser.HTMLParser):
    """Elements, attributes, text, and whether every element was closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.words, self.ids = [], [], [], []
        self.data = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.data += data
        elif self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words).replace("\u00a0", " "))


def stands_alone(page):
    """It is well formed, loads nothing, runs no script, links to its own parts only, and names every drawing."""
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    tags = [tag for tag, _ in page.elements]
    assert not set(tags) & {"img", "link", "iframe", "object", "embed", "base", "form", "image"}
    assert [a.get("type") for tag, a in page.elements if tag == "script"] == ["application/json"]
    targets = {a["href"][1:] for _, a in page.elements if "href" in a}
    assert targets and targets <= set(page.ids)
    for tag, attributes in page.elements:
        assert not {"src", "style", "srcset", "xlink:href"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("href", "#").startswith("#")
        assert tag != "svg" or attributes.get("role") != "img" or attributes["aria-label"]
    assert any("default-src 'none'" in (a.get("content") or "") for tag, a in page.elements if tag == "meta")


def luminance(color):
    """Relative luminance of `#rrggbb` (WCAG 2.2)."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a, b):
    """Contrast ratio of two colours (WCAG 2.2)."""
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)
