"""Causal language models: prefill, decode, speculative decoding. `saturate.generation` is this package.

    api            generate(), optimize(): what a user calls
    models         how a model is called: Hugging Face's way, forward(ids, cache), or without a cache
    cache          keys and values in place, a position per row
    proof          is a model called rightly, and how much do its logits round?
    decode         the loop: prefill, draft, verify, accept
    sampling       the next token; drafts that stay
    speculative    drafts from a smaller model
    prompt_lookup  drafts from the text itself
    draft_length   how many tokens to draft, from acceptance and cost
    build          from models to a loop
    measure        prefill and decode timed apart; races
    compare        is it still the same text?
    weights        copies of a model with weights in fewer bits
    recipe         one way to generate, as plain data
    host           where a way lives: in a process of its own, or here
    search         which way is the fastest
    judging        is a way right?
    conclusion     what a search says in the end
    artifact       a way to generate in a folder, which `saturate.load` opens
    safetensors    tensors in a file that holds nothing else
    prompts        prompts in the shapes that people have them in
"""

from __future__ import annotations

from typing import Any

_PUBLIC = ("LOOKUP", "Budget", "Generation", "GenerationResult", "Sampling", "generate", "optimize")


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        from saturate.inference.generation import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
