"""A cache between a loader and its dataset: what was made once is read back, by every worker and rank, epoch and run.

Only what is the same each time is cached (`cache_probe`), under a key that changes with the dataset (`cache_key`).
The user's dataset stays what and where it is: a stand-in (`cache_reader`) is put into the loader's iterator, where nothing else
looks.
"""

from __future__ import annotations

import hashlib
import os
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saturate import ranks
from saturate.checkpoints.host_memory import available_bytes
from saturate.data import cache_key, cache_probe, cache_store, transforms
from saturate.data.cache_ahead import Ahead, Beside, foreseeable
from saturate.data.cache_reader import LOOKED, LOOKED_S, CachedDataset, Reader, attributes, same, say

#: Share of the free disk, or of the available memory, that a cache may take.
FREE_SHARE = 0.5

#: How often a dataset may become another one before it is left alone.
MOST_VERSIONS = 3
MOST_STORES = 16


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
    files: _Files | None = None

    def unchanged(self, dataset: Any) -> bool:
        if self.reader is None:
            return same(self.attributes, attributes(dataset))
        return self.reader.unchanged() and (self.files is None or self.files.unchanged())


class _Files:
    """Those that items may be made from. They are looked at when a pass begins, for `LOOKED` of the time and `LOOKED_S` more: short
    passes follow each other sooner than a share of them makes room for one look."""

    def __init__(self, stamps: dict[str, tuple[int, int]]):
        self._stamps = stamps
        self._began, self._looking_s = time.monotonic(), 0.0

    def unchanged(self) -> bool:
        began = time.monotonic()
        if self._looking_s > LOOKED * (began - self._began) + LOOKED_S:
            return True                 # not looked at: some items are made again and compared in any case
        try:
            return all(cache_key.stamp(os.stat(path)) == known for path, known in self._stamps.items())
        except OSError:
            return False                # it is gone
        finally:
            self._looking_s += time.monotonic() - began


class Caches:
    """The caches of one training process. As text: what became of them."""

    def __init__(self, torch: Any, folder: Path | None, max_bytes: int, ahead_s: float):
        """`folder` None: in memory. `max_bytes` 0: a share of what is free. `ahead_s`: how long items may be stored
        before the first of them is asked for."""
        self.torch = torch
        self.folder = folder
        self.max_bytes = max_bytes
        self.ahead_s = ahead_s
        self.in_trial = ahead_s > 0
        self._told: list[_Told] = []
        self._loaders: weakref.WeakKeyDictionary[Any, _Served] = weakref.WeakKeyDictionary()
        self._stores: dict[bytes, cache_store.Store] = {}
        self._looked_at: dict[int, tuple[Any, Any, bytes]] = {}     # by id: the dataset (weakly), what was found, its key
        self._files: dict[bytes, _Files] = {}                       # by key, of those that there is a store for
        self._room: int | None = None                               # bytes for all stores of this run, where the user names no limit
        self._promised = 0                                          # of these, to the stores that there are

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

    def look_again(self, loader: Any) -> None:
        """Another pass with workers that have their readers from the first. Where files have changed, what is stored is not served."""
        served = self._loaders.get(loader)
        if served is not None and served.reader is not None and served.files is not None and not served.files.unchanged():
            served.reader.store.drop("files that its items are made from were changed")

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
            served.files = self._files.get(served.reader.store.key) if served.reader else None
            if before is None or served.reader is None or before.store is not served.reader.store:
                served.versions += 1
            if served.reader:
                self._tell(_Told(type(dataset).__name__, "", served.reader.store, served.reader.steps))
                return served.reader
        self._tell(_Told(type(dataset).__name__, refusal))
        return None

    def _prepared(self, dataset: Any, threads: int) -> tuple[Reader | None, str]:
        try:
            full = f"it is version number {MOST_STORES + 1} of the datasets of this run" if len(self._stores) >= MOST_STORES else ""
            if full and self._known(dataset) is None:
                return None, full           # without making items of it: one that is new in each epoch would pay for that in each
            found, key, files = self._found(dataset, threads)
            if found.refusal:
                return None, found.refusal
            if key not in self._stores:
                if full:
                    return None, full
                self._stores[key] = self._store(key, len(dataset), found.record_bytes)
            if files is not None:
                self._files[key] = files
        except cache_key.Unknowable as problem:
            return None, f"it cannot be told when it changes: {problem}"
        except cache_store.Unusable as problem:
            return None, str(problem)
        return Reader(dataset, self._stores[key], found.steps, found.place), ""

    def _known(self, dataset: Any) -> tuple[cache_probe.Found, bytes] | None:
        known, found, key = self._looked_at.get(id(dataset), (None, None, b""))
        return (found, key) if known is not None and known() is dataset else None

    def _found(self, dataset: Any, threads: int) -> tuple[cache_probe.Found, bytes, _Files | None]:
        """What of a dataset can be cached, and under which key. It is looked at once, unless what is cached has changed; then there
        are also the files that its items may be made from."""
        known = self._known(dataset)
        if known is not None and _key(dataset, known[0], threads) == known[1]:
            return *known, None
        found = cache_probe.probe(dataset, len(dataset))
        files: dict[str, tuple[int, int]] = {}
        key = _key(dataset, found, threads, files)
        self._looked_at[id(dataset)] = weakref.ref(dataset), found, key
        return found, key, _Files(_read_from(files, found))

    def _store(self, key: bytes, length: int, record_bytes: int) -> cache_store.Store:
        limit = self.max_bytes or self._left()      # what the user allows, each may take
        needed = length * (1.05 * record_bytes + 128)
        share = (limit - 8 * length) / needed
        self._promised += min(limit, int(needed) + 8 * length)
        name = key.hex()[:32]
        if self.folder is not None and not cache_store.path_of(self.folder, name).exists():
            cache_store.make_room(self.folder, limit, [store.path for store in self._stores.values()])
        return cache_store.create(self.folder, name, key, length, limit, int(max(0.0, min(1.0, share)) * cache_store.WHOLE))

    def _left(self) -> int:
        if self._room is None:
            self._room = self._free_share()
        return max(0, self._room - self._promised)

    def _tell(self, told: _Told) -> None:
        if told in self._told:
            return
        self._told.append(told)
        if told.refusal and ranks.rank() == 0:
            say(f"not cached: {told.name}: {told.refusal}")

    def _free_share(self) -> int:
        """Bytes. Ranks share a file, and each has a cache of its own in memory."""
        if self.folder is not None:
            folder = next(parent for parent in (self.folder, *self.folder.parents) if parent.exists())
            seen = os.statvfs(folder)
            return int(FREE_SHARE * seen.f_bavail * seen.f_frsize)
        return int(FREE_SHARE * (available_bytes() or 0) / ranks.here())       # nothing tells: nothing is kept


def _read_from(files: dict[str, tuple[int, int]], found: cache_probe.Found) -> dict[str, tuple[int, int]]:
    """Of the files that a dataset names, those that are like the ones that its items were made from: what a training writes beside them
    is none of these. Nothing where there are too many to look at."""
    endings = {os.path.splitext(path)[1] for path in found.opened}
    return {path: known for path, known in files.items() if os.path.splitext(path)[1] in endings} if len(files) <= cache_key.MOST_MET else {}


def _key(dataset: Any, found: cache_probe.Found, threads: int, files: dict[str, tuple[int, int]] | None = None) -> bytes:
    """The key of what is cached of a dataset; `files` as in `cache_key.digest`. Sums over many threads are rounded otherwise than over
    one, and loader workers have one. Raises Unknowable."""
    if found.refusal:
        return repr([id(value) for value in attributes(dataset)]).encode()      # good enough to go on refusing
    if found.steps is not None and transforms.owner_of(dataset) is None:
        return b""                      # it has no transform any more
    source = dataset if found.steps is None else transforms.cut(dataset, found.steps)[0]
    files = {} if files is None else files
    key = cache_key.digest(source, threads, found.place, files=files)
    others = cache_key.beside(found.opened, files) if len(files) <= cache_key.MOST_MET else {}
    if not others:
        return key
    files |= others
    return hashlib.blake2b(repr((key, sorted(others.items()))).encode("utf-8", "surrogateescape"), digest_size=32).digest()


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
