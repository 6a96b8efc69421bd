"""Colours of the terminal, and the labelled line that summaries are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MIN_WIDTH = 40  # narrower terminals wrap by themselves; cutting further would leave nothing to read

BOLD, DIM, RED, GREEN, YELLOW, BLUE = "1", "2", "31", "32", "33", "34"

#: Called with a text and ANSI codes.
Paint = Callable[..., str]


def paints(color: bool) -> Paint:
    """What puts ANSI codes around text, or does not."""
    return _painted if color else _plain


def _plain(text: str, *_: str) -> str:
    return text


def _painted(text: str, *codes: str) -> str:
    return f"\033[{';'.join(codes)}m{text}\033[0m" if codes and text else text


def labelled_line(label: str, text: str, column: int, paint: Paint, *codes: str) -> str:
    """A line: its label, in a column of so many cells, and the text in `codes`."""
    return paint(f"{label:<{column}}", DIM) + paint(text, *codes)


def labelled(label: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    """Labels with their lines: the label beside the first line only."""
    return [(label if index == 0 else "", line) for index, line in enumerate(lines)]
