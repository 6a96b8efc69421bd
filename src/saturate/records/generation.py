"""What `saturate.generation.optimize` measured: prefill and decode of a causal language model, apart, and what made
them faster.

`None` always means "not measured", never zero.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from saturate.records.inference import Fate, Verdict
from saturate.records.result import Phase

SCHEMA = 1


class GenerationTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Of whole batches. The first new token of a row belongs to the prefill."""

    prefill_ms: float                       # of a batch, median
    prefill_ms_per_token: float             # of the prompts' tokens
    decode_ms_per_token: float | None       # of the new tokens of all rows together; None: none after the first
    decode_tokens_per_s: float | None       # the same, as a rate
    tokens_per_s: float                     # new tokens over prefill and decode
    runs: int


class SpeculationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How drafts fared."""

    drafter: str  # the draft's class, or "prompt lookup"
    acceptance_rate: float | None  # chance that a token of the draft stays, given that those before it did; None: nothing drafted
    quoted_acceptance_rate: float | None = None  # the same, of tokens quoted from the text in the draft's place
    quoted_share: float | None = None       # of all tokens that were proposed; the draft's are the others
    tokens_per_round: float | None          # that a round with drafts or quotes gave a row: what stayed, and the token behind it, if it was sure
    draft_length: float | None              # mean, of rows that had drafts or quotes
    cost_ratio: float | None                # time to draft one token, over a plain step
    verify_ratio: float | None              # time to verify the longest draft, over a plain step
    predicted_speedup: float | None         # by acceptance rate and costs of the draft alone, at the best length
    predicted_length: int | None
    ties: int = 0  # next tokens left to a forward of one token, because two logits were too close


class GenerationCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """One way to generate and what became of it."""

    id: str                                 # "compile + speculative"
    numerics: str
    fate: Fate
    reason: str
    speedup: float | None = None            # time per new token, the plain loop's over this one's, prefill included
    speedup_ci: tuple[float, float] | None = None
    timing: GenerationTiming | None = None
    speculation: SpeculationRecord | None = None
    identical: float | None = None          # share of rows whose greedy tokens are all the plain loop's
    length_ratio: float | None = None       # new tokens over the plain loop's
    accuracy: float | None = None
    accuracy_drop: float | None = None
    accuracy_drop_ci: tuple[float, float] | None = None
    verdict: Verdict | None = None          # of the check; None: lossless, not needed
    prepare_s: float | None = None          # until it was ready: start, quantize, compile, meet every batch of prompts
    first_call_s: float | None = None       # the first batch, apart
    compile_s: float | None = None          # of both, in compilers; None: nothing was compiled
    code: str = ""                          # the same by hand


class GenerationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The whole search."""

    schema: int = SCHEMA
    model: str
    device: str
    torch: str
    threads: int
    batch_size: int
    prompts: int
    max_new_tokens: int
    sampling: dict[str, Any]
    verdict: Literal["faster", "nothing_helps", "inconclusive"]
    baseline: GenerationCandidate
    best: GenerationCandidate               # measured again on other prompts; the baseline where nothing helps
    candidates: list[GenerationCandidate]
    notes: list[str] = []
    seconds: float = 0.0
    given_s: float | None = None            # what it was to take
    phases: list[Phase] = []                # what the seconds went into: start, check, ways, winner
