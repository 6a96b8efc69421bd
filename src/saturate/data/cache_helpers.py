"""Processes that make and store items of a dataset beside the training: forked from it, so that they have its dataset; of the
lowest priority, so that they take what it leaves of the processor; gone when it ends.

Nothing depends on them. What they have not stored when it is asked for, the training makes itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import mmap
import os
import signal
import struct
import time
import weakref
from dataclasses import dataclass
from typing import Any

from saturate.data import cache_probe
from saturate.data.glance import open_connection

#: Items that a helper makes before it stores them: it looks at the generators of random numbers once for all of them.
TOGETHER = 4
#: Batches that helpers which were overtaken leave to the training, at most.
MOST_LEFT = 8
#: How long the training may be stopped to fork them: a large process takes a while to be copied.
MOST_FORKING_S = 0.25

_PR_SET_PDEATHSIG = 1
_LEAST_PRIORITY = 19
_WORD, _REACHED, _COUNT = struct.Struct("=q"), 0, 8      # what helpers share with the training, and where

#: Of an operation each of whose results is computed by itself, or which computes nothing.
_TAGS = frozenset({"pointwise", "inplace_view"})
#: Others, by name.
_BY_ITSELF = frozenset({
    "_to_copy", "amax", "amin", "aminmax", "arange", "cat", "constant_pad_nd", "copy_", "empty", "empty_strided", "fill_", "flip",
    "full", "full_like", "gather", "hamming_window", "hann_window", "index", "index_put_", "index_select", "linspace", "masked_fill",
    "masked_fill_", "max", "min", "new_empty", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "reflection_pad1d",
    "reflection_pad2d", "repeat", "replication_pad1d", "replication_pad2d", "roll", "rot90", "scatter", "scatter_", "sort", "stack",
    "topk", "tril", "triu", "upsample_bicubic2d", "upsample_bilinear2d", "upsample_nearest2d", "zero_", "zeros", "zeros_like",
    "_unsafe_view", "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa",
})


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


def most(*datasets: Any) -> int:
    """How many helpers a dataset (and what makes its items) may have: as many as this rank may use cores; none, where they would share
    a connection with the training."""
    try:
        shared = open_connection(*datasets)
    except Exception as error:  # noqa: BLE001 - an object that raises when it is looked at
        shared = type(error).__name__
    return 0 if shared else max(1, usable_cpus() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


class Helpers:
    """Helpers that store the items of some batches, in the order in which these will be asked for."""

    def __init__(self, reader: Any, batches: list[list[int]], count: int, *, reached: int = -1, threads: int = 1,
                 seconds: float = math.inf):
        """`reached`: the last batch that was asked for, by its place in `batches`. `threads`: of torch in this process; a helper has
        one, and ends where that may round otherwise. All end after `seconds`."""
        self._shared = mmap.mmap(-1, mmap.PAGESIZE)
        self.reached(reached)
        self._children: list[int] = []
        self.stop = weakref.finalize(self, _stop, self._children)      # called at the end of the script, if not before
        work = _Work(reader, batches, self._shared, threads, os.getpid(), time.monotonic() + seconds)
        with contextlib.suppress(OSError):              # there is no room for another process: fewer will do
            self._fork(work, count)

    def _fork(self, work: _Work, count: int) -> None:
        if not count:
            return
        began = time.perf_counter()
        self._children.append(_forked(work, 0))
        count = min(count, 1 + int(MOST_FORKING_S / (time.perf_counter() - began)))
        _WORD.pack_into(self._shared, _COUNT, count)
        for number in range(1, count):
            self._children.append(_forked(work, number))

    def reached(self, batch: int) -> None:
        """The training asks for this batch."""
        _WORD.pack_into(self._shared, _REACHED, batch)

    def running(self) -> bool:
        self._children[:] = [child for child in self._children if not _ended(child)]
        return bool(self._children)


def _stop(children: list[int]) -> None:
    for child in children:
        if not _ended(child):
            os.kill(child, signal.SIGKILL)
    while not all(map(_ended, children)):
        time.sleep(0.001)


@dataclass(frozen=True)
class _Work:
    """What helpers do, in processes of their own."""

    reader: Any
    batches: list[list[int]]
    shared: mmap.mmap
    threads: int
    parent: int
    deadline: float

    def run(self, number: int) -> None:
        """As the helper of this number: every so manieth group of items."""
        while not (count := self._word(_COUNT)):        # it is known when the first has been forked
            time.sleep(0.001)
        with _one_thread_will_do() if self.threads > 1 else contextlib.nullcontext():
            if not self._agrees():
                return
            items = [(batch, index) for batch, indices in enumerate(self.batches) for index in indices]
            first = 0                           # of the batches that are not left to the training
            for start in range(number * TOGETHER, len(items), count * TOGETHER):
                if self._over():
                    return
                batch, reached = items[start][0], self._word(_REACHED)
                if batch <= reached:            # overtaken: what comes next would be made twice
                    first = reached + 1 + min(MOST_LEFT, (len(self.batches) - reached) // 4)
                if batch >= first:
                    self._store([index for _, index in items[start:start + TOGETHER]])

    def _store(self, indices: list[int]) -> None:
        store = self.reader.store
        missing = [index for index in indices if store.wanted(index) and not store.holds(index)]
        if missing:
            self.reader.store_ahead(missing)

    def _over(self) -> bool:
        store = self.reader.store
        return os.getppid() != self.parent or store.full or store.dropped or time.monotonic() > self.deadline

    def _word(self, place: int) -> int:
        return _WORD.unpack_from(self.shared, place)[0]

    def _agrees(self) -> bool:
        """Whether this process makes again what the training made and stored."""
        read = itertools.chain.from_iterable(self.batches[:self._word(_REACHED) + 1])
        stored = next(filter(self.reader.store.holds, read), None)
        return stored is None or self.reader.agrees(stored)


def _forked(work: _Work, number: int) -> int:
    child = cache_probe.fork()
    if child:
        return child
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.nice(_LEAST_PRIORITY)
        work.run(number)
    finally:                                    # an item that cannot be made fails again where the training asks for it
        os._exit(0)


def _ended(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG)[0] != 0
    except ChildProcessError:                   # the script waits for all children of this process; or we are a fork of it
        return True


def _one_thread_will_do() -> Any:
    """Within it, an operation that several threads may round otherwise than one raises _Several."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class EachByItself(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            result = function(*arguments, **(keywords or {}))
            if not (function.is_view or _TAGS.intersection(tag.name for tag in function.tags)
                    or function._schema.name.rpartition("::")[2] in _BY_ITSELF or not _has_fractions(result, torch)):
                raise _Several(str(function))
            return result

    return EachByItself()


def _has_fractions(result: Any, torch: Any) -> bool:
    results = result if isinstance(result, (list, tuple)) else [result]
    return any(isinstance(one, torch.Tensor) and (one.is_floating_point() or one.is_complex()) for one in results)


class _Several(Exception):
    """An operation whose result may depend on how many threads it has."""
