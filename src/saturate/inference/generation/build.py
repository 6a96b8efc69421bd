"""From a model, and maybe a draft, to a loop that generates: called rightly (proved), rounding known, costs of drafts
measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from saturate.errors import UsageError
from saturate.inference.generation import measure
from saturate.inference.generation.decode import Loop, Request
from saturate.inference.generation.lengths import refuse, turns_of
from saturate.inference.generation.models import (
    Adapter,
    Decoder,
    RecomputeDecoder,
    decoder,
    plain_forward,
    slots_of,
    text_config,
    without_gradients,
)
from saturate.inference.generation.prompt_lookup import PromptLookup
from saturate.inference.generation.prompts import table_size
from saturate.inference.generation.proof import plainly, prove, prove_behind_window
from saturate.inference.generation.sampling import whole
from saturate.inference.generation.speculative import (
    COMPILED_COUNTS,
    ModelDrafter,
    QuotingDrafter,
    refuse_unfit,
)
from saturate.inference.wrapped import unwrapped

#: The word for drafts from the text itself, in the place of a draft model.
LOOKUP = "prompt-lookup"

_CHOICES = (1, 2, 3, 4, 5, 6, 8, 10)

#: Of compiled loops: each length is a compilation of its own.
_COMPILED_CHOICES = (2, 4, 8)


@dataclass(frozen=True)
class Way:
    """How to generate. draft: a model, `LOOKUP` or None. lengths: of drafts, to choose from; one alone is always
    used. may_stop: no drafts where they do not pay, as the text goes. clock: nanoseconds, of what costs and runs are
    measured in. inference: see `models.without_gradients`."""

    draft: Any = None
    adapter: Adapter = None
    draft_adapter: Adapter = None
    tokenizers: tuple[Any, Any] | None = None
    compile_mode: str | None = None
    lengths: tuple[int, ...] | None = None
    may_stop: bool = True
    clock: Callable[[], int] = time.perf_counter_ns
    inference: bool = False

    @property
    def choices(self) -> tuple[int, ...]:
        return self.lengths or (_CHOICES if self.compile_mode is None else _COMPILED_CHOICES)


def build(torch: Any, model: Any, way: Way, batch: Sequence[list[int]], request: Request) -> Loop:
    """The loop for models in evaluation mode. `batch` is what is tried and timed on. Raises UsageError, by name, for
    what cannot be done rightly."""
    wrong = [length for length in way.choices if not whole(length) or length < 1]
    if wrong or list(way.choices) != sorted(set(way.choices)):
        raise UsageError(f"lengths of drafts {way.choices}", remedy="ascending whole numbers from 1 on")
    model = unwrapped(torch, model)
    with without_gradients(torch, way.inference):
        target = decoder(torch, model, way.adapter, way.compile_mode)
        forward = plain_forward(torch, model, way.adapter)
        several = way.choices[-1] + 1 if way.draft is not None else 5
        if target.context is not None:
            several = max(2, min(several, target.context // 3))
        width = _width(torch, target, forward)
        loop = Loop(
            torch,
            target,
            choices=way.choices,
            may_stop=way.may_stop,
            clock=way.clock,
            inference=way.inference,
            known_tokens=table_size(model, width),
        )
        turns = turns_of(text_config(model))
        loop.fits = lambda lengths, most: refuse(
            target.name, turns, lengths, most, cached=not isinstance(target, RecomputeDecoder),
            slots=None if way.compile_mode is None else slots_of(most))
        if target.window is not None:
            loop.behind_window = lambda rows: prove_behind_window(torch, target, forward, rows, several)
        loop.check(batch, request)
        loop.tolerance = max(loop.tolerance, prove(torch, target, forward, batch, several))
        if way.draft is None:
            return loop
        if isinstance(way.draft, str):
            if way.draft != LOOKUP:
                raise UsageError(f"no such draft: {way.draft!r}", remedy=f"a model, or {LOOKUP!r}")
            loop.drafter = PromptLookup(torch)
        else:
            loop.drafter = _model_drafter(torch, model, way, batch, target, width)
    if len(way.choices) > 1 or way.may_stop:
        alone = replace(loop)           # quotes cost nothing: what is measured is the draft
        loop.price = lambda rows, asked: measure.costs(alone, rows, asked)
        loop.costs = loop.price(batch, request)
    if isinstance(loop.drafter, ModelDrafter):
        loop.drafter = QuotingDrafter(loop.drafter, PromptLookup(torch, longest=8, shortest=4))
    return loop


def _width(torch: Any, target: Decoder, forward: Callable[[Any], Any]) -> int:
    """How many logits there are of a token, by the first forward that a model is asked for."""
    with plainly(torch, target):
        return int(forward(torch.zeros(1, 1, dtype=torch.long, device=target.device)).shape[-1])


def _model_drafter(
    torch: Any, model: Any, way: Way, batch: Sequence[list[int]], target: Decoder, width: int
) -> ModelDrafter:
    inside = unwrapped(torch, way.draft)
    draft = decoder(torch, inside, way.draft_adapter, way.compile_mode)
    if str(draft.device) != str(target.device):
        raise UsageError(
            f"the draft is on {draft.device}, the target on {target.device}",
            remedy="move the draft to the target's device",
        )
    draft_forward = plain_forward(torch, inside, way.draft_adapter)
    narrow = _width(torch, draft, draft_forward)
    refuse_unfit(type(model).__name__, width, type(inside).__name__, narrow, way.tokenizers)
    known = table_size(inside, narrow)
    prove(torch, draft, draft_forward, batch if known is None else [[min(token, known - 1) for token in prompt] for prompt in batch], 2)
    return ModelDrafter(torch, draft, width, known, COMPILED_COUNTS if way.compile_mode is not None else ())


def eos_of(model: Any, eos: int | Sequence[int] | None) -> frozenset[int]:
    """As given; None: what the model's own configuration says, Hugging Face's names. A configuration of its generation decides
    alone, also where it says that nothing ends a text."""
    if eos is None:
        owner = getattr(model, "generation_config", None)
        eos = getattr(getattr(model, "config", None) if owner is None else owner, "eos_token_id", None)
    plain: Any = eos.tolist() if hasattr(eos, "tolist") else eos
    if plain is None:
        return frozenset()
    return frozenset(plain if isinstance(plain, Iterable) and not isinstance(plain, str) else [plain])


def padding_in(model: Any, rows: Sequence[list[int]], eos: frozenset[int]) -> int | None:
    """The token that prompts of one length look padded with, by the model's own configuration; None: they do not. Its own `generate`
    leaves it out, also without an attention mask, unless it ends texts, too."""
    known = [getattr(owner, "pad_token_id", None) for owner in (getattr(model, "generation_config", None), text_config(model))]
    begins = getattr(text_config(model), "bos_token_id", None)
    pad = next((token for token in known if whole(token)), None)
    if pad is None or pad in eos or pad == begins or len({len(row) for row in rows}) != 1:
        return None
    padded = [pad in (row[0], row[-1]) for row in rows if row]
    return pad if any(padded) and not all(padded) else None


#: Settings of Hugging Face's generation that change no token here: what is given to the call instead, what is bookkeeping, and
#: what acts on several beams only, whose number is named.
_NO_MATTER = frozenset(
    "transformers_version _from_model_config use_cache output_attentions output_hidden_states output_scores output_logits "  # noqa: SIM905
    "return_dict_in_generate bos_token_id eos_token_id pad_token_id decoder_start_token_id max_length max_new_tokens max_time "
    "do_sample temperature top_k top_p cache_implementation cache_config compile_config disable_compile prefill_chunk_size "
    "num_return_sequences is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
    "prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind low_memory "
    "max_cache_len continuous_batching_config early_stopping length_penalty".split()
)

#: Those that do nothing at 1; the others do nothing at 0. A prompt is one token long at least.
_NEUTRAL_AT_ONE = frozenset(
    "repetition_penalty encoder_repetition_penalty guidance_scale typical_p num_beams num_beam_groups min_length".split()  # noqa: SIM905
)


def not_done(model: Any) -> list[str]:
    """What the model's `generation_config` asks for that is not done here, with its value: "repetition_penalty 1.1". The
    tokens are then not those of its own `generate`."""
    configuration = getattr(model, "generation_config", None)
    known = configuration.to_dict() if hasattr(configuration, "to_dict") else {}
    return [f"{name} {value}" for name, value in known.items()
            if name not in _NO_MATTER and not _neutral(name, value)]


def undone_sampling(model: Any) -> str:
    """How the model's own `generate` would sample, as the argument that does it here; "" where it decodes greedily."""
    owner = getattr(model, "generation_config", None)
    if not getattr(owner, "do_sample", False):
        return ""
    known = {"temperature": getattr(owner, "temperature", None), "top_k": getattr(owner, "top_k", None), "top_p": getattr(owner, "top_p", None)}
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return f"Sampling({', '.join(f'{name}={value:g}' for name, value in known.items() if value is not None and value != neutral[name])})"


def _neutral(name: str, value: Any) -> bool:
    """Whether a setting with this value does nothing. A number is no flag: True is a request, as is a token of number 0."""
    if value is None or value is False or value in ([], {}):
        return True
    if type(value) not in (int, float) or name.endswith(("token_id", "token_ids")):
        return False
    return value == 0 or (value == 1 and name in _NEUTRAL_AT_ONE)
