"""From the bytes of a file to a Recipe. Public as `saturate.records.recipe`.

The file may come from anywhere: whatever its bytes, reading ends in a Recipe or in a RecipeError, soon.
"""

from __future__ import annotations

import math
import os
import re
import stat
import tomllib
from typing import Any

import msgspec
from msgspec import Struct

from saturate.errors import RecipeError
from saturate.records._recipe_schema import SCHEMA, Entry, MadeFor, MeasuredEvidence, Problem, Recipe, clip
from saturate.records.options import short
from saturate.records.spelling import suggestion

LIMIT_BYTES = 1 << 20
_DEPTH = 8
_DOTS = 64
_VALIDATE = "saturate recipe validate FILE lists everything that is wrong"

#: /dev/null, which whoever reads it finds an empty file: the recipe of a `tune` that could not begin.
_NULL = os.makedev(1, 3)


class Unreadable(Exception):
    """The file is not TOML that can be looked into; carries the one problem."""

    def __init__(self, problem: Problem):
        super().__init__(problem.message)
        self.problem = problem


def read(path: str | os.PathLike[str]) -> Recipe:
    """The recipe in the file `path`. Raises RecipeError: not a regular file, too large, not UTF-8, not a recipe."""
    return loads(text_of(path), name=os.fspath(path))


def loads(text: str, name: str = "recipe") -> Recipe:
    """The recipe that `text` is. `name` is how errors call it. Raises RecipeError."""
    try:
        recipe, problems = examine(text)
    except Unreadable as error:
        raise _error(name, [error.problem]) from None
    if problems:
        raise _error(name, problems)
    return recipe


def text_of(path: str | os.PathLike[str]) -> str:
    name = os.fspath(path)
    try:
        # O_NONBLOCK: opening a named pipe that nobody writes to would wait for ever.
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RecipeError(
            f"cannot open the recipe {clip(repr(name), 200)}: {reason}", remedy="check the path; saturate tune writes a recipe",
        ) from None
    try:
        seen = os.fstat(descriptor)
        null = stat.S_ISCHR(seen.st_mode) and seen.st_rdev == _NULL
        if not stat.S_ISREG(seen.st_mode) and not null:
            raise RecipeError(f"{name} is not a regular file", remedy="give the path of a recipe, a TOML file")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(LIMIT_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"cannot read {name}: {error.strerror}", remedy="check the file system") from None
    finally:
        os.close(descriptor)
    if len(data) > LIMIT_BYTES:
        raise RecipeError(f"{name} is larger than 1 MiB", cause="a recipe is a few kilobytes", remedy="is it the right file?")
    return _decode(data, name)


def _decode(data: bytes, name: str) -> str:
    remedy = "save it as UTF-8 text"
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise RecipeError(f"{name} is UTF-16, not UTF-8", remedy=remedy)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        raise RecipeError(f"{name} is not UTF-8 text", evidence=f"line {line}, byte {column} of it", remedy=remedy) from None


def examine(text: str) -> tuple[Recipe, list[Problem]]:
    """The recipe as far as it can be read, and everything that is wrong with its shape. Raises Unreadable."""
    table = _parse(text.removeprefix("\ufeff"))
    problems: list[Problem] = []
    schema = table.pop("schema", SCHEMA)
    if type(schema) is not int or schema != SCHEMA:
        raise Unreadable(with_lines([Problem(
            message=f"schema {short(schema)} is not one that this saturate knows ({SCHEMA})", key=("schema",),
            remedy="use the saturate that wrote it, or run saturate tune again",
        )], text)[0])
    made_for = _section(MadeFor, table.pop("made_for", {}), ("made_for",), problems)
    evidence = _section(MeasuredEvidence, table.pop("evidence", {}), ("evidence",), problems)
    entries = table.pop("technique", [])
    if not isinstance(entries, list):
        problems.append(Problem(message="technique must be an array of tables", key=("technique",), remedy="write [[technique]]"))
        entries = []
    techniques = [_section(Entry, entry, ("technique", index), problems) for index, entry in enumerate(entries)]
    problems += [_unknown(name, ("schema", "made_for", "evidence", "technique"), ()) for name in table]
    recipe = Recipe(made_for=made_for or MadeFor(), evidence=evidence or MeasuredEvidence(),
                    techniques=[entry for entry in techniques if entry is not None])
    return recipe, with_lines(problems, text)


def _parse(text: str) -> dict[str, Any]:
    # The standard parser takes quadratic time over the parts of one dotted key: half a megabyte of "a.a.a" is hours.
    for number, line in enumerate(_NO_KEY.sub(_as_many_lines, text).split("\n"), 1):
        if line.count(".") > _DOTS:
            raise Unreadable(Problem(message="a key with too many dots", line=number, remedy=_VALIDATE))
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message, line, column = _position(str(error), text)
        raise Unreadable(Problem(message=message, line=line, column=column, remedy="correct that line; a recipe is TOML")) from None
    except RecursionError:
        raise Unreadable(Problem(message="nested too deeply", remedy="a recipe has three levels")) from None
    except (ValueError, OverflowError) as error:  # an integer of thousands of digits, an impossible date
        raise Unreadable(Problem(message=f"not a TOML value: {clip(str(error))}", remedy="correct or remove the value")) from None


def _as_many_lines(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


#: Strings of several lines, strings of one, comments. One that has no end has it where the file, or the line, ends.
_NO_KEY = re.compile(r'''"""(?:[^"\\]|\\[\s\S]|"(?!""))*+(?:"""|\Z)|'{3}(?:[^']|'(?!''))*+(?:'{3}|\Z)'''
                     r'''|"(?:[^"\\\n]|\\.)*+"?|'[^'\n]*+'?|#[^\n]*+''')
_AT = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def _position(message: str, text: str) -> tuple[str, int, int | None]:
    found = _AT.search(message)
    if found is None or found[1] is None:
        return clip(_AT.sub("", message)) + ", at the end of the file", text.count("\n") + 1, None
    return clip(message[:found.start()]), int(found[1]), int(found[2])


def _section(cls: type[Struct], table: Any, key: tuple, problems: list[Problem]) -> Any:
    """One table as a struct; what does not fit is reported and left out. None when a required field is missing."""
    if not isinstance(table, dict):
        problems.append(Problem(message="must be a table", key=key, remedy=f"write [{key[0]}] on a line of its own"))
        return None
    known = {item.encode_name: item for item in msgspec.structs.fields(cls)}
    values = {}
    for name, value in table.items():
        if name not in known:
            problems.append(_unknown(name, known, key))
            continue
        reason = _unfit(value)
        try:
            if reason is None:
                values[name] = msgspec.convert(value, known[name].type)
        except msgspec.ValidationError as error:
            reason = str(error)
        if reason is None and name.endswith("_ci") and values[name][0] > values[name][1]:
            reason = "the interval's low end is above its high end"
        if reason is not None:
            problems.append(Problem(message=clip(reason), key=(*key, name), remedy=f"correct {name}, or remove it"))
    for name, item in known.items():
        if item.required and name not in values:
            if name not in table:
                problems.append(Problem(message=f"{name} is missing", key=key, remedy=f'add {name} = "..."'))
            return None
    return cls(**values)


def _unfit(value: Any, depth: int = 0) -> str | None:
    """Why a TOML value can never be part of a recipe; None when it can."""
    if depth > _DEPTH:
        return "nested too deeply"
    if isinstance(value, float):
        return None if math.isfinite(value) else f"expected a finite number, got {value}"
    if isinstance(value, int):
        return None if abs(value) < 2**63 else "a number this large does not fit into 64 bits"
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return next((reason for item in inner if (reason := _unfit(item, depth + 1))), None)
    return None if isinstance(value, str) else "dates and times are not used in recipes"


def _unknown(name: str, known: Any, key: tuple) -> Problem:
    return Problem(message=f"unknown key '{clip(name)}'", key=(*key, name),
                   remedy=suggestion(name, known) or f"known here: {', '.join(known)}")


def with_lines(problems: list[Problem], text: str) -> list[Problem]:
    """The same problems with line numbers. A text with multi-line strings is not searched: a wrong line misleads."""
    if not problems or '"""' in text or "'''" in text:
        return problems
    lines = _key_lines(text)
    located = []
    for problem in problems:
        key = problem.key
        while key and key not in lines:
            key = key[:-1]
        located.append(msgspec.structs.replace(problem, line=problem.line or lines.get(key)))
    return located


_HEADER = re.compile(r"\s*\[(\[?)\s*([\w-]+(?:\.[\w-]+)*)\s*\]")
_KEY = re.compile(r"""\s*["']?([\w-]+)["']?\s*=""")


def _key_lines(text: str) -> dict[tuple, int]:
    lines: dict[tuple, int] = {}
    prefix: tuple = ()
    count = -1
    for number, line in enumerate(text.split("\n"), 1):
        if header := _HEADER.match(line):
            names = tuple(header[2].split("."))
            count += names == ("technique",)
            prefix = ("technique", count, *names[1:]) if names[0] == "technique" else names
            lines.setdefault(prefix, number)
        elif key := _KEY.match(line):
            lines.setdefault((*prefix, key[1]), number)
    return lines


def _error(name: str, problems: list[Problem]) -> RecipeError:
    first = problems[0]
    place = ":".join(str(part) for part in (name, first.line, first.column) if part is not None)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    where = f"{first.where()}: " if first.key else ""
    return RecipeError(f"{name} is not a recipe: {clip(where)}{first.message}{more}", evidence=place, remedy=first.remedy or _VALIDATE)
