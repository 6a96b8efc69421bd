"""Storing items before they are asked for: only where a trial wants to see a warm cache without waiting for an epoch.

Indices are drawn from the sampler ahead of time, which is unseen by samplers that draw all their random numbers
before their first index, as torch's do; others are not looked ahead of.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Any

from saturate.data import cache_probe

#: Batches that a trial reads at most.
MOST_BATCHES = 2000
#: A child that still runs this long after it should have ended is killed.
_GRACE_S = 10.0

#: torch's own samplers, by name: they draw before the first index, or from a generator of their own.
_KNOWN = ("SequentialSampler", "RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler", "DistributedSampler")


class Ahead:
    """Stands for a sampler of batches in a loader's iterator. `budget.ahead_s` is what is left of the time for it."""

    def __init__(self, sampler: Any, reader: Any, budget: Any, threads: int):
        self._sampler = sampler
        self._reader = reader
        self._budget = budget
        self._threads = threads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._sampler)
        if self._budget.ahead_s <= 0 or not _draws_at_once(self._sampler):
            return batches
        return self._filled(batches)

    def _filled(self, batches: Iterator[Any]) -> Iterator[Any]:
        """A generator: it begins when the first batch is asked for, as the sampler's own would."""
        first = list(itertools.islice(batches, MOST_BATCHES))
        began = time.monotonic()
        fill(self._reader, _indices(first), self._budget.ahead_s, _processes(self._threads))
        self._budget.ahead_s -= time.monotonic() - began
        yield from first
        yield from batches


def _draws_at_once(sampler: Any) -> bool:
    """Whether it is one of torch's samplers, or of batches from one."""
    inner = getattr(sampler, "sampler", sampler)
    if not all(type(one).__module__.startswith("torch.utils.data.") for one in (sampler, inner)):
        return False
    if type(inner).__name__ == "RandomSampler" and inner.generator is not None:
        # More than one permutation is drawn as it goes, from a generator that others may draw from as well.
        return not inner.replacement and inner.num_samples <= len(inner.data_source)
    return type(inner).__name__ in _KNOWN


def _indices(batches: list[Any]) -> list[int]:
    found = dict.fromkeys(index for batch in batches for index in (batch if isinstance(batch, (list, tuple)) else [batch]))
    return [index for index in found if type(index) is int]


def _processes(threads: int) -> int:
    """How many may fill: as many as this process may use cores. 0: it must do so itself, because items are made by several
    threads, which a forked process would not have."""
    return 0 if threads > 1 else max(1, usable_cpus() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def usable_cpus() -> int:
    """Cores that this process may use: affinity and cgroup quota, whichever is less."""
    count = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass                            # cgroups of the first version, or none
    return count


def fill(reader: Any, indices: list[int], seconds: float, processes: int) -> None:
    """Store these items, as far as they are wanted and not there, for at most `seconds`, in so many processes of their own
    (0: in this one)."""
    store = reader.store
    missing = [index for index in indices if 0 <= index < store.slots and store.wanted(index) and not store.holds(index)]
    if not missing or reader.off:
        return
    deadline = time.monotonic() + seconds
    if not processes:
        _store(reader, missing, deadline)
        return
    children = [_forked(reader, missing[place::processes], deadline) for place in range(min(processes, len(missing)))]
    try:
        while children and time.monotonic() < deadline + _GRACE_S:
            children = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
            time.sleep(0.01)
    finally:                            # also when the user interrupts
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _store(reader: Any, indices: list[int], deadline: float) -> None:
    random_state = cache_probe.states()
    try:
        for index in indices:
            if time.monotonic() > deadline or reader.store.full:
                break
            reader.store_ahead(index)
    except Exception:  # noqa: BLE001 - an item that cannot be made fails again where the training asks for it
        return
    finally:
        cache_probe.restore(random_state)


def _forked(reader: Any, indices: list[int], deadline: float) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")     # that this process has threads: so it has when workers are forked
        child = os.fork()
    if child:
        return child
    try:
        cache_probe.settle_child()
        _store(reader, indices, deadline)
    finally:
        os._exit(0)
