"""What a search has found so far, on disk: one JSON line per candidate, synced, so that kill -9 loses at most one.

A line that is cut short or was changed since, or of another search (other model, inputs, versions or machine), is passed over. So
is one that rests on something that is different now, such as the scores of another check.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from saturate.errors import EnvironmentProblem

NAME = "candidates.jsonl"


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
            if isinstance(entry, dict) and entry.pop("digest", None) == _digest(entry) and entry["key"] == self.key and self._holds(entry):
                found[entry["name"]] = entry
        return found

    def _holds(self, entry: dict[str, Any]) -> bool:
        return all(self.more.get(name) == value for name, value in entry["rests"].items())

    def add(self, name: str, entry: dict[str, Any], rests: Collection[str] = ()) -> None:
        """`rests`: names of `more` that must be the same for the entry to hold. Raises EnvironmentProblem where the disk
        takes no more."""
        entry = json.loads(json.dumps({"key": self.key, "name": name, "rests": {one: self.more.get(one) for one in rests}, **entry}))
        line = json.dumps({**entry, "digest": _digest(entry)}) + "\n"
        try:
            with open(self.path, "ab") as stream:
                if stream.tell() and not self._ends_clean():
                    stream.write(b"\n")     # the line before was cut short
                stream.write(line.encode())
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise EnvironmentProblem(f"what was found cannot be written to {self.path}", cause=str(error),
                                     remedy="free some space and give the same command again: it goes on from here") from error
        self.known[name] = entry

    def _ends_clean(self) -> bool:
        with open(self.path, "rb") as stream:
            stream.seek(-1, os.SEEK_END)
            return stream.read(1) == b"\n"


def _digest(entry: dict[str, Any]) -> str:
    """Of a line without its digest: what a person or a bad disk made of it is no finding."""
    return hashlib.blake2b(json.dumps(entry, sort_keys=True).encode(), digest_size=8).hexdigest()
