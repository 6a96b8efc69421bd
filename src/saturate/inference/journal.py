"""What a search has found so far, on disk: one JSON line per candidate, synced, so that kill -9 loses at most one.

A line that is cut short or was changed since, or of another search (other model, inputs, versions or machine), is passed over. So
is one that rests on something that is different now, such as the scores of another check.

Contenders meet the same samples of the confirmation, at a confidence by their place among them (`accuracy.level`). So a place is kept
from one search to the next: a search that began anew with the first would spend more than the promised chance of error.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from saturate import __version__
from saturate.errors import EnvironmentProblem
from saturate.inference import hardware, identity
from saturate.machine import facts as machine

NAME = "candidates.jsonl"

#: What the names of those begin with that met the samples of the confirmation.
_TURN = "turn: "


class Journal:
    """`key` names the search: what all of it depends on, hashed. `more`: what only some entries rest on, by name. `known` are
    entries, plain JSON values, by what `add` called them. Raises EnvironmentProblem where the file cannot be read."""

    def __init__(self, folder: Path, key: str, resume: bool = True, more: Mapping[str, str] | None = None):
        self.path, self.key, self.more = folder / NAME, key, more or {}
        try:
            self.known: dict[str, dict[str, Any]] = self._read() if resume else {}
            if not resume:
                self.path.unlink(missing_ok=True)
        except OSError as error:
            raise EnvironmentProblem(f"what was found before cannot be read from {self.path}", cause=str(error),
                                     remedy="remove it, or choose another folder with workdir") from error

    def _read(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return found
        for line in text.splitlines():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue            # cut short by the end of the process that wrote it
            if isinstance(entry, dict) and entry.pop("digest", None) == _seal(entry) and entry["key"] == self.key and self._holds(entry):
                found[entry["name"]] = entry
        return found

    def _holds(self, entry: dict[str, Any]) -> bool:
        return all(self.more.get(name) == value for name, value in entry["rests"].items())

    def add(self, name: str, entry: dict[str, Any], rests: Collection[str] = ()) -> None:
        """`rests`: names of `more` that must be the same for the entry to hold. Raises EnvironmentProblem where the disk
        takes no more."""
        entry = json.loads(json.dumps({"key": self.key, "name": name, "rests": {one: self.more.get(one) for one in rests}, **entry}))
        line = json.dumps({**entry, "digest": _seal(entry)}) + "\n"
        try:
            with open(self.path, "ab") as stream:
                if stream.tell() and not self._ends_clean():
                    stream.write(b"\n")     # the line before was cut short
                stream.write(line.encode())
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise EnvironmentProblem(f"what was found cannot be written to {self.path}", cause=str(error),
                                     remedy="free some space and give the same command again: with "
                                            f"workdir={str(self.path.parent)!r} it goes on from here") from error
        self.known[name] = entry

    def _ends_clean(self) -> bool:
        with open(self.path, "rb") as stream:
            stream.seek(-1, os.SEEK_END)
            return stream.read(1) == b"\n"


def _seal(entry: dict[str, Any]) -> str:
    """Of a line without its digest: what a person or a bad disk made of it is no finding."""
    return hashlib.blake2b(json.dumps(entry, sort_keys=True).encode(), digest_size=8).hexdigest()


def turn(name: str, turns: list[str], keep: Callable[[str], None]) -> int:
    """The place of a contender among those that met the samples of the confirmation (`turns`, with the names that they have in a
    journal), from 0. It keeps it: its bound is the same each time, whatever the budget. `keep` writes down the name of a new one."""
    name = f"{_TURN}{name}"
    if name not in turns:
        turns.append(name)
        keep(name)
    return turns.index(name)


def turns_of(known: Iterable[str]) -> list[str]:
    """Those among the names of a journal, in their order."""
    return [name for name in known if name.startswith(_TURN)]


def key_of(torch: Any, device: str, *given: Any) -> str:
    """What all of a search's results depend on: what was given, versions, and the machine."""
    return _digest(given, __version__, str(torch.__version__), machine.cpu_name(), device, hardware.gpu_name(torch, device))


def rests(torch: Any, check: Callable[..., Any] | None, budget: Any = None, heard: tuple[Any, ...] = ()) -> dict[str, str]:
    """What some of a search's results depend on: the scores on the check, with its data and what it says of the model (`heard`); and
    on the budget who was worth scoring. A check whose code nobody can see may be another one each time."""
    if check is None:
        return {"check": "", "budget": ""}
    return {"check": _digest(identity.of_callable(torch, check) or secrets.token_hex(8), *heard), "budget": _digest(budget)}


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()
