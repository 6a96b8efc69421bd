"""Random numbers that are drawn in between leave those of the user where they were."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="random numbers of its")

from saturate.inference.pruning.values import seeded  # noqa: E402


def test_the_users_own_random_numbers_go_on() -> None:
    torch.manual_seed(123)
    random.seed(5)
    with seeded(torch, 0):
        drawn = torch.rand(3), random.random()
    after = torch.rand(3), random.random()
    torch.manual_seed(123)
    random.seed(5)
    assert torch.equal(after[0], torch.rand(3)) and after[1] == random.random()
    with seeded(torch, 0):
        assert torch.equal(drawn[0], torch.rand(3)) and drawn[1] == random.random()


def test_a_gpu_that_is_not_used_yet_will_begin_with_the_users_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.manual_seed` says to it waits for its first use; it has no state yet that could be restored."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    torch.manual_seed(123)
    with seeded(torch, 0):
        torch.rand(1)
    assert seeds == [123]
