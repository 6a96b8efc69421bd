"""Nested arguments and outputs, taken apart into tensors and a skeleton, and put together again."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

#: Leaves that are the same for every part of a batch when they are equal.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum)


@dataclasses.dataclass(frozen=True)
class Slot:
    """Stands for the tensor number `index` in a skeleton."""

    index: int


def copied(value: Any, change: Callable[[tuple[Any, ...], Any], Any], path: tuple[Any, ...] = ()) -> Any:
    """A copy of nested tuples, lists, mappings and dataclasses in which `change(path, leaf)` replaces every leaf.

    Containers keep their types; those that are not plain (a ModelOutput, a BatchEncoding) are copied shallowly and then
    filled, because they may not be constructible from their items.
    """
    if isinstance(value, tuple):
        items = [copied(item, change, (*path, index)) for index, item in enumerate(value)]
        if type(value) is tuple:
            return tuple(items)
        if hasattr(value, "_make"):
            return type(value)._make(items)
        return type(value)(items) if hasattr(value, "n_fields") else change(path, value)    # torch.return_types; torch.Size
    if type(value) is list:
        return [copied(item, change, (*path, index)) for index, item in enumerate(value)]
    if type(value) is dict:
        return {key: copied(item, change, (*path, key)) for key, item in value.items()}
    if isinstance(value, Mapping) and hasattr(value, "__setitem__"):
        twin = _shallow(value)
        for key in list(dict.keys(value) if isinstance(value, dict) else value.keys()):     # an item may hide the method
            twin[key] = copied(value[key], change, (*path, key))
        return twin
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Slot)):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(twin, field.name, copied(getattr(value, field.name), change, (*path, field.name)))
        return twin
    return change(path, value)


def _shallow(value: Any) -> Any:
    """A copy of a mapping. One whose items are its attributes (`self.__dict__ = self`) may have one that hides a method which
    `copy.copy` needs. One that is no dictionary holds its items in one, as a rule, which a copy must not share."""
    if isinstance(value, dict) and _attributes(value) is value:
        twin = type(value).__new__(type(value))
        object.__setattr__(twin, "__dict__", twin)
        return twin
    twin, own = copy.copy(value), _attributes(value)
    if own is not None and not isinstance(value, dict) and not hasattr(type(value), "__copy__"):
        _attributes(twin).update({name: copy.copy(held) for name, held in own.items() if isinstance(held, dict)})
    return twin


def _attributes(value: Any) -> Any:
    """The attributes of an object; None where it has no dictionary of them."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def _values(value: Any) -> Any:
    """Also where an item, as an attribute, hides the method."""
    return dict.values(value) if isinstance(value, dict) else value.values()


def taken_apart(value: Any, torch: Any) -> tuple[Any, list[Any]]:
    """The skeleton of `value`, with a `Slot` for each tensor, and the tensors."""
    tensors: list[Any] = []

    def take(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return Slot(len(tensors) - 1)

    return copied(value, take), tensors


def put_together(skeleton: Any, tensors: list[Any]) -> Any:
    """What was taken apart, with other tensors."""
    return copied(skeleton, lambda path, leaf: tensors[leaf.index] if isinstance(leaf, Slot) else leaf)


def leaves(skeleton: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of a skeleton, in order."""
    found: list[tuple[str, Any]] = []
    copied(skeleton, lambda path, leaf: found.append((".".join(map(str, path)), leaf)))
    return found


def is_plain(leaf: Any) -> bool:
    """Whether a leaf is a value (and not an object with a life of its own)."""
    return isinstance(leaf, _PLAIN) or type(leaf).__module__ == "torch"


def numel(values: Any, tensor: type) -> int:
    """Entries of all tensors in nested `values`. Cheap: it runs in every step."""
    count = 0
    for value in values:
        if isinstance(value, tensor):
            count += value.numel()
        elif isinstance(value, (list, tuple)):
            count += numel(value, tensor)
        elif isinstance(value, Mapping):
            count += numel(_values(value), tensor)
    return count


def tensors(values: Any, tensor: type) -> list[Any]:
    """All tensors in nested `values`. Cheap: it runs in every step."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors(value, tensor)
        elif isinstance(value, Mapping):
            found += tensors(_values(value), tensor)
    return found


def members(values: Any) -> list[tuple[Any, list[Any]]]:
    """Every container in nested `values`, and the attributes of every object there, each with its members: for `filled`."""
    found: dict[int, tuple[Any, list[Any]]] = {}
    pending = [(values, True)]
    while pending:
        value, nested = pending.pop()
        plain = isinstance(value, (*_FILLED, tuple))
        thing = value if plain else getattr(value, "__dict__", None) if nested and not _has_state(value) else None
        if isinstance(thing, (*_FILLED, tuple)) and id(thing) not in found:
            found[id(thing)] = thing, _members(thing)
            pending += [(member, nested and plain) for member in found[id(thing)][1]]      # objects in objects are not followed
    return list(found.values())


def filled(before: list[tuple[Any, list[Any]]]) -> str:
    """The kind of the first container whose members are not those of `before`; "" when all are."""
    for thing, held in before:
        now = _members(thing)
        if len(now) != len(held) or any(a is not b for a, b in zip(now, held)):
            return type(thing).__name__
    return ""


_FILLED = (list, dict, set, collections.deque)


def _has_state(value: Any) -> bool:
    """Whether it is a tensor, a module or a class, whose attributes are watched elsewhere or are no data."""
    return isinstance(value, type) or hasattr(value, "requires_grad") or hasattr(value, "named_modules")


def _members(thing: Any) -> list[Any]:
    return [member for item in thing.items() for member in item] if isinstance(thing, dict) else list(thing)


def shapes(values: Any, tensor: type) -> tuple[Any, ...]:
    """Of all tensors in nested `values`."""
    return tuple(one.shape for one in tensors(values, tensor))


#: What torch keeps on every module, or on its own kinds of module, and maintains itself.
TORCH_S_OWN = frozenset({"_parameters", "_buffers", "_modules", "_flat_weights"})


def each_module_value(module: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a module and its children hold as attributes, inside plain containers too, and their buffers."""
    for name, child in module.named_modules():
        prefix = f"{name}." if name else ""
        for key, value in vars(child).items():
            if key not in TORCH_S_OWN:
                yield from _inside(prefix + key, value)
        for key, value in child._buffers.items():
            yield prefix + key, value


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield name, value
    if type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield f"{name}[{index}]", item
    elif type(value) is dict:
        for key, item in value.items():
            yield f"{name}[{key!r}]", item
