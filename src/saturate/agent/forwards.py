"""Forwards that are bound to an instance: around the one that the script wrote, gone from what is copied, pickled or exported of it."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any


def forward_overridden(module: Any) -> bool:
    """Whether a script or library replaced `forward` on the instance, as `torch.compile` does with that of its own class."""
    return own_forward(module) is not None


def own_forward(module: Any) -> Any:
    """The forward that an instance has instead of its class's, or None. A wrapped module that was pickled and loaded carries
    its own plain method there, which is no replacement."""
    own = vars(module).get("forward")
    return None if own is None or getattr(own, "__func__", own) is class_forward(module) else own


def class_forward(module: Any) -> Any:
    """None for TorchScript, whose classes have none."""
    return getattr(type(module), "forward", None)


def is_ours(module: Any) -> bool:
    """Whether the forward on the instance is one that `wrap_forward` left there, or its deep copy."""
    function = getattr(vars(module).get("__reduce_ex__"), "__func__", None)     # the forward says that it is the class's
    return getattr(function, "__module__", None) == __name__


def unbind(module: Any) -> None:
    """Take back what `bind_forward` left there."""
    object.__setattr__(module, "__dict__", _as_it_was(vars(module)))


def _as_it_was(attributes: dict[str, Any]) -> dict[str, Any]:
    """What an instance holds, without what `bind_forward` left there."""
    own = getattr(attributes.get("forward"), "instances_own", None)
    kept = {name: value for name, value in dict.items(attributes) if name not in _BOUND or not hasattr(value, "instances_own")}
    return kept if own is None else kept | {"forward": own}


@contextlib.contextmanager
def _unwrapped(modules: Iterable[Any]) -> Iterator[None]:
    """These modules as they were before `bind_forward`, for a while."""
    taken = []
    try:
        for module in modules:
            bound = {name: value for name in _BOUND if hasattr(value := vars(module).get(name), "instances_own")}
            taken.append((module, bound))
            for name in bound:
                del vars(module)[name]
            if "forward" in bound and bound["forward"].instances_own is not None:
                vars(module)["forward"] = bound["forward"].instances_own
        yield
    finally:
        for module, bound in taken:
            vars(module).update(bound)


def exporting(export: Any) -> Any:
    """`export(module, ...)`, which sees the forwards that the script wrote: TorchScript reads their source."""

    @functools.wraps(export)
    def exported(*args: Any, **kwargs: Any) -> Any:
        given = [value for value in (*args[:1], *kwargs.values()) if callable(getattr(value, "modules", None))]
        with _unwrapped([module for value in given for module in value.modules()]):
            return export(*args, **kwargs)

    return exported


class _Attributes(dict[str, Any]):
    """The `__dict__` of a module whose forward is wrapped. Who makes a module from another's attributes, as `torch.nn.DataParallel`,
    learn2learn, higher and averages of weights do, gets those that it had before: what is bound to one module would run, copy and
    save that one."""

    def copy(self) -> dict[str, Any]:
        return _as_it_was(self)

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)

    def keys(self) -> Any:              # `update`, `dict()` and `**` ask for these, and then for each item
        return self.copy().keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.copy())

    def items(self) -> Any:             # loops that set each of them on another module
        return self.copy().items()

    def values(self) -> Any:
        return self.copy().values()


#: What `bind_forward` leaves on an instance.
_BOUND = ("forward", "__getstate__", "__reduce_ex__", "__deepcopy__")


def bind_forward(module: Any, wrappers: list[Any], in_evaluation: list[Any]) -> None:
    """Bind the wrapped forward to the instance so that it follows the instance through deepcopy, and vanishes when the
    instance is pickled.

    A closure over the module would run the original's weights in every deep copy; hooks and `__class__` swaps break
    compilation or the type. A bound method alone is pickled as a call of `getattr`, which `torch.load(weights_only=True)`
    refuses; so the instance says itself what is kept of it (pickle and copy ask it since Python 3.11). `copy.copy` asks the
    class how to reduce it, and the instance only for its state. What an instance has instead is wrapped from outside.
    """
    if is_ours(module):
        unbind(module)
    own = own_forward(module)
    original = class_forward(module) if own is None else lambda self, *args, **kwargs: own(*args, **kwargs)
    inner = outside = original
    for wrap in wrappers:
        inner = wrap(inner)
    for wrap in in_evaluation:
        outside = wrap(outside)

    # Libraries read the signature, to choose dataset columns for one. Not what `torch.compile` keeps on a function of its own.
    @functools.wraps(original if own is None else own, updated=())
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (inner if self.training else outside)(self, *args, **kwargs)

    def state(self: Any) -> Any:
        found = type(self).__getstate__(self)
        return _as_it_was(found) if isinstance(found, dict) else found      # a class may have a state of its own kind

    def reduced(self: Any, protocol: int) -> Any:
        with _unwrapped([self]):
            found = type(self).__reduce_ex__(self, protocol)    # the class may take all of __dict__, itself or a copy
            return _with_copies_of(vars(self), found)

    def deepcopied(self: Any, memo: dict[int, Any]) -> Any:
        with _unwrapped([self]):
            twin = copy.deepcopy(self, memo)
        if own is not None:
            if own_forward(twin) is not None:      # a copy of TorchScript has none until it is called
                bind_forward(twin, wrappers, in_evaluation)        # around its own forward: that of `self` has the weights of `self`
        elif type(twin) is type(self):          # one with a class of its own, as graphs have, has a forward of its own
            bind(twin)
        return twin

    def bind(instance: Any) -> None:        # not by setattr: a compiled module hands that on to the module inside
        bound = {name: types.MethodType(function, instance) for name, function in ours.items()}
        object.__setattr__(instance, "__dict__", _Attributes({**vars(instance), **bound}))

    if own is not None:
        with contextlib.suppress(TypeError, ValueError):        # it has no signature to read
            forward.__signature__ = _with_self(inspect.signature(own))      # type: ignore[attr-defined]
    ours: dict[str, Any] = dict(zip(_BOUND, (forward, state, reduced, deepcopied)))
    for function in ours.values():
        function.instances_own = own        # for `_as_it_was`
    bind(module)


def _with_self(signature: inspect.Signature) -> inspect.Signature:
    """That of a method, whose first parameter is left out where it is bound."""
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[first, *signature.parameters.values()])


def _with_copies_of(own: dict[str, Any], found: Any) -> Any:
    """What `__reduce_ex__` returned, with a copy in place of `own` itself."""
    if found is own:
        return dict(own)
    return tuple(_with_copies_of(own, part) for part in found) if type(found) is tuple else found
