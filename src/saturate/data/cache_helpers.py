"""Processes that make and store items of a dataset beside the training: forked from it, so that they have its dataset; of the
lowest priority, so that they take what it leaves of the processor; gone when it ends.

Nothing depends on them. What they have not stored when it is asked for, the training makes itself.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import select
import signal
import struct
import threading
import time
import weakref
from dataclasses import dataclass
from posix import getpid
from typing import Any

from saturate import ranks
from saturate.data import cache_fork
from saturate.data.contents import open_connection
from saturate.machine.facts import cpu_count

#: Items that a helper makes before it stores them: it looks at the generators of random numbers once for all of them.
TOGETHER = 4
#: Batches that helpers which were overtaken leave to the training, at most.
MOST_LEFT = 8
#: How long the training may be stopped to fork them: a large process takes a while to be copied.
MOST_FORKING_S = 0.25

_LEAST_PRIORITY = 19
#: Where memory runs out the kernel ends these first: each writes into its copy of the dataset, and the training can do without them.
_FIRST_TO_GO = "1000"
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
    """Cores that this process may use, whole ones: affinity or the tightest quota around it, whichever is less."""
    return max(1, int(cpu_count()))


def most(*datasets: Any) -> int:
    """How many helpers a dataset (and what makes its items) may have: as many as this rank may use cores; none, where they would share
    a connection with the training."""
    try:
        shared = open_connection(*datasets)
    except Exception as error:  # noqa: BLE001 - an object that raises when it is looked at
        shared = type(error).__name__
    return 0 if shared else max(1, usable_cpus() // ranks.here())


class Helpers:
    """Helpers that store the items of some batches, in the order in which these will be asked for."""

    def __init__(self, reader: Any, batches: list[list[int]], count: int, *, reached: int = -1, threads: int = 1,
                 seconds: float = math.inf):
        """`reached`: the last batch that was asked for, by its place in `batches`. `threads`: of torch in this process; a helper has
        one, and ends where that may round otherwise. All end after `seconds`."""
        self._shared = mmap.mmap(-1, mmap.PAGESIZE)
        self.reached(reached)
        self._running: dict[int, int] = {}              # what stands for a helper in system calls, and its number
        self.stop = weakref.finalize(self, _stop, self._running, getpid())       # called at the end, if not before
        with contextlib.suppress(OSError):              # there is no room for another process: fewer will do
            work = _Work(reader, batches, self._shared, threads, os.pidfd_open(getpid()), time.monotonic() + seconds)
            try:
                self._fork(work, count)
            finally:
                os.close(work.training)

    def _fork(self, work: _Work, count: int) -> None:
        if not count:
            return
        began = time.perf_counter()
        self._add(_forked(work, 0))
        count = min(count, 1 + int(MOST_FORKING_S / (time.perf_counter() - began)))
        _WORD.pack_into(self._shared, _COUNT, count)
        for number in range(1, count):
            self._add(_forked(work, number))

    def _add(self, process: int) -> None:
        self._running[os.pidfd_open(process)] = process

    def reached(self, batch: int) -> None:
        """The training asks for this batch."""
        _WORD.pack_into(self._shared, _REACHED, batch)

    def running(self) -> bool:
        return not all(map(_ended, self._running))


def _stop(running: dict[int, int], owner: int) -> None:
    if getpid() != owner:            # a fork of the training: they are not its
        return
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
    for process in running:
        select.select([process], [], [])
        os.close(process)
    running.clear()


def _ended(process: int) -> bool:
    return bool(select.select([process], [], [], 0)[0])


@dataclass(frozen=True)
class _Work:
    """What helpers do, in processes of their own."""

    reader: Any
    batches: list[list[int]]
    shared: mmap.mmap
    threads: int
    training: int                       # its process, as system calls name it
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
        return store.full or store.dropped or time.monotonic() > self.deadline

    def _word(self, place: int) -> int:
        return _WORD.unpack_from(self.shared, place)[0]

    def _agrees(self) -> bool:
        """Whether this process makes again what the training made and stored."""
        read = itertools.chain.from_iterable(self.batches[:self._word(_REACHED) + 1])
        stored = next(filter(self.reader.store.holds, read), None)
        return stored is None or self.reader.agrees(stored)


def _forked(work: _Work, number: int) -> int:
    """The number of a new process, which is nobody's child: a script that waits for its children does not meet it."""
    reader, writer = os.pipe()
    between = cache_fork.fork(writer)
    if between == 0:
        try:
            helper = os.fork()
            if helper == 0:
                _help(work, number)
            os.write(writer, _WORD.pack(helper))
        finally:
            os._exit(0)
    os.close(writer)
    try:
        said = os.read(reader, _WORD.size)
    finally:
        os.close(reader)
        cache_fork.wait(between)
    if len(said) < _WORD.size:
        raise OSError("no more processes")
    return _WORD.unpack(said)[0]


def _help(work: _Work, number: int) -> None:
    """Never returns."""
    try:
        threading.Thread(target=_end_with, args=(work.training,), daemon=True).start()
        os.nice(_LEAST_PRIORITY)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(_FIRST_TO_GO)
        work.run(number)
    finally:                                    # an item that cannot be made fails again where the training asks for it
        os._exit(0)


def _end_with(training: int) -> None:
    """Also in the middle of an item."""
    select.select([training], [], [])
    os._exit(0)


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
