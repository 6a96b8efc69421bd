"""Ways to generate from a causal language model: weights in safetensors files, and the recipe of the loop around them.

See `saturate.inference.generation.artifact`, which also stores them. Nothing is unpickled or compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from saturate.errors import ArtifactDamaged
from saturate.inference.techniques._api import Entry

FORMAT = "generation"


def lines(entry: Entry, threads: int, place: Callable[[str], str]) -> str:
    """The loop is saturate's; without it there are the weights."""
    names = ", ".join(entry.files)
    return f"# The loop that generates is saturate's. {names} holds weights alone: safetensors.torch.load_file reads them."


def load(torch: Any, folder: Path, entry: Entry, *, model: Any = None, draft: Any = None) -> Any:
    """prompts -> the new tokens of each, long tensors. model, draft: instances of their classes, where these are not of
    transformers. Raises ArtifactDamaged, UsageError."""
    from saturate.inference.generation import artifact

    try:
        return artifact.program(torch, folder, entry.settings, model, draft)
    except (KeyError, TypeError, AttributeError) as error:
        raise ArtifactDamaged(f"the settings of {folder} are incomplete", cause=repr(error),
                              remedy="copy the artifact again, or make it again") from error
