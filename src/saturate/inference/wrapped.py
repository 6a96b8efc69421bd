"""The user's module inside of what compiles it or spreads it over devices."""

from __future__ import annotations

from typing import Any

_PARALLEL = ("DataParallel", "DistributedDataParallel")


def held_as(module: Any) -> str | None:
    """The name under which a wrapper holds the module that it was made for; None for what is no wrapper."""
    if "_orig_mod" in module._modules:
        return "_orig_mod"
    return "module" if type(module).__name__ in _PARALLEL and "module" in module._modules else None


def unwrapped(torch: Any, model: Any) -> Any:
    """The module inside of all wrappers: there its forward has names."""
    while isinstance(model, torch.nn.Module) and (name := held_as(model)) is not None:
        model = model._modules[name]
    return model
