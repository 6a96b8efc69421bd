"""Loaders whose batches a technique pins: what cannot be pinned comes as it is."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from saturate.agent.context import Context  # noqa: E402 - after the check for torch
from saturate.techniques import _tensor_moves, device_prefetch, pin_memory  # noqa: E402


class Batch:
    """Of a library's own kind."""

    def __init__(self, tensor):
        self.tensor = tensor

    def pin_memory(self):
        return Batch(self.tensor.pin_memory())


@pytest.fixture
def pinning(monkeypatch):
    """`Tensor.pin_memory` as where there is a CUDA device."""
    def pinned(tensor, device=None):
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    return torch.utils.data._utils.pin_memory


@pytest.mark.parametrize("technique, options", [(pin_memory, pin_memory.Options()), (pin_memory, pin_memory.Options(non_blocking=False)),
                                                (device_prefetch, device_prefetch.Options())])
def test_what_cannot_be_pinned_comes_as_it_is(pinning, technique, options):
    """A script has other loaders than the one that its facts are of: for validation, with a collate function that moves to the device."""
    context = Context(torch)
    on_device, sparse = torch.ones(2, device="meta"), torch.eye(2).to_sparse()
    own, host = Batch(on_device), torch.ones(2)
    with pytest.raises(RuntimeError, match="cannot pin"):
        pinning.pin_memory([on_device])
    technique.apply(context, options)
    try:
        found = pinning.pin_memory({"a": (on_device, sparse), "b": [own, host]})
        assert found["a"][0] is on_device and found["a"][1] is sparse and found["b"][0] is own
        assert found["b"][1] is not host and found["b"][1].equal(host)
        assert pinning.pin_memory(Batch(host)).tensor is not host
    finally:
        context.undo()
    with pytest.raises(RuntimeError, match="cannot pin"):
        pinning.pin_memory([on_device])


def test_what_was_pinned_already_is_not_told(pinning, monkeypatch):
    """A collate function may fill a pinned buffer of its own again for each batch."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device=None: self)
    context, told, buffer = Context(torch), [], torch.ones(1)
    _tensor_moves.let_through(context, told.append)
    try:
        assert pinning.pin_memory([buffer])[0] is buffer and not told
    finally:
        context.undo()


def test_only_what_is_pinned_is_told(pinning):
    context, told = Context(torch), []
    _tensor_moves.let_through(context, told.append)
    try:
        found = pinning.pin_memory([torch.ones(1), torch.ones(1, device="meta")])
    finally:
        context.undo()
    assert len(told) == 1 and told[0] is found[0]
