"""What a trained module is called with: its shapes, how much larger they are than others, a cache that it need not build."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable
from math import prod
from typing import Any

from saturate.techniques import _common

#: What `_takes` found. To read a signature takes longer than all else that is asked at each forward. Nothing in it holds a model.
_TAKES: weakref.WeakKeyDictionary[Callable[..., Any], tuple[tuple[str, ...], bool]] = weakref.WeakKeyDictionary()


def shapes(value: Any, torch: Any) -> tuple[Any, ...]:
    return tuple(tuple(tensor.shape) for tensor in _common.tensors(value, torch))


def growth(measured: tuple[Any, ...] | None, now: tuple[Any, ...]) -> float:
    """How many times the measured activations the inputs `now` may need at most, at least 1: as many as there are more
    values, times what the dimension that grew most grew by (attention without a fused kernel takes that twice)."""
    if not measured or not now:
        return 1.0
    more = sum(map(prod, now)) / max(1, sum(map(prod, measured)))
    if [len(shape) for shape in measured] != [len(shape) for shape in now]:
        return max(1.0, more * more)
    longer = [size / max(1, then) for shape, before in zip(now, measured) for size, then in zip(shape, before)]
    return max(1.0, more * max(1.0, *longer))


def without_cache(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Hugging Face models fill a cache of keys and values in training too, which nobody reads there, unless told not to. Who passes
    one to them, be it None, may read it; and in a tuple (`return_dict=False`) others would take its place."""
    config = getattr(module, "config", None)
    if getattr(config, "use_cache", None) is not True or kwargs.get("use_cache") is not None:
        return kwargs
    names, _ = _takes(type(module).forward)
    passed = {*names[1:len(args) + 1], *(name for name in kwargs if name != "use_cache")}
    as_dict = kwargs.get("return_dict")
    as_dict = getattr(config, "return_dict", True) if as_dict is None else as_dict
    if not as_dict or passed & {"use_cache", "past_key_values"} or not _takes_use_cache(module):
        return kwargs
    return {**kwargs, "use_cache": False}


def _takes_use_cache(module: Any) -> bool:
    """By name, in the forward that is called (the instance's own, where Accelerate put one there). Or in that of the model inside an
    adapter of PEFT, which passes on what it does not name; with prompts that are learnt it makes a cache itself."""
    names, passes_on = _takes(module.forward)
    if "use_cache" in names:
        return True
    base = getattr(module, "get_base_model", None)
    if base is None or not passes_on or getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
        return False
    return "use_cache" in _takes(type(base()).forward)[0]


def _takes(function: Callable[..., Any]) -> tuple[tuple[str, ...], bool]:
    """The names of what the function is called with, a method's `self` among them, and whether it takes keywords that it does not name."""
    function = function.__func__ if isinstance(function, types.MethodType) else function
    try:
        if function in _TAKES:
            return _TAKES[function]
    except TypeError:       # something callable that has no hash or no weak references
        return _read(function)
    _TAKES[function] = _read(function)
    return _TAKES[function]


def _read(function: Callable[..., Any]) -> tuple[tuple[str, ...], bool]:
    parameters = inspect.signature(function).parameters
    return tuple(parameters), any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())


class CacheNotBuilt(AttributeError):
    """Raised by `NoCache`; an AttributeError, so that `hasattr` can be asked."""


class NoCache:
    """Stands in a model's output for the cache that it was told not to build, and raises when it is used."""

    def _refuse(self, *args: Any) -> Any:
        raise CacheNotBuilt("saturate's activation-checkpointing told the model to build no cache of keys and values, and the script "
                            "uses one in training: take the technique out of the recipe, or call the model with use_cache=True")

    __getattr__ = __getitem__ = __iter__ = __len__ = _refuse


def marked(output: Any) -> Any:
    """The output of a model that was told to build no cache: no None, which scripts take for "there is none yet"."""
    if isinstance(output, dict) and getattr(output, "past_key_values", ...) is None:
        object.__setattr__(output, "past_key_values", NoCache())    # as an attribute only: what is read by number stays where it is
    return output
