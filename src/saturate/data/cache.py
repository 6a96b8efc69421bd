"""A cache between a loader and its dataset: what was made once is read back, by every worker and rank, epoch and run.

Only what is the same each time is cached (`cache_probe`), under a key that changes with the dataset (`cache_key`).
The user's dataset stays what and where it is: a stand-in is put into the loader's iterator, where nothing else looks.
Now and then an item is made again and compared; one that differs ends the cache for everybody, and is said aloud.
"""

from __future__ import annotations

import operator
import os
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saturate.data import cache_codec, cache_helpers, cache_key, cache_probe, cache_store
from saturate.data.cache_ahead import Ahead, Beside, foreseeable
from saturate.data.glance import glance

#: Share of a process's time that goes into making items again to compare them.
RECHECKED = 0.005

#: Share of a process's time that goes into looking whether the dataset was changed, and how many seconds more.
LOOKED, LOOKED_S = 0.01, 0.1

#: As many items are made together as fit into this, as they are cached: a group stays in the processor's cache.
GROUP_BYTES = 1 << 20

#: Share of the free disk, or of the available memory, that a cache may take.
FREE_SHARE = 0.5

#: How often a dataset may become another one before it is left alone.
MOST_VERSIONS = 3
MOST_STORES = 16


class CachedDataset:
    """Stands in a loader's iterator for the dataset, and in its workers for `get_worker_info().dataset`."""

    __slots__ = ("_saturate_reader", "__weakref__")

    def __init__(self, reader: Reader):
        object.__setattr__(self, "_saturate_reader", reader)

    @property
    def __class__(self) -> Any:
        return type(self._saturate_reader.source)

    def __len__(self) -> int:
        return len(self._saturate_reader.source)

    def __getitem__(self, index: Any) -> Any:
        return self._saturate_reader.item(index)

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        return self._saturate_reader.items(indices)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._saturate_reader.source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._saturate_reader.source, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._saturate_reader.source, name)

    def __reduce__(self) -> Any:
        reader = self._saturate_reader
        return _restored, (reader.source, reader.store.path, reader.store.key, reader.store.slots, reader.steps, reader.place)


def _restored(source: Any, path: str, key: bytes, slots: int, steps: int | None, place: tuple[Any, ...]) -> Any:
    """In a spawned worker; the dataset itself where the store cannot be opened."""
    try:
        return CachedDataset(Reader(source, cache_store.attach(path, key, slots), steps, place))
    except (cache_store.Unusable, OSError):
        return source


class Reader:
    """Reads items of `source` through a store: whole ones, or (`steps`, `place`: see `cache_probe.Found`) those whose
    transform was cut, and does the rest of the transform itself."""

    def __init__(self, source: Any, store: cache_store.Store, steps: int | None, place: tuple[Any, ...]):
        self.source = source
        self.store = store
        self.steps = steps
        self.place = place
        self.off = ""                       # why items come from the source alone
        self._twin, self._prefix, self._rest = (source, None, []) if steps is None else cache_probe.cut(source, steps)
        self._together = steps is None and callable(getattr(source, "__getitems__", None))
        self.attributes = attributes(source)    # as this process left them
        self.kept = 0                       # items that this process has stored
        self._began_anew()
        self._glance = self._look()         # what lies deeper, as this process left it; None: not looked at

    def _began_anew(self) -> None:
        self._pid = os.getpid()
        self._began, self._spent_s, self._looking_s = time.perf_counter(), 0.0, 0.0
        self._read = self._stored = 0
        self._alone, self._group = False, 1     # whether items are made one by one; how many are made together

    def item(self, index: Any) -> Any:
        """`dataset[index]`. Where a dataset also has `__getitems__`, that is what was looked at, and this is not
        cached."""
        plain = hasattr(self.source, "__getitems__") or type(index) is not int
        return self.source[index] if plain else self.items([index])[0]

    def items(self, indices: list[Any]) -> list[Any]:
        """What `dataset.__getitems__(indices)` returns, or a loop over `dataset[index]`."""
        if not self._usable():
            return self._plain(indices)
        out: list[Any] = self._at_once(indices) if self._together else []
        while len(out) < len(indices):
            out += self._in_order(indices[len(out):len(out) + self._group])
        self.attributes = attributes(self.source)
        self._glance = self._look()
        self.store.count(self._read, self._stored)
        self._read = self._stored = 0
        return out

    def unchanged(self) -> bool:
        """Whether what items are made from is as it was left. False also where that cannot be told."""
        return self._unlike() is False

    def _unlike(self) -> bool | None:
        """Whether it is not as it was left; None where that cannot be told, as far as the attributes of the dataset do not tell."""
        if not same(self.attributes, attributes(self.source)):
            return True
        now = self._look() if self._glance is not None else None
        return None if now is None else now != self._glance

    def _look(self) -> Any:
        if self._looking_s > LOOKED * (time.perf_counter() - self._began) + LOOKED_S:
            return None
        began = time.perf_counter()
        try:
            return glance(self._twin)
        except Exception:  # noqa: BLE001 - an object that raises when it is looked at
            return None
        finally:
            self._looking_s += time.perf_counter() - began

    def _at_once(self, indices: list[Any]) -> list[Any]:
        """Items of a dataset that is asked for many at once: what is missing, in one call."""
        out = [self._cached(index) for index in indices]
        missing = [at for at, item in enumerate(out) if item is MISSING]
        if missing:
            before = cache_probe.states()
            fresh = self.source.__getitems__([indices[at] for at in missing])
            drew = cache_probe.drawn_since(before)
            for at, item in zip(missing, fresh):
                out[at] = item
                if not drew:
                    self._keep(indices[at], item)
        return [self._plain([index])[0] if item is PLAIN else item for index, item in zip(indices, out)]

    def _in_order(self, indices: list[Any]) -> list[Any]:
        """Some items: first what is cached of all of them is read or made, then each is finished. So one look at the generators of
        random numbers, which takes a thirtieth of the time in which a photograph is decoded, tells of them all that they drew
        nothing. Where one did, failed, or is not what it was, all that was drawn is taken back, and they are made one by one."""
        if self.off:                        # since the group before
            return self._plain(indices)
        before, fresh, items, read = None, [], [], self._read
        try:
            for index in indices:
                item = self._cached(index)
                if item is MISSING:
                    before = before or cache_probe.states()
                    item = self._base(index)
                    fresh.append((index, item))
                items.append(item)
            drew = before is not None and cache_probe.drawn_since(before)
            again = drew or bool(self.off)
        except Exception:
            if len(indices) == 1:
                raise
            again = True
        if again and len(indices) == 1 and self._prefix is None:
            return items                    # made by the source, and not to be kept
        if again:
            if before is not None:
                cache_probe.restore(before)
            if self.off or len(indices) == 1:
                return self._plain(indices)
            self._alone, self._group, self._read = True, 1, read
            return [item for index in indices for item in self._in_order([index])]
        for index, item in fresh:
            if item is not PLAIN:
                self._keep(index, item)
        return [self._plain([index])[0] if item is PLAIN else self._finished(item) for index, item in zip(indices, items)]

    def _plain(self, indices: list[Any]) -> list[Any]:
        many = getattr(self.source, "__getitems__", None)
        return many(indices) if callable(many) else [self.source[index] for index in indices]

    def _usable(self) -> bool:
        if self.off:
            return False
        if os.getpid() != self._pid:
            self._began_anew()
        if self.store.dropped:
            self.off = self.store.reason
        elif self._unlike():
            self.off = "the dataset was changed while it was read"
            say(f"{self.off}: until the next epoch its items come from itself")
        return not self.off

    def _cached(self, index: Any) -> Any:
        """What is cached of an item; MISSING, or PLAIN for an index that no cache has."""
        if type(index) is not int or not 0 <= index < self.store.slots:
            return PLAIN
        record = self.store.get(index)
        if record is None:
            return MISSING
        try:
            item = cache_codec.decode(record)
        except cache_codec.Damaged:
            return MISSING
        self._sized(len(record))
        if self._spent_s <= RECHECKED * (time.perf_counter() - self._began) and not self._still(index, bytes(record)):
            return MISSING
        self._read += 1
        return item

    def _sized(self, record_bytes: int) -> None:
        if not self._alone:
            self._group = max(1, GROUP_BYTES // record_bytes)

    def _still(self, index: int, record: bytes) -> bool:
        """Make an item again: is it what was stored?"""
        began = time.perf_counter()
        problem = self._difference(index, record)
        self._spent_s += time.perf_counter() - began
        if problem:
            self.off = f"item {index} of {type(self.source).__name__} {problem}"
            self.store.drop(self.off)
            say(f"{self.off}: the cache is dropped, and the training goes on from the dataset itself; "
                "items that were read from the cache before may have been old ones")
        return not problem

    def _difference(self, index: int, record: bytes) -> str:
        random_state = cache_probe.states()
        try:
            again = b"".join(cache_codec.encode(cache_probe.one(self._twin, index)))
            return "" if again == record else "is not what it was when it was stored"
        except Exception as error:  # noqa: BLE001 - what the user's dataset raises, it raises again where the loop sees it
            return f"cannot be read any more ({type(error).__name__}: {error})"
        finally:
            cache_probe.restore(random_state)

    def agrees(self, index: int) -> bool:
        """Whether this process makes an item as it is stored."""
        record = self.store.get(index)
        return record is None or not self._difference(index, bytes(record))

    def _base(self, index: int) -> Any:
        """What of an item is cached, made by the source; PLAIN where its transform does not show. Random numbers may have been
        drawn: by an item that is unlike those that were looked at."""
        calls = self._prefix.calls if self._prefix else 0
        item = cache_probe.one(self._twin, index)
        if self._prefix is None:
            return item
        result, self._prefix.result = self._prefix.result, None
        shows = self._prefix.calls == calls + 1 and cache_probe.find_place(item, result) == self.place
        return item if shows else PLAIN

    def _keep(self, index: int, item: Any) -> None:
        if self.off or self.store.full or not self.store.wanted(index):
            return
        try:
            parts = cache_codec.encode(item)
            self._sized(sum(map(len, parts)))
            stored = self.store.put(index, parts)
            self._stored += stored
            self.kept += stored
        except cache_codec.Unstorable:
            return                          # this one is made each time
        except Exception as error:  # noqa: BLE001 - a guest: the item is there, and the training has it
            self.off = f"storing an item failed: {type(error).__name__}: {error}"
            say(self.off)

    def store_ahead(self, indices: list[int]) -> None:
        """Make and store some items, and forget them."""
        before = cache_probe.states()
        made = [(index, self._base(index)) for index in indices]
        self.attributes, self._glance = attributes(self.source), self._look()
        if cache_probe.drawn_since(before):
            cache_probe.restore(before)
            for index in indices if len(indices) > 1 else []:
                self.store_ahead([index])
            return
        for index, item in made:
            if item is not PLAIN and not self.store.holds(index):       # another process may have been faster
                self._keep(index, item)
        self.store.count(self._read, self._stored)
        self._read = self._stored = 0

    def helpers(self) -> int:
        """How many other processes may store items ahead."""
        return cache_helpers.most(self.source, self._twin)

    def _finished(self, item: Any) -> Any:
        if self._prefix is None:
            return item
        return cache_probe.replaced(item, self.place, lambda sample: cache_probe.through(self._rest, sample))


#: In the place of an item: it is in no cache yet; it is what the source makes of it, whole.
MISSING, PLAIN = object(), object()


def attributes(dataset: Any) -> list[Any]:
    """The values of the attributes of a dataset, of those that it is a view of, and of its transform."""
    found: list[Any] = []
    for _ in range(16):
        own = getattr(dataset, "__dict__", None)
        if own is None:
            break
        found.extend(own.values())
        steps = getattr(own.get("transform"), "transforms", None)
        if type(steps) is list:
            found.extend(steps)
        dataset = own.get("dataset")
    return found


def same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(map(operator.is_, before, after))


# -- for one training process ------------------------------------------------------------------------------------------


@dataclass
class _Told:
    """What became of one dataset, for the report."""

    name: str
    refusal: str = ""
    store: cache_store.Store | None = None
    steps: int | None = None


@dataclass
class _Served:
    """What is known of the dataset of one loader, as long as that loader lives."""

    attributes: list[Any]               # of the dataset when it was looked at
    reader: Reader | None
    versions: int

    def unchanged(self, dataset: Any) -> bool:
        return self.reader.unchanged() if self.reader else same(self.attributes, attributes(dataset))


class Caches:
    """The caches of one training process. As text: what became of them."""

    def __init__(self, torch: Any, folder: Path | None, max_bytes: int, ahead_s: float, ranks: int = 1):
        """`folder` None: in memory. `max_bytes` 0: a share of what is free. `ahead_s`: how long items may be stored
        before the first of them is asked for."""
        self.torch = torch
        self.folder = folder
        self.max_bytes = max_bytes
        self.ahead_s = ahead_s
        self.in_trial = ahead_s > 0
        self.ranks = max(1, ranks)
        self._told: list[_Told] = []
        self._loaders: weakref.WeakKeyDictionary[Any, _Served] = weakref.WeakKeyDictionary()
        self._stores: dict[bytes, cache_store.Store] = {}
        self._looked_at: dict[int, tuple[Any, Any, bytes]] = {}     # by id: the dataset (weakly), what was found, its key

    def __str__(self) -> str:
        return "; ".join(dict.fromkeys(map(_in_words, self._told)))

    def serve(self, iterator: Any, loader: Any) -> None:
        """Put a cache between a new iterator and its dataset, where there can be one. Never raises."""
        from torch.utils.data import get_worker_info

        if get_worker_info() is not None:
            return
        try:
            reader = self._reader(loader)
        except Exception as error:  # noqa: BLE001 - a guest: the training goes on without a cache, and the reason is told
            self._tell(_Told(type(loader.dataset).__name__, f"{type(error).__name__}: {error}"))
            return
        if reader is None or reader.off:
            return
        iterator._dataset = CachedDataset(reader)
        sampler, threads = iterator._index_sampler, 1 if loader.num_workers else self.torch.get_num_threads()
        if not foreseeable(sampler):
            return
        if self.in_trial:
            iterator._index_sampler = Ahead(sampler, reader, threads, self)
        elif not loader.num_workers:
            iterator._index_sampler = Beside(sampler, reader, threads)
        iterator._sampler_iter = iter(iterator._index_sampler)

    def _reader(self, loader: Any) -> Reader | None:
        """For this loader's dataset as it is now; None where it cannot be cached."""
        dataset = loader.dataset
        refusal = _refusal(dataset, self.torch)
        served = self._loaders.get(loader)
        if served is not None and not refusal and served.unchanged(dataset):
            return served.reader
        before, versions = (served.reader, served.versions) if served else (None, 0)
        if not refusal and versions >= MOST_VERSIONS:
            refusal = "it changes from one epoch to the next"
        if not refusal:
            served = self._loaders[loader] = _Served(attributes(dataset), None, versions)
            threads = 1 if loader.num_workers else self.torch.get_num_threads()
            served.reader, refusal = self._prepared(dataset, threads)
            if before is None or served.reader is None or before.store is not served.reader.store:
                served.versions += 1
            if served.reader:
                self._tell(_Told(type(dataset).__name__, "", served.reader.store, served.reader.steps))
                return served.reader
        self._tell(_Told(type(dataset).__name__, refusal))
        return None

    def _prepared(self, dataset: Any, threads: int) -> tuple[Reader | None, str]:
        try:
            found, key = self._found(dataset, threads)
            if found.refusal:
                return None, found.refusal
            if key not in self._stores:
                if len(self._stores) >= MOST_STORES:
                    return None, f"it is version number {MOST_STORES + 1} of the datasets of this run"
                self._stores[key] = self._store(key, len(dataset), found.record_bytes)
        except cache_key.Unknowable as problem:
            return None, f"it cannot be told when it changes: {problem}"
        except cache_store.Unusable as problem:
            return None, str(problem)
        return Reader(dataset, self._stores[key], found.steps, found.place), ""

    def _found(self, dataset: Any, threads: int) -> tuple[cache_probe.Found, bytes]:
        """What of a dataset can be cached, and under which key. It is looked at once, unless what is cached has changed."""
        known, found, before = self._looked_at.get(id(dataset), (None, None, b""))
        if found is not None and known() is dataset and _key(dataset, found, threads) == before:
            return found, before
        found = cache_probe.probe(dataset, len(dataset))
        key = _key(dataset, found, threads)
        self._looked_at[id(dataset)] = weakref.ref(dataset), found, key
        return found, key

    def _store(self, key: bytes, length: int, record_bytes: int) -> cache_store.Store:
        limit = self.max_bytes or self._free_share()
        share = (limit - 8 * length) / (length * (1.05 * record_bytes + 128))
        if self.folder is not None and self.folder.is_dir():
            cache_store.make_room(self.folder, limit)
        return cache_store.create(self.folder, key.hex()[:32], key, length, limit,
                                  int(max(0.0, min(1.0, share)) * cache_store.WHOLE))

    def _tell(self, told: _Told) -> None:
        if told in self._told:
            return
        self._told.append(told)
        if told.refusal and os.environ.get("RANK", "0") == "0":
            say(f"not cached: {told.name}: {told.refusal}")

    def _free_share(self) -> int:
        """Bytes. Ranks share a file, and each has a cache of its own in memory."""
        if self.folder is not None:
            folder = next(parent for parent in (self.folder, *self.folder.parents) if parent.exists())
            seen = os.statvfs(folder)
            return int(FREE_SHARE * seen.f_bavail * seen.f_frsize)
        return int(FREE_SHARE * cache_store.available_memory_bytes() / self.ranks)


def _key(dataset: Any, found: cache_probe.Found, threads: int) -> bytes:
    """The key of what is cached of a dataset. Sums over many threads are rounded otherwise than over one, and loader workers
    have one. Raises Unknowable."""
    if found.refusal:
        return repr([id(value) for value in attributes(dataset)]).encode()      # good enough to go on refusing
    if found.steps is None:
        return cache_key.digest(dataset, threads, found.place)
    if cache_probe.owner_of(dataset) is None:
        return b""                      # it has no transform any more
    return cache_key.digest(cache_probe.cut(dataset, found.steps)[0], threads, found.place)


def _in_words(told: _Told) -> str:
    if told.store is None:
        return f"not cached: {told.name}: {told.refusal}"
    if told.store.dropped:
        return f"dropped: {told.store.reason}"
    read, stored = told.store.counted()
    if not read + stored:
        return f"unused: {told.name}"
    what = "items" if told.steps is None else f"items up to step {told.steps} of their transform"
    return f"cached: {told.name}, {stored} {what} stored, {read} read, {told.store.used_bytes / 1e6:.0f} MB"


def _refusal(dataset: Any, torch: Any) -> str:
    """Why a dataset cannot even be looked at."""
    data = torch.utils.data
    if isinstance(dataset, (data.IterableDataset, getattr(data, "MapDataPipe", ()))):
        return "its items have no numbers"
    if isinstance(dataset, (list, tuple, dict, str)) or type(dataset).__weakrefoffset__ == 0:
        return "it is in memory already"
    if not hasattr(dataset, "__len__") or not len(dataset):
        return "it has no length"
    return ""


def say(line: str) -> None:
    sys.stderr.write(f"saturate: dataset-cache: {line}\n")
