"""What a module's forward can reach besides its arguments, parameters and buffers: objects and containers on its attributes, on
its classes, and in what its code names. A forward that changes some of it (statistics, a list of auxiliary losses), or draws from
a random generator that lies there, is not the same when it runs twice or in parts.

The look is bounded: of long containers it goes into some places, and it ends after so many things. Code of libraries is not
followed. Nor is an attribute that the forward does not name and that leads back to the module: it belongs to what runs the module,
as the Trainer does that a LightningModule knows, with its loaders, optimizers and callbacks.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

from saturate.data.contents import is_generator, reached
from saturate.techniques import _trees

#: Things that are looked at, at most, and of one container.
MOST, EACH = 50_000, 256

#: Things that are looked at to see whether an attribute leads back to the module.
MOST_BACK = 2_000

#: A tensor or array of more bytes is not copied: it is told by its version only, and cannot be put back.
MOST_BYTES = 1 << 20

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (list, dict, set, collections.deque)
_CLOSED = (type, types.ModuleType, types.BuiltinFunctionType, logging.Logger)


class Surroundings:
    """As they are at construction. `generator`: the class of a random generator that lies there, "" without one."""

    def __init__(self, module: Any, torch: Any):
        self._torch = torch
        self._module = module
        self._own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._held: list[tuple[Any, Any, str]] = []         # a container or the attributes of an object, a copy, what it is
        self._tensors: list[tuple[Any, int, Any]] = []      # with its version, and a copy
        self._arrays: list[tuple[Any, Any]] = []
        self.generator = ""
        self._walk(list(_starts(module)))

    def changed(self) -> str:
        """What of them is something else by now; "" when nothing is."""
        for thing, before, name in self._held:
            if not _same(thing, before):
                return f"{name} that lies outside of it"
        if not all(self._unchanged(*held) for held in self._tensors):
            return "a tensor that lies outside of it"
        if any(array.tobytes() != before.tobytes() for array, before in self._arrays):
            return "an array that lies outside of it"
        return ""

    def restore(self) -> str:
        """Put them back to what they were; what was something else."""
        found = self.changed()
        if found:
            for thing, before, _ in self._held:
                if not _same(thing, before):
                    _fill(thing, before)
            for tensor, version, before in self._tensors:
                if before is not None and not self._unchanged(tensor, version, before):
                    tensor.data.copy_(before)
            for array, before in self._arrays:
                if array.flags.writeable:
                    array[...] = before
        return found

    @contextlib.contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Inside, they are what they were; afterwards what they are now."""
        now = Surroundings(self._module, self._torch) if self.changed() else None
        self.restore()
        try:
            yield
        finally:
            if now is not None:
                now.restore()

    def _unchanged(self, tensor: Any, version: int, before: Any) -> bool:
        if before is None:
            return tensor._version == version
        return tensor.shape == before.shape and tensor.detach().equal(before)

    def _walk(self, starts: list[Any]) -> None:
        pending, met = collections.deque(starts), {}        # by id, and held
        for _ in range(MOST):
            if not pending:
                return
            thing = pending.popleft()
            if not isinstance(thing, _PLAIN) and id(thing) not in met:
                met[id(thing)] = thing
                pending.extend(self._inside(thing))

    def _inside(self, thing: Any) -> list[Any]:
        """Remember one thing; what it leads to."""
        torch, numpy = self._torch, sys.modules.get("numpy")
        if isinstance(thing, (*_CLOSED, torch.nn.Module)) or type(thing).__module__.startswith("saturate."):
            return []
        if is_generator(thing):
            self.generator = self.generator or type(thing).__name__
        elif isinstance(thing, torch.Tensor):
            if id(thing) not in self._own:
                small = thing.nbytes <= MOST_BYTES and thing.layout is torch.strided and thing.device.type != "meta"
                self._tensors.append((thing, thing._version, thing.detach().clone() if small else None))
        elif numpy is not None and isinstance(thing, numpy.ndarray):
            if thing.nbytes <= MOST_BYTES and not thing.dtype.hasobject:
                self._arrays.append((thing, thing.copy()))
        elif isinstance(thing, _CONTAINERS):
            self._held.append((thing, copy.copy(thing), f"a {type(thing).__name__}"))
            return _spread(thing)
        elif isinstance(thing, (tuple, frozenset)):
            return _spread(thing)
        elif isinstance(thing, functools.partial):
            return [thing.func, thing.args, thing.keywords]
        elif isinstance(thing, types.MethodType):
            return [thing.__self__, thing.__func__]
        elif isinstance(thing, types.FunctionType):
            return [] if (thing.__module__ or "").startswith(("saturate.", "torch.")) else list(reached(thing))
        elif isinstance(own := getattr(thing, "__dict__", None), dict):
            self._held.append((own, dict(own), f"a {type(thing).__name__}"))
            return _spread(own)
        return []


def _starts(module: Any) -> Iterator[Any]:
    """Of a module and those inside it: their attributes but torch's own, and those and the forward of their classes."""
    classes = {}
    for part, values in attributes(module):
        yield from values.values()
        classes.update(dict.fromkeys(type(part).__mro__))
    for kind in classes:
        if not kind.__module__.startswith(("torch.", "builtins")):
            yield from (value for name, value in vars(kind).items() if isinstance(value, _CONTAINERS) and not name.startswith("__"))
            yield vars(kind).get("forward")


def attributes(module: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Of each module inside, its attributes but torch's own, and but those that belong to what runs the module."""
    parts = list(module.modules())
    own = {id(part) for part in parts} | {id(parameter) for parameter in module.parameters()}
    for part in parts:
        yield part, {name: value for name, value in vars(part).items() if name not in _trees.TORCH_S_OWN
                     and not (_is_object(value) and name not in _named(type(part)) and _leads_to(value, own))}


def _is_object(value: Any) -> bool:
    closed = (*_CLOSED, *_CONTAINERS, types.FunctionType, types.MethodType, functools.partial)
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, (*closed, sys.modules["torch"].nn.Module))


def _leads_to(value: Any, own: set[int]) -> bool:
    pending, met = collections.deque([value]), {}
    for _ in range(MOST_BACK):
        if not pending:
            return False
        thing = pending.popleft()
        if id(thing) in own:
            return True
        if isinstance(thing, (*_PLAIN, *_CLOSED, sys.modules["torch"].nn.Module)) or id(thing) in met:
            continue
        met[id(thing)] = thing
        if isinstance(thing, (*_CONTAINERS, tuple)):
            pending.extend(_spread(thing))
        elif isinstance(inside := getattr(thing, "__dict__", None), dict):
            pending.extend(inside.values())
    return False


@functools.lru_cache(4096)
def _named(kind: type) -> frozenset[str]:
    """The names and texts in the code of a class's forward, and of the methods and properties that it names in turn."""
    found: set[str] = set()
    pending = ["forward"]
    while pending:
        name = pending.pop()
        for base in kind.__mro__:
            member = vars(base).get(name)
            function = getattr(member, "fget", None) or getattr(member, "__func__", None) or member
            code = getattr(function, "__code__", None)
            if code is None or ("site-packages" in code.co_filename and name != "forward"):
                continue
            new = _names_in(code) - found
            found |= new
            pending.extend(new)
    return frozenset(found)


def _names_in(code: types.CodeType) -> set[str]:
    inside = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    texts = {constant for constant in code.co_consts if isinstance(constant, str)}
    return texts.union(code.co_names, *map(_names_in, inside))


def _spread(thing: Any) -> list[Any]:
    values = list(thing.values() if isinstance(thing, dict) else thing)
    return values[::max(1, len(values) // EACH)]


def _same(thing: Any, before: Any) -> bool:
    if len(thing) != len(before):
        return False
    if isinstance(thing, dict):
        return all(name in thing and thing[name] is value for name, value in before.items())
    return thing == before if isinstance(thing, set) else all(a is b for a, b in zip(thing, before))


def _fill(thing: Any, before: Any) -> None:
    if isinstance(thing, list):
        thing[:] = before
        return
    thing.clear()
    thing.extend(before) if isinstance(thing, collections.deque) else thing.update(before)
