"""A pass over a loader whose workers cannot make its batches: forked from a process that uses CUDA, or has only counted its devices,
they must not, and a collate function that moves its batch to a device raises there. The training process makes them itself then, as
the script wrote it. Used by `loader-workers`."""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Iterator
from typing import Any

#: From torch.cuda, raised in the worker and again in the training process, with the worker's traceback.
REFUSAL = "Cannot re-initialize CUDA in forked subprocess"


class Asked:
    """Stands for the iterator over a sampler's batches of indices, and keeps those whose batches have not come yet, in order."""

    def __init__(self, batches: Iterator[Any]):
        self._batches = batches
        self._waiting: collections.deque[Any] = collections.deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        index = next(self._batches)
        self._waiting.append(index)
        return index

    def came(self) -> None:
        """The batch that was waited for the longest."""
        self._waiting.popleft()

    def again(self) -> Any:
        """The indices of the next batch, whether workers were asked for it or not."""
        return self._waiting.popleft() if self._waiting else next(self._batches)


class Passes:
    """Those that may have to go on in the training process: where torch was built for GPUs."""

    def __init__(self, torch: Any):
        self._torch = torch
        self._asked: weakref.WeakKeyDictionary[Any, tuple[Asked, Any]] = weakref.WeakKeyDictionary()    # by iterator: and its loader

    def began(self, iterator: Any, loader: Any) -> None:
        """Workers have not been asked for anything yet."""
        self._asked.pop(iterator, None)
        # Not whether CUDA is in use: the process may begin to use it while workers live, and `is_available` is enough to refuse it to them.
        if (self._torch.version.cuda or self._torch.version.hip) and getattr(iterator, "_in_order", True):
            iterator._sampler_iter = asked = Asked(iterator._sampler_iter)
            self._asked[iterator] = asked, weakref.ref(loader)

    def came(self, iterator: Any) -> None:
        if iterator in self._asked:
            self._asked[iterator][0].came()

    def must_go_on_here(self, iterator: Any, error: BaseException) -> bool:
        """Whether workers failed for a reason that the training process has not."""
        return iterator in self._asked and REFUSAL in str(error)

    def go_on_here(self, iterator: Any) -> Any:
        """The batch that has failed. Those after it, of later passes too, come without workers."""
        asked, held = self._asked.pop(iterator)
        loader = held()
        if loader is not None:
            vars(loader).update(num_workers=0, persistent_workers=False, prefetch_factor=None, _iterator=None)
        iterator._shutdown_workers()
        iterator._tasks_outstanding = 0
        iterator._task_info.clear()
        # On the instance: what wraps the class may be taken back before the pass is over.
        iterator._next_data = functools.partial(_batch, self._torch, iterator, _fetcher(self._torch, iterator), asked)
        return iterator._next_data()


def _fetcher(torch: Any, iterator: Any) -> Any:
    return torch.utils.data._DatasetKind.create_fetcher(
        iterator._dataset_kind, iterator._dataset, iterator._auto_collation, iterator._collate_fn, iterator._drop_last)


def _batch(torch: Any, iterator: Any, fetcher: Any, asked: Asked) -> Any:
    """As torch's own loader without workers makes it."""
    data = fetcher.fetch(asked.again())
    return torch.utils.data._utils.pin_memory.pin_memory(data, iterator._pin_memory_device) if iterator._pin_memory else data
