"""The study file: one SQLite database per study, so that a kill at any moment loses at most the running round.

Where two processes do not live at once, a round is known when both have run: then it loses the running pair of them. So it does
where a loader's workers may have been ahead, until it is known whether they were.

What is kept are answers: facts, finished races and verifications by question, and the rounds of unfinished races. The
loop asks its questions in an order that follows from the answers alone, so the same command walks through the same
questions again and finds the answers already there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from saturate.errors import EnvironmentProblem, SaturateError, StudyDamaged, UsageError
from saturate.trial import layers, mounts
from saturate.trial.lock import FolderLock

VERSION = 2
NAME = "study.sqlite"
#: A row's `digest` is that of the rest: what a person or a bad disk made of an answer is none.
_TABLES = """
begin immediate;
create table meta (key text primary key, value text not null, digest text not null);
create table answers (question text primary key, value text not null, digest text not null);
create table rounds (
    question text not null, pair integer not null, round integer not null,
    a_ms real not null, b_ms real not null, log_ratio real not null, digest text not null, primary key (question, pair, round));
create table trials (id text primary key, record text not null, digest text not null);
create table phases (name text primary key, seconds real not null);
insert into meta values ('version', '{version}', '{digest}');
commit;
"""

#: What SQLite reports when the machine, not the file, is at fault (https://www.sqlite.org/rescode.html).
_ENVIRONMENT = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN,
                sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PROTOCOL)

#: Bytes that SQLite takes for the path of a file (MAX_PATHNAME in its os_unix.c), less what it appends for its journals.
_LONGEST_PATH = 512 - 10

#: A write-ahead log needs memory that all processes of all machines share; these file systems have none, and those in user space
#: (`fuse.sshfs`, `fuse.glusterfs`) as a rule.
_REMOTE = ("fuse", "nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "gpfs", "beegfs", "afs", "glusterfs", "virtiofs")


#: The name of a run folder, see `new_run`. A folder that was given with --dir may have others in it.
_RUN = f"{6 * '[0-9a-f]'}-{4 * '[0-9]'}-{6 * '[0-9]'}*"


class StudyLock(FolderLock):
    """Held by the one process that works in a study folder. What killed ones left of their trials there is discarded first."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        # The processes of a drill have folders of their own in that of their cage.
        for trial in (*folder.glob(f"{_RUN}/*/p[0-9]*"), *folder.glob(f"{_RUN}/*")):
            with suppress(OSError, RuntimeError):       # another user's, or (before Python 3.13) a loop of links: that stops no new study
                # What a link leads to is not ours: a project may have folders called `layers` and `shadow` of its own.
                if trial.resolve().is_relative_to(folder.resolve()) and layers.left_behind(trial):
                    layers.clear_away(trial)

    def _make(self, folder: Path) -> None:
        if folder.is_dir() and not _is_ours(folder):
            raise UsageError(f"{folder} holds files that saturate did not write",
                             cause="a study keeps a lock, a cache and files of its own there, and trials write to that cache",
                             remedy=f"name a new folder: --dir {shlex.quote(str(folder / 'saturate'))}")
        super()._make(folder)
        if not (folder / ".gitignore").exists():
            (folder / ".gitignore").write_text("*\n", encoding="utf-8")     # nobody wants a study in a commit


def _is_ours(folder: Path) -> bool:
    """Whether a folder is empty, or one that a study worked in: it has run folders, or nothing but what every study makes."""
    found = set(os.listdir(folder))
    if not found or folder.name == ".saturate" or any(map(Path.is_dir, folder.glob(_RUN))):
        return True
    return ".gitignore" in found <= {".gitignore", "lock", "cache"} and (folder / ".gitignore").read_bytes() in (b"*\n", b"")


class Store:
    """Typed access to one study file.

    Raises StudyDamaged when the file is something else, here or later, and EnvironmentProblem when the disk is full or
    does not allow it. A file that is not a study of this version is left as it is.
    """

    def __init__(self, folder: Path):
        self.path = folder / NAME
        folder.mkdir(parents=True, exist_ok=True)
        with self._in_our_words():
            self._db = self._connect()
        try:
            with self._in_our_words():
                self._open(_file_system(folder).partition(".")[0] in _REMOTE)
        except SaturateError:
            self._db.close()
            raise

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, isolation_level=None, timeout=30)

    def _open(self, remote: bool) -> None:
        damage = [row[0] for row in self._execute("pragma quick_check(1)")]
        if damage != ["ok"]:
            raise self._damaged(str(damage[0]))
        tables = self._execute("select name from sqlite_master where type = 'table'")
        if tables and (found := self._version()) != str(VERSION):
            raise StudyDamaged(f"{self.path} was written by another version of saturate (format {found})",
                               remedy="use --dir FOLDER for a new study, or that version of saturate")
        if remote or not self._takes_log():
            self._without_log()
        self._execute("pragma synchronous=normal")
        if not tables:
            self._db.executescript(_TABLES.format(version=VERSION, digest=_digest("version", str(VERSION))))

    def _takes_log(self) -> bool:
        """Whether it has a write-ahead log now. Where memory cannot be shared, that shows at the first lock."""
        try:
            found = self._db.execute("pragma journal_mode=wal").fetchall()
            self._db.executescript("begin immediate; rollback")
        except sqlite3.OperationalError:        # of another cause, it comes again
            return False
        return found == [("wal",)]

    def _without_log(self) -> None:
        """Take a rollback journal. A file that has a log already is left by it without shared memory only by a new connection that
        has the file to itself (https://www.sqlite.org/wal.html#use_of_wal_without_shared_memory)."""
        self._db.close()
        self._db = self._connect()
        for pragma in ("locking_mode=exclusive", "journal_mode=delete", "locking_mode=normal"):
            self._execute(f"pragma {pragma}")

    def _version(self) -> str | None:
        """Of the file, whatever else another version has in its rows."""
        rows = self._execute("select value from meta where key = 'version'")
        return str(rows[0][0])[:20] if rows else None

    def close(self) -> None:
        self._db.close()

    def _execute(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """All rows at once: a cursor would read on, and fail, outside our hands."""
        with self._in_our_words():
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def _in_our_words(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", None)     # absent when not the library but the module complains
            if code is not None and code & 0xFF in _ENVIRONMENT and code != sqlite3.SQLITE_IOERR_SHORT_READ:
                too_long = code == sqlite3.SQLITE_CANTOPEN and len(os.fsencode(os.path.realpath(self.path))) > _LONGEST_PATH
                raise EnvironmentProblem(
                    f"cannot work with the study file {self.path}", cause=f"{error} ({error.sqlite_errorname})",
                    remedy="its path is longer than SQLite takes (some 500 bytes): name a folder with a shorter one, --dir FOLDER" if too_long
                    else "free space there, or choose a writable folder on another disk with --dir FOLDER",
                ) from error
            raise self._damaged(str(error)) from error

    def _damaged(self, cause: str) -> StudyDamaged:
        return StudyDamaged(f"{self.path} is not a readable study", cause=cause,
                            remedy=f"move {self.path.parent} away and run the command again; nothing in it is deleted")

    # -- meta ------------------------------------------------------------------------------------------------------

    def meta(self, key: str) -> Any:
        return self._read("select * from meta where key = ?", key)

    def set_meta(self, key: str, value: Any) -> None:
        self._write("meta", key, json.dumps(value))

    # -- answers ---------------------------------------------------------------------------------------------------

    def answer(self, question: str) -> Any:
        """The finished answer to `question`, or None."""
        return self._read("select * from answers where question = ?", question)

    def set_answer(self, question: str, value: Any) -> None:
        self._write("answers", question, json.dumps(value))

    # -- rounds ----------------------------------------------------------------------------------------------------

    def add_round(self, question: str, pair: int, number: int, a_ms: float, b_ms: float, log_ratio: float) -> None:
        self._write("rounds", question, pair, number, *(float(value) + 0.0 for value in (a_ms, b_ms, log_ratio)))     # SQLite keeps no -0.0

    def drop_rounds(self, question: str, pair: int) -> None:
        self._execute("delete from rounds where question = ? and pair = ?", (question, pair))

    def rounds(self, question: str) -> list[list[tuple[float, float, float]]]:
        """Per pair, per round: (a_ms, b_ms, log ratio)."""
        pairs: dict[int, list[tuple[float, float, float]]] = {}
        for row in self._execute("select * from rounds where question = ? order by pair, round", (question,)):
            _, pair, _, a_ms, b_ms, ratio = self._whole(row)
            pairs.setdefault(pair, []).append((a_ms, b_ms, ratio))
        return [pairs[pair] for pair in sorted(pairs)]

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def set_trial(self, identity: str, record: Any) -> None:
        self._write("trials", identity, json.dumps(record))

    def trials(self) -> list[Any]:
        return [self._value(row) for row in self._execute("select * from trials order by rowid")]

    def add_seconds(self, phase: str, seconds: float) -> None:
        self._execute(
            "insert into phases values (?, ?) on conflict (name) do update set seconds = seconds + excluded.seconds",
            (phase, seconds))

    def phases(self) -> list[tuple[str, float]]:
        found = self._execute("select name, seconds from phases order by rowid")
        if not all(isinstance(name, str) and isinstance(seconds, float) and 0 <= seconds < math.inf for name, seconds in found):
            raise self._damaged("a phase has no duration")
        return found  # type: ignore[return-value]

    # -- rows ------------------------------------------------------------------------------------------------------

    def _write(self, table: str, *values: Any) -> None:
        marks = ", ".join("?" * (len(values) + 1))
        self._execute(f"insert or replace into {table} values ({marks})", (*values, _digest(*values)))

    def _read(self, query: str, key: str) -> Any:
        rows = self._execute(query, (key,))
        return self._value(rows[0]) if rows else None

    def _value(self, row: tuple[Any, ...]) -> Any:
        """Of a row of a name and JSON. Raises StudyDamaged where it is none: the digests keep no secret, so anybody can make them fit."""
        name, text = self._whole(row)[:2]
        try:
            return json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise self._damaged(f"the entry {str(name)[:80]!r} is no JSON ({type(error).__name__})") from error

    def _whole(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """A row without its digest. Raises StudyDamaged where that is not its own."""
        *values, digest = row
        if digest != _digest(*values):
            raise self._damaged(f"the entry {str(values[0])[:80]!r} is not as it was written")
        return tuple(values)


def _digest(*values: Any) -> str:
    return hashlib.blake2b(repr(values).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def find_unfinished(folder: Path, identity: str, unreadable: Callable[[EnvironmentProblem], None],
                    usable: Callable[[Store], bool] = lambda store: True) -> Path | None:
    """The folder of an unfinished study with this identity below `folder` that is `usable`, newest first.

    A study that cannot be read is passed by, as it is: it must not stop a new one. `unreadable` is told of it.
    """
    seen = [(path.stat(), path) for path in folder.glob(f"*/{NAME}")]
    for _, path in sorted(((found.st_mtime, path) for found, path in seen if found.st_size), reverse=True):   # empty: just begun
        try:
            store = Store(path.parent)
            try:
                if store.meta("identity") == identity and not store.meta("finished") and usable(store):
                    return path.parent
            finally:
                store.close()
        except EnvironmentProblem as problem:
            unreadable(problem)
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


def _file_system(folder: Path) -> str:
    """The type of the file system that `folder` lies on, as the table of mounts calls it."""
    place = os.path.realpath(folder)
    above = [mount for mount in mounts.all_mounts() if place == mount.at or place.startswith(mount.at.rstrip("/") + "/")]
    return max(above, key=lambda mount: (len(mount.at), mount.number)).kind if above else ""
