"""Copy batches to the GPU from page-locked memory, without waiting for the copy.

What it does
------------
DataLoaders collate into page-locked ("pinned") memory, and copies of pinned tensors to the GPU return at once, so that
the copy overlaps with what the CPU does next.

When it helps
-------------
Large batches on CUDA: copies from pinned memory run at the full rate of the bus and overlap with computation.

When it hurts
-------------
Pinning costs a copy on the host. Pinned memory cannot be swapped, so a machine short of memory suffers.

Numerics
--------
`exact`: the same bytes arrive. A script that overwrites a host tensor right after copying it would race with a copy that
returned at once. So only tensors that a DataLoader has pinned are copied in this way: they are new each time, and never a buffer of the
script's own. A script may write to those, too (`labels[~mask] = -100` after `labels.cuda()`). So the first batch is copied as before, and
all batches are watched. Once the script has written to one, copies wait as before, and a line on stderr says so; if it does that
for the first time in a later batch, that batch may have arrived partly with the new values. Writes through a NumPy view of a batch
are not seen.

How it is applied
-----------------
`pin_memory` of each DataLoader that stands at its default is set when it is built; what cannot be pinned in its batches
(tensors on a device already, sparse ones) comes as it is. `Tensor.to` and `Tensor.cuda` get `non_blocking=True` when a
tensor that a DataLoader pinned goes to a CUDA device, from the second batch on. What the script copies with `non_blocking=True` itself is
watched in the same way: as long as its memory was not pinned, that copy waited as well. Tensors inside of batches with a method `pin_memory` of their own are
not known, and copied as before.

References
----------
PyTorch tutorials, "A guide on good usage of non_blocking and pin_memory() in PyTorch".
PyTorch documentation, "CUDA semantics", section "Use pinned memory buffers".
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from saturate import notices
from saturate.records.facts import Evidence, Facts
from saturate.techniques import _common, _tensor_moves
from saturate.techniques._api import Eligible, Ineligible, Proof, Technique, Touch

TECHNIQUE = Technique(
    id="pin-memory",
    title="pinned batches, non-blocking copies",
    numerics="exact",
    stage="import",
    touches=(Touch("loader", 20), Touch("pinned-memory"), Touch("tensor-copy")),
)

#: An attribute of tensors that a DataLoader has pinned.
PINNED = "_saturate_pinned"

#: Of the note that says why copies wait.
STOPPED = f"{TECHNIQUE.id}:stopped"

#: Tensors that are watched until the next batch. Iterators of other kinds do not tell of it.
MOST_WATCHED = 1000


@dataclass(frozen=True)
class Options:
    """`non_blocking` lets copies of pinned tensors return before they are done."""

    non_blocking: bool = True


def eligible(facts: Facts) -> Eligible | Ineligible:
    if facts.device != "cuda":
        return Ineligible("pinned memory only matters for copies to a CUDA device")
    if facts.loaders and all(loader.pin_memory for loader in facts.loaders):
        return Ineligible("the script already pins its batches")
    if (refused := _common.why_no_copies(facts)) is not None:
        return refused
    return _common.copies_batches(facts)


def bound(facts: Facts) -> float | None:
    return _common.bound_of_copies(facts)


def apply(context: Any, options: Options) -> str:
    def rewrite(dataset: Any, arguments: dict[str, Any], given: frozenset[str]) -> dict[str, Any]:
        return {} if arguments.get("pin_memory") else {"pin_memory": True}

    context.on_loader(rewrite)
    _tensor_moves.let_through(context, _mark)
    if options.non_blocking:
        copied = _Copied(context)
        for name in ("to", "cuda"):
            context.set_attribute(context.torch.Tensor, name, _copying(context, name, copied))
        iterator = context.torch.utils.data.dataloader._BaseDataLoaderIter
        original = iterator.__next__

        @functools.wraps(original)
        def next_batch(self: Any) -> Any:
            copied.look()
            return original(self)

        context.set_attribute(iterator, "__next__", next_batch)
    return f"DataLoaders pin their batches, non-blocking copies {options.non_blocking}"


def _mark(tensor: Any) -> None:
    """For `Tensor.to` and `Tensor.cuda` to know it again."""
    setattr(tensor, PINNED, True)


class _Copied:
    """Tensors of the batch at hand that were copied, as they were then."""

    def __init__(self, context: Any):
        self._note = context.note
        self._watched: list[tuple[Any, int]] = []
        self._looked = self._stopped = False

    def may_return_at_once(self, tensor: Any) -> bool:
        """Of the copy of a tensor that begins now."""
        if self._stopped:
            return False
        if len(self._watched) >= MOST_WATCHED:
            self.look()
        self._watched.append((tensor, tensor._version))
        return self._looked

    def look(self) -> None:
        """Another batch is asked for."""
        watched, self._watched = self._watched, []
        if any(tensor._version != version for tensor, version in watched):
            self._stopped = True
            reason = "the script writes to a batch behind its copy to the device"
            self._note(STOPPED, f"copies wait: {reason}")
            notices.tell(f"saturate: {TECHNIQUE.id}: {reason}; copies wait as before\n")
        self._looked = self._looked or bool(watched)


def _copying(context: Any, name: str, copied: _Copied) -> Any:
    """`Tensor.to` or `Tensor.cuda` with `non_blocking=True` for tensors that a loader pinned, on their way to a CUDA device. Who says
    `non_blocking=False` gets that."""
    torch = context.torch
    original = getattr(torch.Tensor, name)
    pending = [True]

    @functools.wraps(original)
    def copy(self: Any, *args: Any, **kwargs: Any) -> Any:
        place = next((at for at, argument in enumerate(args) if isinstance(argument, bool)), None)      # where it is given by position
        asked = kwargs.get("non_blocking") if place is None else args[place]                            # None: not said
        if (
            (asked is None or asked)
            and (name == "cuda" or to_cuda(torch, args, kwargs))
            and not torch.compiler.is_compiling()
            and self.device.type == "cpu"
            and getattr(self, PINNED, False)
            and not self.is_inference()         # it does not tell who writes to it
            and self.is_pinned()
        ):
            at_once = copied.may_return_at_once(self)
            if place is not None:
                args = (*args[:place], at_once, *args[place + 1:])
            elif at_once or asked:      # from memory that was not pinned, the copy waited all the same
                kwargs["non_blocking"] = at_once
            if at_once and pending:
                pending.clear()
                seen = "a pinned tensor was copied without blocking"
                context.note(TECHNIQUE.id, _tensor_moves.StandingNote(torch, name, copy, seen))
        return original(self, *args, **kwargs)

    return copy


def to_cuda(torch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of `Tensor.to` name a CUDA device, as text, number, device or another tensor's."""
    target = kwargs.get("device", kwargs.get("other", args[0] if args else None))
    if isinstance(target, str):
        return target.startswith("cuda")
    if isinstance(target, torch.Tensor):
        target = target.device
    if isinstance(target, torch.device):
        return target.type == "cuda"
    return isinstance(target, int) and not isinstance(target, bool)


def active(evidence: Evidence, options: Options) -> Proof:
    if not any(loader.pin_memory for loader in evidence.loaders):
        return Proof(False, "no DataLoader that the training reads from pins its batches")
    if STOPPED in evidence.notes:
        return Proof(False, evidence.notes[STOPPED])
    seen = evidence.notes.get(TECHNIQUE.id, "")
    if options.non_blocking and not seen:
        return Proof(False, "no pinned tensor was copied to the device")
    return Proof(seen != _tensor_moves.LOST, seen or "the DataLoader pins its batches")


def as_code(options: Options) -> str:
    lines = "loader = DataLoader(dataset, ..., pin_memory=True)"
    return lines + ("\ninputs = inputs.to(device, non_blocking=True)" if options.non_blocking else "")
