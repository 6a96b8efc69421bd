"""One way to generate, as plain data: what a candidate's process is told, and what an artifact remembers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from saturate.inference.generation.build import LOOKUP, Way
from saturate.inference.generation.models import Adapter

_CLOCK = time.perf_counter_ns

#: The word for the draft model that was given, in a recipe.
MODEL = "model"


@dataclass(frozen=True)
class Recipe:
    """draft: `MODEL`, "prompt-lookup" or None. weights: the technique that stores them in fewer bits, by its id."""

    draft: str | None = None
    weights: str | None = None
    compile_mode: str | None = None
    lengths: tuple[int, ...] | None = None
    may_stop: bool = True


#: One token per forward, as the model came.
PLAIN = Recipe()


@dataclass(frozen=True)
class Given:
    """The user's models, and how they are called. tokenizers: (target's, draft's) as mappings from text to number."""

    model: Any
    draft: Any = None
    adapter: Adapter = None
    draft_adapter: Adapter = None
    tokenizers: tuple[Any, Any] | None = None
    clock: Callable[[], int] = field(default=_CLOCK, compare=False)
    inference: bool = field(default=False, compare=False)       # in a process of its own: see `models.without_gradients`

    def way(self, recipe: Recipe) -> Way:
        draft = self.draft if recipe.draft == MODEL else recipe.draft
        return Way(draft, self.adapter, self.draft_adapter, self.tokenizers, recipe.compile_mode, recipe.lengths,
                   recipe.may_stop, self.clock, self.inference)

    def module(self, torch: Any) -> Any:
        """All of it as one module, which is what travels to another process (`inference.source`): it computes
        nothing by itself, and knows of no class that the other process would have to find."""
        holder = torch.nn.Identity().eval()
        for name in ("model", "draft", "adapter", "draft_adapter"):
            setattr(holder, name, getattr(self, name))
        holder.tokenizers = None if self.tokenizers is None else tuple(map(vocabulary, self.tokenizers))
        return holder

    @staticmethod
    def of(holder: Any) -> Given:
        """What `module` put together, in the process that it was sent to."""
        return Given(holder.model, holder.draft, holder.adapter, holder.draft_adapter, holder.tokenizers, inference=True)


def vocabulary(tokenizer: Any) -> dict[str, int]:
    return dict(tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else tokenizer)


__all__ = ["LOOKUP", "MODEL", "Given", "Recipe", "vocabulary"]
