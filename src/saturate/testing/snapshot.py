"""What a technique could leave behind, as flat dictionaries that can be compared: name -> plain value."""

from __future__ import annotations

import gc
import os
from typing import Any

Snapshot = dict[str, Any]


def surroundings(torch: Any) -> Snapshot:
    """Process-wide state: environment, collector, torch's flags, and the attributes of the classes that get patched."""
    found: Snapshot = {
        f"environment variable {name}": value
        for name, value in os.environ.items()
        if "TORCHINDUCTOR" not in name      # the compiler keeps notes to itself there
    }
    found |= {
        "gc.isenabled()": gc.isenabled(),
        "gc.get_threshold()": gc.get_threshold(),
        "objects in the frozen generation": bool(gc.get_freeze_count()),
        "torch.get_num_threads()": torch.get_num_threads(),
        "matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "grad enabled": torch.is_grad_enabled(),
        "torch.autograd.backward": id(torch.autograd.backward),
        "torch.autograd.grad": id(torch.autograd.grad),
    }
    classes = [torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.optim.AdamW, torch.utils.data.DataLoader]
    classes.append(torch.utils.data.dataloader._MultiProcessingDataLoaderIter)
    if torch.distributed.is_available():
        classes.append(torch.nn.parallel.DistributedDataParallel)
    home = os.path.dirname(torch.__file__)
    for cls in classes:
        found |= {
            f"{cls.__name__}.{name}": id(value) for name, value in vars(cls).items() if _is_foreign(value, home)
        }
    return found


def _is_foreign(value: Any, home: str) -> bool:
    """Whether a function, or one that it wraps, comes from outside torch (whose compiler patches its own classes)."""
    while value is not None:
        code = getattr(value, "__code__", None)
        if code is not None and os.path.isabs(code.co_filename) and not code.co_filename.startswith(home):
            return True
        attributes = getattr(value, "__dict__", {})
        value = attributes.get("_torchdynamo_orig_callable", attributes.get("__wrapped__"))
    return False


def structure(model: Any, optimizer: Any) -> Snapshot:
    """Shape of the user's objects: instance attributes, hooks, memory layout, optimizer flags. No trained values."""
    found: Snapshot = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            found[f"{name or 'model'}.{key}"] = len(value) if isinstance(value, dict) else type(value).__name__
        found[f"type of {name or 'model'}"] = id(type(module))
    for name, parameter in model.named_parameters():
        found[f"strides of {name}"] = parameter.stride()
        found[f"identity of {name}"] = id(parameter)
    for key, value in vars(optimizer).items():
        hooks = isinstance(value, dict) and key.endswith("_hooks")
        found[f"optimizer.{key}"] = len(value) if hooks else type(value).__name__
    found["optimizer.defaults"] = repr(optimizer.defaults)
    for index, group in enumerate(optimizer.param_groups):
        found[f"optimizer group {index}"] = repr({key: value for key, value in group.items() if key != "params"})
    return found


def values(workload: Any) -> Snapshot:
    """Bits of the parameters and of the optimizer's state."""
    found: Snapshot = {f"value of {name}": _bits(tensor) for name, tensor in workload.model.state_dict().items()}
    for index, state in workload.optimizer.state_dict()["state"].items():
        found |= {f"optimizer state {index}.{key}": _bits(value) for key, value in state.items()}
    return found


def _bits(value: Any) -> Any:
    if not hasattr(value, "detach"):
        return value
    tensor = value.detach().cpu()
    return str(tensor.dtype), tuple(tensor.shape), tensor.stride(), tensor.contiguous().numpy().tobytes()


def differences(before: Snapshot, after: Snapshot) -> list[str]:
    """One phrase for each entry that appeared, vanished or changed."""
    found = []
    for name in sorted({*before, *after}):
        if name not in after:
            found.append(f"{name} is gone")
        elif name not in before:
            found.append(f"{name} is left behind")
        elif before[name] != after[name]:
            found.append(f"{name} changed")
    return found
