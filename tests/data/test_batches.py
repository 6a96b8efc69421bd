"""What counts as a mapping among all that datasets put into a batch."""

from __future__ import annotations

import collections

import pytest

torch = pytest.importorskip("torch")

from saturate.data.batches import is_mapping, tensors_of  # noqa: E402 - after the import that decides whether to run at all


class Fields:
    """Looks names up among its fields, and raises what a dict does where there is none."""

    def __init__(self, **fields):
        self.__dict__["fields"] = fields

    def __getattr__(self, name):
        return self.fields[name]


class Delegating:
    """As the graphs of torch_geometric: its methods are those of what it holds."""

    def __init__(self, **fields):
        self.__dict__["store"] = fields

    def __getattr__(self, name):
        return getattr(self.store, name)


class Table:
    """As one of pandas: its `values` are computed."""

    keys = dict.keys

    @property
    def values(self):
        raise AssertionError("nothing is computed")


MADE = {"dict": (dict, True), "UserDict": (collections.UserDict, True), "Delegating": (Delegating, True), "Fields": (Fields, False),
        "Table": (Table, False), "list": (list, False), "text": (str, False)}


@pytest.mark.parametrize("kind", MADE)
def test_what_is_a_mapping(kind):
    make, mapping = MADE[kind]
    assert is_mapping(make()) is mapping


def test_tensors_are_found_beside_what_cannot_be_looked_at():
    first, second = torch.ones(1), torch.zeros(2)
    batch = [first, {"inside": (Fields(x=second), Delegating(x=second))}, Table(), None]
    assert [id(tensor) for tensor in tensors_of(torch, batch)] == [id(first), id(second)]
