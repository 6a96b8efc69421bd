"""What a search has found so far, on disk: one JSON line per candidate, synced, so that kill -9 loses at most one.

A line that is cut short, or of another search (other model, inputs or baseline scores), is passed over.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from saturate.errors import EnvironmentProblem

NAME = "candidates.jsonl"


class Journal:
    """`key` names the search: what it depends on, hashed. Entries are plain JSON values by a candidate's label."""

    def __init__(self, folder: Path, key: str, resume: bool = True):
        self.path, self.key = folder / NAME, key
        self.known: dict[str, dict[str, Any]] = self._read() if resume else {}
        if not resume:
            self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return found
        for line in text.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue            # cut short by the end of the process that wrote it
            if isinstance(entry, dict) and entry.get("key") == self.key and isinstance(entry.get("label"), str):
                found[entry["label"]] = entry
        return found

    def add(self, label: str, entry: dict[str, Any]) -> None:
        """Raises EnvironmentProblem where the disk takes no more."""
        line = json.dumps({"key": self.key, "label": label, **entry}) + "\n"
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
        self.known[label] = json.loads(line)

    def _ends_clean(self) -> bool:
        with open(self.path, "rb") as stream:
            stream.seek(-1, os.SEEK_END)
            return stream.read(1) == b"\n"
