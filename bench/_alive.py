"""How many bytes of activations are alive, counted apart from the product: every tensor that autograd saves, wherever it
saves it (also within `torch.utils.checkpoint`), is remembered by its storage, and a storage counts until it is freed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves


class Alive:
    """Use it around one or more whole steps: `with Alive(model) as alive: step()`; then `alive.peak`, in bytes."""

    def __init__(self, *models: torch.nn.Module):
        self.excluded = {StorageWeakRef(t.untyped_storage()).cdata for m in models for t in (*m.parameters(), *m.buffers())}
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self._stack: Any = None

    def saw(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference.cdata in self.excluded or reference.cdata in self.held:
            return
        self.held = {key: entry for key, entry in self.held.items() if not entry[0].expired()}
        self.held[reference.cdata] = reference, storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.held.values()))

    def __enter__(self) -> Alive:
        self._stack = _counting(self)
        self._stack.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.__exit__(*exception)


@contextmanager
def _counting(alive: Alive) -> Iterator[None]:
    """Hooks around the whole step see what no other hook does; every other hook is made to tell, but for those of a
    checkpoint's forward, which keep nothing. Products and arguments that a checkpoint keeps are no saved tensors."""
    init, wrapper = saved_tensors_hooks.__init__, getattr(checkpoint, "_VersionWrapper", None)
    frame = checkpoint._CheckpointFrame
    save_inputs = getattr(frame, "save_inputs", None)

    def told(self: Any, pack: Any, unpack: Any) -> None:
        def pack_and_tell(tensor: torch.Tensor) -> Any:
            alive.saw(tensor)
            return pack(tensor)

        keeps = type(self).__name__ != "_checkpoint_hook" and "saturate" not in pack.__module__
        init(self, pack_and_tell if keeps else pack, unpack)

    kept = wrapper.__init__ if wrapper is not None else None

    def kept_and_told(self: Any, value: Any) -> None:
        kept(self, value)
        if isinstance(value, torch.Tensor):
            alive.saw(value)

    def inputs_told(self: Any, *arguments: Any) -> None:
        for value in tree_leaves(arguments):
            if isinstance(value, torch.Tensor):
                alive.saw(value)
        save_inputs(self, *arguments)

    def plain(tensor: torch.Tensor) -> torch.Tensor:
        alive.saw(tensor)
        return tensor

    outer = saved_tensors_hooks(plain, lambda tensor: tensor)
    saved_tensors_hooks.__init__ = told
    if wrapper is not None:
        wrapper.__init__ = kept_and_told
    if save_inputs is not None:
        frame.save_inputs = inputs_told
    try:
        with outer:
            yield
    finally:
        saved_tensors_hooks.__init__ = init
        if wrapper is not None:
            wrapper.__init__ = kept
        if save_inputs is not None:
            frame.save_inputs = save_inputs
