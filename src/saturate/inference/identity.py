"""Digests by which a study knows the model and the inputs that it was made for: weights, structure and code.

They are equal for equal things in two processes, so nothing in them depends on addresses, on the order of sets, or on
what pickles look like.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from types import CodeType, FunctionType
from typing import Any

from saturate.inference import pickles
from saturate.techniques._trees import copied

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def of_model(torch: Any, model: Any, called: str = "") -> str:
    """Of the weights, buffers, plain attributes and code of a module. `called`: how it is called, when not as a
    module."""
    digest = hashlib.sha256(called.encode())
    classes: dict[str, type] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        classes[f"{type(module).__module__}.{type(module).__qualname__}"] = type(module)
        _add(digest, name, type(module).__qualname__)
        for key, value in sorted(vars(module).items()):
            if "_hooks" in key and isinstance(value, dict):
                value = list(value.values())        # their keys count what was registered in this process
            if key not in ("_parameters", "_buffers", "_modules"):
                _add_value(torch, digest, key, value)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                _add(digest, key)
                _add_tensor(torch, digest, tensor)
    for name in sorted(classes):
        _add(digest, name, code_of(classes[name]))
    return digest.hexdigest()


def of_batches(torch: Any, *lists: list[tuple[Any, ...]]) -> str:
    """Of the values of batches, in order."""
    digest = hashlib.sha256()

    def add(path: tuple[Any, ...], leaf: Any) -> Any:
        _add_value(torch, digest, ".".join(map(str, path)), leaf)
        return leaf

    for batches in lists:
        _add(digest, str(len(batches)))
        for batch in batches:
            copied(batch, add)
    return digest.hexdigest()


def code_of(thing: Any) -> str:
    """The code of a class or function, with its base classes and the functions that it calls by a global name;
    torch's own is left out, its version says what that does."""
    found: dict[int, tuple[Any, str]] = {}
    pending = [thing]
    while pending:
        one = pending.pop()
        if id(one) in found or (getattr(one, "__module__", None) or "").partition(".")[0] in ("builtins", "torch"):
            continue
        found[id(one)] = one, _source(one)
        if isinstance(one, type):
            pending += [*one.__mro__[1:], *(member for member in vars(one).values() if isinstance(member,
                                                                                                  FunctionType))]
        else:
            used = (one.__globals__.get(name) for name in one.__code__.co_names)
            pending += [other for other in used if isinstance(other, FunctionType)]
    return "\n".join(source for _, source in found.values())


def _source(thing: Any) -> str:
    """As it was written; where that is not known (typed into a shell), its instructions."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return repr(_instructions(thing.__code__)) if isinstance(thing, FunctionType) else thing.__qualname__


def _instructions(code: CodeType) -> tuple[Any, ...]:
    constants = [_instructions(constant) if isinstance(constant, CodeType) else repr(constant)
                 for constant in code.co_consts if not isinstance(constant, frozenset)]
    return code.co_code, code.co_names, constants


def _add(digest: Any, *texts: str) -> None:
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "big") + data)


def _add_value(torch: Any, digest: Any, key: str, value: Any) -> None:
    """Plain data, tensors and functions; objects with a life of their own say nothing that two processes agree on."""
    if isinstance(value, torch.Tensor):
        _add(digest, key)
        _add_tensor(torch, digest, value)
    elif isinstance(value, _PLAIN):
        _add(digest, key, repr(value))
    elif isinstance(value, FunctionType):
        _add(digest, key, code_of(value))
    elif isinstance(value, (set, frozenset)):
        _add(digest, key, repr(sorted(repr(item) for item in value if isinstance(item, _PLAIN))))
    elif isinstance(value, dict):
        for name, item in value.items():
            _add_value(torch, digest, f"{key}.{name}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _add_value(torch, digest, f"{key}.{index}", item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _add_value(torch, digest, f"{key}.{field.name}", getattr(value, field.name, None))


def _add_tensor(torch: Any, digest: Any, tensor: Any) -> None:
    _add(digest, str(tensor.dtype), str(tuple(tensor.shape)))
    if hasattr(tensor, "__tensor_flatten__"):       # a subclass made of other tensors, as quantized weights are
        for name in tensor.__tensor_flatten__()[0]:
            _add(digest, name)
            _add_tensor(torch, digest, getattr(tensor, name))
    elif tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta":
        digest.update(pickles.memory_of(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()))
