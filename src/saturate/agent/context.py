"""What a technique may do in the user's process. Every change is listed and can be taken back.

Nothing here keeps a module or an optimizer: what the script drops must be freed as without us, and takes what was done to it along.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from saturate.techniques._api import NotApplied

_ABSENT = object()


class _Training:
    """What is trained now, shared by the views of all techniques. `kinds`: the modules' classes, still known when those are gone."""

    modules: tuple[weakref.ref[Any], ...] = ()
    optimizers: tuple[weakref.ref[Any], ...] = ()
    kinds: frozenset[type] = frozenset()


class _Stack:
    """The wrappers around one module's forward, and the place of each. Only that forward holds them: they may hold the module."""

    def __init__(self, module: Any):
        self.module = weakref.ref(module)
        self.wrappers: dict[object, tuple[int, Any, Any]] = {}      # order, wrapper, and that of evaluation or None


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
        self._roots: list[tuple[str, int, str]] = []    # (owner, id and class of one of `modules` that it wrapped)
        self._stacks: weakref.WeakValueDictionary[int, _Stack] = weakref.WeakValueDictionary()      # by id(module)

    @property
    def modules(self) -> tuple[Any, ...]:
        """Those of what is trained that are still there."""
        return living(self._training.modules)

    @modules.setter
    def modules(self, found: Iterable[Any]) -> None:
        self._training.modules = tuple(map(weakref.ref, found))
        self._training.kinds = frozenset(map(type, self.modules))

    @property
    def kinds(self) -> frozenset[type]:
        return self._training.kinds

    def trains(self, modules: Iterable[Any]) -> bool:
        """Whether these are all that is trained, as far as techniques know."""
        return {id(module) for module in modules} == {id(reference()) for reference in self._training.modules}      # id(None): of the gone

    @property
    def optimizers(self) -> tuple[Any, ...]:
        return living(self._training.optimizers)

    @optimizers.setter
    def optimizers(self, found: Iterable[Any]) -> None:
        self._training.optimizers = tuple(map(weakref.ref, found))

    def some_gone(self) -> bool:
        """Whether the script has dropped any of what is trained, as far as techniques know."""
        return any(reference() is None for reference in (*self._training.modules, *self._training.optimizers))

    def of(self, owner: str) -> Context:
        """The same, as one technique has it: what it does later is its own as well."""
        view = copy.copy(self)
        view.owner = owner
        return view

    def wrap_forward(self, module: Any, order: int, wrap: Any, around: bool = False, in_evaluation: Any = None) -> None:
        stack = self._stacks.get(id(module))
        if stack is None or stack.module() is not module:       # a copy keeps the stack of one that is gone
            if is_ours(module):         # a deep copy of a module that was wrapped
                _unbind(module)
            if _class_forward(module) is None and not forward_overridden(module):
                raise NotApplied(f"{type(module).__name__} is TorchScript, whose forward is no Python function")
            if forward_overridden(module) and not around:
                raise NotApplied(
                    f"{type(module).__name__}.forward was already replaced on the instance by the script or a library"
                )
            self._stacks[id(module)] = stack = _Stack(module)
        place = object()
        stack.wrappers[place] = order, wrap, in_evaluation
        modes = "" if in_evaluation else " (training mode only)"
        self.changes.append(f"{self.owner}: {type(module).__name__}.forward wrapped{modes}")
        self.on_undo(functools.partial(self._unwrap, weakref.ref(stack), place))
        if any(module is root for root in self.modules):
            self._uncalled.add(id(module))
            self._roots.append((self.owner, id(module), type(module).__name__))
        try:
            self._bind(module, stack)
        except BaseException:
            del stack.wrappers[place]
            if stack.wrappers:      # those of other techniques stay on
                self._bind(module, stack)
            raise

    def _bind(self, module: Any, stack: _Stack) -> None:
        uncalled, compiler = self._uncalled, self.torch.compiler

        def noted(inner: Any) -> Any:
            def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
                if not compiler.is_compiling() and uncalled:
                    uncalled.discard(id(self))
                return inner(self, *args, **kwargs)

            forward.stack = stack       # type: ignore[attr-defined]
            return forward

        entries = sorted(stack.wrappers.values(), key=lambda entry: entry[0])
        _bind_forward(module, [*(wrap for _, wrap, _ in entries), noted], [wrap for _, _, wrap in entries if wrap is not None])

    def never_called(self) -> dict[str, set[str]]:
        """Techniques that wrapped what is trained and of which no forward was called in training mode since: classes by technique."""
        found: dict[str, set[str]] = {}
        for owner, _, kind in self._roots:
            found.setdefault(owner, set()).add(kind)
        return {owner: kinds for owner, kinds in found.items()
                if all(identity in self._uncalled for other, identity, _ in self._roots if other == owner)}

    def _unwrap(self, held: weakref.ref[_Stack], place: object) -> None:
        stack = held()
        module = stack.module() if stack is not None else None
        if stack is None or module is None:
            return
        stack.wrappers.pop(place, None)     # it may have failed to be bound
        _unbind(module)
        if stack.wrappers:
            self._bind(module, stack)
        else:
            self._stacks.pop(id(module), None)

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        # Read what is stored on this very object: an inherited value must be inherited again after the undo.
        stored = vars(owner).get(name, _ABSENT) if hasattr(owner, "__dict__") else getattr(owner, name)
        shadow = getattr(owner, name, _ABSENT)
        setattr(owner, name, value)
        if stored is _ABSENT and name not in getattr(owner, "__dict__", {}):
            stored = shadow         # a property with a setter, as torch.backends has
        self.changes.append(f"{self.owner}: {_name(owner)}.{name} set")
        held = _reference(owner)

        def undo() -> None:
            there = held()
            if there is not None and stored is not _ABSENT:
                setattr(there, name, stored)
            elif there is not None and name in getattr(there, "__dict__", {}):
                delattr(there, name)

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
        self._roots[:] = [root for root in self._roots if owners is not None and root[0] not in owners]
        self._uncalled.intersection_update([identity for _, identity, _ in self._roots])
        self.changes[:] = [line for line in self.changes if owners is not None and line.partition(":")[0] not in owners]
        if owners is None:
            self.notes.clear()

    def forget(self, owner: str) -> None:
        """Drop the notes of a technique: they are of what is no longer there."""
        for key in [key for key in self.notes if key.partition(":")[0] == owner]:
            del self.notes[key]


def living(references: Iterable[weakref.ref[Any]]) -> tuple[Any, ...]:
    """What is still there of what they refer to."""
    return tuple(found for reference in references if (found := reference()) is not None)


def _reference(thing: Any) -> Callable[[], Any]:
    """A weak one, where there can be one."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing


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
    kept = {name: value for name, value in dict.items(attributes) if name not in _BOUND or not hasattr(value, "instances_own")}
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


#: What `_bind_forward` leaves on an instance.
_BOUND = ("forward", "__getstate__", "__reduce_ex__", "__deepcopy__")


def _bind_forward(module: Any, wrappers: list[Any], in_evaluation: list[Any]) -> None:
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
                _bind_forward(twin, wrappers, in_evaluation)        # around its own forward: that of `self` has the weights of `self`
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
