"""From a Recipe to the text of a file. Public as `saturate.records.recipe`.

A person may have edited the file that is written again. Their comments stay: inside a table, behind a value, and above
a table as long as that table is still there.
"""

from __future__ import annotations

import itertools
import os
import secrets
from pathlib import Path
from typing import Any

import msgspec
import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, Comment, InlineTable, Table, Whitespace

from saturate.errors import EnvironmentProblem, RecipeError
from saturate.records._recipe_reader import loads, read, text_of
from saturate.records._recipe_schema import Recipe, same

_HEAD = """\
# A recipe: what saturate found to make one training script faster, and what it measured.
# Use it:       saturate run THIS_FILE -- python train.py
# Understand:   saturate explain ID          Without saturate:  saturate recipe show THIS_FILE --as-code
# To switch one technique off, remove its [[technique]] table. An empty file is a valid recipe that changes nothing.
"""

_ABOVE = {
    "made_for": "# Where this was measured. On another machine, torch or script, the gains below are only a guess.\n",
    "evidence": "# What all techniques together gave, measured against the unmodified script.\n",
}

_ABOVE_TECHNIQUE = {
    "exact": "# Changes no result: bit-identical numbers.\n",
    "reordering": "# Same mathematics, summed in another order: the last bits differ.\n",
    "stream": "# Other random numbers from the same distributions.\n",
    "precision": "# Other number formats: results differ by rounding.\n",
    "convergence": "# Changes the training itself: you allowed this.\n",
}

_BEHIND = {
    "script": "SHA-256 of the training script",
    "baseline_ms": "median step of the unmodified script, milliseconds",
    "tuned_ms": "median step with this recipe, milliseconds",
    "speedup": "baseline_ms / tuned_ms, from paired rounds",
    "speedup_ci": "95 % confidence interval",
    "verified": "does it still train the same? false: no; absent: could not be checked",
    "noise_floor": "smallest difference that could be seen here (0.01: 1 %)",
    "break_even_steps": "steps until the recipe has paid for its start-up cost",
    "peak_bytes": "the most memory that a trial of this set needed: of torch's allocator on a device, resident on a CPU",
    "baseline_peak_bytes": "the same of the unmodified script",
    "limit_bytes": "what was allowed with tune --fit",
    "gain": "what this one adds to the others (0.10: 10 % faster)",
    "gain_ci": "95 % confidence interval",
    "numerics": "saturate explain CLASS",
}


def dumps(recipe: Recipe, previous_text: str | None = None) -> str:
    """The recipe as TOML. `loads` gives an equal recipe back.

    With `previous_text`, the comments of that text are kept. Raises RecipeError when `previous_text` is not a recipe or
    when `recipe` holds what a recipe cannot (NaN, dates, null inside options).
    """
    head, tail, old = _HEAD, "", {}
    schema_line = f"schema = {recipe.schema}\n"
    if previous_text is not None and previous_text.strip("\ufeff \t\r\n"):
        head, schema_line, tail, old = _take_apart(previous_text, schema_line)
    parts = [head, schema_line]
    for name in ("made_for", "evidence"):
        values = _present(getattr(recipe, name))
        if values:
            parts.append(_table(f"[{name}]", values, old.get(name), _ABOVE[name]))
    for entry in recipe.techniques:
        above = _ABOVE_TECHNIQUE.get(entry.numerics, "")
        parts.append(_table("[[technique]]", _present(entry), old.get(("technique", entry.id)), above))
    text = "".join(parts) + tail
    loads(text)  # never hand out what cannot be read back
    return text


def write(path: str | os.PathLike[str], recipe: Recipe) -> None:
    """Write the recipe to `path` at once: a reader sees the old file or the new one, also after a crash.

    Comments in a recipe that is already there are kept. A file there that is not a recipe is kept as `PATH.old` (`.old1`, ...).
    Raises EnvironmentProblem when the folder or the disk does not allow it.
    """
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace(target, dumps(recipe, _previous(target)))
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot write the recipe {target}", cause=error.strerror or str(error),
            remedy="choose a folder that you may write to, with space left",
        ) from None


def _previous(target: Path) -> str | None:
    """The text whose comments are to be kept. What is not a recipe is moved out of the way, not lost."""
    if not target.is_file():
        return None
    try:
        read(target)
        return text_of(target)
    except RecipeError:
        names = (target.with_name(f"{target.name}.old{count or ''}") for count in itertools.count())
        os.replace(target, next(name for name in names if not name.exists()))
        return None


def _replace(target: Path, text: str) -> None:
    # Not `tempfile`, whose files are private: who may read a new recipe is for the user's umask to say.
    temporary = target.with_name(f".recipe-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8", newline="\n") as file:
            if target.exists():     # before a word of it is there: who may not read the old text may not read the new one
                os.fchmod(file.fileno(), target.stat().st_mode & 0o777)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _present(struct: msgspec.Struct) -> dict[str, Any]:
    """The fields worth writing: those that hold something."""
    values = msgspec.structs.asdict(struct)
    return {name: _text_safe(value) for name, value in values.items() if value not in (None, "", [], {})}


def _text_safe(value: Any) -> Any:
    """Arguments that were no UTF-8 carry lone surrogates, which cannot be written; null has no TOML."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list | tuple):
        return [_text_safe(item) for item in value]
    if isinstance(value, dict):
        return {_text_safe(key): _text_safe(item) for key, item in value.items()}
    if value is None:
        raise RecipeError("an option holds null inside an array or a table", remedy="TOML has no null: leave it out")
    return value


def _table(header: str, values: dict[str, Any], old: tuple[str, Table] | None, above: str) -> str:
    """One table with what stands above it, updated in place where it was there before."""
    lead, table = old if old is not None else ("\n" + above, tomlkit.table())
    trailing = f"{table.trivia.comment_ws}{table.trivia.comment}" if table.trivia.comment else ""
    if isinstance(table.get("options"), Table) and "options" in values:
        _update(table["options"], values["options"])  # the person's own [technique.options]
    _update(table, values)
    body = table.as_string().strip("\n")
    return f"{lead}{header}{trailing}\n{body}\n"


def _update(table: Table, values: dict[str, Any]) -> None:
    """Make the table hold `values`. What is equal stays as it was written, and so do comments behind changed values."""
    old = table.unwrap()
    for name in old:
        if name not in values:
            del table[name]
    for name, value in values.items():
        if name not in old:
            item = _item(value)
            if name in _BEHIND:
                item.comment(_BEHIND[name])
            table.add(name, item)  # tomlkit puts a value in front of sub-tables
        elif not same(old[name], value):
            table[name] = _item(value)


def _item(value: Any) -> Any:
    if isinstance(value, dict):
        inline = tomlkit.inline_table()
        inline.update({key: _item(item) for key, item in value.items()})
        return inline
    if isinstance(value, list):
        array = tomlkit.array()
        array.extend([_item(item) for item in value])
        return array
    return tomlkit.item(value)


def _take_apart(text: str, schema_line: str) -> tuple[str, str, str, dict[Any, tuple[str, Table]]]:
    """What stands before the first key, the schema's line, what follows the last table, and each table with what stands
    directly above it."""
    loads(text)
    try:
        document = tomlkit.parse(text.removeprefix("\ufeff").replace("\r\n", "\n"))
    except (TOMLKitError, RecursionError, ValueError) as error:
        raise RecipeError("the comments of the recipe that is there cannot be kept", cause=str(error),
                          remedy="move that file away") from None
    head, tables = "", {}
    lead = ""
    for key, item in document.body:
        if isinstance(item, Comment | Whitespace):
            lead += item.as_string()
        elif key is not None and key.key == "schema":
            head, lead = lead, ""
            if item.trivia.comment:
                schema_line = schema_line.rstrip("\n") + f"{item.trivia.comment_ws}{item.trivia.comment}\n"
        else:
            for table in item.body if isinstance(item, AoT) else [item]:
                if not isinstance(table, Table) or isinstance(table, InlineTable):
                    continue  # `made_for = {...}` or dotted keys: valid, and written as a table from now on
                name = ("technique", str(table["id"])) if isinstance(item, AoT) else key.key
                tables[name] = (lead, table)
                lead = _cut_tail(table)
    return head, schema_line, lead, tables


def _cut_tail(table: Table) -> str:
    """Take the comments and blank lines off the end of a table: they stand above the next one."""
    last = table
    while last.value.body and isinstance(last.value.body[-1][1], Table):
        last = last.value.body[-1][1]
    body = last.value.body
    tail: list[str] = []
    while body and isinstance(body[-1][1], Comment | Whitespace):
        tail.insert(0, body.pop()[1].as_string())
    return "".join(tail)
