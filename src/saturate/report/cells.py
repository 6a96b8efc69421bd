"""Text measured and cut in terminal cells: what every summary shares."""

from __future__ import annotations

import textwrap
import unicodedata

from saturate.report import words


def cells(text: str) -> int:
    """Terminal cells that `text` takes: two for wide characters, none for combining ones."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def fit(text: str, width: int) -> str:
    """`text` on one line of at most `width` cells."""
    return cut(words.one_line(text), width)


def cut(text: str, width: int) -> str:
    """`text` cut to `width` cells, at a word where one ends near enough."""
    if cells(text) <= width:
        return text
    end, used = 0, 0
    while used + cells(text[end]) <= width - 3:
        used += cells(text[end])
        end += 1
    kept = text[:end]
    space = kept.rfind(" ")
    if space > end * 2 // 3:
        kept = kept[:space]
    return kept.rstrip(" ,;:") + "..."


def wrap(text: str, width: int, most: int) -> list[str]:
    """`text` on at most `most` lines of `width` cells."""
    lines = textwrap.wrap(words.one_line(text), width, break_on_hyphens=False)
    if len(lines) > most:
        lines = [*lines[: most - 1], " ".join(lines[most - 1 :])]
    return [fit(line, width) for line in lines]
