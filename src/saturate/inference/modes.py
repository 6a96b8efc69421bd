"""Evaluation mode: of a user's own modules for a while, with everything back afterwards, and of a model but for what trains on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def evaluating(torch: Any, *models: Any) -> Iterator[None]:
    """Modules in evaluation mode, and afterwards as they were.

    Some parts do something when their mode changes: an adapter adds its weights to those of its layer. Their own `train` takes
    that back, and what it leaves of rounding is restored: training goes on with the very bits. A model without a part in training mode is
    not touched, nor are its weights kept, which would be a copy of all of them.
    """
    turned = [model for model in models if not hasattr(model, "modules") or any(part.training for part in model.modules())]
    parts = [part for model in turned if hasattr(model, "modules") for part in model.modules()]
    before = [(part, part.training) for part in parts]
    acting = any(_acts(torch, part) for part in parts)
    kept = Kept(torch, [tensor for part in parts for tensor in (*part._parameters.values(), *part._buffers.values())] if acting else [])
    named = [(held, dict(held)) for part in parts for held in (part._parameters, part._buffers)] if acting else []
    try:
        for model in turned:
            if hasattr(model, "eval"):
                model.eval()
        yield
    finally:
        for part, training in before if acting else ():     # from the outside in: a part that was in another mode comes after its parent
            if part.training != training:
                part.train(training)
        for part, training in before:
            part.training = training
        for held, tensors in named:
            held.clear()
            held.update(tensors)
        kept.restore()


def training_parts(model: Any) -> set[str]:
    """Names of the parts that are in training mode though the model serves: dropout that draws at inference, statistics of the batch."""
    return {name for name, part in model.named_modules() if part.training}


def evaluate(model: Any, on_purpose: set[str]) -> None:
    """Evaluation mode, but for the parts with these names."""
    model.eval()
    for name, part in model.named_modules():
        if name in on_purpose:
            part.training = True


class Kept:
    """What tensors hold, to be restored bit by bit; not those of a class of its own (quantized ones), of which nobody knows the bits.
    What did not change is not written to: that could not be done (memory that is read-only or shared by its elements), or would break
    a backward pass that waits."""

    def __init__(self, torch: Any, tensors: list[Any]):
        self._torch = torch
        distinct = {id(tensor): tensor for tensor in tensors
                    if tensor is not None and not torch.nn.parameter.is_lazy(tensor) and not tensor.is_inference() and not tensor.is_meta
                    and type(tensor.data) is torch.Tensor}
        # On the host: a GPU that holds a model may have no room for it twice.
        self._held = [(tensor, tensor.data, tensor.data.to("cpu", copy=True), tensor.requires_grad) for tensor in distinct.values()]

    def restore(self) -> None:
        for tensor, data, value, requires_grad in self._held:
            if tensor.is_leaf:
                tensor.requires_grad_(requires_grad)
            if not _same_memory(tensor, data):
                tensor.data = data
            if not same_bits(self._torch, data.cpu(), value):
                data.copy_(value)       # not to the tensor itself: what a waiting backward pass has kept of it holds again


def same_bits(torch: Any, one: Any, other: Any) -> bool:
    """Whether two tensors hold the same bits: NaN is NaN, and 0 is not -0. False where it cannot be told."""
    if one.layout != torch.strided or one.is_quantized or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.view(whole), other.view(whole))


def _acts(torch: Any, part: Any) -> bool:
    """Whether a module does something of its own when its mode changes. A model of transformers does where it has kernels to exchange."""
    idle = (f"{torch.__name__}.",) if getattr(part, "use_kernels", False) else (f"{torch.__name__}.", "transformers.modeling_utils.")
    return not all(f"{getattr(method, '__module__', '')}.".startswith(idle) for method in (part.train, part.eval))


def _same_memory(tensor: Any, data: Any) -> bool:
    if tensor.shape != data.shape or tensor.dtype != data.dtype or tensor.layout != data.layout:
        return False
    try:
        return tensor.data_ptr() == data.data_ptr() and tensor.stride() == data.stride()
    except RuntimeError:            # sparse tensors have neither
        return True
