"""Where the items of a batch come from."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

pytest.importorskip("torch")
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from saturate.agent.fetched import described


class Rows(Dataset):
    def __getitem__(self, index):
        return index

    def __len__(self):
        return 8


class Batches(Rows):
    def __getitems__(self, indices):
        return indices


class Stream(IterableDataset):
    def __iter__(self):
        yield 1


class Collator:
    def __call__(self, items):
        return items


def collate(items, pad=0):
    return items


@pytest.mark.parametrize(("dataset", "kind", "function"), [
    (Rows(), "Rows", "__getitem__"), (Batches(), "Batches", "__getitems__"), (Stream(), "Stream", "__iter__"),
    (Subset(Subset(Rows(), [1, 2]), [0]), "Rows", "__getitem__"), (ConcatDataset([Rows(), Batches()]), "Rows", "__getitem__"),
])
def test_the_users_own_method_is_named(dataset, kind, function):
    found = described(dataset)
    method = vars(type(dataset) if kind == type(dataset).__name__ else Rows)[function]
    assert found == {"kind": kind, "file": __file__, "line": method.__code__.co_firstlineno, "function": function, "collate": None}


def test_a_method_of_torch_that_makes_items_is_named():
    import torch

    found = described(TensorDataset(torch.zeros(3)))
    assert found["kind"] == "TensorDataset" and found["function"] == "__getitem__" and Path(found["file"]).name == "dataset.py"


@pytest.mark.parametrize(("function", "name"), [
    (collate, "collate"), (functools.partial(collate, pad=1), "collate"), (Collator(), "Collator"),
])
def test_a_function_of_the_user_that_collates_is_named_as_well(function, name):
    found = described(Rows(), DataLoader(Rows(), collate_fn=function).collate_fn)["collate"]
    assert found["function"] == name and found["file"] == __file__ and found["line"] > 0


def test_what_torch_collates_with_is_not_named():
    assert described(Rows(), DataLoader(Rows()).collate_fn)["collate"] is None
    assert described(Rows(), DataLoader(Rows(), batch_size=None).collate_fn)["collate"] is None


def test_a_dataset_without_code_of_its_own():
    assert described(None) is None
    assert described([1, 2]) == {"kind": "list", "file": "", "line": 0, "function": "", "collate": None}
