"""What stands for a dataset in a loader's iterator: items come from a store, or from the dataset, and then go into the store.

Now and then an item is made again and compared; one that differs ends the cache for everybody, and is said aloud. Between and
within epochs a glance tells whether the dataset was changed.
"""

from __future__ import annotations

import operator
import threading
import time
from posix import getpid
from typing import Any

from saturate import notices
from saturate.data import cache_codec, cache_helpers, cache_store, random_states, transforms
from saturate.data.glance import LOOKED, LOOKED_S, Watch
from saturate.data.stand_in import StandIn

#: Share of a process's time that goes into making items again to compare them.
RECHECKED = 0.005

#: Seconds that one glance may take as a pass begins, however many there were: what is to be done without it takes longer.
AT_PASS_S = 1.0

#: As many items are made together as fit into this, as they are cached: a group stays in the processor's cache.
GROUP_BYTES = 1 << 20


class CachedDataset(StandIn):
    """A dataset whose items come from a cache."""

    __slots__ = ("_saturate_reader",)

    def __init__(self, reader: Reader):
        super().__init__(reader.source)
        object.__setattr__(self, "_saturate_reader", reader)

    def __getitem__(self, index: Any) -> Any:
        return self._saturate_reader.item(index)

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        return self._saturate_reader.items(indices)

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
        self._twin, self._prefix, self._rest = (source, None, []) if steps is None else transforms.cut(source, steps)
        self._together = steps is None and transforms.made_together(source)
        self.attributes = attributes(source)    # as this process left them
        self.kept = 0                       # items that this process has stored
        self._began_anew()
        self._watch = Watch()
        self._glance = self._watch.within(AT_PASS_S, self._twin)    # what lies deeper, as this process left it; None: not looked at
        self._known = self._glance          # the latest of which it is sure that only making items has led to it
        self._before = self._glance         # before those items that are made now; None: not looked at

    def _began_anew(self) -> None:
        self._pid = getpid()
        self._began, self._spent_s, self._looking_s = time.perf_counter(), 0.0, 0.0
        self._read = self._stored = 0
        self._uneven = False                    # whether a batch of items that differ in size was made again and compared
        self._alone, self._group = False, 1     # whether items are made one by one; how many are made together

    def elsewhere(self) -> bool:
        """Whether another thread than the main one asks for items: a script reads ahead of its training so. What that draws meanwhile
        would be taken for what items draw, and be taken back."""
        found = threading.current_thread() is not threading.main_thread()
        if found and not self.off:
            self.off = "a thread of the script's own asks for its items"
            say(f"{self.off}: they come from the dataset itself")
        return found

    def item(self, index: Any) -> Any:
        """`dataset[index]`. Where a dataset also has `__getitems__`, that is what was looked at, and this is not
        cached."""
        plain = hasattr(self.source, "__getitems__") or type(index) is not int
        return self.source[index] if plain else self.items([index])[0]

    def items(self, indices: list[Any]) -> list[Any]:
        """What `dataset.__getitems__(indices)` returns, or a loop over `dataset[index]`."""
        if type(indices) not in (list, tuple, range) or not self._usable():        # a sampler of the script's may hand out what is read once only
            return self._plain(indices)
        try:
            out: list[Any] = self._at_once(indices) if self._together else []
            while not self._together and len(out) < len(indices):
                out += self._in_order(indices[len(out):len(out) + self._group])
        finally:
            self.left()                     # also where one of them could not be made, and the script goes on with the next batch
        self.store.count(self._read, self._stored)
        self._read = self._stored = 0
        return out

    def left(self) -> None:
        """What items are made from is now as making some of them left it."""
        self.attributes, self._glance = attributes(self.source), self._look()
        if None not in (self._before, self._glance) and self._before == self._known:
            self._known = self._glance
        self._before = None

    def unchanged(self) -> bool:
        """As a pass begins: whether what items are made from is as it was left. False also where that cannot be told."""
        if self._known is None or not same(self.attributes, attributes(self.source)):
            return False
        self._before = self._glance = self._watch.within(AT_PASS_S, self._twin)
        return self._before == self._known

    def _unlike(self) -> bool | None:
        """Whether it is not as it was left; None where that cannot be told, as far as the attributes of the dataset do not tell."""
        if not same(self.attributes, attributes(self.source)):
            return True
        self._before = self._look() if self._glance is not None else None
        return None if self._before is None else self._before != self._glance

    def _look(self) -> Any:
        seen = self._watch.within(LOOKED * (time.perf_counter() - self._began) + LOOKED_S - self._looking_s, self._twin)
        self._looking_s += self._watch.took_s
        return seen

    def _at_once(self, indices: list[Any]) -> list[Any]:
        """Items of a dataset that is asked for many at once, which may depend on the others of their batch: as padding to the longest
        does. The batch is either all from the cache or all from the dataset, never mixed; whenever the dataset makes it, what is
        cached of it must agree, and what is not is kept only if the same comes out alone."""
        found, sizes = [], set()
        for index in indices:
            record = self._record(index)
            found.append(decoded(record))
            sizes.add(0 if record is MISSING or record is PLAIN else len(record))
        whole = not any(item is MISSING or item is PLAIN for item in found)
        # Items of a batch that was padded do not differ in size: where some do, one batch is compared at least.
        if whole and not self._due() and (self._uneven or len(sizes) == 1):
            self._read += len(found)
            return found
        before = random_states.states()
        began = time.perf_counter()
        made = self._plain(indices)
        if whole:                           # only to compare
            self._spent_s += time.perf_counter() - began
            self._uneven = self._uneven or len(sizes) > 1
        drew = random_states.drawn_since(before)
        after = random_states.states()
        try:
            self._compare(indices, found, made, keep=not drew)
        finally:
            random_states.restore(after)
        self._read += len(found) if whole and not self.off else 0
        return made

    def _compare(self, indices: list[int], found: list[Any], made: list[Any], keep: bool) -> None:
        """Keep what is new of a batch that the dataset has made; the cache is dropped where something of it is not what a cache gives."""
        new = []
        if len(made) != len(indices):       # what cannot be read may be left out
            return self._drop(indices[0], "depends on the batch that it is fetched in")
        for index, cached, item in zip(indices, found, made):
            if cached is PLAIN or (cached is MISSING and (not keep or self.store.full or not self.store.wanted(index))):
                continue
            try:
                encoded = b"".join(cache_codec.encode(item))
            except cache_codec.Unstorable:
                continue                    # this one is made each time
            record = self._alone_as_stored(index) if cached is MISSING else bytes(self.store.get(index) or encoded)
            if record != encoded:
                before = "" if cached is MISSING else "is not what it was when it was stored, or "
                return self._drop(index, f"{before}depends on the batch that it is fetched in")
            if cached is MISSING:
                new.append((index, item))
        self._keep(new)

    def _alone_as_stored(self, index: int) -> bytes:
        """b"" where it cannot be made alone."""
        try:
            return b"".join(cache_codec.encode(transforms.one(self.source, index)))
        except Exception:  # noqa: BLE001 - whatever the user's dataset raises: a batch may need more than one item
            return b""

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
                    before = before or random_states.states()
                    item = self._base(index)
                    fresh.append((index, item))
                items.append(item)
            drew = before is not None and random_states.drawn_since(before)
            again = drew or bool(self.off)
        except Exception:
            if len(indices) == 1:
                raise
            again = True
        if again and len(indices) == 1 and self._prefix is None:
            return items                    # made by the source, and not to be kept
        if again:
            if before is not None:
                random_states.restore(before)
            if self.off or len(indices) == 1:
                return self._plain(indices)
            self._alone, self._group, self._read = True, 1, read
            return [item for index in indices for item in self._in_order([index])]
        self._keep([(index, item) for index, item in fresh if item is not PLAIN])
        return [self._plain([index])[0] if item is PLAIN else self._finished(item) for index, item in zip(indices, items)]

    def _plain(self, indices: list[Any]) -> list[Any]:
        many = getattr(self.source, "__getitems__", None)
        return many(indices) if callable(many) else [self.source[index] for index in indices]

    def _usable(self) -> bool:
        if self.off:
            return False
        if getpid() != self._pid:
            self._began_anew()
        if self.elsewhere():
            return False
        if self.store.dropped:
            self.off = self.store.reason
        elif self._unlike():
            self.off = "the dataset was changed while it was read"
            say(f"{self.off}: until the next epoch its items come from itself")
        return not self.off

    def _record(self, index: Any) -> Any:
        """What is stored of an item; MISSING, or PLAIN for an index that no cache has."""
        if type(index) is not int or not 0 <= index < self.store.slots:
            return PLAIN
        record = self.store.get(index)
        return MISSING if record is None else record

    def _cached(self, index: Any) -> Any:
        """What is cached of an item, or MISSING, or PLAIN."""
        record = self._record(index)
        item = decoded(record)
        if item is MISSING or item is PLAIN:
            return item
        self._sized(len(record))
        if self._due() and not self._still(index, bytes(record)):
            return MISSING
        self._read += 1
        return item

    def _due(self) -> bool:
        """Whether something is to be made again to compare it."""
        return self._spent_s <= RECHECKED * (time.perf_counter() - self._began)

    def _sized(self, record_bytes: int) -> None:
        if not self._alone:
            self._group = max(1, GROUP_BYTES // record_bytes)

    def _still(self, index: int, record: bytes) -> bool:
        """Make an item again: is it what was stored?"""
        began = time.perf_counter()
        problem = self._difference(index, record)
        self._spent_s += time.perf_counter() - began
        if problem:
            self._drop(index, problem)
        return not problem

    def _drop(self, index: int, problem: str) -> None:
        self.off = f"item {index} of {type(self.source).__name__} {problem}"
        self.store.drop(self.off)
        say(f"{self.off}: the cache is dropped, and the training goes on from the dataset itself; "
            "items that were read from the cache before may have been old ones")

    def _difference(self, index: int, record: bytes) -> str:
        random_state = random_states.states()
        try:
            again = b"".join(cache_codec.encode(transforms.one(self._twin, index)))
            return "" if again == record else "is not what it was when it was stored"
        except Exception as error:  # noqa: BLE001 - what the user's dataset raises, it raises again where the loop sees it
            return f"cannot be read any more ({type(error).__name__}: {error})"
        finally:
            random_states.restore(random_state)

    def agrees(self, index: int) -> bool:
        """Whether this process makes an item as it is stored."""
        record = self.store.get(index)
        return record is None or not self._difference(index, bytes(record))

    def _base(self, index: int) -> Any:
        """What of an item is cached, made by the source; PLAIN where its transform does not show. Random numbers may have been
        drawn: by an item that is unlike those that were looked at."""
        calls = self._prefix.calls if self._prefix else 0
        item = transforms.one(self._twin, index)
        if self._prefix is None:
            return item
        result, self._prefix.result = self._prefix.result, None
        shows = self._prefix.calls == calls + 1 and transforms.find_place(item, result) == self.place
        return item if shows else PLAIN

    def _keep(self, items: list[tuple[int, Any]]) -> None:
        """Store items that were just made, by their index."""
        if self.off or self.store.full:
            return
        samples = []
        try:
            for index, item in items:
                try:
                    if self.store.wanted(index):
                        samples.append((index, cache_codec.encode(item)))
                except cache_codec.Unstorable:
                    continue                # this one is made each time
            if samples:
                self._sized(sum(map(len, samples[-1][1])))
                stored = self.store.put_all(samples)
                self._stored += stored
                self.kept += stored
        except Exception as error:  # noqa: BLE001 - a guest: the items are there, and the training has them
            self.off = f"storing an item failed: {type(error).__name__}: {error}"
            say(self.off)

    def store_ahead(self, indices: list[int]) -> None:
        """Make and store some items, and forget them."""
        before = random_states.states()
        made = [(index, self._base(index)) for index in indices]
        if random_states.drawn_since(before):
            random_states.restore(before)
            for index in indices if len(indices) > 1 else []:
                self.store_ahead([index])
            return
        # Another process may have been faster.
        self._keep([(index, item) for index, item in made if item is not PLAIN and not self.store.holds(index)])
        self.store.count(self._read, self._stored)
        self._read = self._stored = 0

    def helpers(self) -> int:
        """How many other processes may store items ahead."""
        return cache_helpers.most(self.source, self._twin)

    def _finished(self, item: Any) -> Any:
        if self._prefix is None:
            return item
        return transforms.replaced(item, self.place, lambda sample: transforms.through(self._rest, sample))


#: In the place of an item: it is in no cache yet; it is what the source makes of it, whole.
MISSING, PLAIN = object(), object()


def decoded(record: Any) -> Any:
    """The item that was stored; MISSING and PLAIN stay what they are, and damage is MISSING."""
    if record is MISSING or record is PLAIN:
        return record
    try:
        return cache_codec.decode(record)
    except cache_codec.Damaged:
        return MISSING


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


def say(line: str) -> None:
    notices.tell(f"saturate: dataset-cache: {line}\n")
