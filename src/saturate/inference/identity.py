"""Digests by which a study knows what it was made for: the model (weights, structure and code), the inputs, and how the
user scores and trains.

They are equal for equal things in two processes, so nothing in them depends on addresses, on the order of sets, or on
what pickles look like. Of an object counts what would travel to another process; what cannot travel is no other's equal, not
even in the next process: then a study is not gone on with.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import hashlib
import inspect
import secrets
import sys
import weakref
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from saturate.inference import pickles
from saturate.techniques._trees import copied

_PLAIN = (type(None), bool, int, float, complex, str, bytes)

#: Attributes that are others in each process: transformers keeps Python's hash of a text.
_OF_THE_PROCESS = ("_original_object_hash",)


class _Digest:
    """A SHA-256. `known` are objects that were looked at, with what they came to: they may be many times in a model, and hold
    each other. They are kept, so that no other gets the same id."""

    def __init__(self, known: dict[int, tuple[str, Any]] | None = None):
        self._sha = hashlib.sha256()
        self.update, self.hexdigest = self._sha.update, self._sha.hexdigest
        self.known = {} if known is None else known


def of_model(torch: Any, model: Any, called: Any = "") -> str:
    """Of the weights, buffers, plain attributes and code of a module. `called`: how it is called, and with what, when not as a
    module."""
    digest = _Digest()
    _add_module(torch, digest, model)
    _add_value(torch, digest, "called", called)
    return digest.hexdigest()


def of_batches(torch: Any, *lists: list[tuple[Any, ...]]) -> str:
    """Of the values of batches, in order."""
    digest = _Digest()

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
    digest = _Digest()
    return digest.hexdigest() if _add_callable(torch, digest, thing) else ""


def of_train(torch: Any, train: Any) -> str:
    """Of how the user trains, a dataclass, with the data as far as it lies in lists, tensors and attributes: a loader is not
    read, it may give another order each time. Empty without."""
    if train is None:
        return ""
    digest = _Digest()
    for field in dataclasses.fields(train):
        value = getattr(train, field.name)
        _add(digest, field.name)
        if callable(value):
            _add_callable(torch, digest, value)
        else:
            _add_value(torch, digest, "value", value)
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
        _add_value(torch, digest, "of", thing.__self__)
        return _add_callable(torch, digest, thing.__func__)
    if not isinstance(thing, (FunctionType, type)) and isinstance(inspect.getattr_static(type(thing), "__call__", None), FunctionType):
        _add_value(torch, digest, "of", thing)
        thing = type(thing)
    _add(digest, getattr(thing, "__qualname__", ""))
    if _torchs(thing):
        return True
    if not isinstance(thing, (FunctionType, type)):
        return False
    _add(digest, code_of(thing), _file_of(thing))
    _add_used(torch, digest, thing)
    return True


def _file_of(thing: Any) -> str:
    try:
        return Path(inspect.getsourcefile(thing) or "").read_text(encoding="utf-8", errors="replace")
    except (OSError, TypeError):        # typed into a shell
        return ""


def _add_used(torch: Any, digest: Any, thing: Any) -> None:
    """What the code of a class or function finds by name and is no function: the code of these is there already. Python's own
    modules are left out: their caches, sys.stderr and os.environ are of the process."""
    for one in _reached(thing):
        if isinstance(one, FunctionType) and not _pythons(one.__module__):
            for name, value in {**_used(one), "defaults": [one.__defaults__, one.__kwdefaults__]}.items():
                if not isinstance(value, FunctionType) and not ("." in name and _pythons(name)):
                    _add_value(torch, digest, name, value)


def _pythons(name: str | None) -> bool:
    return (name or "").partition(".")[0] in sys.stdlib_module_names


def _add_module(torch: Any, digest: Any, model: Any) -> None:
    modules = list(model.named_modules(remove_duplicate=False))
    digest.known |= {id(module): (f"module {name}", module) for name, module in reversed(modules)}      # they may refer to each other
    classes: dict[str, type] = {}
    for name, module in modules:
        classes[_name(type(module))] = type(module)
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


def _add_value(torch: Any, digest: Any, key: str, value: Any) -> None:
    _add(digest, key)
    if isinstance(value, torch.Tensor):
        _add_tensor(torch, digest, value)
    elif isinstance(value, _PLAIN):
        _add(digest, repr(value))
    elif isinstance(value, ModuleType):
        _add(digest, value.__name__)
    elif not isinstance(value, torch.utils.hooks.RemovableHandle):     # these count what was registered in this process
        if id(value) not in digest.known:
            digest.known[id(value)] = ("within itself", value)
            own = _Digest(digest.known)
            try:
                _add_object(torch, own, value)
            except RecursionError:
                _add_unknown(own)
            digest.known[id(value)] = (own.hexdigest(), value)
        _add(digest, digest.known[id(value)][0])


def _add_object(torch: Any, digest: Any, value: Any) -> None:
    """What may hold other values, by its parts."""
    _add(digest, _name(type(value)))
    if isinstance(value, torch.nn.Module):
        _add_module(torch, digest, value)
    elif isinstance(value, type):
        _add(digest, _name(value), code_of(value))
    elif isinstance(value, FunctionType):
        _add(digest, _name(value), code_of(value))
        if not _torchs(value):
            _add_used(torch, digest, value)
    elif isinstance(value, MethodType):
        _add_items(torch, digest, (value.__self__, value.__func__))
    elif isinstance(value, weakref.ref):
        _add_value(torch, digest, "to", value())
    elif type(value) in (list, tuple):
        _add_items(torch, digest, value)
    elif type(value) is dict:
        _add_items(torch, digest, [pair for pair in value.items() if pair[0] not in _OF_THE_PROCESS])
    elif type(value) in (set, frozenset):
        each = [_Digest(digest.known) for _ in value]
        for own, item in zip(each, value):
            _add_value(torch, own, "", item)
        _add(digest, *sorted(own.hexdigest() for own in each))
    elif type(value).__module__ == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject:
        _add(digest, repr(value.dtype), repr(value.shape))
        digest.update(value.tobytes())
    elif inspect.isroutine(value):      # compiled: its name says what it does
        _add(digest, _name(value))
        _add_value(torch, digest, "of", getattr(value, "__self__", None))
    elif type(value).__module__ == "torch._ops":
        _add(digest, str(value))
    else:
        _add_parts(torch, digest, value)


def _add_parts(torch: Any, digest: Any, value: Any) -> None:
    """Of which another process would make it again."""
    try:
        reduce = copyreg.dispatch_table.get(type(value))
        parts = value.__reduce_ex__(4) if reduce is None else reduce(value)
        parts = parts if isinstance(parts, str) else [*parts[:3], *(list(items or ()) for items in parts[3:5])]
    except Exception:       # noqa: BLE001 - it cannot travel; the user's own code says so as it likes
        return _add_unknown(digest)
    if isinstance(parts, str):          # a global name, such as that of a number format
        _add(digest, _name(value), parts)
        parts = [getattr(value, "__wrapped__", None)]
    _add_items(torch, digest, parts)


def _add_items(torch: Any, digest: Any, values: Any) -> None:
    _add(digest, str(len(values)))
    for value in values:
        _add_value(torch, digest, "", value)


def _add_unknown(digest: Any) -> None:
    _add(digest, secrets.token_hex(8))


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', '')}"


def _add_tensor(torch: Any, digest: Any, tensor: Any) -> None:
    _add(digest, str(tensor.dtype), str(tuple(tensor.shape)))
    if hasattr(tensor, "__tensor_flatten__"):       # a subclass made of other tensors, as quantized weights are
        for name in tensor.__tensor_flatten__()[0]:
            _add(digest, name)
            _add_tensor(torch, digest, getattr(tensor, name))
    elif tensor.layout != torch.strided or tensor.is_quantized:
        _add_parts(torch, digest, tensor.detach())
    elif tensor.device.type != "meta":
        digest.update(pickles.memory_of(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()))
