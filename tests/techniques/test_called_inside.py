"""A step that calls its model and, by itself, a part of it: both are trained modules, and what acts on parts finds each once."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the import that decides whether to run at all

from saturate.agent.context import Context  # noqa: E402
from saturate.techniques import activation_checkpointing, bf16_autocast, channels_last, compile  # noqa: E402


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.act = nn.ReLU()

    def forward(self, x):
        return x + self.act(self.conv(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*(Block() for _ in range(6)))
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.head(self.encoder(x))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("technique,options,said", [
    (activation_checkpointing, {"mode": "blocks"}, "6 blocks"),
    (bf16_autocast, {"scope": "layers"}, "7 linear and convolution"),
    (channels_last, {}, "6 parameters"),
    (compile, {"scope": "blocks"}, "6 repeated blocks"),
])
def test_a_part_that_is_called_by_itself_as_well_is_counted_once(technique, options, said, order):
    model, context = Model(), Context(torch)
    context.modules, context.device = (model, model.encoder)[::order], "cpu"
    assert said in technique.apply(context, technique.Options(**options))
    context.undo()
