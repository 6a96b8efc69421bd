"""Is there something about a dataset's items that is the same each time? Some items are made twice, under different
random numbers, in a child process: what that opens, counts or draws, the training never sees.

Three answers: whole items are; or the items are up to a certain step of their `transform`, and everything after it is
random; or nothing can be cached, with the reason.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from saturate.data import cache_codec, random_states, transforms
from saturate.data.cache_fork import fork, wait
from saturate.data.contents import open_connection, own_generator, unseeded_source

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
    if not whole.refusal or transforms.owner_of(dataset) is None:
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
        alone = {index: cache_codec.fingerprint(transforms.one(dataset, index)) for index in indices}
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
        first, drew, seconds = _made(dataset, lambda index=index: transforms.one(dataset, index), 1)
        second, _, again = _made(dataset, lambda index=index: transforms.one(dataset, index), 2)
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
    if transforms.made_together(dataset):
        made = dataset.__getitems__(list(indices))
        if type(made) is not list:      # a cache would hand over a list
            return Found(f"its __getitems__ returns a {type(made).__name__}")
        together = [b"".join(cache_codec.encode(item)) for item in made]
        if together != records or _depend_on_batch(dataset, length):
            return Found("its items depend on the batch that they are fetched in")
    return _worth(records, make_s, None, ())


def _split(dataset: Any, indices: list[int]) -> Found:
    count = min(_same_steps(dataset, index) for index in indices)
    twin, prefix, rest = transforms.cut(dataset, count)
    records, make_s, places = [], [], set()
    for index in indices:
        calls = prefix.calls
        item, drew, seconds = _made(dataset, lambda index=index: transforms.one(twin, index), 3)
        place = transforms.find_place(item, prefix.result)
        if drew or prefix.calls != calls + 1 or place is None:
            return Found("its items are random outside of its transform, or are changed after it")
        places.add(place)
        try:
            records.append(b"".join(cache_codec.encode(item)))
        except cache_codec.Unstorable as problem:
            return Found(f"its items are random, and what comes before their first random step cannot be stored: {problem}")
        make_s.append(seconds)
        plain, after = _states_of(lambda index=index: transforms.one(dataset, index))
        ours, ours_after = _states_of(lambda item=item, place=place: transforms.replaced(item, place, lambda x: transforms.through(rest, x)))
        if cache_codec.fingerprint(plain) != cache_codec.fingerprint(ours) or after != ours_after:
            return Found("its items are random, and doing the steps of its transform one by one gives others")
    if len(places) != 1:
        return Found("its items are built differently from one to the next")
    return _worth(records, make_s, count, places.pop())


def _same_steps(dataset: Any, index: int) -> int:
    """How many first steps of the transform draw no random numbers and give the same twice."""
    twin, prefix, _ = transforms.cut(dataset, 0)
    transforms.one(twin, index)
    found = transforms.owner_of(dataset)
    assert found is not None
    steps = transforms.steps_of(vars(found[0][-1])[found[1]])
    sample = prefix.result
    for count, step in enumerate(steps):
        inputs = copy.deepcopy(sample), copy.deepcopy(sample)       # a step may change its input
        first, drew, _ = _made(dataset, lambda step=step, x=inputs[0]: step(x), 4)
        second, _, _ = _made(dataset, lambda step=step, x=inputs[1]: step(x), 5)
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


def _made(dataset: Any, make: Any, number: int) -> tuple[Any, bool, float]:
    """What `make` returns under this seed, whether it drew random numbers, and the seconds that it took."""
    random_states.seed(number)
    before = random_states.states()
    with _in_worker(dataset, number):
        began = time.perf_counter()
        value = make()
        seconds = time.perf_counter() - began
    return value, random_states.drawn_since(before), seconds


@contextlib.contextmanager
def _in_worker(dataset: Any, number: int) -> Iterator[None]:
    """As in one of two workers: items may be seeded or chosen by theirs, and one is stored for all of them."""
    workers = getattr(getattr(sys.modules.get("torch.utils.data"), "_utils", None), "worker", None)
    if not hasattr(workers, "_worker_info"):
        yield
        return
    before = workers._worker_info
    workers._worker_info = workers.WorkerInfo(id=number % 2, num_workers=2, seed=number, dataset=dataset)
    try:
        yield
    finally:
        workers._worker_info = before


def _states_of(make: Any) -> tuple[Any, Any]:
    random_states.seed(6)
    value = make()
    return value, random_states.comparable(random_states.states())
