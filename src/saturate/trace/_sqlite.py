"""A SQLite file that another program wrote: opened without touching it, and read without trusting it.

It is opened `immutable`: SQLite then takes no lock and writes no journal, so nothing appears beside the user's file.
A table that is really a view, or virtual, is not read: its definition is a program of the file's author.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saturate.errors import TraceError
from saturate.trace.columns import Column

MAGIC = b"SQLite format 3\x00"
CHUNK_ROWS = 1 << 14

#: No row takes fewer bytes.
SHORTEST = 4

#: Of one cell or row, in bytes; the longest kernel names of template libraries have some 10^5.
LONGEST = 1 << 24

_VIRTUAL = re.compile(r"\s*CREATE\s+VIRTUAL", re.IGNORECASE)

#: Stands for a cell that holds no integer. Beyond any time or identifier of a trace, and far from int64 overflow.
MISSING = -(1 << 62)


def check(path: Path) -> int:
    """The size in bytes of what looks like a whole SQLite database. Raises TraceError with cause and remedy."""
    try:
        with path.open("rb") as file:
            head = file.read(100)
            size = file.seek(0, 2)
    except OSError as error:
        raise TraceError(f"{path} cannot be read", cause=error.strerror or str(error)) from error
    if not size:
        raise TraceError(f"{path} is empty (0 bytes)", cause="whatever wrote it did not finish",
                         remedy="export it again")
    if head[:16] != MAGIC[:len(head)]:
        raise TraceError(f"{path} is not a SQLite database", cause="byte 0: not the signature of SQLite",
                         remedy=f"a report of Nsight Systems is exported by: nsys export --type sqlite {path}")
    # Its format: sqlite.org/fileformat2.html, 1.3. The page count holds where both change counters agree.
    page_bytes = int.from_bytes(head[16:18], "big")
    promised = (65536 if page_bytes == 1 else page_bytes) * int.from_bytes(head[28:32], "big")
    if len(head) < 100 or (head[24:28] == head[92:96] and size < promised):
        where = f"; its header promises {promised:,} bytes" if len(head) == 100 else ", inside its header"
        raise TraceError(f"{path} is truncated", cause=f"it ends at byte {size:,}{where}",
                         remedy="copy or export it again")
    journal = path.with_name(path.name + "-journal")
    if journal.exists() and journal.stat().st_size:
        raise TraceError(f"{path} is half written", remedy="wait for the export, or repeat it",
                         cause=f"{journal.name} lies beside it: an export is running or was interrupted")
    return size


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def whole_numbers(rows: Sequence[tuple[Any, ...]]) -> Column:
    """Rows as an int64 array (rows, columns); MISSING for what is no number."""
    try:
        return np.array(rows, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        # SQLite stores any type in any column: NULL, text or a blob where the schema says INTEGER.
        return np.array([[cell if type(cell) is int else MISSING for cell in row] for row in rows], dtype=np.int64)


class Database:
    """Read access; `tables` maps each real table to its columns. Every method may raise `sqlite3.Error`."""

    def __init__(self, path: Path):
        self._connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        self._texts: dict[int, str] | None = None
        self._most = path.stat().st_size // SHORTEST
        self._connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
        try:
            for setting in ("query_only = 1", "trusted_schema = 0", "cell_size_check = 1"):
                self._connection.execute(f"PRAGMA {setting}")
            self.tables = self._schema()
        except BaseException:
            self._connection.close()
            raise

    def _schema(self) -> dict[str, frozenset[str]]:
        found = self._connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
        tables = {}
        for name, sql in found:
            if isinstance(name, str) and isinstance(sql, str) and not _VIRTUAL.match(sql):
                columns = self._connection.execute("SELECT name FROM pragma_table_info(?)", (name,))
                tables[name] = frozenset(column for column, in columns)
        return tables

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *raised: object) -> None:
        self._connection.close()

    def find(self, table: str) -> str:
        """The table of that name, or the newest of its versions (`NVTX_EVENTS_V3`); empty where there is none."""
        versions = [name for name in self.tables if re.fullmatch(rf"{table}(_V\d{{1,9}})?", name)]
        return max(versions, key=lambda name: int(name[len(table) + 2:] or 0), default="")

    def select(self, table: str, expressions: Sequence[str]) -> Iterator[list[tuple[Any, ...]]]:
        """Rows, chunk after chunk."""
        cursor = self._connection.execute(f"SELECT {', '.join(expressions)} FROM {quoted(table)}")
        while rows := cursor.fetchmany(CHUNK_ROWS):
            yield rows

    def all(self, table: str, columns: Sequence[str], most: int = 10_000) -> list[dict[str, Any]]:
        """At most `most` rows of a small table, with None for columns it lacks; nothing where it is not there."""
        present = [name for name in columns if name in self.tables.get(table, ())]
        if not present:
            return []
        rows = self._connection.execute(f"SELECT {', '.join(map(quoted, present))} FROM {quoted(table)} LIMIT {most}")
        return [dict.fromkeys(columns) | dict(zip(present, row)) for row in rows]

    def rows(self, table: str) -> int:
        """How many rows a table has: its last row id, as nsys deletes none, and counting reads the whole table."""
        try:
            last = self._connection.execute(f"SELECT max(rowid) FROM {quoted(table)}").fetchone()[0] or 0
        except sqlite3.OperationalError:        # declared WITHOUT ROWID
            last = -1
        if type(last) is not int or not 0 <= last <= self._most:        # a column may have that name, and hold anything
            last = self._connection.execute(f"SELECT count(*) FROM {quoted(table)}").fetchone()[0]
        return last

    def string(self, number: int) -> str | None:
        """A text of the table StringIds, or None."""
        if not {"id", "value"} <= self.tables.get("StringIds", frozenset()):
            return None
        if self._texts is None and not self._indexed():
            self._texts = dict(self._connection.execute("SELECT id, value FROM StringIds"))
        if self._texts is not None:
            text = self._texts.get(number)
        else:
            row = self._connection.execute("SELECT value FROM StringIds WHERE id = ?", (number,)).fetchone()
            text = row[0] if row else None
        return text if isinstance(text, str) else None

    def _indexed(self) -> bool:
        """Whether `StringIds.id` is the key, as nsys declares it; else every look-up would read the whole table."""
        key = self._connection.execute("SELECT pk FROM pragma_table_info('StringIds') WHERE name = 'id'").fetchone()
        return bool(key and key[0])
