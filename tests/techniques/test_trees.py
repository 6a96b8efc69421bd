"""Nested arguments, taken apart and put together."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

from saturate.techniques import _trees


class Fields(MutableMapping):
    """Of a library: no dictionary, but one inside."""

    def __init__(self, **fields):
        self._fields = fields

    def __getitem__(self, name):
        return self._fields[name]

    def __setitem__(self, name, value):
        self._fields[name] = value

    def __delitem__(self, name):
        del self._fields[name]

    def __iter__(self):
        return iter(self._fields)

    def __len__(self):
        return len(self._fields)


def test_taking_a_mapping_apart_leaves_it_whole() -> None:
    """Where its items lie in a dictionary that a copy would share, the script found our placeholders in its batch."""
    given = Fields(x=torch.ones(2), inner=Fields(y=torch.zeros(1)))
    skeleton, tensors = _trees.taken_apart(given, torch)
    assert given["x"] is tensors[0] and given["inner"]["y"] is tensors[1]
    again = _trees.put_together(skeleton, [tensor + 1 for tensor in tensors])
    assert type(again) is Fields and again["x"].tolist() == [2, 2] and again["inner"]["y"].tolist() == [1]
    assert given["x"].tolist() == [1, 1] and given["inner"]["y"].tolist() == [0]
