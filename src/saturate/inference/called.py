"""What the user gave as a model: the module that is in it, how that is called, and where it lives.

It may be an nn.Module, a bound method of one, or `functools.partial` of either; compiled, or spread over devices by a wrapper.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from saturate.errors import UsageError
from saturate.inference import batches, wrapped


@dataclass(frozen=True)
class Called:
    """A module, and how the user calls it: itself, or a method, with some arguments given already."""

    module: Any
    method: str
    arguments: tuple[Any, ...]
    named: dict[str, Any]

    def function(self, module: Any) -> Callable[..., Any]:
        found = batches.call_of(module) if self.method == "forward" else getattr(module, self.method)
        return functools.partial(found, *self.arguments, **self.named) if self.arguments or self.named else found

    def call(self, module: Any, *inputs: Any) -> Any:
        """What the user's callable answers, with the hooks of the module where it is called itself."""
        target = module if self.method == "forward" else getattr(module, self.method)
        return target(*self.arguments, *inputs, **self.named)

    def words(self) -> tuple[Any, ...]:
        """What it is known by beside its module."""
        return self.method, self.arguments, sorted(self.named.items())

    def as_module(self, torch: Any) -> Any:
        if self.method == "forward" and not self.arguments and not self.named:
            return self.module
        called = self

        class Method(torch.nn.Module):
            """Calls what the user's callable calls. The module is a child, so that whatever is replaced in it is
            called."""

            def __init__(self) -> None:
                super().__init__()
                self.module = called.module
                self.training = called.module.training      # not train(): parts may be in another mode on purpose

            def forward(self, *inputs: Any) -> Any:
                return called.call(self.module, *inputs)

        signature = batches.signature_of(called.function(called.module))
        if signature is not None:       # programs take the names that the user's callable takes
            own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
            Method.forward.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
        return Method()


def find(torch: Any, model: Any) -> tuple[Called | None, list[str]]:
    """Find the module in what the user gave, and what to say about it. Raises UsageError where there is none."""
    if model is None:
        return None, []
    given, arguments, named = model, (), {}
    if isinstance(model, functools.partial):
        given, arguments, named = model.func, model.args, model.keywords
    method = "forward"
    if not isinstance(given, torch.nn.Module) and isinstance(getattr(given, "__self__", None), torch.nn.Module):
        given, method = given.__self__, given.__name__
    module, notes = _unwrapped(torch, given)
    if isinstance(module, torch.export.ExportedProgram) or "_StatefulGraphModule" in {cls.__name__ for cls in type(module).__mro__}:
        raise UsageError("the model is a program of torch.export", cause="its layers cannot be exchanged any more",
                         remedy="give the torch.nn.Module that it was exported from")
    if not isinstance(module, torch.nn.Module):
        kind = getattr(given, "__qualname__", None) or type(given).__qualname__
        raise UsageError(
            f"the model is {'a class' if isinstance(given, type) else 'no torch.nn.Module'}: {kind}",
            cause="candidates change the layers of a module, and there is none to be found in it",
            remedy="give an instance" if isinstance(given, type) else
            "give the module, a method of it, or a small torch.nn.Module whose forward calls what is to be served")
    _check_layers(torch, module)
    if method in ("__call__", "_call_impl"):
        method = "forward"
    return Called(module, method, tuple(arguments), dict(named)), notes


def _check_layers(torch: Any, model: Any) -> None:
    """Raises UsageError for layers that are no layers any more, or not yet."""
    lazy = torch.nn.parameter.UninitializedTensorMixin
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"the part {name!r} of the model" if name else "the model"
            raise UsageError(f"{what} is a TorchScript program", cause="its layers cannot be exchanged any more",
                             remedy="give the torch.nn.Module that it was made from")
        if any(isinstance(one, lazy) for one in (*module._parameters.values(), *module._buffers.values())):
            raise UsageError("the model has no weights yet", cause=f"{name or type(module).__name__} waits for its first call",
                             remedy="call the model once: model(*batch)")


def signature_of(model: Any) -> inspect.Signature | None:
    """Of what the user gave as a model; None where it has none."""
    import torch

    called, _ = find(torch, model)
    return batches.signature_of(called.function(called.module)) if called else None


def callable_of(torch: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
    """The module in what the user gave as a model, and what is called of it."""
    called, _ = find(torch, model)
    assert called is not None
    return called.module, functools.partial(called.call, called.module)


def _unwrapped(torch: Any, model: Any) -> tuple[Any, list[str]]:
    """The user's module inside of what compiles it or spreads it over devices."""
    notes = []
    while isinstance(model, torch.nn.Module) and (name := wrapped.held_as(model)) is not None:
        notes.append("the model came compiled: the baseline is the model without torch.compile, which is tried as a candidate"
                     if name == "_orig_mod" else
                     f"the model came in {type(model).__name__}: the module inside is optimized, on one device")
        model = model._modules[name]
    return model, notes


def device_of(module: Any, given: set[str]) -> str:
    """Where the module's numbers are; without any, where the inputs came from (`given`)."""
    devices = {str(tensor.device) for tensor in itertools.chain(module.parameters(), module.buffers())} or given or {"cpu"}
    if len(devices) > 1:
        raise UsageError(f"the model is spread over {', '.join(sorted(devices))}",
                         remedy="put all of it on one device first")
    device = devices.pop()
    if device.partition(":")[0] not in ("cpu", "cuda"):
        what = "has no weights yet (device meta)" if device == "meta" else f"is on {device}"
        raise UsageError(f"the model {what}", remedy="load it onto the CPU or a CUDA device first")
    return device
