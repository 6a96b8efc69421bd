"""Finding the blocks of a model."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the import that decides whether to run at all

from saturate.techniques import _blocks  # noqa: E402


class Layer(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.attention, self.mlp = nn.MultiheadAttention(width, 1), nn.Sequential(nn.Linear(width, width), nn.ReLU())


class Stage(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(count)))


class Holder(nn.Module):
    def __init__(self, *modules, **named):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.parts = nn.ModuleList(modules)
        for name, module in named.items():
            setattr(self, name, module)


def kinds(root):
    return [type(block).__name__ for block in _blocks.blocks(root)]


def test_the_outermost_repeated_modules():
    assert kinds(Holder(*(Layer() for _ in range(6)))) == ["Layer"] * 6
    assert kinds(nn.Sequential(*(Layer() for _ in range(2)))) == ["Layer"] * 2


def test_stages_are_looked_into():
    assert kinds(Holder(Stage(3), Stage(3))) == ["Layer"] * 6
    assert kinds(Holder(*(Stage(1) for _ in range(8)))) == ["Stage"] * 8       # enough as they are


def test_two_kinds_in_the_order_of_registration():
    found = kinds(nn.Transformer(8, 1, 3, 3, 8))
    assert found == ["TransformerEncoderLayer"] * 3 + ["TransformerDecoderLayer"] * 3


def test_a_module_at_two_places_is_one_block():
    layer = Layer()
    assert kinds(Holder(layer, Layer(), again=layer)) == ["Layer"] * 2


def test_without_repetition_the_children():
    assert kinds(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))) == ["Linear", "ReLU", "Linear"]
    assert kinds(Holder(lstm=nn.LSTM(2, 2))) == ["Linear", "LSTM"]
    wrapped = nn.Module()
    wrapped.inner = Holder(lstm=nn.LSTM(2, 2))
    assert kinds(wrapped) == ["Linear", "LSTM"]
    assert kinds(nn.Linear(2, 2)) == []


def test_blocks_are_disjoint():
    root = Holder(Stage(2), Stage(4), extra=Layer())
    found = _blocks.blocks(root)
    inside = [id(module) for block in found for module in block.modules()]
    assert len(inside) == len(set(inside))
