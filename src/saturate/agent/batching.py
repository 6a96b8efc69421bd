"""Batches of another size in a script that nobody edited: what `saturate fit` asks of the training's DataLoader.

A loader's iterator draws lists of indices from its batch sampler. Under the plan key `fit` that source is replaced by one
that draws from the same sampler, in the same order and with the same `drop_last`, and cuts lists of the size asked for *now*:
it can change whenever the ranks stand at the gate. The loader itself stays as it is, so frameworks that rebuild loaders
around a batch sampler (Accelerate, Trainer, Lightning) cannot resize twice.

    plan: {"size": 64 | null, "loaders": [[description, factor], ...] | null, "largest": [index, ...], "own": 32 | null, "bounded": false}
    gate: {"do": "go", ..., "fit": {any of the above, "hold": true, "first": true, "end": true, "fresh": true, "settle": true, ...}}

`loaders` are those that feed the training (null: not known, all are resized; evaluation is recognised by disabled
gradients). `own` is the script's own size: loaders of an evaluation that have it, too, are resized with them, since one argument sets
both more often than not. A loader is known again in another process by its description: the order of construction would do for
a plain script, but a Trainer builds a new one for every evaluation. `hold` lets no epoch end while sizes are measured (the
sampler begins again); where a script does not bear that, `bounded` lets a pass have no more batches than its own. `end` ends
the running one, so that the script's evaluation and checkpoint come within reach. `first` makes the next batch of the samples
in `largest`. `fresh` starts the device's peaks anew, `settle` gives freed memory back at the next gate, so that what is
resident there is what is in use.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections import deque
from typing import Any

from saturate.agent import extents, kinds, memory, seams
from saturate.agent.observe import length
from saturate.checkpoints.guards import holders
from saturate.data.batches import tensors_of

#: A loader feeds the training when it was read before at least this share of the backward passes that followed a read.
FEEDING_SHARE = 0.5

#: What writes checkpoints: (module, function).
_SAVES = (("torch", "save"), ("safetensors.torch", "save_file"), ("torch.distributed.checkpoint", "save"))


def install(session: Any) -> None:
    """Called at the first sign of training, before the first loader is built."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    batching = session.batching = Batching(session, session.plan["fit"])
    original_init, original_reset = _BaseDataLoaderIter.__init__, _BaseDataLoaderIter._reset

    @functools.wraps(original_init)
    def init(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, loader, *args, **kwargs)
        batching.begins(self, loader)

    @functools.wraps(original_reset)
    def reset(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        original_reset(self, loader, *args, **kwargs)
        batching.begins(self, loader)

    seams.replace(session, _BaseDataLoaderIter, "__init__", init)
    seams.replace(session, _BaseDataLoaderIter, "_reset", reset)
    saving = (getattr(sys.modules.get(module), name, None) for module, name in _SAVES)
    counting = {id(save): _counting(batching, save) for save in saving if save is not None}
    for module, name, save in holders(counting):        # the script may have taken one by name
        seams.replace(session, module, name, counting[id(save)])


def _counting(batching: Batching, original: Any) -> Any:
    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        batching.saves += 1
        return result

    return save


class Batching:
    """Sizes, who is resized, and what was delivered. One per training process; the same orders reach every rank."""

    def __init__(self, session: Any, plan: dict[str, Any]):
        self.session = session
        self.memory = memory.DeviceMemory(session)
        self.size: int | None = None
        self.factors: dict[str, float] | None = None    # by description, of the loaders that feed the training
        self.own: int | None = None
        self.hold = self.first = self.ending = self.settle = self.bounded = False
        self.held = 0                                   # passes that went on where they would have been over
        self.largest: list[int] = []
        self.saves = self.evaluations = 0
        self.scanning = False
        self.kinds: dict[str, dict[str, Any]] = {}      # what is known of each loader, by description
        self.credits: dict[str, int] = {}               # backward passes that a loader was read before
        self.feeds = 0
        self._recent: list[str] = []                    # read since the latest backward pass
        self._pending: dict[str, int] = {}              # samples delivered since the latest step
        self._strange = False                           # a loader was read that does not feed the training
        self.samples: list[int] = []                    # per step since the latest order
        self.delivered = 0                              # the largest batch since then
        self.cutters: weakref.WeakKeyDictionary[Any, Cutter] = weakref.WeakKeyDictionary()
        self._take(plan)

    def _take(self, order: dict[str, Any]) -> None:
        self.size = order.get("size", self.size)
        self.largest = order.get("largest", self.largest)
        self.hold = order.get("hold", self.hold)
        self.own, self.bounded = order.get("own", self.own), order.get("bounded", self.bounded)
        if order.get("loaders") is not None:
            self.factors = dict(order["loaders"])
        self.first, self.ending, self.settle = bool(order.get("first")), bool(order.get("end")), bool(order.get("settle"))
        if "limit_bytes" in order:
            self.memory.limit(order["limit_bytes"])

    # -- from the loaders ------------------------------------------------------------------------------------------

    def begins(self, iterator: Any, loader: Any) -> None:
        """An iterator was made, or begins its next epoch."""
        if not self.session.asleep and not self.scanning:
            self.session.guard(self._begins, iterator, loader)

    def _begins(self, iterator: Any, loader: Any) -> None:
        description = describe(loader)
        if description not in self.kinds:
            self.kinds[description] = self._known(loader)
        self.cutters[iterator] = cutter = Cutter(self, description, loader, iterator._sampler_iter)
        if loader._auto_collation:
            iterator._sampler_iter = cutter

    def _known(self, loader: Any) -> dict[str, Any]:
        torch, sampler = self.session.torch, loader._index_sampler
        size = getattr(sampler, "batch_size", None) if loader._auto_collation else None
        return {
            "dataset": type(loader.dataset).__name__, "batch_size": size if isinstance(size, int) else None,
            "collates": bool(loader._auto_collation), "sizes": [], "workers": loader.num_workers,
            "iterable": isinstance(loader.dataset, torch.utils.data.IterableDataset),
            "drop_last": bool(getattr(sampler, "drop_last", False)),
            "length": length(getattr(sampler, "sampler", None)) or length(loader.dataset),
            "queue": loader.num_workers * (loader.prefetch_factor or 2),
        }

    def trains(self, description: str) -> bool:
        return self.factors is None or description in self.factors

    def size_of(self, description: str) -> int | None:
        """How many samples its next batch has; None: as many as the script wants."""
        if self.size is None:
            return None
        if not self.trains(description) or not self.session.torch.is_grad_enabled():
            return self.size if self.own is not None and self.kinds[description]["batch_size"] == self.own else None
        return max(1, round(self.size * (self.factors or {}).get(description, 1.0)))

    @property
    def reference(self) -> str | None:
        return next(iter(self.factors), None) if self.factors else None

    # -- from the session ------------------------------------------------------------------------------------------

    def fetched(self, iterator: Any, batch: Any) -> None:
        """This batch was delivered."""
        cutter = self.cutters.get(iterator)
        if cutter is None:
            return
        description = cutter.description
        size = cutter.drawn.popleft() if cutter.drawn else 0
        if self.kinds[description]["iterable"]:
            size = _came(self.session.torch, batch, size)
        self._recent.append(description)
        self._pending[description] = self._pending.get(description, 0) + size
        known = self.kinds[description]["sizes"]
        if size not in known and len(known) < 8:
            known.append(size)
        if not self.trains(description):
            self._strange = True
        elif description == (self.reference or description):
            self.delivered = max(self.delivered, size)

    def fed(self) -> None:
        """A backward pass has ended."""
        if self._recent:
            self.feeds += 1
            for description in dict.fromkeys(self._recent):     # of several that feed it, the one read first leads: in every process
                self.credits[description] = self.credits.get(description, 0) + 1
            self._recent.clear()

    def stepped(self, evaluated: bool) -> None:
        """A step has ended. Samples are those of the loader that the size is of."""
        if self.factors:
            self.samples.append(self._pending.get(self.reference or "", 0))
        if self.factors or not self.kinds:      # with loaders: once it is known which of them feed the training
            self.evaluations += evaluated or self._strange
        self._pending.clear()
        self._strange = False

    def ordered(self, order: dict[str, Any]) -> None:
        """The gate has opened."""
        self.samples, self.delivered = [], 0
        self._take(order)
        if order.get("fresh"):
            self.memory.begin()

    def standing(self) -> dict[str, Any]:
        """What every rank says at the gate."""
        if self.settle:
            memory.give_back_freed(self.session)
        return {"samples": self.samples, "delivered": self.delivered, "saves": self.saves, "evaluations": self.evaluations,
                "ending": self.ending, "held": self.held, "device": self.memory.seen(), "heap_bytes": memory.heap_peak_bytes(self.session)}

    def answer(self, question: str) -> Any:
        if question == "fit":
            feeding = sorted((d for d in self.credits if self.credits[d] >= FEEDING_SHARE * self.feeds),
                             key=lambda d: -self.credits[d])
            return {"loaders": [{"description": d, **self.kinds[d]} for d in feeding], "kinds": kinds.memory(self.session),
                    "given": _given(self.session.inspection)}
        read = [iterator for iterator, cutter in self.cutters.items() if cutter.description == self.reference]
        self.scanning = True
        try:
            return extents.scan(self.session.torch, read[-1], self.cutters[read[-1]].context) if read else extents.nothing("its loader is not being read")
        finally:
            self.scanning = False


class Cutter:
    """Lists of indices from a batch sampler, of the size that is wanted when they are drawn."""

    def __init__(self, batching: Batching, description: str, loader: Any, batches: Any):
        self.description = description
        self.drawn: deque[int] = deque()    # sizes that were drawn and are not delivered yet
        self._batching = batching
        self._sampler = loader._index_sampler
        self._drop_last = bool(getattr(self._sampler, "drop_last", False))
        self._length = length(self._sampler)
        self._finite = self._length is not None
        self._made = 0                      # batches of this pass
        self.context = loader.multiprocessing_context
        self._batches = batches
        self._left: list[Any] = []          # indices that were drawn and not handed on
        self._backwards = batching.session.backwards

    def __iter__(self) -> Cutter:
        return self

    def __next__(self) -> list[Any]:
        batching = self._batching
        if batching.ending and self._finite and self._trains():
            batching.ending = False
            raise StopIteration
        if batching.bounded and self._finite and self._made >= self._length and self._trains():
            raise StopIteration
        self._made += 1
        size = batching.size_of(self.description)
        batch = self._next_list() if size is None else self._cut(size)
        if batch is None:
            raise StopIteration
        if batching.first and batching.largest and self.description == batching.reference:
            batching.first = False
            batch = list(itertools.islice(itertools.cycle(batching.largest), len(batch)))
        self.drawn.append(len(batch))
        return batch

    def _cut(self, size: int) -> list[Any] | None:
        while len(self._left) < size and (more := self._next_list()) is not None:
            self._left.extend(more)
        batch, self._left = self._left[:size], self._left[size:]
        return batch if batch and not (self._drop_last and len(batch) < size) else None

    def _next_list(self) -> list[Any] | None:
        """The sampler's next list; at its end None, or the first of another pass while the epoch is held."""
        batch = next(self._batches, None)
        if batch is None and self._holds():
            self._batches = iter(self._sampler)
            self._batching.held += 1
            batch = next(self._batches, None)       # a generator that can be read once gives no more
        return list(batch) if hasattr(batch, "__next__") else batch

    def _holds(self) -> bool:
        """Only for a loader that really trains: batches were read and backward passes followed. Anything else would never
        come to its end."""
        batching = self._batching
        return batching.hold and self._finite and self._trains() and batching.session.backwards > self._backwards

    def _trains(self) -> bool:
        batching = self._batching
        return batching.factors is not None and self.description in batching.factors and batching.session.torch.is_grad_enabled()


def describe(loader: Any) -> str:
    """The same text for the same loader in every process that runs the same script."""
    sampler = loader._index_sampler
    inner = getattr(sampler, "sampler", getattr(sampler, "batch_sampler", None))
    collate = loader.collate_fn
    parts = (type(loader.dataset).__qualname__, length(loader.dataset), type(sampler).__name__, type(inner).__name__, length(inner),
             getattr(sampler, "batch_size", None), bool(getattr(sampler, "drop_last", False)), loader.num_workers,
             getattr(collate, "__qualname__", type(collate).__qualname__))
    return "|".join(map(str, parts))


def _came(torch: Any, batch: Any, asked: int) -> int:
    """Samples in a batch of an iterable dataset, which has fewer than were asked for where the dataset ends: as many as its tensors are long,
    unless one of them is as long, in any direction, as was asked."""
    shapes = [tuple(tensor.shape) for tensor in tensors_of(torch, batch) if tensor.dim()]
    if not shapes or any(asked in shape for shape in shapes):
        return asked
    return min(asked, max(shape[0] for shape in shapes))


def _given(inspection: Any) -> str | None:
    """What tells whether the model is given the same sizes as in another process; None: not known (no hook may be set, or its tensors lie
    in containers)."""
    if inspection is None or not inspection.shapes or not all(inspection.shapes):
        return None
    return f"{inspection.calls} x {sorted(inspection.shapes)}"
