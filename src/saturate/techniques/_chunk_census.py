"""Is anything against cutting a module's batch: what it consists of (`census`), and what one of the script's own forwards does (`Watch`).

A module that keeps something of a forward would keep it once per chunk.
"""

from __future__ import annotations

from typing import Any

from saturate.techniques import _trees
from saturate.techniques._chunks import FILLS
from saturate.techniques._surroundings import Surroundings

#: Hooks of these packages do not look at batches, or look at each alike.
_KNOWN_HOOKS = ("torch.", "saturate.", "accelerate.", "peft.", "transformers.")


def census(module: Any, torch: Any, then: str = "which would run for each chunk") -> str:
    """Why no forward of this module can be cut, from what it consists of; empty when nothing is against it. `then`: what would become of
    a hook of the script."""
    nn = torch.nn
    for name, child in module.named_modules():
        where = f"{name or 'the model'} ({type(child).__name__})"
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.training:
            return f"{where} normalizes over the batch, so its samples depend on each other"
        if isinstance(child, nn.modules.instancenorm._InstanceNorm) and child.training and child.track_running_stats:
            return f"{where} keeps running statistics of each batch"
        if getattr(child, "scale_grad_by_freq", False) and child.weight.requires_grad:
            return f"{where} divides gradients by how often an index occurs in the batch, so its samples depend on each other"
        if type(child).__name__.startswith(("FullySharded", "FSDP")):
            return "its parameters are sharded (FSDP)"
        if child is not module and (hook := _own_hook(child)):
            return f"{where} has a hook of the script ({hook}), {then}"
    for name, parameter in module.named_parameters():
        if parameter.device.type not in ("cpu", "cuda"):
            return f"{name} lives on {parameter.device}: only CPUs and CUDA devices are known here"
        if type(parameter).__name__ == "DTensor":
            return f"{name} is a distributed tensor"
        if not parameter.is_leaf:
            return f"{name} is computed from other tensors"
    generator = Surroundings(module, torch).generator
    return f"it has a random generator of its own ({generator})" if generator else ""


def has_hooks(module: Any) -> bool:
    """Whoever set them."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def _own_hook(module: Any) -> str:
    for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        for hook in getattr(module, kind, {}).values():
            function = getattr(hook, "func", hook)
            home = getattr(function, "__module__", None) or type(function).__module__
            if not f"{home}.".startswith(_KNOWN_HOOKS):
                return getattr(function, "__qualname__", type(function).__name__)
    return ""


class Watch:
    """The state of a module and its arguments around one forward of the script's own."""

    def __init__(self, module: Any, arguments: Any, inputs: list[Any], torch: Any):
        self.module = module
        self.torch = torch
        self.inputs = inputs
        self.versions = [tensor._version for tensor in inputs]
        self.members = _trees.members(arguments)
        self.around = Surroundings(module, torch)
        self.before = self._values()

    def _values(self) -> dict[str, Any]:
        found = {}
        for name, value in [*_trees.each_module_value(self.module), *self.module.named_parameters()]:
            if isinstance(value, self.torch.Tensor):
                found[name] = self._digest(value)
            elif isinstance(value, (int, float)):
                found[name] = value
        return found

    def _digest(self, tensor: Any) -> Any:
        if tensor.grad_fn is not None:
            return "graph"
        if tensor.is_sparse or tensor.device.type == "meta" or not tensor.numel():
            return tensor.shape, tensor._version
        flat = self.torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        return tensor.shape, float(flat.sum(dtype=self.torch.float64)), float(flat.flatten()[0])

    def problem(self) -> str:
        """What this forward did besides computing its output; empty when nothing was seen."""
        if any(tensor._version != version for tensor, version in zip(self.inputs, self.versions)):
            return "its forward changes its input in place"
        if filled := _trees.filled(self.members):
            return f"{FILLS} ({filled})"
        after = self._values()
        for name, value in after.items():
            if value == "graph":
                return f"it keeps a tensor of its forward with its graph ({name})"
            if repr(self.before.get(name)) != repr(value):      # as text nan equals nan
                return f"its forward changes {name}"
        outside = self.around.changed()
        return f"its forward changes {outside}" if outside else ""
