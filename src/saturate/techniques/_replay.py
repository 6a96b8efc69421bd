"""Running a module's forward a second time as if it were the first."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from saturate.techniques import _common
from saturate.techniques._surroundings import Surroundings


class State:
    """What a forward reads besides its arguments and torch's random numbers (`torch.utils.checkpoint` keeps those): which tensors
    are its parameters and buffers (`torch.func.functional_call` puts others there for one call), the values of some buffers, which
    parts are in training mode, and the random numbers of Python and numpy. Taken before the forward."""

    def __init__(self, module: Any, buffers: tuple[tuple[str, str], ...]):
        self._buffers = [(module.get_submodule(path), name) for path, name in buffers]
        self._values = [_copy(owner._buffers[name]) for owner, name in self._buffers]
        self._random = _random_state()
        self._training = [(part, part.training) for part in module.modules()]
        self._tensors = _tensors(module)

    @contextlib.contextmanager
    def restored(self) -> Iterator[list[Any]]:
        """Inside, everything is as it was; afterwards as it is now, whatever ran. Yields the copies that stand in for the
        buffers: a forward that updates running statistics updates those."""
        now = _random_state()
        real = [(held, dict(held)) for held, _ in self._tensors]
        switched = [part for part, training in self._training if part.training != training]
        copies = [_copy(value) for value in self._values]       # a graph may be gone through more than once
        _set_random_state(self._random)
        _refill(self._tensors)
        for (owner, name), value in zip(self._buffers, copies):
            owner._buffers[name] = value
        for part in switched:
            part.training = not part.training
        try:
            yield copies
        finally:
            for part in switched:
                part.training = not part.training
            _refill(real)
            _set_random_state(now)


def buffers(module: Any) -> tuple[tuple[str, str], ...]:
    """(path, name) of every buffer of a module and of those inside it."""
    return tuple((path, name) for path, part in module.named_modules() for name in part._buffers)


def _tensors(module: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The mappings that hold the parameters and buffers of a module and of those inside it, with what is in them. TorchScript has
    none, and keeps its own."""
    return [(vars(part)[kind], dict(vars(part)[kind])) for part in module.modules() for kind in ("_parameters", "_buffers")
            if kind in vars(part)]


def _refill(tensors: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for held, before in tensors:
        held.clear()
        held.update(before)


def _copy(buffer: Any) -> Any:
    return None if buffer is None else buffer.detach().clone()


def _random_state() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy is not None else None


def _set_random_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])


def checkpointed(
    torch: Any, inner: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
    buffers: tuple[tuple[str, str], ...], contexts: Callable[[], tuple[Any, Any]] | None, replayed: Callable[[int], None],
    around: Surroundings | None = None,
) -> Any:
    """`inner(module, *args, **kwargs)`, whose activations are made again in backward. `contexts` makes the pair that
    `torch.utils.checkpoint` runs the forward and its recomputation under. `replayed` is called at each recomputation with
    its number, from 1: a graph may be gone through more than once. `around`: what the forward reads elsewhere is for the
    recomputation what it is there."""
    from torch.utils.checkpoint import checkpoint

    state = State(module, buffers)
    nested = [(tensor, tensor._version) for value in (*args, *kwargs.values())
              if not isinstance(value, torch.Tensor) for tensor in _common.tensors(value, torch)]
    names, count = tuple(kwargs), len(args)
    kept = _copied((*args, *kwargs.values()), torch)
    again = False

    # Keyword arguments are passed by position: torch keeps the generators of the devices, and checks the versions, of
    # positional tensors only. Lists and dicts are for the recomputation what they were: others may have changed them since.
    def run(*flat: Any) -> Any:
        if again:
            flat = tuple(now if isinstance(now, torch.Tensor) else then for now, then in zip(flat, _copied(kept, torch)))
        return inner(module, *flat[:count], **dict(zip(names, flat[count:])))

    @contextlib.contextmanager
    def replay(number: int, second: Any) -> Iterator[None]:
        if any(tensor._version != version for tensor, version in nested):
            raise RuntimeError("an argument of a recomputed block was modified in place after its forward")
        replayed(number)
        nonlocal again
        again = True
        with state.restored(), around.as_they_were() if around else contextlib.nullcontext(), second:
            yield

    def both() -> tuple[Any, Any]:
        first, second = contexts() if contexts is not None else (contextlib.nullcontext(), contextlib.nullcontext())
        # What is kept is kept for one time: who goes through the graph once more runs the whole forward again.
        return first, _Again(lambda number: replay(number, second if number == 1 else contextlib.nullcontext()))

    return checkpoint(run, *args, *kwargs.values(), use_reentrant=False, context_fn=both)


def _copied(values: tuple[Any, ...], torch: Any) -> tuple[Any, ...]:
    """The same tensors in lists and dicts of their own; of tensors that are no part of one, nothing."""
    return tuple(None if isinstance(value, torch.Tensor) else _common.map_tensors(value, lambda tensor: tensor, torch) for value in values)


class _Again:
    """A context manager that can be entered again and again: `make(number)` gives one for each time."""

    def __init__(self, make: Callable[[int], Any]):
        self._make, self._number, self._current = make, 0, None

    def __enter__(self) -> None:
        self._number += 1
        self._current = self._make(self._number)
        self._current.__enter__()

    def __exit__(self, *exception: Any) -> Any:
        current, self._current = self._current, None
        return current.__exit__(*exception)


def why_not_arguments(values: Any, torch: Any) -> str:
    """Why a second run might not see the same arguments; "" when they are tensors and plain values, however nested.
    Anything else (a cache of keys and values, for one) may be changed by the forward without a trace."""
    for value in values:
        if isinstance(value, (tuple, list)):
            reason = why_not_arguments(value, torch)
        elif type(value) is dict:
            reason = why_not_arguments(value.values(), torch)
        else:
            plain = value is None or isinstance(value, (
                torch.Tensor, bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.Size))
            reason = "" if plain else f"a {type(value).__name__} is passed to it, which its forward may change{_remedy(value)}"
        if reason:
            return reason
    return ""


def _remedy(value: Any) -> str:
    """For the caches of Hugging Face's models, which they build in training too unless told not to."""
    return " (a model called with use_cache=False builds none)" if type(value).__name__.endswith("Cache") else ""


def hooked(module: Any) -> bool:
    """Whether a part inside has forward hooks, which a second run would call again. A script may set them at any time."""
    return any(part is not module and (part._forward_hooks or part._forward_pre_hooks) for part in module.modules())


def containers(value: Any) -> list[tuple[Any, list[Any]]]:
    """The lists and dicts in nested arguments, each with its keys and what is in it."""
    if type(value) is dict:
        inside = list(value.values())
        return [(value, [*value, *inside]), *(found for item in inside for found in containers(item))]
    found = [found for item in value for found in containers(item)] if isinstance(value, (tuple, list)) else []
    return [(value, list(value)), *found] if isinstance(value, list) else found


def changed_container(before: list[tuple[Any, list[Any]]]) -> bool:
    """Whether one of them holds something else than when `containers` was asked."""
    for container, held in before:
        now = [*container, *container.values()] if isinstance(container, dict) else list(container)
        if len(now) != len(held) or any(a is not b for a, b in zip(now, held)):
            return True
    return False


def attributes(module: Any) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """Attributes of the module and of those inside it, and the lengths of those that are containers."""
    return [(part, dict(vars(part)), {name: len(value) for name, value in vars(part).items() if isinstance(value, _SIZED)})
            for part in module.modules()]


_SIZED = (list, dict, set)


def changed_attribute(before: list[tuple[Any, dict[str, Any], dict[str, int]]]) -> str:
    """The first attribute that a forward set or filled since `attributes` was taken; "" when it left nothing behind.
    What was set is put back."""
    reason = ""
    for part, held, lengths in before:
        now = dict(vars(part))
        names = [name for name in {**held, **now} if name not in held or now.get(name, before) is not held[name]]
        reset, filled = names, [name for name, length in lengths.items() if len(held[name]) != length]
        for name in reset:
            if name in held:
                vars(part)[name] = held[name]
            else:
                del vars(part)[name]
        for name in [*reset, *filled]:
            reason = reason or f"its forward changes {type(part).__name__}.{name}"
    return reason
