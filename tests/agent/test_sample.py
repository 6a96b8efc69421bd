"""What is read from parameters is little, and spread over all of them."""

from __future__ import annotations

import torch

from saturate.agent.sample import few, strided


def test_few() -> None:
    assert few(list(range(5))) == list(range(5))
    assert few(list(range(80))) == list(range(0, 80, 10))


def test_strided() -> None:
    assert strided(torch.arange(3.0).reshape(3, 1), 16) == [0.0, 1.0, 2.0]
    assert strided(torch.arange(100.0).reshape(10, 10), 4) == [0.0, 25.0, 50.0, 75.0]
    assert strided(torch.empty(0), 4) == []
    assert strided(torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), 4) == [1.0, 1.0]


def test_a_shard_stands_for_its_tensor() -> None:
    class Sharded:
        def to_local(self) -> torch.Tensor:
            return torch.tensor([7.0])

    assert strided(Sharded(), 4) == [7.0]
