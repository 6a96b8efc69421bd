"""What a technique may do in the user's process. Every change is listed and can be taken back.

Nothing here keeps a module or an optimizer: what the script drops must be freed as without us, and takes what was done to it along.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

from saturate.agent.forwards import bind_forward, class_forward, forward_overridden, is_ours, unbind
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
                unbind(module)
            if class_forward(module) is None and not forward_overridden(module):
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
        bind_forward(module, [*(wrap for _, wrap, _ in entries), noted], [wrap for _, _, wrap in entries if wrap is not None])

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
        unbind(module)
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


def _name(owner: Any) -> str:
    return getattr(owner, "__name__", None) or type(owner).__name__
