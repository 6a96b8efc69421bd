"""Cuts a record down to what one page can hold, and says what it cut."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from saturate.records.result import StudyRecord
from saturate.report.words import clean, shell


@dataclass(frozen=True)
class Limits:
    """The most of everything: characters of a text, entries of a list, values of a series, points of a curve."""

    text: int
    items: int
    series: int
    points: int


#: From what a reader expects down to what fits under any circumstances; the first that fits is taken.
LADDER = (Limits(2000, 400, 400, 160), Limits(400, 120, 100, 80), Limits(160, 40, 32, 40), Limits(40, 12, 8, 12))

#: Fields whose keys are data; all other objects are structs, whose fields must stay.
_MAPPINGS = frozenset({"machine", "workload", "split_before", "split_after", "titles", "options"})

Told = TypeVar("Told", bound=msgspec.Struct)

_SIGNIFICANT = 6  # digits; more than any interval in a report resolves, and a third of the bytes
_INT_LIMIT = 2**64  # where the JSON encoder ends


def trim(record: StudyRecord, limits: Limits) -> StudyRecord:
    """The record within `limits`, cleaned of unsafe characters; what was left out is appended to `notes`."""
    flat, cuts = within(_flat_options(msgspec.to_builtins(record, enc_hook=str)), limits, _MAPPINGS)
    flat["notes"] = [*flat["notes"], *(f"Left out of this page for its size: {cut}." for cut in cuts)]
    return msgspec.convert(flat, StudyRecord)


def within(whole: Any, limits: Limits, mappings: frozenset[str]) -> tuple[Any, list[str]]:
    """Plain data within `limits`, cleaned, and one line for each kind of thing that was left out. `mappings` are the
    fields whose keys are data, and may be cut as well."""
    cuts: dict[str, str] = {}

    def walk(value: Any, name: str) -> Any:
        if isinstance(value, str):
            if len(value) <= limits.text:
                return clean(value)
            cuts[f"{name} text"] = f"{name}: texts longer than {limits.text:,} characters are cut"
            return clean(value[: limits.text - 1]) + "\u2026"
        if isinstance(value, float):
            return float(f"{value:.{_SIGNIFICANT}g}")
        if isinstance(value, int) and abs(value) >= _INT_LIMIT:
            return str(value)[: limits.text]
        if isinstance(value, dict) and name.rpartition(".")[2] in mappings:
            if len(value) > limits.items:
                cuts[name] = f"{name}: {limits.items:,} of {len(value):,} entries are shown"
            return {walk(str(key), name): walk(item, name) for key, item in list(value.items())[: limits.items]}
        if isinstance(value, dict):
            return {key: walk(item, f"{name}.{key}" if name else key) for key, item in value.items()}
        if isinstance(value, list | tuple):
            series = bool(value) and all(isinstance(item, float | int) for item in value)
            most = limits.series if series else limits.items
            if len(value) > most:
                kind = "values of a series, equally spaced," if series else "entries"
                cuts[name] = f"{name}: {most:,} of {len(value):,} {kind} are shown"
                value = [value[i * len(value) // most] for i in range(most)] if series else value[:most]
            return [walk(item, name) for item in value]
        return value

    return walk(whole, ""), list(cuts.values())


def _flat_options(record: dict[str, Any]) -> dict[str, Any]:
    """Nested option values as text: nothing in a page needs their structure, and text can be cut."""
    for outcome in record["result"]["techniques"]:
        outcome["options"] = {
            key: str(value) if isinstance(value, dict | list | tuple) else value
            for key, value in outcome["options"].items()
        }
    return record


def redact(command: list[str]) -> list[str]:
    """A command without the values of its arguments: the program and the names of options stay."""

    def name(word: str) -> str:
        if word.startswith("--"):
            option, equals, _ = word.partition("=")
            return option + ("=\u2026" if equals else "")
        if word.startswith("-"):
            return word[:2] + ("\u2026" if len(word) > 2 else "")
        return "\u2026"

    return command[:1] + [name(word) for word in command[1:]]


def command_without_values(command: list[str]) -> list[str]:
    """A command as it may be saved: what is saved is passed on, and an argument may be a token. The script's name stays: it is no
    argument of it, and tells records apart.

    >>> command_without_values(["python", "-u", "train.py", "--token", "t0k3n", "small"])
    ['python', '-u', 'train.py', '--token', '…', '…']
    """
    shown = redact(command)
    behind = ["", *command]
    script = next((i for i, word in enumerate(command) if word.endswith(".py") and word[0] != "-" and not _CODE.fullmatch(behind[i])), None)
    if script is not None:
        shown[script] = command[script]
    return shown


#: Behind it a whole program stands in one word (`bash -lc "TOKEN=t0k3n python train.py"`), and not a script's name.
_CODE = re.compile(r"-[A-Za-z]*c")


def without_values(record: Told) -> Told:
    """A record with a `command` and a `next_command`, without the values of the workload's arguments."""
    command = command_without_values(record.command)       # type: ignore[attr-defined]
    following: str = record.next_command    # type: ignore[attr-defined]
    ours, dashes, theirs = following.partition(" -- ")
    return msgspec.structs.replace(
        record, command=command, next_command=f"{ours} -- {shell(command)}" if dashes and theirs else following)
