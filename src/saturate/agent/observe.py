"""Looking at the user's training without disturbing it: ranks, trained modules and parameters, loaders, saves."""

from __future__ import annotations

import gc
import io
import os
import weakref
from typing import Any

from saturate import ranks
from saturate.agent.context import living
from saturate.data import batches
from saturate.records.facts import LoaderFacts
from saturate.techniques import _common
from saturate.techniques._given import referable

#: The launchers' variables as a trial's command was given them: whoever set them did not start the ranks of this trial.
inherited: dict[str, str] = {}


def rank() -> int:
    """This process's rank: what torch.distributed says, else the launcher's variable, else 0."""
    group = ranks.group()
    return group.get_rank() if group is not None else _declared()[0]


def world_size() -> int:
    group = ranks.group()
    return group.get_world_size() if group is not None else _declared()[1]


def _declared() -> tuple[int, int]:
    """What the variables say where no process group exists: not yet, or because ranks speak through another library."""
    present = {name: os.environ[name] for name in ranks.VARIABLES if name in os.environ}
    return (0, 1) if present == inherited else ranks.declared()


# -- modules ---------------------------------------------------------------------------------------------------------


#: Modules that lived when the script called `gc.freeze`: the collector does not list them any more.
_frozen: list[weakref.ref[Any]] = []


def all_modules(torch: Any) -> list[Any]:
    """Every living nn.Module. `type(o)`, not `isinstance`: lazy proxies must not be touched."""
    found = [o for o in gc.get_objects() if issubclass(type(o), torch.nn.Module)]
    listed = {id(module) for module in found}
    return found + [module for reference in _frozen if (module := reference()) is not None and id(module) not in listed]


def remember_modules(torch: Any) -> None:
    """Before `gc.freeze`."""
    _frozen[:] = [weakref.ref(module) for module in all_modules(torch)]


def trained_parameters(session: Any) -> list[Any]:
    """What the optimizers hold; without an optimizer, every module parameter that has a gradient; without those, the
    plain tensors that backward passes reach."""
    held = [p for o in session.optimizers.living() for group in o.param_groups for p in group["params"]]
    if held:
        return held
    found = {id(p): p for m in all_modules(session.torch) for p in m._parameters.values()
             if p is not None and p.is_leaf and p.requires_grad and p.grad is not None}      # of others, torch warns
    return list(found.values()) or [leaf for reference in session.leaves if (leaf := reference()) is not None]


def device_kind(parameters: list[Any]) -> str:
    """The accelerator that any of the parameters is on: some stay in the host's memory beside it, like large embeddings. "cpu" where
    there is none."""
    kinds = [p.device.type for p in parameters] or ["cpu"]
    return next((kind for kind in kinds if kind not in ("cpu", "meta")), kinds[0])


def devices(parameters: list[Any], kind: str) -> tuple[Any, ...]:
    """The devices of a kind that parameters are on, in the order of the parameters. A model may be spread over several."""
    return tuple(dict.fromkeys(p.device for p in parameters if p.device.type == kind))


class ChangeWatch:
    """Do parameters change between backward passes? For loops without an optimizer, while the step is being found.

    A checksum of a few parameters, because `p.data.add_()` does not bump a tensor's version counter. Parameters are
    looked up now and then only: a walk over all living objects takes tens of milliseconds. None is kept: nobody looks
    any more once the step is known.
    """

    def __init__(self) -> None:
        self._parameters: list[weakref.ref[Any]] = []
        self._checksum: list[float] = []
        self._calls = 0

    def changed(self, session: Any) -> bool:
        """Since the last call."""
        watched = living(self._parameters)
        if self._calls % 256 == 0 or len(watched) < len(self._parameters):
            found = trained_parameters(session)
            watched = tuple(found[:: max(1, len(found) // 8)][:8])
            self._parameters, self._checksum = list(map(weakref.ref, watched)), []
        self._calls += 1
        checksum = [float(_common.reals(p.detach(), session.torch).double().abs().sum()) for p in watched]
        before, self._checksum = self._checksum, checksum
        return bool(before) and before != checksum


# -- loaders ---------------------------------------------------------------------------------------------------------


#: Loaders that are told apart, at most: a script may build others in each epoch.
MOST_LOADERS = 8


def remember_loader(session: Any, iterator: Any, batch: Any) -> None:
    """Facts of a loader at its first batch, first of the one that is trained on: whose batches the most backward passes follow at once.
    Frameworks validate before they train, with a dataset of the same class. Kept as values: a reference would keep the user's
    dataset alive."""
    found = dict(session.loaders)       # another thread may fetch batches, too
    for one in found.values():
        if one["since"] is not None:    # its batch was the one before this
            one["trained_on"] += session.backwards > one["since"]
            one["since"] = None
    key = _which_loader(found, iterator)
    entry = found.setdefault(key, {"trained_on": 0}) | {"workers": getattr(iterator, "_workers", []), "since": session.backwards}
    entry["dataset"] = weakref.ref(iterator._dataset) if referable(iterator._dataset) else None
    if "facts" not in entry:
        entry["facts"] = _loader_facts(session.torch, iterator, batch)
    found[key] = entry
    if len(found) > MOST_LOADERS:
        del found[min((other for other in found if other != key), key=lambda other: found[other]["trained_on"])]
    session.loaders = dict(sorted(found.items(), key=lambda item: -item[1]["trained_on"]))


def _which_loader(loaders: dict[Any, Any], iterator: Any) -> tuple[Any, ...]:
    """The key of a loader. One that is built anew in each epoch is known again by its dataset, which may grow, or where its new dataset
    is as long as the one before."""
    dataset = iterator._dataset
    kind = type(dataset), iterator._num_workers, getattr(iterator._index_sampler, "batch_size", None)
    for key, entry in loaders.items():
        if key[:3] == kind and entry["dataset"] is not None and entry["dataset"]() is dataset:
            return key
    return *kind, length(dataset)


def _loader_facts(torch: Any, iterator: Any, batch: Any) -> LoaderFacts:
    tensors = list(batches.tensors_of(torch, batch))
    dataset = iterator._dataset
    return LoaderFacts(
        num_workers=iterator._num_workers,
        batch_size=getattr(iterator._index_sampler, "batch_size", None),
        pin_memory=bool(iterator._pin_memory),
        persistent_workers=bool(getattr(iterator, "_persistent_workers", False)),
        prefetch_factor=getattr(iterator, "_prefetch_factor", None),
        iterable=isinstance(dataset, torch.utils.data.IterableDataset),
        dataset_length=length(dataset),
        batch_bytes=sum(t.numel() * t.element_size() for t in tensors),
        holds_device_tensors=any(t.device.type not in ("cpu", "meta") for t in tensors),
        tensor_rows=_stacks_rows(torch, iterator),
    )


def unmade_batches(session: Any) -> int | None:
    """How many batches the workers of a loader have been asked for and have not made yet, of the loader that is furthest behind;
    0 where there are no workers, None where nobody can tell."""
    try:
        return max((_unmade(iterator) for iterator in session.iterators), default=0)
    except (AttributeError, NotImplementedError):       # a loader of another kind; a system whose queues have no length
        return None


def _unmade(iterator: Any) -> int:
    if not iterator._num_workers:
        return 0
    queues = {id(queue): queue for queue in (iterator._data_queue, iterator._worker_result_queue)}     # two where memory is pinned
    return max(0, iterator._tasks_outstanding - sum(queue.qsize() for queue in queues.values()))


def _stacks_rows(torch: Any, iterator: Any) -> bool:
    from saturate.data import rows

    own = getattr(iterator, "_collate_fn", None) is not torch.utils.data.default_collate
    return not own and bool(rows.tensors_of(torch, iterator._dataset))


def length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return None                 # iterable datasets and endless samplers have none


# -- saves -----------------------------------------------------------------------------------------------------------


def saved_bytes(target: Any) -> int | None:
    """Size of what was just saved: to a path, or to a buffer that a library will write. None for a file that the script
    opened itself: no technique acts on it."""
    if isinstance(target, io.BytesIO):
        return target.getbuffer().nbytes
    try:
        return os.stat(target).st_size if isinstance(target, (str, os.PathLike)) else None
    except OSError:
        return None                 # moved away at once, by another thread
