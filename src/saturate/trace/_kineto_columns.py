"""Columns that grow: interning, exact times and chunks, for the Kineto reader."""

from __future__ import annotations

from collections.abc import Iterable
from mmap import mmap
from operator import attrgetter
from typing import Any

import numpy as np

from saturate.trace._kineto_events import ANNOTATION, INT64, LATEST_NS, UNKNOWN
from saturate.trace.columns import Column, GpuEvents, HostEvents


class TooFine(Exception):
    """float64 does not tell the nanoseconds of these times apart."""


class Index(dict[Any, int]):
    """Interns: an unknown key gets the next number."""

    def __missing__(self, key: Any) -> int:
        found = self[key] = len(self)
        return found

    def all(self, keys: Iterable[Any]) -> Column:
        return np.array([self[key] for key in keys], "i8")


class Names(Index):
    """Names, and which of them are annotations whatever their category."""

    def __init__(self) -> None:
        super().__init__()
        self.marked: list[int] = []

    def __missing__(self, key: str) -> int:
        found = super().__missing__(key)
        if ANNOTATION.match(key):
            self.marked.append(found)
        return found

    def is_annotation(self, ids: Column) -> Column:
        return np.isin(ids, self.marked)


class Threads(Index):
    """(pid, tid) -> index of its label; numbers and their text are the same thread."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: list[str] = []
        self.pids: list[int] = []
        self._of = Index()

    def __missing__(self, key: tuple[int | str, int | str]) -> int:
        label = f"{key[0]}/{key[1]}"
        found = self[key] = self._of[label]
        if found == len(self.labels):
            self.labels.append(label)
            self.pids.append(small(key[0]))
        return found


class Table:
    """Columns that grow, page by page. All large arrays come from the system directly, not from the heap, where
    arrays that come and go leave as much memory again in holes."""

    def __init__(self) -> None:
        self._rows = 0
        self._pages: dict[str, list[Column]] = {}

    def add(self, columns: dict[str, Column]) -> None:
        if not len(columns["start"]):
            return
        for name, values in columns.items():
            pages = self._pages.setdefault(name, [])
            held = pages[0].dtype if pages else _SMALL.get(name, _DTYPES[name])
            dtype = held if _fits(values, held) or name not in _SMALL else _wider(values, _DTYPES[name])
            if dtype != held:
                pages[:] = [_copied(page, dtype) for page in pages]
            values, row = narrow(values, dtype), self._rows
            while len(values):
                if row // _PAGE == len(pages):
                    pages.append(_blank(_PAGE, dtype))
                part = values[: _PAGE - row % _PAGE]
                pages[-1][row % _PAGE : row % _PAGE + len(part)] = part
                values, row = values[len(part) :], row + len(part)
        self._rows += len(columns["start"])

    def columns(self) -> dict[str, Column]:
        """Sorted by start, longer events first. Empties the table on the way: no more than one column is there
        twice."""
        if not self._rows:
            return {}
        start = self._joined("start")
        if "end" in self._pages:
            order = np.argsort(-self._joined("end"), kind="stable")
            order = order[np.argsort(start[order], kind="stable")]
        else:
            order = np.argsort(start, kind="stable")
        del start
        found = {}
        for name in list(self._pages):
            joined = self._joined(name)
            del self._pages[name]
            found[name] = np.take(
                joined, order, out=_blank(len(order), joined.dtype), mode="clip"
            )  # "raise" would copy
        return found

    def _joined(self, name: str) -> Column:
        pages = self._pages[name]
        used = [page[: self._rows - number * _PAGE] for number, page in enumerate(pages)]
        return np.concatenate(used, out=_blank(self._rows, pages[0].dtype))


_PAGE = 1 << 17  # rows


def _blank(rows: int, dtype: Any) -> Column:
    return np.frombuffer(mmap(-1, max(rows, 1) * dtype.itemsize), dtype)[:rows]


_DTYPES = {name: column.dtype for kind in (HostEvents, GpuEvents) for name, column in vars(kind()).items()}
_DTYPES |= {"collective": np.dtype("i4"), "allocated": np.dtype("i8"), "reserved": np.dtype("i8")}

#: Ids and sizes are kept in as little space as every one in the file fits into. Nobody adds ids up; who calculates with
#: sizes widens them first (sums do by themselves).
_SMALL = dict.fromkeys(("correlation", "external", "bytes", "blocks", "shared_bytes"), np.dtype("i4"))
_SMALL |= dict.fromkeys(("name", "tid", "shapes", "device", "stream", "collective"), np.dtype("i1"))


def _wider(values: Column, most: Any) -> Any:
    """The smallest integers that hold the values, `most` where none does."""
    return next((dtype for dtype in map(np.dtype, ("i2", "i4", "i8")) if _fits(values, dtype) or dtype == most), most)


def _copied(page: Column, dtype: Any) -> Column:
    wide = _blank(len(page), dtype)
    wide[:] = page
    return wide


def _fits(values: Column, dtype: Any) -> bool:
    if dtype.kind != "i":
        return True
    limit = np.iinfo(dtype).max
    return not len(values) or (int(values.max()) <= limit and int(values.min()) >= -limit)


def narrow(values: Column, dtype: Any) -> Column:
    """As `dtype`; integers that do not fit are unknown."""
    if dtype.kind == "i" and dtype.itemsize < values.itemsize and not _fits(values, dtype):
        limit = np.iinfo(dtype).max
        values = np.where((values > limit) | (values < -limit), UNKNOWN, values)
    return values.astype(dtype, copy=False)


def nanoseconds(values: list[int | float]) -> tuple[Column, int]:
    """Microseconds as exact integer nanoseconds, and how many were finer than that."""
    found = np.array(values)
    if found.dtype.kind == "i":
        if int(found.max()) >= LATEST_NS // 1000 or int(found.min()) <= -LATEST_NS // 1000:
            raise OverflowError("no time")
        return found * 1000, 0
    if found.dtype.kind != "f":
        raise OverflowError("beyond 64 bits")
    if float(np.abs(found).max()) >= 2.0**43:
        raise TooFine
    whole = np.floor(found)
    rest = (found - whole) * 1000
    nearest = np.rint(rest)
    finer = np.abs(rest - nearest) > 1e-6 + 1000 * np.spacing(np.abs(found))
    return whole.astype("i8") * 1000 + nearest.astype("i8"), int(np.count_nonzero(finer))


def known(time: int | None) -> int:
    if time is None:
        raise ValueError("no time")
    return time


def integers(items: list[Any], name: str) -> Column:
    return np.fromiter(map(attrgetter(name), items), "i8", len(items))


def floats(items: list[Any], name: str) -> Column:
    return np.fromiter(map(attrgetter(name), items), "f8", len(items))


def volume(sides: tuple[int, int, int] | None) -> int:
    found = sides[0] * sides[1] * sides[2] if sides else 0
    return found if 0 < found <= INT64 else UNKNOWN


def small(value: int | str) -> int:
    """A process, device or stream number; -1 where the text is none."""
    try:
        found = int(value)
    except ValueError:
        return UNKNOWN
    return found if abs(found) <= INT64 else UNKNOWN


def label(value: Any) -> int | str:
    return value if isinstance(value, int | str) else ""


def host_events(columns: dict[str, Column], pids: list[int]) -> HostEvents:
    """The table; what a kind of event does not have is one constant, not a column in memory."""
    if not columns:
        return HostEvents()
    count = len(columns["start"])
    absent = {
        name: np.broadcast_to(_DTYPES[name].type(UNKNOWN), count)
        for name in ("correlation", "external", "shapes")
        if name not in columns
    }
    processes = np.array(pids, "i8")
    pid = np.broadcast_to(processes[0], count) if (processes == processes[0]).all() else processes[columns["tid"]]
    return HostEvents(**columns, **absent, pid=pid)


def launching(correlation: Column, external: Column, device: Column, calls: HostEvents) -> Column:
    """The process of the call that launched each device event; -1 where none is recorded, or where it is not known which.

    Each process counts its correlations from 1, so in one file calls of several may have the same. Then the external id
    decides where the call of one of them alone has it as well, else the device: where all its other events are of one
    process, and every other process that has the id is known, by events of its own, to be on other devices. (All may be on
    one device, and only the process with the most calls has ids that no other has.)
    """
    if not len(calls.start):
        return np.broadcast_to(np.int64(UNKNOWN), len(correlation))
    if calls.pid.strides == (0,):
        return np.broadcast_to(calls.pid[0], len(correlation))
    found, shared = _only(calls.correlation, calls.pid, correlation)
    rows = np.flatnonzero(shared)
    if not len(rows):
        return found
    own, asked = _pairs((calls.correlation, calls.external), (correlation[rows], external[rows]))
    by_external, _ = _only(own, calls.pid, asked)
    decided = (external[rows] > 0) & (by_external >= 0)
    found[rows[decided]] = by_external[decided]
    rows, known = rows[~decided], found.copy()
    for number in np.unique(device[rows]).tolist():
        here = (device == number) & (known >= 0)
        of_device = np.unique(known[here])
        if len(of_device) == 1:
            asking = rows[device[rows] == number]
            elsewhere = np.setdiff1d(known[~here], of_device)
            possible = ~np.isin(calls.pid, elsewhere)
            left, _ = _only(calls.correlation[possible], calls.pid[possible], correlation[asking])
            found[asking] = np.where(left == of_device[0], left, UNKNOWN)
    return found


def _only(keys: Column, pids: Column, wanted: Column) -> tuple[Column, Column]:
    """For each wanted key the one process that has it, else -1; and whether several have it."""
    order = np.lexsort((pids, keys))
    keys, pids = keys[order], pids[order]
    first = np.append(True, (keys[1:] != keys[:-1]) | (pids[1:] != pids[:-1]))
    keys, pids = keys[first], pids[first]
    low, high = np.searchsorted(keys, wanted, "left"), np.searchsorted(keys, wanted, "right")
    return np.where(high - low == 1, pids[low.clip(max=len(pids) - 1)], UNKNOWN), high - low > 1


def _pairs(left: tuple[Column, Column], right: tuple[Column, Column]) -> tuple[Column, Column]:
    """Pairs of ids of two tables as one number each, the same for the same pair."""
    joined = []
    for one, other in zip(left, right):
        joined.append(np.unique(np.concatenate((one, other)), return_inverse=True)[1].astype("i8"))
    keys = joined[0] * (int(joined[1].max()) + 1) + joined[1]
    return keys[: len(left[0])], keys[len(left[0]) :]


def repeated(ids: Column, pids: Column) -> int:
    """How many events have an id that an earlier one of the same process has. By sorting: `np.unique` hashes, and
    takes several times the memory."""
    known = ids > 0
    if pids.strides == (0,):
        found = np.sort(ids[known])
        return int(np.count_nonzero(found[1:] == found[:-1]))
    order = np.lexsort((ids[known], pids[known]))
    found, of = ids[known][order], pids[known][order]
    return int(np.count_nonzero((found[1:] == found[:-1]) & (of[1:] == of[:-1])))
