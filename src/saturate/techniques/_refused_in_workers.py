"""Where a loader's workers refuse their work or are lost, its pass goes on in the training process, as the script wrote it.
Used by `loader-workers`.

What workers refuse: the use of CUDA, and a call of the model that is being trained.

Forked from a process that uses CUDA, or has only counted its devices, workers must not use it, and a collate function that moves its
batch to a device raises there. And a dataset that calls the model (to choose hard examples, say) would call a copy of it, as it was
when the worker began: `refusing_models` makes that raise.

How they are lost: the kernel ends a process where memory runs short, and the script alone would have none that it ends. torch looks for
lost workers whenever a child process ends, and raises wherever the training is then. Here it looks only while the training waits for a
batch, where there is somebody who can go on, and not while the sampler draws, which would be over.

What does not cross: a batch of a class that was made in a function, or with a generator or a lambda in it, cannot be pickled, and torch
would wait for it for ever. Others are pickled, and cannot be put together again (a `__getattr__` that asks for what is not there yet).

Whatever else a worker raises is the script's, which may expect it: to skip a file that cannot be read, say. Of a worker's exception there
is only a text here, and torch makes another one of it, of the same class where that takes a text, without its attributes. So that
batch is made once more, in the training process: it raises what the script alone would have raised."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import multiprocessing.connection
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from saturate.techniques._interrupts import from_signal_handler

#: From torch.cuda, raised in the worker and again in the training process, with the worker's traceback.
REFUSAL = "Cannot re-initialize CUDA in forked subprocess"
#: From `refusing_models`, in the same way.
TRAINED = "a worker process has no model that is being trained, but a copy"

#: From `sending_all`, in the same way.
STAYS = "a worker process cannot send what it has made"

#: From torch, of workers that have ended before their work: which.
LOST = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")

#: What the training process meets where a worker ends while it hands over a batch: its end of a connection is closed before the kernel
#: says that it has ended, so torch finds it alive.
_CUT_OFF = (ConnectionError, EOFError, FileNotFoundError)

#: How long a process that was killed may take to go.
_PATIENCE_S = 5.0
_MOMENT_S = 1.0     # where it may be that none was

#: Of a training that keeps its batches: each tensor that a worker has sent is an open file for as long as it lives.
_MANY = "makes batches that the training keeps, more than files may be open"

#: What is said of a dataset whose batches no worker can make.
_REASONS = {REFUSAL: "uses CUDA, which forked workers cannot",
            "Too many open files": _MANY, "received 0 items of ancdata": _MANY,
            TRAINED: "calls the model that is being trained, of which workers have a copy as it was when they began",
            STAYS: "makes batches that cannot be sent to another process"}


def trained_by(optimizers: list[Any]) -> frozenset[int]:
    """The parameters that they train, by id. One whose making has failed has no groups."""
    groups = (group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ()))
    return frozenset(id(parameter) for group in groups for parameter in group["params"] if parameter.requires_grad)


@contextlib.contextmanager
def refusing_models(torch: Any, trained: frozenset[int]) -> Iterator[None]:
    """Where workers are forked inside of this, a call of a module that holds any of these parameters raises in them. What is
    told is the call: parameters that an item is computed from in another way are not, nor is a copy that the script keeps of them,
    such as an average."""

    def refuse(module: Any, inputs: Any) -> None:
        if torch.utils.data.get_worker_info() is not None and not trained.isdisjoint(map(id, module.parameters())):
            raise RuntimeError(f"{TRAINED} ({type(module).__name__})")

    hook = torch.nn.modules.module.register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


class _Sending:
    """torch's loop of a worker, in which one that cannot send a batch says so: `multiprocessing` would print why, and send nothing. Of a
    tensor that is yet to be conjugated or negated torch sends what lies in memory: here that is done before."""

    def __init__(self) -> None:
        from torch.utils.data._utils import worker

        self._original = worker._worker_loop

    def __reduce__(self) -> Any:
        """A process that is not forked has torch's own there."""
        return _Sending, ()

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        from multiprocessing.reduction import ForkingPickler

        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        results = inspect.signature(self._original).bind(*args, **kwargs).arguments["data_queue"]

        def tell(error: Exception, kept: Any) -> None:
            if isinstance(kept, tuple):         # otherwise it was pickled, and whoever it was for has ended
                told = RuntimeError(f"{STAYS} ({type(error).__name__}: {error})")
                results.put((kept[0], torch._utils.ExceptionWrapper((RuntimeError, told, None))))

        results._on_queue_feeder_error = tell
        ForkingPickler.register(torch.Tensor, lambda tensor: reduce_tensor(tensor.resolve_conj().resolve_neg()))     # in this process alone
        self._original(*args, **kwargs)


@contextlib.contextmanager
def sending_all(torch: Any) -> Iterator[None]:
    """Where workers are started inside of this, however they are, they run in `_Sending`."""
    module = torch.utils.data._utils.worker
    original = module._worker_loop
    module._worker_loop = _Sending()
    try:
        yield
    finally:
        module._worker_loop = original


class NotReceived(Exception):
    """A batch that a worker has sent could not be put together; the message says why."""


class Asked:
    """Stands for the iterator over a sampler's batches of indices, and keeps those whose batches have not come yet, in order. `undisturbed`:
    what the sampler draws in: raised into, it would be over."""

    def __init__(self, batches: Iterator[Any], undisturbed: Callable[[], contextlib.AbstractContextManager[None]]):
        self._batches = batches
        self._undisturbed = undisturbed
        self._waiting: collections.deque[Any] = collections.deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._undisturbed():
            index = next(self._batches)
            self._waiting.append(index)
        return index

    def came(self) -> None:
        """The batch that was waited for the longest."""
        self._waiting.popleft()

    def again(self) -> Any:
        """The indices of the next batch, whether workers were asked for it or not."""
        return self._waiting.popleft() if self._waiting else next(self._batches)


class Failure:
    """In the place of a batch: what a worker has raised over it, or the thread that pins memory."""

    def __init__(self, raised: Any):
        self._raised = raised       # torch's ExceptionWrapper

    def __str__(self) -> str:
        return str(self._raised.exc_msg)

    @property
    def kind(self) -> str:
        return str(self._raised.exc_type.__name__)


class Passes:
    """Those that may have to go on in the training process."""

    def __init__(self, torch: Any):
        self._torch = torch
        self._signals = torch.utils.data._utils.signal_handling
        self._asked: weakref.WeakKeyDictionary[Any, tuple[Asked, Any]] = weakref.WeakKeyDictionary()    # by iterator: and its loader

    def began(self, iterator: Any, loader: Any) -> None:
        """Workers have not been asked for anything yet."""
        self._asked.pop(iterator, None)
        if getattr(iterator, "_in_order", True):
            iterator._sampler_iter = asked = Asked(iterator._sampler_iter, functools.partial(self._undisturbed, weakref.ref(iterator)))
            self._asked[iterator] = asked, weakref.ref(loader)
            self._look_away(iterator)

    @contextlib.contextmanager
    def waits(self, iterator: Any) -> Iterator[None]:
        """While the training waits for a batch: a worker that is lost, now or before, raises."""
        if iterator not in self._asked or iterator._shutdown:
            yield
            return
        try:
            self._look(iterator)
            yield
        finally:
            self._look_away(iterator)

    @contextlib.contextmanager
    def _undisturbed(self, held: Callable[[], Any]) -> Iterator[None]:
        """Whoever is lost meanwhile raises behind it."""
        iterator = held()
        looking = iterator is not None and iterator._worker_pids_set
        if looking:
            self._look_away(iterator)
        try:
            yield
        finally:
            if looking:
                self._look(iterator)

    def _look(self, iterator: Any) -> None:
        self._signals._set_worker_pids(id(iterator), tuple(worker.pid for worker in iterator._workers))
        iterator._worker_pids_set = True        # at the end of the pass torch looks away itself, before it ends them
        self._signals._error_if_any_worker_fails()

    def _look_away(self, iterator: Any) -> None:
        if iterator._worker_pids_set:
            self._signals._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False

    def came(self, iterator: Any) -> None:
        if iterator in self._asked:
            self._asked[iterator][0].came()

    def receive(self, iterator: Any, get: Callable[[Any], Any]) -> Any:
        """What `get` finds. Nothing of the script's but its signal handlers runs there: what it raises that is not known is of the batch."""
        try:
            return get(iterator)
        except Exception as error:
            if not self.goes_on(iterator) or from_signal_handler(error) or self.must_go_on_here(iterator, error):
                raise
            raise NotReceived(f"{type(error).__name__}: {error}") from error

    def kept(self, iterator: Any, data: Any) -> Any:
        """What a worker has sent, or a `Failure` where torch would raise."""
        return Failure(data) if iterator in self._asked and isinstance(data, self._torch._utils.ExceptionWrapper) else data

    def once_more(self, iterator: Any) -> Any:
        """The batch over which a worker has failed, or what it raises in the training process."""
        return _batch(self._torch, iterator, _fetcher(self._torch, iterator), self._asked[iterator][0])

    def must_go_on_here(self, iterator: Any, error: BaseException | Failure) -> str:
        """Why workers failed, in words, if it is for a reason that the training process has not; else ""."""
        if iterator not in self._asked:
            return ""
        dataset = type(iterator._dataset).__name__
        if isinstance(error, NotReceived):
            return f"batches that workers have made of {dataset} cannot be received ({error}): there are none"
        if lost(iterator, error):
            return f"{dataset} has lost a worker ({error}): its batches are made in the training process from here on"
        found = (said for refusal, said in _REASONS.items() if refusal in str(error))
        return next((f"{dataset} or its collate_fn {said}: there are none" for said in found), "")

    def goes_on(self, iterator: Any) -> bool:
        """Whether the training process could."""
        return iterator in self._asked and not iterator._shutdown

    def go_on_here(self, iterator: Any, error: BaseException | Failure | None, for_good: bool = True) -> Any:
        """The batch that has failed, or comes next. Those after it come without workers; those of later passes, too, if it is `for_good`."""
        asked, held = self._asked.pop(iterator)
        loader = held()
        if loader is not None and for_good:
            without_workers(loader)
        elif loader is not None:
            loader._iterator = None
        if error is not None and lost(iterator, error):
            end(iterator)
        else:
            iterator._shutdown_workers()
        iterator._tasks_outstanding = 0
        iterator._task_info.clear()
        # On the instance: what wraps the class may be taken back before the pass is over.
        iterator._next_data = functools.partial(_batch, self._torch, iterator, _fetcher(self._torch, iterator), asked)
        return iterator._next_data()


def lost(iterator: Any, error: BaseException | Failure) -> bool:
    """Whether it is a worker of this iterator that has ended; torch looks at those of all."""
    if isinstance(error, _CUT_OFF):
        return bool(multiprocessing.connection.wait([worker.sentinel for worker in iterator._workers], timeout=_MOMENT_S))
    found = LOST.match(str(error))
    return found is not None and not {worker.pid for worker in iterator._workers}.isdisjoint(map(int, found[1].split(",")))


def without_workers(loader: Any) -> None:
    """From its next pass on."""
    vars(loader).update(num_workers=0, persistent_workers=False, prefetch_factor=None, _iterator=None, _DataLoader__multiprocessing_context=None)


def end(iterator: Any) -> None:
    """End the other workers. One that was killed may hold a lock, or have sent half of a message that the thread which pins memory
    waits for: nothing is asked of anybody, as torch would."""
    iterator._shutdown = True
    iterator._worker_result_queue.cancel_join_thread()
    if hasattr(iterator, "_pin_memory_thread"):
        iterator._pin_memory_thread_done_event.set()        # of this process alone
    for worker in iterator._workers:
        worker.kill()
        worker.join(timeout=_PATIENCE_S)
    for queue in iterator._index_queues:
        queue.cancel_join_thread()
        queue.close()


def _fetcher(torch: Any, iterator: Any) -> Any:
    return torch.utils.data._DatasetKind.create_fetcher(
        iterator._dataset_kind, iterator._dataset, iterator._auto_collation, iterator._collate_fn, iterator._drop_last)


def _batch(torch: Any, iterator: Any, fetcher: Any, asked: Asked) -> Any:
    """As torch's own loader without workers makes it."""
    data = fetcher.fetch(asked.again())
    return torch.utils.data._utils.pin_memory.pin_memory(data, iterator._pin_memory_device) if iterator._pin_memory else data
