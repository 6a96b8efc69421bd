"""What the verbs share when they print: colour only where it is wanted, and tables."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from saturate.errors import SaturateError, UsageError
from saturate.records.encoding import encoded, printable

_PACKAGE = Path(__file__).resolve().parent.parent

UNCUT = 100_000     # cells: no line is longer

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def coloured(stream: TextIO) -> bool:
    """Whether escape codes are welcome: a terminal that understands them, and no NO_COLOR (no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def width(stream: TextIO, most: int = 120) -> int:
    """Cells of a line on `stream`: those of the terminal, up to `most`; where it is none, lines are as long as they are,
    unless COLUMNS says otherwise."""
    wide = 0 if stream.isatty() or os.environ.get("COLUMNS") else UNCUT
    return wide or min(most, shutil.get_terminal_size((80, 24)).columns)


def paint(text: str, *styles: str, stream: TextIO | None = None) -> str:
    """The text in `styles` ("bold", "red", ...), as it is where colour is not wanted."""
    if not styles or not coloured(stream or sys.stdout):
        return text
    return f"\x1b[{';'.join(_CODES[style] for style in styles)}m{text}\x1b[0m"


def safe_line(text: str) -> str:
    """Text from a file (a recipe, a manifest) as one line of printable characters: it must not drive the terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def tell(text: str) -> None:
    """On standard error. Where nobody reads that any more (`2>&1 | head -1`, a terminal that was closed) the exit code still tells."""
    try:
        print(text, end="", file=sys.stderr, flush=True)
    except OSError:
        to_nowhere(sys.stderr)


def to_nowhere(stream: TextIO) -> None:
    """The interpreter flushes once more at exit: give it somewhere to flush to."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def present(text: str, stream: TextIO) -> None:
    """What a verb has found, for people: on standard output or, beside JSON, on standard error."""
    if stream is sys.stderr:
        tell(text + "\n")
    else:
        print(text, file=stream)


def table(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Rows in aligned columns, the last one ragged."""
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join(
        indent + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]).rstrip() for row in rows
    )


#: What the verb has printed as its JSON answer: one object, unless it ended before it had any.
_answers: list[str] = []

#: Where the verb began, at most one entry: the user's code may change the working directory, and their shell stays where it is.
_began_in: list[str] = []


@contextlib.contextmanager
def of_a_verb() -> Iterator[None]:
    """What is printed in here is of one verb."""
    _answers.clear()
    with contextlib.suppress(OSError):      # the directory may be gone
        _began_in.append(os.getcwd())
    try:
        yield
    finally:
        _began_in.clear()


def answer_of_failure(error: BaseException) -> None:
    """The object of `--json` where a verb ended before it had one of its own."""
    if _answers:
        return
    failed = error if isinstance(error, SaturateError) else None
    told = (failed.message, failed.cause, failed.remedy) if failed else (
        "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}", "", "")
    answer({"schema": 1, "error": {"code": failed.code if failed else "", **dict(zip(("message", "cause", "remedy"), told))}})


def answer(plain: dict[str, Any]) -> None:
    """Print an object of plain values, which needs no library that may be missing."""
    text = json.dumps(printable(plain))
    _answers.append(text)
    print(text, flush=True)


def show_json(record: Any, stream: TextIO | None = None) -> None:
    """Print a record as one line of JSON. A stream that cannot take all of Unicode gets the rest as JSON escapes it: as Python
    does it for what people read (`\\xe9`), no parser would take it."""
    stream = stream or sys.stdout
    text = encoded(record)
    _answers.append(text)
    print(_escaped(text, _DRIVES if _takes_everything(stream) else _NOT_ASCII), file=stream, flush=True)


def _takes_everything(stream: TextIO) -> bool:
    try:
        return codecs.lookup(stream.encoding or "ascii").name.startswith("utf")
    except LookupError:
        return False


_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")

#: What JSON may hold as it is and a terminal acts upon (see `errors.clean`): names in a trace are data of whoever wrote it.
_DRIVES = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]+")


def _escaped(text: str, characters: re.Pattern[str]) -> str:
    """The same JSON, with these characters as JSON escapes them."""
    return characters.sub(lambda found: json.dumps(found[0])[1:-1], text)


def percent(share: float) -> str:
    """0.213 as `+21.3 %`."""
    return f"{share * 100:+.1f} %"


def place_of(path: Path, what: str) -> Path:
    """Where a file that `what` asked for is written, links followed: a rename would take the place of a link, a pipe or a
    device. Raises UsageError where something else than a regular file is there, or that cannot be seen."""
    place = Path(os.path.realpath(path))
    try:
        cause = ("it is a folder" if place.is_dir() else "it is no regular file" if place.exists() and not place.is_file()
                 else "" if place.parent.is_dir() else "its folder is missing")
    except OSError as error:        # a folder that may not be searched, a name that is too long
        cause = error.strerror or str(error)
    if cause:
        raise UsageError(f"{what} cannot write {path}", cause=cause, remedy="name a file in a folder that is there")
    return place


def with_program(summary: str) -> str:
    """A summary whose `next` command can be typed as it stands: it begins with what `saturate` is called here. Records that are
    saved keep the plain name, because they are read elsewhere."""
    return _NEXT.sub(lambda found: found[1] + program() + " ", summary)


#: What stands before the program's name in the last line of a summary, with or without colour.
_NEXT = re.compile(r"^((?:\x1b\[[\d;]*m)*next +(?:\x1b\[[\d;]*m)*)saturate ", re.MULTILINE)


def program() -> str:
    """What to type for the saturate that runs: its name where the shell finds just this one under it, else the path that it was
    started by. As part of another program (a test, a notebook) it is called by its name."""
    began, found = os.path.realpath(_from_where_it_began(sys.argv[0] or ".")), shutil.which("saturate")
    if os.path.basename(began) == "__main__.py" and Path(began).parent == _PACKAGE:       # python -m saturate
        beside = os.path.join(os.path.dirname(sys.executable), "saturate")
        named = found is not None and os.path.realpath(found) == os.path.realpath(beside)
        return "saturate" if named else f"{_from_here(sys.executable)} -m saturate"
    if os.path.basename(began) != "saturate" or (found is not None and os.path.realpath(found) == began):
        return "saturate"
    return _from_here(sys.argv[0])


def _from_where_it_began(path: str) -> str:
    return os.path.abspath(os.path.join(*_began_in, path))


def _from_here(path: str) -> str:
    """A file as a shell takes it: from the working directory where it lies below, with a slash, or else it would be looked up."""
    path = _from_where_it_began(path)
    inside = os.path.relpath(path, *_began_in)
    if not inside.startswith(os.pardir):
        path = inside if os.sep in inside else os.path.join(os.curdir, inside)
    return shlex.quote(path)


def span(value_s: float) -> str:
    """Seconds for a person.

    >>> span(5400)
    '1.5 h'
    """
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if value_s >= length:
            return f"{value_s / length:.3g} {unit}"
    return f"{value_s:.3g} s" if value_s >= 1 else f"{value_s * 1000:.3g} ms"
