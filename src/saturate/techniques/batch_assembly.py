"""Take a batch from tensors in memory by one indexing operation, instead of row by row.

What it does
------------
A `TensorDataset` (or a `Subset` of one) hands out single rows, which the default collate function stacks again. Here
the rows of a batch are selected from each tensor at once.

When it helps
-------------
Small, fast models on data that fits into memory: tabular data, MNIST-like images, precomputed embeddings. Python's
work per row is then much of the step.

When it hurts
-------------
Hardly: one indexing operation costs less than one per row. Large rows gain little, because copying them dominates.

Numerics
--------
`exact`: the same bytes in the same order, and the same random numbers drawn.

How it is applied
-----------------
A stand-in takes the dataset's place inside the loader's iterator; `loader.dataset` stays the user's. Left alone are
loaders with a collate function of their own, subclasses of `TensorDataset`, and tensors that are not dense,
contiguous and on the CPU. Where a sampler yields anything but numbers of rows (lists of them, as for the episodes of few-shot
learning), batches are assembled as without.

References
----------
PyTorch documentation, "torch.utils.data", sections "Automatic batching" and "Working with collate_fn".
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from saturate.data import rows
from saturate.records.facts import Evidence, Facts
from saturate.techniques import _common
from saturate.techniques._api import Eligible, Ineligible, Proof, Technique, Touch

TECHNIQUE = Technique(
    id="batch-assembly",
    title="batches of rows in one operation",
    numerics="exact",
    stage="import",
    touches=(Touch("dataset"),),
)


@dataclass(frozen=True)
class Options:
    """There is nothing to choose."""


def eligible(facts: Facts) -> Eligible | Ineligible:
    if not facts.loaders:
        return Ineligible(_common.NO_LOADER)
    if not any(loader.tensor_rows for loader in facts.loaders):
        return Ineligible("no DataLoader stacks rows of tensors in memory (a TensorDataset with the default collate function)")
    refused = _common.hardly_waits(facts)
    return Eligible("rows of tensors in memory are stacked one by one") if refused is None else refused


def bound(facts: Facts) -> float | None:
    return _common.waiting(facts)


def apply(context: Any, options: Options) -> str:
    torch = context.torch
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    original = iterator.__init__
    served = 0

    @functools.wraps(original)
    def init(self: Any, loader: Any) -> None:
        nonlocal served
        original(self, loader)
        if rows.refusal(torch, loader) is None:
            self._dataset, self._collate_fn = rows.Rows(loader.dataset), rows.as_it_is
            served += 1
            context.note(TECHNIQUE.id, f"batches are assembled at once in {served} epoch(s) of DataLoaders")

    context.set_attribute(iterator, "__init__", init)
    return "rows of TensorDatasets are selected a batch at a time"


def active(evidence: Evidence, options: Options) -> Proof:
    seen = evidence.notes.get(TECHNIQUE.id, "")
    return Proof(bool(seen), seen or "no DataLoader of rows of tensors was iterated")


def as_code(options: Options) -> str:
    return (
        "from torch.utils.data import BatchSampler, RandomSampler      # SequentialSampler where nothing is shuffled\n"
        "sampler = BatchSampler(RandomSampler(dataset), batch_size, drop_last=False)\n"
        "loader = DataLoader(dataset, sampler=sampler, batch_size=None)     # dataset[indices] selects the whole batch"
    )
