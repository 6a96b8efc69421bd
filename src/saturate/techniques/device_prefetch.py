"""Copy the next batch to the GPU while the current one is computed on.

What it does
------------
When the script takes a batch from its DataLoader, copying the next batch begins on a separate stream. When the script later moves
that next batch with `.to(device)` or `.cuda()`, it gets the copy that was already begun.

When it helps
-------------
Large batches on CUDA, whose copies take a good part of a step: images, video, long sequences.

When it hurts
-------------
One more batch lies in the device's memory, and batches are pinned, which costs a copy on the host. Where the loader
is the bottleneck no batch is ever waiting, and nothing is gained.

Numerics
--------
`exact`: the same bytes arrive. A tensor that is written to between loader and device is copied anew; only writes that
torch cannot see, through a NumPy view of a batch, would be missed. What is written to it behind the move comes too late for the copy, as
in a move that waits.

How it is applied
-----------------
DataLoaders with workers pin their batches, but for what cannot be pinned in them. `Tensor.to` and `Tensor.cuda` return
the copy that was begun for that very tensor, once: the batch itself stays on the host, so code that reads it there finds
it. The host waits until that copy is there (not for what the device computes), and `record_stream` keeps its memory until the
stream that uses it has done so. On a CPU there is no device to copy to.

References
----------
PyTorch documentation, "CUDA semantics", sections "CUDA streams" and "Use pinned memory buffers".
PyTorch tutorials, "A guide on good usage of non_blocking and pin_memory() in PyTorch".
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from saturate.data import device_copies
from saturate.records.facts import Evidence, Facts
from saturate.techniques import _common, _tensor_moves
from saturate.techniques._api import Eligible, Ineligible, Proof, Technique, Touch
from saturate.techniques._interrupts import from_signal_handler

TECHNIQUE = Technique(
    id="device-prefetch",
    title="batches copied to the device ahead",
    numerics="exact",
    stage="import",
    touches=(Touch("loader", 30), Touch("pinned-memory"), Touch("tensor-copy")),
)


@dataclass(frozen=True)
class Options:
    """There is nothing to choose."""


def eligible(facts: Facts) -> Eligible | Ineligible:
    if facts.device != "cuda":
        return Ineligible("there is no device to copy to: the training runs on the CPU" if facts.device == "cpu"
                          else "batches are copied ahead to CUDA devices only")
    if (refused := _common.why_no_copies(facts)) is not None:
        return refused
    if not any(loader.num_workers for loader in facts.loaders):
        return Ineligible("the loader has no workers, so no batch is ready before it is asked for")
    return _common.copies_batches(facts)


def bound(facts: Facts) -> float | None:
    return _common.bound_of_copies(facts)


def apply(context: Any, options: Options) -> str:
    torch = context.torch
    move = torch.Tensor.to
    install(context, device_copies.Copies(torch, device_copies.Cuda(torch, move)))
    return "the batch that waits in a loader's queue is copied to the device ahead"


def install(context: Any, copies: Any, kind: str = "cuda") -> None:
    """`kind`: the type of devices that copies go to."""
    torch = context.torch
    iterator = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    original = iterator._next_data

    def pinned(dataset: Any, arguments: dict[str, Any], given: frozenset[str]) -> dict[str, Any]:
        return {"pin_memory": True} if arguments.get("num_workers") and not arguments.get("pin_memory") else {}

    @functools.wraps(original)
    def next_data(self: Any) -> Any:
        batch = original(self)
        try:
            copies.next_batch(batch, device_copies.waiting_batch(self))
        except Exception as error:  # a guest: the training has its batch, and copies it itself
            if from_signal_handler(error):
                raise
            copies.forget(f"{type(error).__name__}: {error}")
        return batch

    context.on_loader(pinned)
    context.set_attribute(iterator, "_next_data", next_data)
    _tensor_moves.let_through(context)
    for name in ("to", "cuda"):
        context.set_attribute(torch.Tensor, name, _moving(torch, copies, name, kind))
    context.note(TECHNIQUE.id, _tensor_moves.StandingNote(torch, "to", vars(torch.Tensor)["to"], copies))


def _moving(torch: Any, copies: Any, name: str, kind: str) -> Any:
    """`Tensor.to` or `Tensor.cuda` that takes what was copied ahead."""
    original = getattr(torch.Tensor, name)

    @functools.wraps(original)
    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not copies.knows(self):
            return original(self, *args, **kwargs)
        device = _target(torch, self, name, args, kwargs)
        if device is None or device.type != kind:
            return original(self, *args, **kwargs)
        taken = copies.take(self, device)
        return original(self, *args, **kwargs) if taken is None else taken

    return move


def _target(torch: Any, tensor: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The device, with its number, of a plain move; None where more than the device changes."""
    if name == "cuda":
        if len(args) > 2 or {*kwargs} - {"device", "non_blocking"}:
            return None
        named = args[0] if args else kwargs.get("device")
        device = torch.device("cuda" if named is None else named)
    else:
        if {*kwargs} - {"device", "dtype", "non_blocking", "tensor"}:
            return None             # a copy, or another memory format
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or layout is not None or dtype not in (None, tensor.dtype):
            return None
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def active(evidence: Evidence, options: Options) -> Proof:
    seen = str(evidence.notes.get(TECHNIQUE.id, ""))
    if not seen:
        return Proof(False, "the script moved no tensor of a batch to the device")
    return Proof(seen != _tensor_moves.LOST and not seen.startswith("0 of"), seen)


def as_code(options: Options) -> str:
    return (
        "import itertools\n"
        "\n"
        "loader = DataLoader(dataset, ..., pin_memory=True)      # with workers; from other memory no copy overlaps\n"
        "\n"
        "def copied_ahead(loader):\n"
        "    \"\"\"Batches on the device, each of them a list; the copy of the next one begins before one is handed out.\"\"\"\n"
        "    stream, ready = torch.cuda.Stream(), None\n"
        "    for batch in itertools.chain(loader, [None]):\n"
        "        torch.cuda.current_stream().wait_stream(stream)\n"
        "        current, ready = ready, None\n"
        "        if batch is not None:\n"
        "            with torch.cuda.stream(stream):\n"
        "                ready = [tensor.to(device, non_blocking=True) for tensor in batch]\n"
        "        if current is not None:\n"
        "            for tensor in current:\n"
        "                tensor.record_stream(torch.cuda.current_stream())\n"
        "            yield current\n"
        "\n"
        "for inputs, targets in copied_ahead(loader):\n"
        "    output = model(inputs)      # and the rest of the step"
    )
