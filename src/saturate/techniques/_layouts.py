"""Fused optimizer kernels walk memory and look at no strides: what they read together must lie alike.

On CPUs torch 2.13 updates wrongly, and in silence, where a parameter has gaps (a slice of another tensor), or its gradient or
state lies in another order than it does; on CUDA such a step raises. The kernels that work one operation at a time take both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from saturate.techniques import _closures


class Layouts:
    """Of the parameters, gradients and state of one optimizer. The state of other optimizers than torch's own is not known."""

    def __init__(self, torch: Any, optimizer: Any):
        self._torch = torch
        self._optimizer = weakref.ref(optimizer)        # its hooks hold this
        self._known: tuple[Any, ...] = ()   # strides of parameters and gradients of a step in which all lay alike, and dtypes

    def forget(self) -> None:
        """The state is another one."""
        self._known = ()

    def align(self) -> str:
        """Lay each gradient and state out as its parameter; why that is not enough, or ""."""
        parameters = [p for group in self._optimizer().param_groups for p in group["params"] if p.grad is not None]
        if not parameters:
            return ""
        gradients = [p.grad for p in parameters]
        if any([gradient.is_sparse for gradient in gradients]):
            return "gradients are sparse"
        strides = [p.stride() for p in parameters], [gradient.stride() for gradient in gradients], [p.dtype for p in parameters]
        if strides == self._known:
            return ""                       # as in the step before: asking a hundred parameters takes some 50 us
        if not all(p.is_floating_point() for p in parameters):
            return "a parameter is not floating point"
        if not all(map(dense, parameters)):
            return "the elements of a parameter do not fill its memory"
        self._known = strides
        for parameter, gradient in zip(parameters, gradients):
            if _places(gradient) != _places(parameter):
                parameter.grad = self._laid_out(parameter, gradient)
                self._known = ()            # the next ones may come the same way
            state = self._optimizer().state.get(parameter) or {}
            for name, value in state.items():
                if name != "step" and getattr(value, "shape", None) == parameter.shape and _places(value) != _places(parameter):
                    state[name] = self._laid_out(parameter, value)
        return ""

    def _laid_out(self, parameter: Any, value: Any) -> Any:
        with self._torch.no_grad():
            return self._torch.empty_like(parameter, dtype=value.dtype).copy_(value)


class Aligning:
    """A hook before a step: what the script loads or makes later is laid out as it would be without us, which its fused kernels do
    not see."""

    def __init__(self, torch: Any, layouts: Layouts):
        self._torch, self._layouts = torch, layouts

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if self._torch.compiler.is_compiling():
            return None
        with_closure = _closures.around(args, kwargs, self._layouts.align)
        if with_closure is None:
            self._layouts.align()
        return with_closure


class Saving:
    """A hook behind `Optimizer.state_dict`: the state of some parameters in the usual format, while the state itself stays as it is.
    A load keeps strides, in whichever process."""

    def __init__(self, torch: Any, ours: Callable[[Any], bool]):
        self._torch, self._ours = torch, ours

    def __call__(self, optimizer: Any, state_dict: Any) -> Any:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        numbers = {number for number, parameter in enumerate(parameters) if self._ours(parameter)}
        if not numbers or not isinstance(state_dict.get("state"), dict):
            return None
        state = {key: {name: self._usual(value) for name, value in values.items()} if key in numbers else values
                 for key, values in state_dict["state"].items()}
        return {**state_dict, "state": state}

    def _usual(self, value: Any) -> Any:
        return value.contiguous() if isinstance(value, self._torch.Tensor) else value


def in_usual_format(tensors: dict[Any, Any], torch: Any) -> dict[Any, Any]:
    """These tensors, and copies in place of those that lie channels-last; names of one stretch of memory have one copy."""
    copies: dict[Any, Any] = {}

    def usual(tensor: Any) -> Any:
        strided = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        if not strided or tensor.dim() != 4 or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=torch.channels_last):
            return tensor
        place = tensor.data_ptr(), tensor.shape
        if place not in copies:
            copies[place] = tensor.contiguous()
        return copies[place]

    return {name: usual(tensor) for name, tensor in tensors.items()}


def dense(tensor: Any) -> bool:
    """Whether its elements fill a stretch of memory, each once, in whichever order of dimensions."""
    if tensor.is_contiguous():
        return True
    reach = 1
    for stride, size in sorted(_places(tensor)):
        if stride != reach:
            return False
        reach *= size
    return True


def _places(tensor: Any) -> list[tuple[int, int]]:
    """Strides and sizes; the stride of a dimension of one element says nothing."""
    return [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1]
