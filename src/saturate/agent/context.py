"""What a technique may do in the user's process. Every change is listed and can be taken back."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from saturate.techniques._api import NotApplied

_ABSENT = object()


class _Training:
    """What is trained now: shared, so that no technique keeps what a training has left behind."""

    modules: tuple[Any, ...] = ()
    optimizers: tuple[Any, ...] = ()


class Context:
    """Implements `saturate.techniques._api.Context`. One per process, and a view of it for each technique (`of`); `owner` is
    the id of the technique."""

    def __init__(self, torch: Any):
        self.torch = torch
        self._training = _Training()
        self.device = ""
        self.early = False
        self.differentiates_gradients = False
        self.autocast: str | None = None
        self.steps_in_forward = False       # the trained module's forward updates it itself
        self.gradient_norms: dict[int, Any] | None = None
        self.built_optimizers: Callable[[], list[Any]] = list      # a function: to keep them would keep what a training has left behind
        self.owner = ""
        self.notes: dict[str, str] = {}
        self.changes: list[str] = []            # the patch manifest: one line per change
        self.loader_rewrites: list[Any] = []
        self._undo: list[tuple[str, Any]] = []
        self._uncalled: set[int] = set()        # wrapped modules that were not called in training mode since, by id
        self._roots: list[tuple[str, Any]] = [] # (owner, one of `modules` that it wrapped)
        self._stacks: dict[int, tuple[Any, list[tuple[int, Any]]]] = {}     # id(module) -> (module, wrappers by order)

    modules = property(lambda self: self._training.modules, lambda self, found: setattr(self._training, "modules", found))
    optimizers = property(lambda self: self._training.optimizers, lambda self, found: setattr(self._training, "optimizers", found))

    def of(self, owner: str) -> Context:
        """The same, as one technique has it: what it does later is its own as well."""
        view = copy.copy(self)
        view.owner = owner
        return view

    def wrap_forward(self, module: Any, order: int, wrap: Any, around: bool = False) -> None:
        if id(module) not in self._stacks:
            if is_ours(module):         # a deep copy of a module that was wrapped
                _unbind(module)
            if _class_forward(module) is None and not forward_overridden(module):
                raise NotApplied(f"{type(module).__name__} is TorchScript, whose forward is no Python function")
            if forward_overridden(module) and not around:
                raise NotApplied(
                    f"{type(module).__name__}.forward was already replaced on the instance by the script or a library"
                )
            self._stacks[id(module)] = (module, [])
        stack = self._stacks[id(module)][1]
        entry = (order, wrap)
        stack.append(entry)
        stack.sort(key=lambda entry: entry[0])
        self.changes.append(f"{self.owner}: {type(module).__name__}.forward wrapped (training mode only)")
        self.on_undo(lambda: self._unwrap(module, entry))
        self._uncalled.add(id(module))
        if any(module is root for root in self.modules):
            self._roots.append((self.owner, module))
        self._bind(module)

    def _bind(self, module: Any) -> None:
        uncalled, compiler = self._uncalled, self.torch.compiler

        def noted(inner: Any) -> Any:
            def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
                if not compiler.is_compiling() and uncalled:
                    uncalled.discard(id(self))
                return inner(self, *args, **kwargs)

            return forward

        _bind_forward(module, [*(wrapper for _, wrapper in self._stacks[id(module)][1]), noted])

    def never_called(self) -> dict[str, set[str]]:
        """Techniques that wrapped what is trained and of which no forward was called in training mode since: classes by technique."""
        found: dict[str, set[str]] = {}
        for owner, module in self._roots:
            found.setdefault(owner, set()).add(type(module).__name__)
        return {owner: names for owner, names in found.items()
                if all(id(module) in self._uncalled for other, module in self._roots if other == owner)}

    def _unwrap(self, module: Any, entry: tuple[int, Any]) -> None:
        stack = self._stacks[id(module)][1]
        stack[:] = [other for other in stack if other is not entry]
        _unbind(module)
        self._roots[:] = [(owner, root) for owner, root in self._roots if owner != self.owner or root is not module]
        if stack:
            self._bind(module)
        else:
            self._uncalled.discard(id(module))
            del self._stacks[id(module)]

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        # Read what is stored on this very object: an inherited value must be inherited again after the undo.
        stored = vars(owner).get(name, _ABSENT) if hasattr(owner, "__dict__") else getattr(owner, name)
        shadow = getattr(owner, name, _ABSENT)
        setattr(owner, name, value)
        self.changes.append(f"{self.owner}: {_name(owner)}.{name} set")

        def undo() -> None:
            if stored is not _ABSENT:
                setattr(owner, name, stored)
            elif name in getattr(owner, "__dict__", {}):
                delattr(owner, name)
            elif shadow is not _ABSENT:         # a property with a setter, as torch.backends has
                setattr(owner, name, shadow)

        self.on_undo(undo)

    def set_item(self, mapping: Any, key: Any, value: Any) -> None:
        stored = mapping.get(key, _ABSENT)
        mapping[key] = value
        self.changes.append(f"{self.owner}: [{key!r}] set")

        def undo() -> None:
            if stored is _ABSENT:
                mapping.pop(key, None)
            else:
                mapping[key] = stored

        self.on_undo(undo)

    def on_undo(self, callback: Any) -> None:
        self._undo.append((self.owner, callback))

    def on_loader(self, rewrite: Any) -> None:
        self.loader_rewrites.append(rewrite)
        self.changes.append(f"{self.owner}: DataLoader arguments rewritten at construction")
        self.on_undo(lambda: self.loader_rewrites.remove(rewrite))

    def note(self, key: str, value: str) -> None:
        self.notes[key] = value

    def undo(self, owners: Collection[str] | None = None) -> None:
        """Take back everything, newest first; or what the techniques `owners` did, whose notes stay."""
        others: list[tuple[str, Any]] = []
        try:
            while self._undo:
                owner, callback = self._undo.pop()
                if owners is None or owner in owners:
                    callback()
                else:
                    others.append((owner, callback))
        finally:
            self._undo.extend(reversed(others))
        self.changes[:] = [line for line in self.changes if owners is not None and line.partition(":")[0] not in owners]
        if owners is None:
            self.notes.clear()

    def forget(self, owner: str) -> None:
        """Drop the notes of a technique: they are of what is no longer there."""
        for key in [key for key in self.notes if key.partition(":")[0] == owner]:
            del self.notes[key]


def forward_overridden(module: Any) -> bool:
    """Whether a script or library replaced `forward` on the instance, as `torch.compile` does with that of its own class."""
    return own_forward(module) is not None


def own_forward(module: Any) -> Any:
    """The forward that an instance has instead of its class's, or None. A wrapped module that was pickled and loaded carries
    its own plain method there, which is no replacement."""
    own = vars(module).get("forward")
    return None if own is None or getattr(own, "__func__", own) is _class_forward(module) else own


def _class_forward(module: Any) -> Any:
    """None for TorchScript, whose classes have none."""
    return getattr(type(module), "forward", None)


def is_ours(module: Any) -> bool:
    """Whether the forward on the instance is one that `wrap_forward` left there, or its deep copy."""
    function = getattr(vars(module).get("__reduce_ex__"), "__func__", None)     # the forward says that it is the class's
    return getattr(function, "__module__", None) == __name__


def _unbind(module: Any) -> None:
    object.__setattr__(module, "__dict__", _as_it_was(vars(module)))


def _as_it_was(attributes: dict[str, Any]) -> dict[str, Any]:
    """What an instance holds, without what `_bind_forward` left there."""
    own = getattr(attributes.get("forward"), "instances_own", None)
    kept = {name: value for name, value in attributes.items() if name not in _BOUND or not hasattr(value, "instances_own")}
    return kept if own is None else kept | {"forward": own}


@contextlib.contextmanager
def _unwrapped(modules: Iterable[Any]) -> Iterator[None]:
    """These modules as they were before `_bind_forward`, for a while."""
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
    """The `__dict__` of a module whose forward is wrapped. Who makes a module from another's attributes, as `torch.nn.DataParallel`
    and learn2learn do, gets those that it had before: what is bound to one module would run, copy and save that one."""

    def copy(self) -> dict[str, Any]:
        return _as_it_was(self)

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)

    def keys(self) -> Any:              # `update`, `dict()` and `**` ask for these, and then for each item
        return self.copy().keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.copy())


#: What `_bind_forward` leaves on an instance.
_BOUND = ("forward", "__getstate__", "__reduce_ex__", "__deepcopy__")


def _bind_forward(module: Any, wrappers: list[Any]) -> None:
    """Bind the wrapped forward to the instance so that it follows the instance through deepcopy, and vanishes when the
    instance is pickled.

    A closure over the module would run the original's weights in every deep copy; hooks and `__class__` swaps break
    compilation or the type. A bound method alone is pickled as a call of `getattr`, which `torch.load(weights_only=True)`
    refuses; so the instance says itself what is kept of it (pickle and copy ask it since Python 3.11). `copy.copy` asks the
    class how to reduce it, and the instance only for its state. What an instance has instead is wrapped from outside.
    """
    if is_ours(module):
        _unbind(module)
    own = own_forward(module)
    original = _class_forward(module) if own is None else lambda self, *args, **kwargs: own(*args, **kwargs)
    inner = original
    for wrap in wrappers:
        inner = wrap(inner)

    # Libraries read the signature, to choose dataset columns for one. Not what `torch.compile` keeps on a function of its own.
    @functools.wraps(original if own is None else own, updated=())
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (inner if self.training else original)(self, *args, **kwargs)

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
                _bind_forward(twin, wrappers)       # around its own forward: that of `self` has the weights of `self`
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


def _name(owner: Any) -> str:
    return getattr(owner, "__name__", None) or type(owner).__name__
