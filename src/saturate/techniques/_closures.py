"""`optimizer.step(closure)` calls the closure after the pre-hooks of the step: gradients are made, and learning rates set, in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _nothing() -> None:
    pass


def around(args: tuple[Any, ...], kwargs: dict[str, Any], after: Callable[[], Any],
           before: Callable[[], Any] = _nothing) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a step (the optimizer first, as its pre-hooks see them) with a closure that has `before` and `after` run
    around each of its calls; None if no closure is passed. `after` is not run where the closure raises: nothing is updated then."""
    def wrapped(closure: Callable[..., Any]) -> Callable[..., Any]:
        def call(*its: Any, **options: Any) -> Any:
            before()
            result = closure(*its, **options)
            after()
            return result

        return call

    if len(args) > 1 and callable(args[1]):
        return (args[0], wrapped(args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": wrapped(kwargs["closure"])}
    return None
