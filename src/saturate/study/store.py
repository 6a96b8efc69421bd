"""The study file: one SQLite database per study, so that a kill at any moment loses at most the running round.

What is kept are answers: facts, finished races and verifications by question, and the rounds of unfinished races. The
loop asks its questions in an order that follows from the answers alone, so the same command walks through the same
questions again and finds the answers already there.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

from saturate.errors import EnvironmentProblem, StudyDamaged, StudyLocked

VERSION = 1
NAME = "study.sqlite"
_TABLES = """
create table if not exists meta (key text primary key, value text not null);
create table if not exists answers (question text primary key, value text not null);
create table if not exists rounds (
    question text not null, pair integer not null, round integer not null,
    a_ms real not null, b_ms real not null, log_ratio real not null, primary key (question, pair, round));
create table if not exists trials (id text primary key, record text not null);
create table if not exists phases (name text primary key, seconds real not null);
"""


class StudyLock:
    """Held by the one process that works in a study folder. The kernel drops it however that process ends."""

    def __init__(self, folder: Path):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(folder / "lock", "a+", encoding="utf-8")  # noqa: SIM115 - held open as long as the lock
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot write in {folder}", cause=str(error), remedy="choose a writable folder with --dir FOLDER",
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise StudyLocked(
                f"another saturate is working in {folder}", evidence=f"process {holder}",
                remedy="wait until it has ended, or give this one a folder of its own with --dir FOLDER",
            ) from error
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        self._file.close()


class Store:
    """Typed access to one study file. Raises StudyDamaged when the file is something else."""

    def __init__(self, folder: Path):
        self.path = folder / NAME
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(self.path, isolation_level=None, timeout=30)
            # A write-ahead log needs shared memory between processes; network file systems have none.
            mode = self._db.execute("pragma journal_mode=wal").fetchone()[0]
            if mode != "wal":
                self._db.execute("pragma journal_mode=delete")
            self._db.execute("pragma synchronous=normal")
            self._db.executescript(_TABLES)
            found = self.meta("version")
        except sqlite3.DatabaseError as error:
            raise StudyDamaged(
                f"{self.path} is not a readable study", cause=str(error),
                remedy=f"move {folder} away and run the command again; nothing in it is deleted",
            ) from error
        if found is None:
            self.set_meta("version", VERSION)
        elif found != VERSION:
            raise StudyDamaged(f"{self.path} was written by another version of saturate (format {found})",
                               remedy="use --dir FOLDER for a new study, or that version of saturate")

    def close(self) -> None:
        self._db.close()

    # -- meta ------------------------------------------------------------------------------------------------------

    def meta(self, key: str) -> Any:
        row = self._db.execute("select value from meta where key = ?", (key,)).fetchone()
        return None if row is None else self._loads(row[0])

    def set_meta(self, key: str, value: Any) -> None:
        self._db.execute("insert or replace into meta values (?, ?)", (key, json.dumps(value)))

    # -- answers ---------------------------------------------------------------------------------------------------

    def answer(self, question: str) -> Any:
        """The finished answer to `question`, or None."""
        row = self._db.execute("select value from answers where question = ?", (question,)).fetchone()
        return None if row is None else self._loads(row[0])

    def set_answer(self, question: str, value: Any) -> None:
        self._db.execute("insert or replace into answers values (?, ?)", (question, json.dumps(value)))

    # -- rounds ----------------------------------------------------------------------------------------------------

    def add_round(self, question: str, pair: int, number: int, a_ms: float, b_ms: float, log_ratio: float) -> None:
        self._db.execute("insert or replace into rounds values (?, ?, ?, ?, ?, ?)",
                         (question, pair, number, a_ms, b_ms, log_ratio))

    def rounds(self, question: str) -> list[list[tuple[float, float, float]]]:
        """Per pair, per round: (a_ms, b_ms, log ratio)."""
        pairs: dict[int, list[tuple[float, float, float]]] = {}
        query = "select pair, a_ms, b_ms, log_ratio from rounds where question = ? order by pair, round"
        for pair, a_ms, b_ms, ratio in self._db.execute(query, (question,)):
            pairs.setdefault(pair, []).append((a_ms, b_ms, ratio))
        return [pairs[pair] for pair in sorted(pairs)]

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def set_trial(self, identity: str, record: Any) -> None:
        self._db.execute("insert or replace into trials values (?, ?)", (identity, json.dumps(record)))

    def trials(self) -> list[Any]:
        return [self._loads(row[0]) for row in self._db.execute("select record from trials order by rowid")]

    def add_seconds(self, phase: str, seconds: float) -> None:
        self._db.execute(
            "insert into phases values (?, ?) on conflict (name) do update set seconds = seconds + excluded.seconds",
            (phase, seconds))

    def phases(self) -> list[tuple[str, float]]:
        return list(self._db.execute("select name, seconds from phases order by rowid"))

    def _loads(self, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise StudyDamaged(f"{self.path} holds a damaged entry", cause=str(error),
                               remedy="move the study folder away and run the command again") from error


def find_unfinished(folder: Path, identity: str) -> Path | None:
    """The folder of an unfinished study with this identity below `folder`, newest first."""
    candidates = sorted(folder.glob(f"*/{NAME}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in candidates:
        try:
            store = Store(path.parent)
        except StudyDamaged:
            continue                # an old study that cannot be read must not stop a new one
        try:
            if store.meta("identity") == identity and not store.meta("finished"):
                return path.parent
        finally:
            store.close()
    return None


def new_run(folder: Path, identity: str) -> Path:
    """A fresh run folder, named by the study and the moment."""
    stamp = time.strftime("%m%d-%H%M%S")
    base = f"{identity[:6]}-{stamp}"
    for suffix in ("", *(f"-{n}" for n in range(2, 100))):
        try:
            (folder / (base + suffix)).mkdir(parents=True)
            return folder / (base + suffix)
        except FileExistsError:
            continue
    raise EnvironmentProblem(f"no free run folder in {folder}")
