"""Iterating a DataLoader that was given workers as if it had none: the same order, the same random draws, and nothing kept alive for longer.

`loader-workers` decides who gets workers; here is what follows from that in torch's own iterators.
"""

from __future__ import annotations

import functools
import sys
import time
import traceback
import types
import weakref
from collections.abc import Callable
from typing import Any

from saturate.data.glance import LOOKED, LOOKED_S, Watch
from saturate.techniques._drawn_ahead import DrawnAhead, generators_of, set_state, state_of
from saturate.techniques._given import Given
from saturate.techniques._loaders import samplers_in
from saturate.techniques._refused_in_workers import (
    Failure,
    Passes,
    end,
    refusing_models,
    sending_all,
    trained_by,
    without_workers,
)


def keep(context: Any, ours: Callable[[Any], bool], given: Given, lost: Callable[[Any], str], say: Callable[[str], None]) -> None:
    """`ours`: whether a loader's workers persist because of the technique. `given`: the datasets whose loaders have workers because of
    it. `lost`: why a loader that is about to start its workers cannot keep them, or "". `say`: tell the user, once."""
    over: weakref.WeakSet[Any] = weakref.WeakSet()         # iterators that have said that there are no more batches
    _keep_order(context, ours)
    _begin_late(context, given, over, say)
    _keep_passes(context, ours, given, over, lost, say)
    _let_copy(context, ours)


def _keep_order(context: Any, ours: Callable[[Any], bool]) -> None:
    """Draw the per-epoch random number that persistent workers skip, so that samplers shuffle as without workers."""
    torch = context.torch
    iterator = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    original = iterator._reset

    @functools.wraps(original)
    def reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        if not first_iter and ours(loader):
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        original(self, loader, first_iter)

    context.set_attribute(iterator, "_reset", reset)


class _Copied:
    """What workers have a copy of since a pass began, looked at now and then while it lasts: a script that changes it meanwhile (a
    curriculum that goes on with each step) would get batches of what it was. Not the model that is trained, which its code may reach: workers
    refuse to call that."""

    def __init__(self, loader: Any, optimizers: Callable[[], list[Any]]):
        self.loader, self._optimizers = weakref.ref(loader), optimizers
        self._things = loader.dataset, loader.collate_fn
        self._watch, self._began, self._spent_s = Watch(), time.perf_counter(), 0.0
        self._as_copied = self._look()

    def _look(self) -> tuple[frozenset[int], Any]:
        trained = trained_by(self._optimizers())
        seen = self._watch.within(LOOKED * (time.perf_counter() - self._began) + LOOKED_S - self._spent_s, *self._things, trained=trained)
        self._spent_s += self._watch.took_s
        return trained, seen

    def changed(self) -> bool:
        """False also where that cannot be told: not in the time, or since something else is trained now."""
        trained, then = self._as_copied
        if then is None:
            return False
        now_trained, now = self._look()
        return now is not None and now_trained == trained and now != then


class _Begun:
    """A sampler whose iterator is there: one that draws where it is asked for it must not be asked twice."""

    def __init__(self, iterator: Any):
        self._iterator = iterator

    def __iter__(self) -> Any:
        return self._iterator


def _begin_late(context: Any, given: Given, over: Any, say: Callable[[str], None]) -> None:
    """Ask the sampler for indices at the first `next`, as without workers: what it draws then must not come before what the script
    draws, or another loader's sampler, between the beginning of a pass and its first batch."""
    iterator = context.torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    reset, next_data, get, process = iterator._reset, iterator._next_data, iterator._get_data, iterator._process_data
    waiting: weakref.WeakSet[Any] = weakref.WeakSet()      # iterators whose workers have nothing to do before the first `next`
    orders: weakref.WeakKeyDictionary[Any, DrawnAhead] = weakref.WeakKeyDictionary()
    passes = Passes(context.torch)
    copied: weakref.WeakKeyDictionary[Any, _Copied] = weakref.WeakKeyDictionary()
    changed: weakref.WeakSet[Any] = weakref.WeakSet()      # loaders whose datasets were changed within a pass

    def begin(started: Any) -> None:
        waiting.discard(started)
        for _ in range(0 if started._shutdown else started._prefetch_factor * started._num_workers):
            started._try_put_index()

    @functools.wraps(reset)
    def late_reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        over.discard(self)
        if loader not in given:
            return reset(self, loader, first_iter)
        ahead, self._prefetch_factor = self._prefetch_factor, 0
        indices = self._index_sampler
        if first_iter:      # torch has asked it once by now, and without workers it asks no second time
            self._index_sampler = _Begun(self._sampler_iter)
        try:
            reset(self, loader, first_iter)
        finally:
            self._prefetch_factor, self._index_sampler = ahead, indices
        orders.pop(self, None)
        sampler = loader._index_sampler
        order = DrawnAhead(self._sampler_iter, sampler, functools.partial(say, _out_of_order(type(getattr(sampler, "sampler", sampler)).__name__)))
        if order.draws:
            self._sampler_iter = orders[self] = order
        passes.began(self, loader)
        copied[self] = _Copied(loader, context.built_optimizers)
        waiting.add(self)

    @functools.wraps(next_data)
    def late_next(self: Any) -> Any:
        if self in waiting:
            begin(self)
        if self in orders:
            orders[self].reached()
        if self in copied and passes.goes_on(self) and copied[self].changed():
            loader = copied.pop(self).loader()
            if self in orders:
                orders.pop(self).settle()
            say(f"{type(self._dataset).__name__} or its collate_fn was changed within a pass, of which workers have a copy: its batches are made in the "
                "training process from here on")
            again = loader in changed
            if loader is not None:
                changed.add(loader)
            return passes.go_on_here(self, None, for_good=again)
        try:
            with passes.waits(self):
                batch = next_data(self)
        except StopIteration:
            over.add(self)
            raise
        except Exception as error:      # a dataset may have made another one of it
            reason, failure = passes.must_go_on_here(self, error), error
            if not reason:
                raise
        else:
            if not isinstance(batch, Failure):
                passes.came(self)
                return batch
            reason, failure = passes.must_go_on_here(self, batch), batch
            if not reason:
                made = passes.once_more(self)
                say(f"a worker has raised {batch.kind} over a batch of {type(self._dataset).__name__}, which the training process could make")
                return made
        if self in orders:
            orders.pop(self).settle()
        say(reason)
        return passes.go_on_here(self, failure)

    @functools.wraps(get)
    def get_received(self: Any) -> Any:
        return passes.receive(self, get)

    @functools.wraps(process)
    def process_kept(self: Any, data: Any, *arguments: Any) -> Any:
        return process(self, passes.kept(self, data), *arguments)

    def undo() -> None:
        for started in list(waiting):
            begin(started)
        for order in list(orders.values()):
            order.settle()

    context.on_undo(undo)
    context.set_attribute(iterator, "_reset", late_reset)
    context.set_attribute(iterator, "_next_data", late_next)
    context.set_attribute(iterator, "_get_data", get_received)
    context.set_attribute(iterator, "_process_data", process_kept)


def _keep_passes(context: Any, ours: Callable[[Any], bool], given: Given, over: Any, lost: Callable[[Any], str],
                 say: Callable[[str], None]) -> None:
    """What workers change without a word. A loader with persistent ones has one iterator: a second pass inside of one that is not over, as
    `zip(loader, loader)`, would take its batches. They keep the dataset of the first epoch. A file that was opened since the loader was built
    would be shared by all of them, and a generator that was made since copied. A dataset that reads a loader of its own takes it along into a
    worker, which can have none. They go on with their own random numbers where the script seeds anew: with another seed, or with the same one,
    so that what a pass begins from is what the pass before began from. And a loader that is kept but never passed over again, as those of
    evaluations are by some frameworks, would keep its workers: those of one that was passed over once end when another one begins."""
    kind = context.torch.utils.data.DataLoader
    original = kind.__iter__
    seen: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()     # by loader, as its workers began
    once: weakref.WeakSet[Any] = weakref.WeakSet()      # loaders that were passed over once
    watches: weakref.WeakKeyDictionary[Any, Watch] = weakref.WeakKeyDictionary()

    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        if self in given and self._iterator is not None and not all(worker.is_alive() for worker in self._iterator._workers):
            end(self._iterator)         # the kernel has ended one between two passes
            self._iterator = None
        if self._iterator is None and self.num_workers and lost(self):
            without_workers(self)
        if not ours(self):
            return begin(self, original)
        if _busy(self, over):
            return begin(self, type(self)._get_iterator)
        generator = _seeds_workers(context.torch, self)
        held = _held(self, watches.setdefault(self, Watch()))
        now, drawn = (held, trained_by(context.built_optimizers()), generator.initial_seed()), state_of(generator)
        if self not in seen:
            for other in [other for other in once if other._iterator is not None and not _busy(other, over)]:
                _end_workers(other)
            once.add(self)
        else:
            once.discard(self)
            begun, drawn_then = seen[self]
            if self._iterator is not None and (begun != now or drawn_then == drawn):
                _end_workers(self)
                if lost(self):              # new ones might share what the script has opened since
                    without_workers(self)
                    return begin(self, original)
        seen[self] = now, drawn
        return begin(self, original)

    def begin(loader: Any, make: Callable[[Any], Any]) -> Any:
        if loader.num_workers and loader in given and (loader._iterator is None or make is not original):     # workers are started
            generators = [_seeds_workers(context.torch, loader), *generators_of(list(samplers_in(loader._index_sampler)))]
            states = [state_of(generator) for generator in generators]
            try:
                with refusing_models(context.torch, trained_by(context.built_optimizers())), sending_all(context.torch):
                    return make(loader)
            except OSError as error:        # if it is the script's own, it comes again
                _end_half_made(context.torch, error)
                say(f"workers of {type(loader.dataset).__name__} cannot be started ({error}), so there are none")
            without_workers(loader)
            for generator, state in zip(generators, states):
                set_state(generator, state)
        return make(loader)

    context.set_attribute(kind, "__iter__", iterate)


def _let_copy(context: Any, ours: Callable[[Any], bool]) -> None:
    """A loader is copied and pickled without the iterator that persistent workers leave on it, which cannot be. The copy has a dataset of
    its own, by which nobody knows it: without persistent workers it draws what the script alone would."""
    kind = context.torch.utils.data.DataLoader
    plain = kind.__getstate__

    @functools.wraps(plain)
    def state(self: Any) -> Any:
        found = plain(self)
        return {**found, "_iterator": None, "persistent_workers": False} if isinstance(found, dict) and ours(self) else found

    context.set_attribute(kind, "__getstate__", state)


def _held(loader: Any, watch: Watch) -> Any:
    """A glance at what its workers hold a copy of; where that cannot be told, they are started anew."""
    seen = watch.at_pass(loader.dataset, loader.collate_fn, loader.worker_init_fn)
    return object() if seen is None else seen


def _seeds_workers(torch: Any, loader: Any) -> Any:
    """The generator from which they are."""
    return torch.default_generator if loader.generator is None else loader.generator


def _end_half_made(torch: Any, error: BaseException) -> None:
    """The workers of an iterator that could not have all of them. torch would ask for what it does not have yet."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        made = frame.f_locals.get("self")
        if isinstance(made, torch.utils.data.dataloader._MultiProcessingDataLoaderIter):
            made._shutdown = True
            if hasattr(made, "_workers"):
                end(made)
            return


def _end_workers(loader: Any) -> None:
    loader._iterator._shutdown_workers()
    loader._iterator = None


def _busy(loader: Any, over: Any) -> bool:
    """Whether the script is in the middle of a pass over the loader: one that has had its last batch has still to be told that there
    are no more. One that it broke off, it has let go."""
    references = _references(loader)        # before there is one more here
    iterator = loader._iterator
    return iterator is not None and iterator not in over and references > _ALONE


def _references(loader: Any) -> int:
    return sys.getrefcount(loader._iterator)


_ALONE = _references(types.SimpleNamespace(_iterator=types.SimpleNamespace()))      # what Python itself adds


def _out_of_order(sampler: str) -> str:
    return (f"{sampler} draws random numbers between two batches, and the training draws from the same generator: asked for batches "
            "ahead, it gives others than without workers")
