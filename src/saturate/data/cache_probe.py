"""Is there something about a dataset's items that is the same each time? Some items are made twice, under different
random numbers, in a child process: what that opens, counts or draws, the training never sees.

Three answers: whole items are; or the items are up to a certain step of their `transform`, and everything after it is
random; or nothing can be cached, with the reason.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import json
import os
import random
import select
import signal
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from saturate.data import cache_codec
from saturate.data.cache_fork import fork, wait
from saturate.data.glance import open_connection, own_generator, unseeded_source

#: Items that are looked at, spread over the dataset, and how long that may take.
ITEMS = 6
MOST_S = 60.0

#: Batches of a dataset that makes many items at once which are compared with the same items made alone, their size, and how long
#: that may take.
BATCHES, BATCH, BATCHES_S = 8, 8, 5.0

#: Making an item must take this many times what reading it from a cache takes.
LEAST_GAIN = 1.5
#: How often reading an item is timed, the least counts: code that runs for the first time takes several times as long.
READINGS = 3

#: Where a dataset keeps what it does to each sample.
_ATTRIBUTES = ("transform", "transforms")


@dataclass(frozen=True)
class Found:
    """`refusal`: why nothing can be cached; "" when something can. `steps` is None when whole items can, else how
    many first steps of the transform are cached with them, and `place` where in the item their result stands."""

    refusal: str = ""
    steps: int | None = None
    place: tuple[Any, ...] = ()
    record_bytes: int = 0           # of one item, the mean
    make_s: float = 0.0             # what one item takes, without and with a cache
    read_s: float = 0.0
    opened: tuple[str, ...] = ()    # files that were read to make items, as far as Python opened them: absolute paths


# -- datasets with a transform -------------------------------------------------------------------------------------------


def owner_of(dataset: Any) -> tuple[list[Any], str] | None:
    """The datasets from the outermost to the one that has a transform (`Subset` has its `.dataset`), and the
    attribute's name; None where there is none."""
    chain: list[Any] = []
    while dataset is not None and len(chain) < 16:
        chain.append(dataset)
        own = getattr(dataset, "__dict__", {})
        for name in _ATTRIBUTES:
            if callable(own.get(name)):
                return chain, name
        dataset = own.get("dataset")
    return None


def steps_of(transform: Any) -> list[Any]:
    """The steps that a transform consists of; itself when it does not say."""
    inner = getattr(transform, "transforms", None)
    if isinstance(inner, (list, tuple)) and all(map(callable, inner)):
        return list(inner)
    torch = sys.modules.get("torch")
    if torch is not None and type(transform) is torch.nn.Sequential:
        return list(transform)
    return [transform]


class Prefix:
    """Stands where a transform stood, and does its first steps only. Remembers the latest result."""

    def __init__(self, steps: list[Any]):
        self.steps = steps
        self.calls = 0
        self.result: Any = None

    def __call__(self, sample: Any) -> Any:
        self.calls += 1
        for step in self.steps:
            sample = step(sample)
        self.result = sample
        return sample

    def __reduce__(self) -> Any:
        return Prefix, (self.steps,)        # what it remembers is no part of it: also for a fingerprint


def cut(dataset: Any, count: int) -> tuple[Any, Prefix, list[Any]]:
    """A copy of `dataset`, sharing its data, whose transform is cut after `count` steps; the stand-in for it; the
    rest."""
    found = owner_of(dataset)
    assert found is not None
    chain, name = found
    transform = vars(chain[-1])[name]
    steps = steps_of(transform)
    prefix = Prefix(steps[:count])
    twin = copy.copy(chain[-1])
    vars(twin)[name] = prefix
    both = vars(twin).get("transforms")
    if name == "transform" and getattr(both, "transform", None) is transform:     # torchvision keeps it in two places
        both = copy.copy(both)
        vars(both)["transform"] = prefix
        vars(twin)["transforms"] = both
    for outer in reversed(chain[:-1]):
        around = copy.copy(outer)
        vars(around)["dataset"] = twin
        twin = around
    return twin, prefix, steps[count:] if count else [transform]


def find_place(item: Any, wanted: Any) -> tuple[Any, ...] | None:
    """Where in nested tuples, lists and dictionaries the very object `wanted` stands; None unless exactly once."""
    found = list(_places(item, wanted, ()))
    return found[0] if len(found) == 1 else None


def _places(item: Any, wanted: Any, way: tuple[Any, ...]) -> Any:
    if item is wanted:
        yield way
    elif type(item) in (tuple, list):
        for index, inner in enumerate(item):
            yield from _places(inner, wanted, (*way, index))
    elif type(item) is dict:
        for key, inner in item.items():
            yield from _places(inner, wanted, (*way, key))


def replaced(item: Any, place: tuple[Any, ...], change: Any) -> Any:
    """`item` with `change(what stands at place)` there."""
    if not place:
        return change(item)
    first, *rest = place
    inner = replaced(item[first], tuple(rest), change)
    if type(item) is tuple:
        return (*item[:first], inner, *item[first + 1:])
    item[first] = inner
    return item


def through(steps: list[Any], sample: Any) -> Any:
    for step in steps:
        sample = step(sample)
    return sample


def one(dataset: Any, index: int) -> Any:
    """One item, the way a loader asks for it."""
    many = getattr(dataset, "__getitems__", None)
    return many([index])[0] if callable(many) else dataset[index]


def made_together(dataset: Any) -> bool:
    """Whether items of a batch may know of each other. A Subset has `__getitems__`, and asks its dataset for one after the other where
    that has none."""
    torch = sys.modules.get("torch")
    while torch is not None and type(dataset) is torch.utils.data.Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


# -- looking -------------------------------------------------------------------------------------------------------------


def probe(dataset: Any, length: int) -> Found:
    """Look at some items of a dataset, in a child process."""
    connection = open_connection(dataset)
    if connection:
        return Found(f"it holds an open {connection}, which a process that looks at its items would share")
    reader, writer = os.pipe()
    child = fork(writer)
    if child == 0:
        _in_child(dataset, length, writer)
    os.close(writer)
    try:
        text = _read(reader, time.monotonic() + MOST_S)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        wait(child)
    if text is None:
        return Found(f"making {ITEMS} of its items took longer than {MOST_S:.0f} s, or did not end")
    try:
        answer = json.loads(text)
    except ValueError:
        return Found("the process that made some of its items died")
    return Found(**{**answer, "place": tuple(answer["place"]), "opened": tuple(answer["opened"])})


def _read(reader: int, deadline: float) -> bytes | None:
    """Everything that is written until the other end closes; None when that takes too long."""
    text = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([reader], [], [], left)[0]:
            return None
        part = os.read(reader, 1 << 16)
        if not part:
            return text
        text += part
    return None


def _in_child(dataset: Any, length: int, writer: int) -> None:
    """Never returns. `os._exit`: nothing that the parent registered for its own end may run here."""
    opened: set[str] = set()

    def note(event: str, arguments: Any) -> None:
        if event == "open" and isinstance(arguments[0], (str, bytes)) and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            opened.add(os.path.abspath(os.fsdecode(arguments[0])))

    try:
        try:
            sys.addaudithook(note)      # it cannot be removed: this process ends soon
            found = replace(examine(dataset, length), opened=tuple(sorted(opened)))
        except Exception as error:  # noqa: BLE001 - whatever the user's dataset raises is the answer
            found = Found(f"making an item of it failed: {type(error).__name__}: {error}")
        os.write(writer, json.dumps(vars(found)).encode())
    finally:
        os._exit(0)


def examine(dataset: Any, length: int) -> Found:
    """`probe`, in this process: draws random numbers, and whatever making items does."""
    found = _drawing(dataset) or _made_twice(dataset, length)
    return _drawing(dataset) or found       # some get their generator when the first item is made


def _drawing(dataset: Any) -> Found | None:
    """Refused where there is a random generator of its own: it would have to be drawn from for every item, and none of those that are
    looked at need be one that it changes."""
    own = own_generator(dataset)
    if own:
        return Found(f"it, or a step of its transform, has a random generator of its own ({own})")
    unseeded = unseeded_source(dataset)
    return Found(f"its code draws random numbers that no seed decides ({unseeded})") if unseeded else None


def _made_twice(dataset: Any, length: int) -> Found:
    indices = list(dict.fromkeys(round(place * (length - 1) / max(1, ITEMS - 1)) for place in range(ITEMS)))
    whole = _whole(dataset, indices, length)
    if not whole.refusal or owner_of(dataset) is None:
        return whole
    return _split(dataset, indices)


def _depend_on_batch(dataset: Any, length: int) -> bool:
    """Whether some batches hold other items than are made alone. The last one has the shortest and the longest: what is padded to the
    longest of a batch shows there, if anywhere."""
    chance, sizes, until = random.Random(0), {}, time.monotonic() + BATCHES_S
    for _ in range(BATCHES):
        if time.monotonic() > until:
            break
        indices = chance.sample(range(length), min(BATCH, length))
        alone = {index: cache_codec.fingerprint(one(dataset, index)) for index in indices}
        if not _made_alike(dataset, alone):
            return True
        sizes |= alone
    by_size = sorted(sizes, key=lambda index: len(sizes[index]))
    return bool(sizes) and not _made_alike(dataset, {index: sizes[index] for index in (by_size[0], by_size[-1])})


def _made_alike(dataset: Any, alone: dict[int, bytes]) -> bool:
    return list(map(cache_codec.fingerprint, dataset.__getitems__(list(alone)))) == list(alone.values())


def _whole(dataset: Any, indices: list[int], length: int) -> Found:
    records, make_s = [], []
    for index in indices:
        first, drew, seconds = _made(lambda index=index: one(dataset, index), 1)
        second, _, again = _made(lambda index=index: one(dataset, index), 2)
        try:
            record = cache_codec.encode(first)
        except cache_codec.Unstorable as problem:
            return Found(f"its items cannot be stored: {problem}")
        if cache_codec.fingerprint(first) != cache_codec.fingerprint(second):
            return Found("its items are not the same each time that they are read")
        if drew:
            return Found("its items are the same each time, but making them draws random numbers, and later draws would differ")
        records.append(b"".join(record))
        make_s.append(min(seconds, again))
    if made_together(dataset):
        made = dataset.__getitems__(list(indices))
        if type(made) is not list:      # a cache would hand over a list
            return Found(f"its __getitems__ returns a {type(made).__name__}")
        together = [b"".join(cache_codec.encode(item)) for item in made]
        if together != records or _depend_on_batch(dataset, length):
            return Found("its items depend on the batch that they are fetched in")
    return _worth(records, make_s, None, ())


def _split(dataset: Any, indices: list[int]) -> Found:
    count = min(_same_steps(dataset, index) for index in indices)
    twin, prefix, rest = cut(dataset, count)
    records, make_s, places = [], [], set()
    for index in indices:
        calls = prefix.calls
        item, drew, seconds = _made(lambda index=index: one(twin, index), 3)
        place = find_place(item, prefix.result)
        if drew or prefix.calls != calls + 1 or place is None:
            return Found("its items are random outside of its transform, or are changed after it")
        places.add(place)
        try:
            records.append(b"".join(cache_codec.encode(item)))
        except cache_codec.Unstorable as problem:
            return Found(f"its items are random, and what comes before their first random step cannot be stored: {problem}")
        make_s.append(seconds)
        plain, after = _states_of(lambda index=index: one(dataset, index))
        ours, ours_after = _states_of(lambda item=item, place=place: replaced(item, place, lambda x: through(rest, x)))
        if cache_codec.fingerprint(plain) != cache_codec.fingerprint(ours) or after != ours_after:
            return Found("its items are random, and doing the steps of its transform one by one gives others")
    if len(places) != 1:
        return Found("its items are built differently from one to the next")
    return _worth(records, make_s, count, places.pop())


def _same_steps(dataset: Any, index: int) -> int:
    """How many first steps of the transform draw no random numbers and give the same twice."""
    twin, prefix, _ = cut(dataset, 0)
    one(twin, index)
    found = owner_of(dataset)
    assert found is not None
    steps = steps_of(vars(found[0][-1])[found[1]])
    sample = prefix.result
    for count, step in enumerate(steps):
        inputs = copy.deepcopy(sample), copy.deepcopy(sample)       # a step may change its input
        first, drew, _ = _made(lambda step=step, x=inputs[0]: step(x), 4)
        second, _, _ = _made(lambda step=step, x=inputs[1]: step(x), 5)
        try:
            cache_codec.encode(first)
        except cache_codec.Unstorable:
            return count
        if drew or cache_codec.fingerprint(first) != cache_codec.fingerprint(second):
            return count
        sample = first
    return len(steps)


def _worth(records: list[bytes], make_s: list[float], steps: int | None, place: tuple[Any, ...]) -> Found:
    """The answer, unless reading an item from a cache saves nothing."""
    read_s = _middle([min(_reading_s(record) for _ in range(READINGS)) for record in records]) + 5e-6     # and a system call
    made = _middle(make_s)                          # the first one may have opened something
    if made < LEAST_GAIN * read_s:
        return Found(f"making an item takes {made * 1e3:.3f} ms, reading it from a cache would take {read_s * 1e3:.3f} ms: it is kept "
                     f"where making takes {LEAST_GAIN} times as long")
    return Found("", steps, place, sum(map(len, records)) // len(records), made, read_s)


def _reading_s(record: bytes) -> float:
    began = time.perf_counter()
    cache_codec.decode(bytearray(record))
    return time.perf_counter() - began


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


# -- random numbers ------------------------------------------------------------------------------------------------------


def states() -> tuple[Any, ...]:
    """Of the generators that scripts draw from without saying so."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (torch.get_rng_state() if torch else None, random.getstate(), numpy.random.get_state() if numpy else None)


def restore(saved: tuple[Any, ...]) -> None:
    if saved[0] is not None:
        sys.modules["torch"].set_rng_state(saved[0])
    random.setstate(saved[1])
    if saved[2] is not None:
        sys.modules["numpy"].random.set_state(saved[2])


def seed(number: int) -> None:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None:
        torch.random.default_generator.manual_seed(number)      # of the CPU only: no device is woken here
    random.seed(number)
    if numpy is not None:
        numpy.random.seed(number)


def drawn_since(before: tuple[Any, ...]) -> bool:
    """Whether random numbers were drawn since these were the states."""
    return comparable(states()) != comparable(before)


def comparable(saved: tuple[Any, ...]) -> tuple[Any, ...]:
    torch, python, numpy = saved
    return (None if torch is None else ctypes.string_at(torch.data_ptr(), torch.numel()), python,
            None if numpy is None else (numpy[0], numpy[1].tobytes(), *numpy[2:]))


def _made(make: Any, number: int) -> tuple[Any, bool, float]:
    """What `make` returns under this seed, whether it drew random numbers, and the seconds that it took."""
    seed(number)
    before = states()
    began = time.perf_counter()
    value = make()
    seconds = time.perf_counter() - began
    return value, drawn_since(before), seconds


def _states_of(make: Any) -> tuple[Any, Any]:
    seed(6)
    value = make()
    return value, comparable(states())
