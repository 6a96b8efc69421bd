"""The short training that the techniques share that train with rounding: towards the original's outputs and the user's loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from saturate.inference.techniques import _training
from saturate.inference.techniques._api import Context, Ineligible, NotApplied
from saturate.records.inference import NO_TRAIN, ModelFacts

#: Place among techniques that train: after those that change the structure.
ORDER = 90


def refusal(facts: ModelFacts) -> Ineligible | None:
    """Why nothing can be trained, or None."""
    return None if facts.trainable else Ineligible(NO_TRAIN)


def original(context: Context) -> Any:
    """A copy of the model that teaches, to be taken before anything is trained. Raises NotApplied without training data."""
    if context.train is None:
        raise NotApplied(NO_TRAIN)
    return copy.deepcopy(context.model).requires_grad_(False)


def recover(context: Context, student: Any, teacher: Any, after_step: Callable[[float], None] | None = None) -> str:
    """Train `student`, which rounds, in place. A sentence. Raises NotApplied as `_training.recover` does, and for batches
    that a captured graph does not take."""
    try:
        return _training.recover(context, student, teacher, after_step=after_step).sentence()
    except (AssertionError, RuntimeError) as error:     # the guards of a captured graph, or torch's own checks of shapes
        words = str(error).strip().splitlines() or [repr(error)]
        raise NotApplied(f"the model with rounding cannot be trained: {words[0]}") from error
