"""Nested inputs and outputs as a flat list of tensors and a description in JSON: what a program stores of the structure
that it was made from.

A runtime knows a list of tensors; a model takes and returns tuples, dictionaries, named tuples and dataclasses. The
description is plain data, so a stored program brings no classes along: a named class is taken from the modules that
the process has already imported (nothing is imported because a file says so), and where it is not there a stand-in
with the same fields takes its place.

    [0, ...]                  a tensor, by its place in the flat list
    {"value": 3}              None, a bool, a number or text: part of the program, it cannot change
    {"number": "inf"}         also "-inf" and "nan": JSON has no form for them
    {"list": [...]}           also "tuple"
    {"dict": [[key, ...]]}    keys are text, numbers, bools, or lists of these, which are tuples; with "dict of": "module:Class", a subclass
                              of dict
    {"tuple of": "module:Class", "fields": [[name, ...]]}       a named tuple, or one of torch.return_types
    {"fields of": "module:Class", "fields": [[name, ...]]}      a dataclass; transformers' ModelOutput is one

Nothing of a class that a file names is called, for it may be any that is imported, and some import or write what their fields say: an
instance is made without it, and filled. What a `__post_init__` would add beside the fields is not there.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import json
import math
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

#: What a description holds beside tensors.
SCALARS = (bool, int, float, str, type(None))

#: The module of the classes of what torch.max(x, 1) and its like return.
_TORCH_RETURNS = "torch.return_types"

_NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class NotDescribable(TypeError):
    """A value that is neither a tensor, nor plain data, nor a known container; the message names its type and place."""


class Fields(dict):
    """Stands in for a dataclass whose class this process does not know: its fields as attributes, by name, and by place
    among those that are not None (as in ModelOutput). A field hides the method of its name: `values` is the field."""

    def __getattribute__(self, name: str) -> Any:
        if dict.__contains__(self, name) and not name.startswith("__"):
            return dict.__getitem__(self, name)
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return super().__getitem__(key)
        return tuple(value for value in dict.values(self) if value is not None)[key]

    def __reduce__(self) -> Any:
        return Fields, (dict(dict.items(self)),)


class NamedFields(tuple):
    """Stands in for a named tuple whose class this process does not know. A field hides the method of its name."""

    _names: tuple[str, ...]     # no field of a named tuple begins with an underscore

    def __new__(cls, names: tuple[str, ...], values: list[Any]) -> NamedFields:
        made = super().__new__(cls, values)
        made._names = tuple(names)
        return made

    def __getattribute__(self, name: str) -> Any:
        names = super().__getattribute__("_names")
        if name in names and not name.startswith("__"):
            return tuple.__getitem__(self, names.index(name))
        return super().__getattribute__(name)

    def __reduce__(self) -> Any:
        return NamedFields, (super().__getattribute__("_names"), list(self))


class Items(dict):
    """Stands in for a subclass of dict that this process does not know: items as attributes too, where no method has the name,
    because that is what most such classes are for."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def flatten(torch: Any, value: Any, *, distinct: bool = False) -> tuple[Any, list[Any]]:
    """The description of `value` and its tensors; one that occurs twice is listed once, unless `distinct`: inputs that
    happen to be the same tensor need not be so in the next call.

    Raises NotDescribable for anything else than tensors, plain data and containers of them.
    """
    tensors: list[Any] = []
    places: dict[int, int] = {}

    def describe(value: Any, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            if distinct or id(value) not in places:
                places[id(value)] = len(tensors)
                tensors.append(value)
            return [places[id(value)]]
        if isinstance(value, torch.SymInt) and (size := value.node.maybe_as_int()) is not None:
            value = size        # torch.export has sizes that cannot vary in this guise, too
        if type(value) is float and not math.isfinite(value):
            return {"number": str(value)}
        if type(value) in SCALARS:
            return {"value": storable(value, where)}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {"tuple of": _name(value), "fields": fields(value, value._fields, where)}
        if _is_torch_return(type(value)):
            return {"tuple of": _name(value), "fields": fields(value, type(value).__match_args__, where)}
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [describe(item, f"{where}[{index}]") for index, item in enumerate(value)]}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            return {"fields of": _name(value), "fields": fields(value, names, where)}
        if isinstance(value, Mapping):
            items = [[stored_key(key, where), describe(item, f"{where}[{key!r}]")] for key, item in _items(value)]
            return {**_dict_class(value), "dict": items}
        raise NotDescribable(f"{where or 'the value'} is a {type(value).__module__}.{type(value).__qualname__}, "
                             "neither a tensor nor plain data")

    def stored_key(key: Any, where: str) -> Any:
        """As JSON has it: the scales of a depth network are ("disp", 0) and so on."""
        if type(key) is tuple:
            return [stored_key(part, where) for part in key]
        if type(key) not in SCALARS:
            kind = f"{type(key).__module__}.{type(key).__qualname__}"
            raise NotDescribable(f"{where or 'the value'} has a key that is a {kind}, neither plain data nor a tuple of it")
        return storable(key, where)

    def storable(value: Any, where: str) -> Any:
        """A scalar that comes back from JSON as it is."""
        if isinstance(value, float) and not math.isfinite(value):
            raise NotDescribable(f"{where or 'the value'} has the key {value}, which cannot be stored")
        if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise NotDescribable(f"{where or 'the value'} holds the text {value!a:.60}, which is no Unicode text")
        return value

    def fields(value: Any, names: Iterable[str], where: str) -> list[Any]:
        return [[name, describe(getattr(value, name), f"{where}.{name}")] for name in names]

    return describe(value, ""), tensors


def same(one: Any, other: Any) -> bool:
    """Whether two descriptions are equal, and their values of the same types: 1, 1.0 and True are equal to Python, as are the
    two zeros. The class of a dictionary, and torch's own of a tuple, may differ: who takes one takes the plain kind too."""
    return any(json.dumps(form(one), sort_keys=True) == json.dumps(form(other), sort_keys=True) for form in (lambda node: node, _plain))


def difference(one: Any, other: Any, path: str = "") -> tuple[str, Any, Any]:
    """Where two descriptions differ first, as Python reaches it, and what stands there in each."""
    if isinstance(one, dict) and isinstance(other, dict):
        for kind in ("list", "tuple", "dict", "fields"):
            items, others = one.get(kind), other.get(kind)
            if items is None or others is None or len(items) != len(others):
                continue
            steps = [(f"[{index}]", *pair) for index, pair in enumerate(zip(items, others))]
            if kind in ("dict", "fields"):
                if [name for name, _ in items] != [name for name, _ in others]:
                    continue
                steps = [(f"[{_key(item[0])!r}]" if kind == "dict" else f".{item[0]}", item[1], another[1]) for _, item, another in steps]
            for step, item, another in steps:
                if not same(item, another):
                    return difference(item, another, path + step)
    return path, one, other


def _plain(node: Any) -> Any:
    """A description with plain dictionaries, and plain tuples for torch.return_types."""
    if not isinstance(node, dict):
        return node
    if str(node.get("tuple of", "")).startswith(f"{_TORCH_RETURNS}:"):
        return {"tuple": [_plain(item) for _, item in node["fields"]]}
    found: dict[str, Any] = {kind: [_plain(item) for item in node[kind]] for kind in ("list", "tuple") if kind in node}
    found |= {kind: [[key, _plain(item)] for key, item in node[kind]] for kind in ("dict", "fields") if kind in node}
    return {**{key: value for key, value in node.items() if key not in ("dict of", "attributes")}, **found}


def rebuild(description: Any, tensors: list[Any], classes: Mapping[str, type] | None = None) -> Any:
    """The inverse of `flatten`. `classes` are known beside those of imported modules, by "module:Class".

    Raises ValueError for a description that is none.
    """
    try:
        return _rebuild(description, tensors, classes or {})
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a description of nested tensors: {description!r}") from error


def _rebuild(node: Any, tensors: list[Any], classes: Mapping[str, type]) -> Any:
    if isinstance(node, list):
        return tensors[node[0]]
    if "value" in node:
        return node["value"]
    if "number" in node:
        return _NUMBERS[node["number"]]
    if "list" in node:
        return [_rebuild(item, tensors, classes) for item in node["list"]]
    if "tuple" in node:
        return tuple(_rebuild(item, tensors, classes) for item in node["tuple"])
    if "dict" in node:
        items = {_key(key): _rebuild(item, tensors, classes) for key, item in node["dict"]}
        return _dict_made(node, items, classes) if "dict of" in node else items
    fields = {name: _rebuild(item, tensors, classes) for name, item in node["fields"]}
    if "tuple of" in node:
        cls = _known(node["tuple of"], classes)
        if isinstance(cls, type) and issubclass(cls, tuple) and getattr(cls, "_fields", None) == tuple(fields):
            return tuple.__new__(cls, fields.values())
        if _is_torch_return(cls) and cls.__match_args__ == tuple(fields):
            return cls(list(fields.values()))
        return NamedFields(tuple(fields), list(fields.values()))
    cls = _known(node["fields of"], classes)
    is_one = isinstance(cls, type) and dataclasses.is_dataclass(cls)
    if is_one and [field.name for field in dataclasses.fields(cls)] == list(fields):
        return _dataclass_made(cls, fields)
    return Fields(fields)


def _key(stored: Any) -> Any:
    """Of a dictionary, as it was."""
    return tuple(map(_key, stored)) if isinstance(stored, list) else stored


def _is_key(stored: Any) -> bool:
    return all(map(_is_key, stored)) if isinstance(stored, list) else type(stored) in SCALARS


def _dataclass_made(cls: Any, fields: dict[str, Any]) -> Any:
    """An instance with just these values, without the class's own code: what `__post_init__` would compute from them is in them."""
    base = next(kind for kind in (collections.OrderedDict, dict, object) if issubclass(cls, kind))
    try:
        made = base.__new__(cls)
    except TypeError:                   # laid out by another built-in class
        return Fields(fields)
    for name, value in fields.items():
        slot = inspect.getattr_static(cls, name, None)
        if isinstance(slot, types.MemberDescriptorType):
            slot.__set__(made, value)
        else:
            try:
                object.__getattribute__(made, "__dict__")[name] = value         # frozen ones too
            except AttributeError:
                return Fields(fields)
        if base is not object and value is not None:        # transformers' ModelOutput is a dictionary of what is not None
            base.__setitem__(made, name, value)     # type: ignore[attr-defined]
    return made


def _is_torch_return(cls: Any) -> bool:
    """Whether it is a class of what torch.max(x, 1) and its like return."""
    return isinstance(cls, type) and issubclass(cls, tuple) and cls.__module__ == _TORCH_RETURNS and hasattr(cls, "n_fields")


def _items(value: Mapping[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """Also where an item, as an attribute, hides the method."""
    return dict.items(value) if isinstance(value, dict) else value.items()


def _dict_class(value: Mapping[Any, Any]) -> dict[str, Any]:
    """What a description says of a mapping's class: {} where it is a plain dictionary, or an object with a state of its own,
    which comes back as one. "attributes" are the items themselves, as with `self.__dict__ = self`."""
    if type(value) is dict or not isinstance(value, dict) or isinstance(value, (Fields, Items)):
        return {}
    state = getattr(value, "__dict__", {})
    if not state:
        return {"dict of": _name(value)}
    whole = len(state) == len(value) and all(key in state and state[key] is item for key, item in _items(value))
    return {"dict of": _name(value), "attributes": True} if whole else {}


def _dict_made(node: Any, items: dict[Any, Any], classes: Mapping[str, type]) -> dict[Any, Any]:
    """A dictionary of the class that the description names. Nothing of the class is called, which may be any that is imported."""
    cls = _known(node["dict of"], classes)
    if not isinstance(cls, type) or not issubclass(cls, dict) or dataclasses.is_dataclass(cls):
        return Items(items)
    base = collections.OrderedDict if issubclass(cls, collections.OrderedDict) else dict
    made = base.__new__(cls)
    for key, item in items.items():
        base.__setitem__(made, key, item)
    if node.get("attributes") is True:
        object.__setattr__(made, "__dict__", made)
    return made


def places(description: Any) -> list[int]:
    """The places of the tensors that a description refers to, in order. Raises ValueError for a description that is none."""
    try:
        return list(_places(description))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a description of nested tensors: {description!r:.200}") from error


def _places(node: Any) -> Iterator[int]:
    if isinstance(node, list):
        place, = node
        if type(place) is not int or place < 0:
            raise TypeError(place)
        yield place
        return
    if "value" in node:
        if type(node["value"]) not in SCALARS:
            raise TypeError(node["value"])
        return
    if "number" in node:
        if node["number"] not in _NUMBERS:
            raise TypeError(node["number"])
        return
    kind = next((kind for kind in ("list", "tuple", "dict", "fields") if kind in node), "")
    items = node[kind]
    if type(items) is not list or (kind == "fields" and not isinstance(node.get("tuple of", node.get("fields of")), str)):
        raise TypeError(items)
    if not isinstance(node.get("dict of", ""), str):
        raise TypeError(node["dict of"])
    for item in items:
        if kind in ("dict", "fields"):
            key, item = item
            if not _is_key(key) or (kind == "fields" and type(key) is not str):
                raise TypeError(key)
        yield from _places(item)


def accessors(description: Any, root: str) -> dict[int, str]:
    """How Python reaches each tensor of a described value that has the name `root`, by the tensor's place."""
    if isinstance(description, list):
        return {description[0]: root}
    pairs = [(f"[{index}]", item) for kind in ("list", "tuple") for index, item in enumerate(description.get(kind, ()))]
    pairs += [(f"[{_key(key)!r}]", item) for key, item in description.get("dict", ())]
    pairs += [(f".{name}", item) for name, item in description.get("fields", ())]
    return {place: path for step, item in pairs for place, path in accessors(item, root + step).items()}


def flat_inputs(description: Any) -> str:
    """The tensors of `inputs`, a tuple that is arranged as described, as one Python expression of a sequence."""
    if description == {"tuple": [[place] for place in range(len(description.get("tuple", ())))]}:
        return "inputs"
    return f"[{', '.join(path for _, path in sorted(accessors(description, 'inputs').items()))}]"


def classes_in(value: Any) -> dict[str, type]:
    """The named classes inside a value, for `rebuild` where no imported module knows them: those of a script that
    travelled by value to a candidate's process."""
    found: dict[str, type] = {}
    if isinstance(value, Mapping):
        items = [item for _, item in _items(value)]
    elif isinstance(value, (list, tuple)):
        items = list(value)
    else:
        items = []
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found[_name(value)] = type(value)
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif (isinstance(value, tuple) and hasattr(value, "_fields")) or (isinstance(value, Mapping) and _dict_class(value)):
        found[_name(value)] = type(value)
    for item in items:
        found |= classes_in(item)
    return found


def _name(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _known(name: str, classes: Mapping[str, type]) -> Any:
    """A class by name, or None. Only what is imported already: a file must not make this process import anything."""
    if name in classes:
        return classes[name]
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)    # not getattr: a module may import on demand
    return found
