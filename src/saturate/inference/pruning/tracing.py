"""One forward of a model, recorded operation by operation.

The model runs as it is, on a real batch, below autograd: what is seen are ATen operations with real shapes, whatever
Python code led to them. Data-dependent control flow and models that `torch.export` refuses are no obstacle; the record
holds for the path that was taken, and a value that was read back into Python (`.item()`) counts as an output.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from saturate.inference.batches import tensors

#: Questions about tensors that are not answered from their values.
_METADATA = frozenset({"_fused_sdp_choice", "is_same_size", "size", "stride", "sym_size", "sym_stride", "sym_numel",
                       "numel", "dim", "is_contiguous", "_has_compatible_shallow_copy_type"})


@dataclass
class Leaf:
    """A parameter or buffer. `owners` are all (module, attribute, whether a buffer) that hold it: tied ones have several."""

    name: str
    tensor: Any
    owners: list[tuple[Any, str, bool]] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """One operation. `module` is the innermost module whose forward was running, None outside of all."""

    name: str                       # without namespace and trailing underscore: "add", "convolution"
    known: bool                     # of ATen
    pointwise: bool
    arguments: dict[str, Any]       # by the names of the schema, defaults filled in
    outputs: list[Any]
    module: Any

    def inputs(self, torch: Any) -> list[Any]:
        return tensors(torch, list(self.arguments.values()))


@dataclass(frozen=True)
class Trace:
    """Calls that the outputs depend on, in order. Holds every tensor of the forward, so that no address is used twice."""

    calls: list[Call]
    outputs: list[Any]
    leaves: list[Leaf]


def leaves_of(model: Any) -> list[Leaf]:
    found: dict[int, Leaf] = {}
    for prefix, module in model.named_modules():
        for is_buffer, held in ((False, module._parameters), (True, module._buffers)):
            for name, tensor in held.items():
                if tensor is not None:
                    leaf = found.setdefault(id(tensor), Leaf(f"{prefix}.{name}".lstrip("."), tensor))
                    leaf.owners.append((module, name, is_buffer))
    return list(found.values())


@contextlib.contextmanager
def plain_attention(torch: Any) -> Iterator[None]:
    """Without the fused forward of whole transformer layers, which would hide everything inside."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def record(torch: Any, model: Any, batch: tuple[Any, ...]) -> Trace:
    """Run `model(*batch)` once without gradients. What its forward raises is passed on."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: list[Call] = []
    running: list[Any] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if hasattr(function, "decompose"):      # under inference mode, composite operations arrive in one piece
                with self:
                    result = function.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            result = function(*args, **kwargs)
            calls.append(_call(torch, function, args, kwargs, result, running[-1] if running else None))
            return result

    def leave(*_: Any) -> None:
        running.pop()

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda module, _: running.append(module), prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    given = copy.deepcopy(batch)        # it may write to its inputs
    try:
        with torch.no_grad(), plain_attention(torch), Recorder():
            result = model(*given)
    finally:
        for handle in handles:
            handle.remove()
    outputs = tensors(torch, result)
    return Trace(_alive(torch, calls, outputs), outputs, leaves_of(model))


def _call(torch: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, module: Any) -> Call:
    schema = getattr(function, "_schema", None)
    if schema is None:      # a higher-order operator
        return Call(str(function), False, False, {"args": args, **kwargs}, tensors(torch, result), module)
    space, _, name = schema.name.partition("::")
    arguments = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    arguments |= {argument.name: value for argument, value in zip(schema.arguments, args)} | kwargs
    bare = name.rstrip("_") if not name.startswith("__") else name
    return Call(bare, space == "aten", _is_pointwise(torch, function, bare), arguments, tensors(torch, result), module)


def _is_pointwise(torch: Any, function: Any, name: str) -> bool:
    """By its tag; an operation in place carries none in some versions, so the one it is a variant of is asked too."""
    if torch.Tag.pointwise in function.tags:
        return True
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or function._schema.name == f"aten::{name}":
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def _alive(torch: Any, calls: list[Call], outputs: list[Any]) -> list[Call]:
    """Without calls whose results nothing uses (averaged attention weights that are thrown away). By storage, so that a
    write through one view of a buffer keeps what others read."""
    alive = {storage(tensor) for tensor in outputs}
    kept = []
    for call in reversed(calls):
        if call.name in _METADATA:
            continue
        if not call.outputs or any(storage(tensor) in alive for tensor in call.outputs):
            kept.append(call)
            alive.update(storage(tensor) for tensor in call.inputs(torch))
    return kept[::-1]


def storage(tensor: Any) -> int:
    """Identifies the memory of a tensor and its views, as long as one of them lives."""
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):     # sparse and other tensors without one storage
        return id(tensor)
