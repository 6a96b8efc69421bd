"""Digests by which a study knows what it was made for: the model (weights, structure and code), the inputs, and how the
user scores and trains.

They are equal for equal things in two processes, so nothing in them depends on addresses, on the order of sets, or on
what pickles look like.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
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


def of_callable(torch: Any, thing: Any) -> str:
    """Of a user's function: its code, the file it stands in, and the plain data, tensors and modules that it has from
    closures, globals, defaults and attributes. Empty where nothing shows its code."""
    digest = hashlib.sha256()
    return digest.hexdigest() if _add_callable(torch, digest, thing) else ""


def of_train(torch: Any, train: Any) -> str:
    """Of how the user trains, a dataclass, with the data as far as it lies in lists, tensors and attributes: a loader is not
    read, it may give another order each time. Empty without."""
    if train is None:
        return ""
    digest = hashlib.sha256()
    for field in dataclasses.fields(train):
        value = getattr(train, field.name)
        _add(digest, field.name)
        if callable(value):
            _add_callable(torch, digest, value)
        else:
            _add_object(torch, digest, value)
            _add_object(torch, digest, getattr(value, "dataset", None))
    return digest.hexdigest()


def code_of(thing: Any) -> str:
    """The code of a class or function, with its base classes and the functions that it calls by a global name, from a module
    or from a closure; torch's own is left out, its version says what that does."""
    return "\n".join(_source(one) for one in _reached(thing))


def _reached(thing: Any) -> list[Any]:
    found: dict[int, Any] = {}
    pending = [thing]
    while pending:
        one = pending.pop()
        if id(one) in found or _torchs(one):
            continue
        found[id(one)] = one
        if isinstance(one, type):
            pending += [*one.__mro__[1:], *(member for member in vars(one).values() if isinstance(member,
                                                                                                  FunctionType))]
        else:
            pending += [other for other in _used(one).values() if isinstance(other, FunctionType)]
    return list(found.values())


def _torchs(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "").partition(".")[0] in ("builtins", "torch")


def _used(function: FunctionType) -> dict[str, Any]:
    """What a function finds by name: in its globals, in modules that are among these, and in its closure."""
    names = _names(function.__code__)
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for module in [value for value in found.values() if isinstance(value, ModuleType)]:
        found |= {f"{module.__name__}.{name}": vars(module)[name] for name in names if name in vars(module)}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            found[name] = cell.cell_contents
        except ValueError:              # not assigned yet
            continue
    return found


def _names(code: CodeType) -> list[str]:
    """Also those of the functions inside of it, such as lambdas."""
    inner = (name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant))
    return list(dict.fromkeys((*code.co_names, *inner)))


def _source(thing: Any) -> str:
    """As it was written; where that is not known (typed into a shell), its instructions. Of a lambda both: several may stand in
    one line, and what is known of each is that line."""
    instructions = repr(_instructions(thing.__code__)) if isinstance(thing, FunctionType) else thing.__qualname__
    try:
        source = inspect.getsource(thing)
    except (OSError, TypeError):
        return instructions
    return source + instructions if getattr(thing, "__name__", "") == "<lambda>" else source


def _instructions(code: CodeType) -> tuple[Any, ...]:
    constants = [_instructions(constant) if isinstance(constant, CodeType) else repr(constant)
                 for constant in code.co_consts if not isinstance(constant, frozenset)]
    return code.co_code, code.co_names, constants


def _add(digest: Any, *texts: str) -> None:
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "big") + data)


def _add_callable(torch: Any, digest: Any, thing: Any) -> bool:
    """Whether anything shows what it does."""
    if isinstance(thing, functools.partial):
        _add_value(torch, digest, "given", [thing.args, thing.keywords])
        return _add_callable(torch, digest, thing.func)
    if isinstance(thing, MethodType):
        _add_object(torch, digest, thing.__self__)
        return _add_callable(torch, digest, thing.__func__)
    if not isinstance(thing, (FunctionType, type)) and isinstance(inspect.getattr_static(type(thing), "__call__", None), FunctionType):
        _add_object(torch, digest, thing)
        thing = type(thing)
    _add(digest, getattr(thing, "__qualname__", ""))
    if _torchs(thing):
        return True
    if not isinstance(thing, (FunctionType, type)):
        return False
    _add(digest, code_of(thing), _file_of(thing))
    for one in _reached(thing):
        if isinstance(one, FunctionType):
            for name, value in {**_used(one), "defaults": [one.__defaults__, one.__kwdefaults__]}.items():
                if isinstance(value, torch.nn.Module):
                    _add(digest, name, of_model(torch, value))
                elif not isinstance(value, FunctionType):       # their code is there already
                    _add_value(torch, digest, name, value)
    return True


def _file_of(thing: Any) -> str:
    try:
        return Path(inspect.getsourcefile(thing) or "").read_text(encoding="utf-8", errors="replace")
    except (OSError, TypeError):        # typed into a shell
        return ""


def _add_object(torch: Any, digest: Any, thing: Any) -> None:
    """Data, or the class of an object with what it holds."""
    _add_value(torch, digest, "value", thing)
    if hasattr(thing, "__dict__") and not isinstance(thing, (type, FunctionType, torch.Tensor)):
        _add(digest, type(thing).__qualname__, code_of(type(thing)))
        for name, value in sorted(vars(thing).items()):
            _add_value(torch, digest, name, value)


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
