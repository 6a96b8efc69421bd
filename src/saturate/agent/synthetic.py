"""Steps without the loader: one batch of each loader is kept and given out again, so that what the loader costs shows
as a difference. A window like those of `agent.profiling`, timed by its block; real batches come again when it ends.

Epochs keep their lengths: a replayed batch counts, and an iterator that has given out as many as its sampler has,
real ones and replayed ones, is at its end.
"""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

from saturate.agent.window import Window
from saturate.techniques import _trees

_COUNT = "_saturate_replayed"       # on an iterator: batches that it gave out without loading them, and in which epoch


class Replay(Window):
    """Replays from the step before the window on, whose batch is the one that is kept. The block times it, like one of ordinary steps:
    a device that is drained would not be what the host has got ahead of there."""

    drained = False

    def prepare(self) -> None:
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        self.replayed = 0
        keep_length(self.session, _BaseDataLoaderIter)
        original = _BaseDataLoaderIter.__next__
        kept: dict[Any, tuple[Any, Any]] = {}       # by loader: what it makes batches of, so that its ids stay taken, and the batch

        @functools.wraps(original)
        def next_batch(this: Any) -> Any:
            if self.torch.is_inference_mode_enabled():      # of an evaluation: not a batch to train on, and its tensors have no versions
                return original(this)
            made_of = this._dataset, this._collate_fn
            collate = made_of[1] if isinstance(made_of[1], types.MethodType) else id(made_of[1])    # a method is another object each time
            key = id(this._dataset), collate, getattr(this._index_sampler, "batch_size", None)
            if key not in kept or at_end(this):
                batch = original(this)              # raises StopIteration at the end
                kept[key] = made_of, Kept(self.torch, batch)
                return batch
            vars(this)[_COUNT] = replayed_by(this) + 1, this._sampler_iter
            self.replayed += 1
            return kept[key][1].again()

        self.replace(_BaseDataLoaderIter, "__next__", next_batch)

    def finish(self) -> None:
        self.result["replayed"] = self.replayed


def keep_length(session: Any, iterator: Any) -> None:
    """From now on, iterators that replayed batches end where they would have ended without."""
    if getattr(iterator.__next__, "_saturate_keeps_length", False):
        return
    original = iterator.__next__

    @functools.wraps(original)
    def next_batch(this: Any) -> Any:
        if replayed_by(this) and at_end(this):
            raise StopIteration
        return original(this)

    next_batch._saturate_keeps_length = True        # type: ignore[attr-defined]
    iterator.__next__ = next_batch

    def undo() -> None:
        if vars(iterator).get("__next__") is next_batch:
            iterator.__next__ = original

    session.undo.append(undo)


def replayed_by(iterator: Any) -> int:
    """Batches of this epoch that were replayed. A persistent iterator begins anew with a new iterator of its
    sampler."""
    count, epoch = vars(iterator).get(_COUNT, (0, None))
    return count if epoch is iterator._sampler_iter else 0


def at_end(iterator: Any) -> bool:
    """Whether an iterator has given out its last batch, counting those that it replayed."""
    try:
        return iterator._num_yielded + replayed_by(iterator) >= len(iterator._index_sampler)
    except (TypeError, NotImplementedError):
        return False                                # it has no length


class Kept:
    """A batch that can be given out again and again, whatever the script does to what it gets."""

    def __init__(self, torch: Any, batch: Any):
        self._torch = torch
        #: By the tensor's id: another one over its storage, a copy, its version, whether it required gradients.
        self._pristine: dict[int, tuple[Any, Any, int, bool]] = {}
        self._batch = self._fresh(batch, self._remember)

    def again(self) -> Any:
        """The same batch: containers and tensors are made anew, over storages that are written back if they were written to."""
        return self._fresh(self._batch, self._restored)

    def _remember(self, tensor: Any) -> Any:
        kept = tensor.detach()          # shares the version: every write to the storage counts
        self._pristine[id(tensor)] = kept, kept.clone(), kept._version, tensor.requires_grad
        return tensor

    def _restored(self, tensor: Any) -> Any:
        """A new leaf: the script may have asked the one before for gradients."""
        kept, pristine, version, requires_grad = self._pristine[id(tensor)]
        if kept._version != version:
            kept.copy_(pristine)
            self._pristine[id(tensor)] = kept, pristine, kept._version, requires_grad
        return kept.detach().requires_grad_(requires_grad)

    def _fresh(self, value: Any, change: Any) -> Any:
        return _trees.copied(value, lambda path, leaf: change(leaf) if isinstance(leaf, self._torch.Tensor) else _apart(leaf))


def _apart(value: Any) -> Any:
    """A copy of what is no tensor: a script may take an object of its own class apart. Tensors in it are copied as well, each time."""
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - objects say in any way that they cannot be copied
        return value
