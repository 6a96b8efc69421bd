"""What several techniques need: functions around a module's forward that survive a copy, and trees of tensors."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable
from typing import Any

from saturate.inference import batches
from saturate.inference.techniques._api import Context
from saturate.records.inference import ModelFacts
from saturate.techniques import _trees

#: `mapped`, in the lines that make a candidate without saturate. torch takes dataclasses for leaves.
MAPPED_CODE = """\
import copy
from torch.utils._pytree import tree_map
def mapped(change, tree):      # a copy with its tensors changed, those inside of dataclasses too
    def leaf(x):
        if hasattr(x, "__dataclass_fields__"):
            x = copy.copy(x)
            for name in x.__dataclass_fields__:
                object.__setattr__(x, name, mapped(change, getattr(x, name)))
        return change(x) if torch.is_tensor(x) else x
    return tree_map(leaf, tree)
"""

#: inner(*args, **kwargs) is the forward of the module that was called.
Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def around(module: Any, wrapper: Around) -> None:
    """Put `wrapper(inner, args, kwargs)` around the forward of one module, outside of earlier wrappers.

    A bound method takes the old one's place, so module names stay, hooks run outside of it, a deep copy runs its own
    weights, and both dynamo and torch.export trace it as they trace any forward.
    """
    before = module.forward
    inner = getattr(before, "__func__", None) if getattr(before, "__self__", None) is module else None

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return before(*args, **kwargs) if inner is None else inner(self, *args, **kwargs)

        return wrapper(call, args, kwargs)

    signature = batches.signature_of(before)
    if signature is not None:       # calls by keyword find their places by it
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])      # type: ignore[attr-defined]
    module.forward = types.MethodType(forward, module)


def own(facts: ModelFacts, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call may get: a copy, where the model writes to its inputs. So every call gets what the user gave."""
    return copy.deepcopy(inputs) if facts.writes_inputs else inputs


def answer(context: Context, inputs: tuple[Any, ...]) -> Any:
    """The model's answer while it is looked at, in the mode that it runs in."""
    with getattr(context.torch, context.facts.mode)():
        return context.model(*own(context.facts, inputs))


def mapped(torch: Any, value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested tuples, lists, mappings and dataclasses with `change(tensor)` in place of every tensor."""
    return _trees.copied(value, lambda _, leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf)
