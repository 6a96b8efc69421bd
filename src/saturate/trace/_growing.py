"""Columns that grow chunk by chunk, in hardly more memory than they take in the end."""

from __future__ import annotations

import sqlite3
from dataclasses import fields

import numpy as np

from saturate.trace.columns import Column, GpuEvents, HostEvents


class Growing:
    """The columns of one table of a Trace, and `process`, the unique id of the process.

    A column is one value until it gets a second one: half of all columns never do (one process, nothing recorded).
    Then it is allocated at once for all rows that may come, and pages that are never written cost nothing.
    """

    def __init__(self, table: type[GpuEvents] | type[HostEvents], most: int):
        empty = table()
        self._dtypes = {field.name: getattr(empty, field.name).dtype for field in fields(table)}
        self._dtypes["process"] = np.dtype("i8")
        self._held: dict[str, Column] = {name: np.empty(0, dtype) for name, dtype in self._dtypes.items()}
        self._constant = set(self._dtypes)
        self._most = most
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, count: int, **columns: Column) -> None:
        """`count` rows; what is not given is unknown, and so is a number that its column cannot hold.

        Raises sqlite3.DatabaseError for more rows than the table's row ids allow.
        """
        if not count:
            return
        first, self._rows = self._rows, self._rows + count
        if self._rows > self._most:
            raise sqlite3.DatabaseError("a table gives more rows than it has row ids")
        for name, dtype in self._dtypes.items():
            given = columns.get(name)
            if given is None:
                given = np.array([0 if name == "graph" else np.nan if dtype.kind == "f" else -1])
            elif name not in ("start", "end"):
                given = np.where((given < 0) | (given > np.iinfo(dtype).max), -1, given)
            self._put(name, given.astype(dtype), first)

    def _put(self, name: str, given: Column, first: int) -> None:
        held = self._held[name]
        if name in self._constant:
            value = held if first else given[:1].copy()
            if bool((_bits(given) == _bits(value)).all()):
                self._held[name] = value
                return
            self._constant.remove(name)
            held = self._held[name] = np.empty(self._most, held.dtype)
            held[:first] = value
        held[first:self._rows] = given

    def sorted(self) -> dict[str, Column]:
        """The columns by start; equal starts stay in the order of the file. Constant ones cannot be written to.

        Once only: the columns are given up, one after the other, so that at most one exists twice.
        """
        def whole(name: str, column: Column) -> Column:
            constant = name in self._constant and self._rows
            return np.broadcast_to(column, self._rows) if constant else column[:self._rows]

        start = whole("start", self._held["start"])
        order = None if bool(np.all(start[1:] >= start[:-1])) else np.argsort(start, kind="stable")
        done: dict[str, Column] = {}
        for name in self._dtypes:
            column = whole(name, self._held.pop(name))
            done[name] = column if order is None or name in self._constant else column[order]
        return done


def _bits(column: Column) -> Column:
    """The same memory as unsigned integers: equal means the same value, of NaN too."""
    return column.view(f"u{column.itemsize}")
