"""Prompts in the shapes that people have them in, as lists of token numbers."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from saturate.errors import UsageError

_SHAPES = "token numbers of one prompt, a list of such prompts, a tensor [rows, tokens], or what a tokenizer returns"

#: What comes with tokens, and is not lost if only these are given to a model: what is done here by itself, and what a training would take.
_BESIDE = frozenset(("input_ids", "attention_mask", "position_ids", "token_type_ids", "labels", "targets"))


def as_lists(prompts: Any, model: Any = None) -> list[list[int]]:
    """A prompt (numbers), several (of any lengths), a tensor or array of one or two dimensions, or a mapping with
    "input_ids" and maybe "attention_mask", whose masked tokens are left out. model: that they are for. Raises UsageError for anything
    else, and for a mapping that holds more of what the model takes (an image): only tokens are given to it."""
    if isinstance(prompts, Mapping) and "input_ids" not in prompts:
        raise UsageError(f"there is no 'input_ids' among {', '.join(map(str, prompts)) or 'nothing'}", remedy=f"pass {_SHAPES}")
    if isinstance(prompts, Mapping) or hasattr(prompts, "input_ids"):
        ids = prompts["input_ids"] if isinstance(prompts, Mapping) else prompts.input_ids
        mask = (
            prompts.get("attention_mask")
            if isinstance(prompts, Mapping)
            else getattr(prompts, "attention_mask", None)
        )
        _refuse_others(prompts, model)
        rows = as_lists(ids)
        if mask is None:
            return rows
        masks = _masks(mask)
        if [len(row) for row in rows] != [len(keep) for keep in masks]:
            raise UsageError("the attention_mask has other lengths than the input_ids", remedy="one number for each token: 1, or 0 for padding")
        return [[token for token, seen in zip(row, keep) if seen] for row, keep in zip(rows, masks)]
    plain = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(plain, str | bytes) or not isinstance(plain, Iterable):
        raise UsageError(
            f"{type(prompts).__name__} is no prompt",
            remedy=f"pass {_SHAPES}; a text goes through its tokenizer first",
        )
    items = list(plain)
    if items and all(_whole(item) for item in items):
        return [[int(item) for item in items]]
    rows = []
    for number, item in enumerate(items, 1):
        if item in ([], ()) if isinstance(item, list | tuple) else 0 in getattr(item, "shape", ()):
            raise UsageError(f"prompt {number} of {len(items)} is empty", remedy="there must be a token to begin with, such as the one that begins texts")
        found = as_lists(item, model)
        if len(found) != 1:
            raise UsageError("prompts are nested too deep", remedy=f"pass {_SHAPES}")
        rows += found
    if not rows:
        raise UsageError("no prompts", remedy=f"pass {_SHAPES}")
    return rows


def table_size(model: Any, width: int) -> int | None:
    """How many tokens the model can look up: its smallest table that holds as many as it has logits (`width`). None:
    no table does."""
    sizes = (
        [module.num_embeddings for module in model.modules() if hasattr(module, "num_embeddings")]
        if hasattr(model, "modules")
        else []
    )
    return min((size for size in sizes if size >= width), default=None)


def batches(prompts: Sequence[list[int]], size: int) -> list[list[list[int]]]:
    """Prompts in batches of `size`, the last one maybe smaller."""
    if size < 1:
        raise UsageError(f"batch_size {size}", remedy="at least 1")
    return [list(prompts[start:start + size]) for start in range(0, len(prompts), size)]


def halves(prompts: Sequence[list[int]], size: int) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """Batches for choosing a way and for confirming it, of `size` prompts each, without a prompt in common. Where a
    half does not fill its batches, its prompts are repeated. Raises UsageError for fewer than two different prompts.
    """
    different = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))]
    if len(different) < 2:
        raise UsageError(
            "one prompt alone, and the winner has to hold on prompts that did not choose it",
            remedy="pass at least two different prompts, better a dozen",
        )
    batches(different, size)        # refuses sizes below 1
    both = []
    for half in (different[0::2], different[1::2]):
        wanted = -(-len(half) // size) * size
        filled = (half * -(-wanted // len(half)))[:wanted]
        both.append(batches(filled, size))
    return both[0], both[1]


def _refuse_others(prompts: Any, model: Any) -> None:
    """Raise UsageError for what stands beside the tokens and would change what the model says. Columns of a data set that it does not
    take are nothing to it."""
    try:
        takes = inspect.signature(getattr(model, "forward", model)).parameters.keys() - _BESIDE
    except (TypeError, ValueError):         # no model, or one that does not say what it takes
        return
    beside = prompts if isinstance(prompts, Mapping) else getattr(prompts, "__dict__", {})
    if others := [name for name in beside if name in takes and beside[name] is not None]:
        raise UsageError(
            f"the prompts hold {', '.join(others)} beside their tokens, and only tokens are given to {type(model).__name__} here",
            cause="it would answer as if the rest were not there",
            remedy="pass the input_ids and attention_mask alone, or use the model's own generate",
        )


def _whole(item: Any) -> bool:
    """Whether it is a token's number: Python's, numpy's, or a tensor without dimensions that holds one."""
    if getattr(item, "ndim", None) == 0 and hasattr(item, "item"):
        item = item.item()
    return isinstance(item, Integral) and not isinstance(item, bool)


def _masks(mask: Any) -> list[list[bool]]:
    """Which tokens of each prompt count: numbers or flags, of one prompt or of several, as lists, tensor or array."""
    plain = mask.tolist() if hasattr(mask, "tolist") else mask
    try:
        rows = [row.tolist() if hasattr(row, "tolist") else row for row in plain]
        several = any(isinstance(row, Iterable) for row in rows)
        return [[_counts(one) for one in row] for row in (rows if several else [rows])]
    except (TypeError, ValueError) as error:
        raise UsageError(f"the attention_mask is no mask: {error}", remedy="one number for each token: 1, or 0 for padding") from error


def _counts(one: Any) -> bool:
    one = one.item() if hasattr(one, "item") else one
    if not isinstance(one, (bool, int, float)):
        raise TypeError(f"it holds a {type(one).__name__}")
    return bool(one)
