"""Snapshots of tensors on a GPU: whole, whatever the streams do next."""

from __future__ import annotations

import pytest
import torch

from saturate.agent.context import Context
from saturate.checkpoints.arena import Arena
from saturate.techniques import async_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("mode", ["thread", "process", "sync"])
def test_no_later_write_tears_a_snapshot(tmp_path, mode):
    context = Context(torch)
    async_checkpoint.apply(context, async_checkpoint.Options(mode))
    try:
        state = {"a": torch.zeros(1 << 22, device="cuda"), "b": torch.zeros(1 << 20, dtype=torch.bfloat16, device="cuda"),
                 "host": torch.zeros(1000)}
        state["view"] = state["a"][10:20]
        for step in range(1, 10):
            for tensor in (state["a"], state["b"], state["host"]):
                tensor.fill_(step)
            torch.save(state, tmp_path / "a.pt")
            for tensor in (state["a"], state["b"], state["host"]):
                tensor.data.mul_(-1)            # at once, on the stream that computes
            found = torch.load(tmp_path / "a.pt")
            for name in ("a", "b", "host", "view"):
                assert bool((found[name] == step).all()), (step, name)
                assert found[name].device == state[name].device
    finally:
        context.undo()


def test_device_memory_is_given_back(tmp_path):
    """The snapshot holds no device memory once it has arrived."""
    context = Context(torch)
    async_checkpoint.apply(context, async_checkpoint.Options("thread"))
    try:
        before = torch.cuda.memory_allocated()
        torch.save({"a": torch.ones(1 << 24, device="cuda")}, tmp_path / "a.pt")
        assert (tmp_path / "a.pt").stat().st_size > 1 << 26
        assert torch.cuda.memory_allocated() == before
    finally:
        context.undo()


def test_a_buffer_that_cannot_be_page_locked_leaves_no_error_behind():
    """What is page-locked already is refused: torch would raise that after the script's next kernel."""
    cuda, arena = torch.cuda.cudart(), Arena(torch, 1 << 21)
    assert int(cuda.cudaHostRegister(arena.tensor.data_ptr(), arena.size, 0)) == 0
    try:
        arena.pin(torch.device("cuda", 0))
        assert arena._pinned is False
        assert torch.ones(4, device="cuda").sum().item() == 4
    finally:
        cuda.cudaHostUnregister(arena.tensor.data_ptr())
        arena.close()
