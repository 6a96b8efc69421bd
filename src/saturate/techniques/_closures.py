"""`optimizer.step(closure)` calls the closure after the pre-hooks of the step: gradients are made, and learning rates set, in it.

Scripts pass more than functions: objects that count their calls, whose attributes the optimizer reads and sets, and models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: What Python looks up on the class of an object, where nobody can stand in for it. An optimizer that is given something of the kind
#: may use it otherwise than by a call.
_MORE_THAN_CALLS = ("__len__", "__iter__", "__next__", "__getitem__", "__contains__", "__enter__", "__await__")


def _nothing() -> None:
    pass


def passed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a step is given that can be called, a closure usually; None if nothing is."""
    found = args[1] if len(args) > 1 and callable(args[1]) else kwargs.get("closure")
    return found if callable(found) else None


def around(args: tuple[Any, ...], kwargs: dict[str, Any], after: Callable[[], Any],
           before: Callable[[], Any] = _nothing) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a step (the optimizer first, as its pre-hooks see them) with a closure that has `before` and `after` run
    around each of its calls; None if no closure is passed. `after` is not run where the closure raises: nothing is updated then.

    None, too, for what is more than a closure (`surprising`), which the optimizer gets as it is."""
    closure = passed(args, kwargs)
    if closure is None or _is_more(closure):
        return None
    watched = _Watched(closure, before, after)
    if closure is kwargs.get("closure"):
        return args, {**kwargs, "closure": watched}
    return (args[0], watched, *args[2:]), kwargs


def surprising(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a step is given something to call of which nobody knows what it is for, and when gradients are complete: a model."""
    closure = passed(args, kwargs)
    return closure is not None and _is_more(closure)


def _is_more(closure: Any) -> bool:
    return (isinstance(closure, type) or hasattr(type(closure), "named_parameters")
            or any(hasattr(type(closure), name) for name in _MORE_THAN_CALLS))


class _Watched:
    """Stands in for a closure: a call has `before` and `after` around it, and all else is the closure's own."""

    __slots__ = ("_parts",)

    def __init__(self, closure: Any, before: Callable[[], Any], after: Callable[[], Any]):
        object.__setattr__(self, "_parts", (closure, before, after))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        closure, before, after = object.__getattribute__(self, "_parts")
        before()
        result = closure(*args, **kwargs)
        after()
        return result

    def __getattribute__(self, name: str) -> Any:
        if name == "__call__":
            return object.__getattribute__(self, name)
        return getattr(_closure(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_closure(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_closure(self), name)

    def __repr__(self) -> str:
        return repr(_closure(self))

    def __eq__(self, other: object) -> bool:
        return bool(_closure(self) == (_closure(other) if type(other) is _Watched else other))

    def __hash__(self) -> int:
        return hash(_closure(self))

    def __bool__(self) -> bool:
        return bool(_closure(self))


def _closure(watched: Any) -> Any:
    return object.__getattribute__(watched, "_parts")[0]
