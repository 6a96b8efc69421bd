"""Storing items before they are asked for.

In a trial, `Ahead` stores what it will read before the first batch: what is to be seen is a warm cache, without an epoch's wait. In
a run, `Beside` lets helpers store what is missing while the training goes on.

Indices are drawn from the sampler ahead of time. That changes nothing where all random numbers are drawn before the first index, as
torch's samplers do it; the last batch of one that draws once more behind it is not drawn ahead, and of others none is.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

from saturate.data import random_states
from saturate.data.cache_helpers import Helpers

#: Batches that are looked ahead at once; a trial reads no more.
MOST_BATCHES = 2000
#: A helper that still runs this long after it should have ended is killed.
_GRACE_S = 10.0
#: How long a pass must last, and the training make items itself, before it gets helpers.
PATIENCE_S = 0.1

#: torch's own samplers, by name: they draw before the first index, or from a generator of their own.
_KNOWN = ("SequentialSampler", "RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler", "DistributedSampler")


class _Foreseen:
    """Stands in a loader's iterator for a sampler that is `foreseeable`. Its own iterators are generators: they begin when the first
    batch is asked for, as the sampler's would."""

    def __init__(self, sampler: Any, reader: Any, threads: int):
        self._sampler = sampler
        self._reader = reader
        self._threads = threads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def _may_be_drawn(self) -> int:
        """How many batches may be drawn before they are asked for. RandomSampler draws another permutation when its last index has been
        taken, and uses none of it: where the generator is the script's, that must come when it would."""
        inner = _innermost(self._sampler)
        shared = type(inner).__name__ == "RandomSampler" and inner.generator is not None
        return max(0, len(self._sampler) - shared)      # of a pass without a batch there is nothing to leave


class Ahead(_Foreseen):
    """`budget.ahead_s` is what is left of the time for it."""

    def __init__(self, sampler: Any, reader: Any, threads: int, budget: Any):
        super().__init__(sampler, reader, threads)
        self._budget = budget

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._sampler)
        if self._budget.ahead_s > 0:
            first = list(itertools.islice(batches, min(MOST_BATCHES, self._may_be_drawn())))
            began = time.monotonic()
            # Where items are made by several threads, this process must make them.
            processes = 0 if self._threads > 1 else self._reader.helpers()
            fill(self._reader, [index for batch in first for index in _indices(batch)], self._budget.ahead_s, processes)
            self._budget.ahead_s -= time.monotonic() - began
            yield from first
        yield from batches


class Beside(_Foreseen):
    """Processes of their own make the items of later batches meanwhile, in a pass that lasts and has to make items itself."""

    def __iter__(self) -> Iterator[Any]:
        batches, left = iter(self._sampler), self._may_be_drawn()
        while some := list(itertools.islice(batches, min(MOST_BATCHES, left))):
            left -= len(some)
            yield from self._helped(some)
        yield from batches

    def _helped(self, batches: list[Any]) -> Iterator[Any]:
        reader, helpers = self._reader, None
        began, kept = time.monotonic(), reader.kept
        try:
            for place, batch in enumerate(batches):
                if helpers is not None:
                    helpers.reached(place)
                elif reader.kept > kept and not reader.off and time.monotonic() > began + PATIENCE_S:
                    helpers = Helpers(reader, list(map(_indices, batches)), reader.helpers(), reached=place, threads=self._threads)
                yield batch
        finally:                            # also when the script lets go of its iterator
            if helpers is not None:
                helpers.stop()


def foreseeable(sampler: Any) -> bool:
    """Whether it is one of torch's samplers, or of batches from one: whose order may be drawn before it is asked for."""
    inner = _innermost(sampler)
    if not all(type(one).__module__.startswith("torch.utils.data.") for one in (sampler, inner)):
        return False
    if type(inner).__name__ == "RandomSampler" and inner.generator is not None:
        # More than one permutation is drawn as it goes, from a generator that others may draw from as well.
        return not inner.replacement and inner.num_samples <= len(inner.data_source)
    return type(inner).__name__ in _KNOWN


def _innermost(sampler: Any) -> Any:
    return getattr(sampler, "sampler", sampler)


def _indices(batch: Any) -> list[int]:
    return [index for index in (batch if isinstance(batch, (list, tuple)) else [batch]) if type(index) is int]


def fill(reader: Any, indices: list[int], seconds: float, processes: int) -> None:
    """Store these items, as far as they are wanted and not there, for at most `seconds`, in so many processes of their own
    (0: in this one)."""
    store = reader.store
    missing = [index for index in dict.fromkeys(indices) if store.wanted(index) and not store.holds(index)]
    if not missing or reader.elsewhere() or reader.off:
        return
    deadline = time.monotonic() + seconds
    if not processes:
        _store(reader, missing, deadline)
        return
    helpers = Helpers(reader, [missing], min(processes, len(missing)), seconds=seconds)
    try:
        while helpers.running() and time.monotonic() < deadline + _GRACE_S:
            time.sleep(0.01)
    finally:                            # also when the user interrupts
        helpers.stop()


def _store(reader: Any, indices: list[int], deadline: float) -> None:
    random_state = random_states.states()
    try:
        for index in indices:
            if time.monotonic() > deadline or reader.store.full:
                break
            reader.store_ahead([index])
    except Exception:  # noqa: BLE001 - an item that cannot be made fails again where the training asks for it
        return
    finally:
        random_states.restore(random_state)
        with contextlib.suppress(Exception):    # an object that raises when it is looked at
            reader.left()
