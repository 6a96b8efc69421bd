"""What a window reports besides times: modules by name, memory by kind, compilations, and what was left on the CPU."""

from __future__ import annotations

import sys
from typing import Any

from saturate.agent import facts, observe
from saturate.data import batches

_MOST_REASONS = 8
_MOST_LEFT = 20


def named_modules(session: Any, most: int) -> dict[int, tuple[str, str]]:
    """id -> (qualified name, class) of the trained modules and those inside them, outer ones first. With several trained
    modules, names begin with the class of theirs, and with its number where several are of one class."""
    roots = session.context.modules
    found: list[tuple[int, int, tuple[str, str]]] = []
    for root, called in zip(roots, _numbered([type(root).__name__ for root in roots])):
        for name, module in root.named_modules():
            full = called if not name else f"{called}.{name}" if len(roots) > 1 else name
            found.append((name.count(".") + bool(name), id(module), (full, type(module).__name__)))
    found.sort(key=lambda entry: entry[0])
    names: dict[int, tuple[str, str]] = {}
    for _, identity, entry in found:
        if len(names) < most:
            names.setdefault(identity, entry)
    return names


def _numbered(names: list[str]) -> list[str]:
    """
    >>> _numbered(["Generator", "Critic", "Generator"])
    ['Generator#1', 'Critic', 'Generator#2']
    """
    return [f"{name}#{names[:i + 1].count(name)}" if names.count(name) > 1 else name for i, name in enumerate(names)]


# -- memory ----------------------------------------------------------------------------------------------------------


def memory(session: Any) -> dict[str, int]:
    """Bytes of what lives on the training device from step to step; every storage counts once."""
    parameters = observe.trained_parameters(session)
    roots = session.context.modules
    held = [*parameters, *(p for m in roots for p in m.parameters()), *(b for m in roots for b in m.buffers())]
    gradients = [p.grad for p in held if getattr(p, "grad", None) is not None]
    states = [value for o in session.optimizers.living() for state in o.state.values()
              for value in batches.tensors_of(session.torch, state)]
    device = session.context.device
    return {"parameters": bytes_of(held, device), "gradients": bytes_of(gradients, device),
            "optimizer_state": bytes_of(states, device)}


def bytes_of(tensors: Any, device: str = "") -> int:
    """Bytes of their storages; only of those on a kind of device, where one is given."""
    storages = {}
    for tensor in tensors:
        for part in parts_of(tensor):
            if not device or part.device.type == device:
                key, size = storage_of(part)
                storages[key] = size
    return sum(storages.values())


def parts_of(tensor: Any) -> list[Any]:
    """The plain tensors that a tensor is made of. One that only looks like its shape and type (8-bit state, ours or
    torchao's, or state in host memory) has a storage that is as large as it looks and that nobody ever allocated."""
    if hasattr(tensor, "lies_in"):
        inner = tensor.lies_in()
    elif hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    else:
        return [tensor]
    return [part for one in inner for part in parts_of(one)]


def storage_of(tensor: Any) -> tuple[Any, int]:
    """What is shared by all views of a tensor, and its bytes; of a sharded tensor, this rank's shard."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    try:
        storage = local.untyped_storage()
        return (local.device, storage.data_ptr()), storage.nbytes()
    except (RuntimeError, NotImplementedError):     # sparse and other tensors without a storage
        return id(tensor), local.numel() * local.element_size()


def device_memory(torch: Any, device: Any) -> dict[str, int]:
    """What the CUDA allocator says of a device since its peaks were last reset, bytes."""
    stats = torch.cuda.memory_stats(device)
    return {
        "peak": stats["allocated_bytes.all.peak"],
        "active_peak": stats["active_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
        "total": torch.cuda.get_device_properties(device).total_memory,
    }


def uuid_of(torch: Any, device: Any) -> str:
    """The number by which NVML knows a CUDA device; "" where this torch does not tell."""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def off_device(session: Any) -> list[str]:
    """Parameters and buffers of the trained modules that are on the CPU while training runs elsewhere."""
    if session.context.device == "cpu":
        return []
    found = [f"{type(m).__name__}.{name}" for m in session.context.modules
             for name, tensor in (*m.named_parameters(), *m.named_buffers()) if tensor.device.type == "cpu"]
    return found[:_MOST_LEFT]


# -- compilation -----------------------------------------------------------------------------------------------------


def compiler(session: Any, began_ns: int, ended_ns: int) -> dict[str, Any]:
    """What dynamo did: compilations between two times of `time.time_ns`, and all graph breaks since the start (a break is
    found when a frame is compiled, and taken in every step after that)."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return {"compiled": False}
    counters = dynamo.utils.counters
    compiled = session.inspection.compiled or counters["frames"].get("ok", 0) > 0
    if not compiled:
        return {"compiled": False}
    compilations = dynamo.utils.get_compilation_metrics()
    late = [m for m in compilations if began_ns <= (m.start_time_us or 0) * 1000 < ended_ns]
    limit_hit = facts.recompile_limit_hit(counters)
    # Where it gave up before the window, what it had compiled again and again is why.
    again = late or [m for m in compilations if limit_hit and m.recompile_reason]
    # A frame that is skipped as a whole, for a break inside a loop, is not among the breaks.
    skipped = [key for key in counters.get("unimplemented", {}) if "kipping the frame" in key]
    breaks = len(dynamo.utils.graph_break_reasons) + len(skipped)
    return {
        "compiled": True,
        "recompiles": len(late),
        "recompile_reasons": _distinct(map(_recompiled, again)),
        "compile_s": sum(m.entire_frame_compile_time_s or 0.0 for m in late),
        "window_s": (ended_ns - began_ns) / 1e9,
        "graph_breaks": breaks,
        "graph_break_reasons": _distinct([*map(_break, dynamo.utils.graph_break_reasons), *map(_one_line, skipped)]),
        "limit_hit": limit_hit,
    }


def _recompiled(metrics: Any) -> str:
    where = f"{metrics.co_filename}:{metrics.co_firstlineno} {metrics.co_name}"
    return f"{where}: {_one_line(metrics.recompile_reason)}" if metrics.recompile_reason else where


def _break(reason: Any) -> str:
    frame = reason.user_stack[-1] if reason.user_stack else None
    where = f"{frame.filename}:{frame.lineno}: " if frame is not None else ""
    return where + _one_line(reason.reason)


def _one_line(text: Any) -> str:
    lines = str(text).strip().splitlines()
    return lines[0][:200] if lines else ""


def _distinct(texts: Any) -> list[str]:
    return list(dict.fromkeys(texts))[:_MOST_REASONS]
