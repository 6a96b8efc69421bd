"""Lengths of text from which a Hugging Face model computes something else, which its cache or the other rows of a batch do not bear.

rescaled      longer than this, and all positions of a text are scaled anew ("longrope"), those of its first tokens included:
              keys that were kept of a shorter text are none of the longer one, and rows of one batch share one scale
own_window    layers that see only so many slots, by a mask of their own over the whole of the cache (the last ones of it, or those that
              score highest): right for one row that ends there, and not for rows at positions of their own

The proof that a model is called rightly takes a short text, where neither shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saturate.errors import UsageError


@dataclass(frozen=True)
class Turns:
    """Of one model, in tokens; None where it has no such length."""

    rescaled: int | None = None
    own_window: int | None = None


def turns_of(config: Any) -> Turns:
    """By the configuration of the language model; None: it has none."""
    local = "local" in (getattr(config, "attention_layers", None) or ())
    return Turns(_rescaled(config), _whole(getattr(config, "window_size" if local else "keep_window_size", None)))


def _rescaled(config: Any) -> int | None:
    """The smallest such length of all kinds of layers."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(given, Mapping):
        return None
    found = [_whole(one.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None))
             for one in (given, *given.values())      # of all layers, or by the kind of layer
             if isinstance(one, Mapping) and "longrope" in (one.get("rope_type"), one.get("type"))]
    return min((length for length in found if length is not None), default=None)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def refuse(name: str, turns: Turns, prompts: Sequence[int], most: int, *, cached: bool, slots: int | None = None) -> None:
    """Raise UsageError for a batch that the model would answer wrongly. prompts: lengths; most: tokens of the longest text, with drafts
    that may not stay; cached: keys and values are kept; slots: of a cache that is always read as a whole."""
    alone = len(prompts) == 1
    if turns.rescaled is not None and min(prompts) <= turns.rescaled < most and (cached or not alone):
        raise UsageError(
            f"{name} scales the positions of texts of more than {turns.rescaled} tokens anew, and here they grow from {min(prompts)} to {most}",
            cause="what its cache keeps of a shorter text is scaled otherwise, and the rows of a batch share one scale",
            remedy=f"keep prompts and new tokens within {turns.rescaled}, or all prompts above; or adapter=\"recompute\" with batch_size=1, "
                   "which uses no cache",
        )
    window = turns.own_window
    if cached and window is not None and (slots or most) > window and (slots is not None or not alone):
        raise UsageError(
            f"{name} has layers that see only {window} slots of its cache, by a mask of their own",
            cause="it is made of the whole cache, where " + ("a compiled program has free slots" if slots is not None else
                                                                   "the rows of a batch do not end together"),
            remedy=f'batch_size=1, prompts and new tokens within {window}, or adapter="recompute", which uses no cache',
        )
