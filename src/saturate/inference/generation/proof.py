"""Is a model called rightly? Its logits by the decoder's way (rows of different length, drafts rejected, several
tokens at once, one at a time) against those of one plain forward over the whole sequence.

What comes out is the rounding between a step of one token and a step of several: two logits that are closer than a
few times that cannot be told apart, see `sampling.accept_greedy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from saturate.errors import UsageError
from saturate.inference.generation.models import Decoder, RecomputeDecoder

#: Logits closer than so many times the largest rounding seen are a tie: each of the two is off by it, and few steps
#: were seen.
TIE = 8.0

_WITHOUT_CACHE = 'pass adapter="recompute" (of a draft, draft_adapter=), which uses no cache, or a function (model, ids, cache) -> logits'

#: Where the classes of what torch.compile raises are.
_COMPILERS = ("torch._dynamo", "torch._inductor")

_TOKENS = 24            # length of the longer sequence that is tried
_STEPS = 4              # of its last tokens, fed one at a time


def prove(
    torch: Any, decoder: Decoder, forward: Callable[[Any], Any], prompts: Sequence[Sequence[int]], several: int = 5,
    length: int = _TOKENS,
) -> float:
    """The tolerance for ties. `several`: tokens of a forward that verifies drafts. `length`: of the sequence that is
    tried. Raises UsageError, by what went wrong, where the decoder's logits are not the model's."""
    with plainly(torch, decoder):
        plain = _plainly(torch, decoder, forward, prompts, several, length)
    if isinstance(decoder, RecomputeDecoder):       # the same forwards, of two rows at once
        with _named(torch, decoder.name, "cannot be called with several rows of tokens", "let its forward take ids of any [rows, tokens]"):
            return _tolerance(torch, decoder, plain, several)
    # It answered to a plain forward: it is the cache, the mask or the positions that its code does not take.
    with _named(torch, decoder.name, "cannot be called with a static cache, and a mask and positions for each row", _WITHOUT_CACHE):
        return _tolerance(torch, decoder, plain, several)


def plainly(torch: Any, decoder: Decoder) -> AbstractContextManager[None]:
    """Around the plainest forwards of a model: the names of its parameters may say a way to call it that its code does not mean."""
    if isinstance(decoder, RecomputeDecoder):
        return _named(torch, decoder.name, "cannot be called with token numbers alone, [rows, tokens]",
                      "pass adapter=, a function (model, ids, cache) -> logits")
    return _named(torch, decoder.name, "cannot be called as the names of its parameters say", _WITHOUT_CACHE)


@contextmanager
def _named(torch: Any, name: str, what: str, remedy: str) -> Iterator[None]:
    """What the code of a model raises, as UsageError. What says nothing about the way it is called passes: memory, and what a
    compiler makes of it, which is called in the same way as the loop that was proved without it."""
    try:
        yield
    except (UsageError, *_memory_errors(torch)):
        raise
    except (ValueError, TypeError, LookupError, AttributeError, AssertionError, RuntimeError) as error:
        if _of_memory(error) or type(error).__module__.startswith(_COMPILERS):
            raise
        raise UsageError(f"{name} {what}", cause=_line(error), remedy=remedy) from error


def _memory_errors(torch: Any) -> tuple[type[BaseException], ...]:
    return MemoryError, torch.cuda.OutOfMemoryError


def _of_memory(error: Exception) -> bool:
    """The CPU's allocator, and libraries, have no class of their own for it."""
    return any(words in str(error).lower() for words in ("out of memory", "allocate memory", "not enough memory"))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:300]


def prove_behind_window(
    torch: Any, decoder: Decoder, forward: Callable[[Any], Any], prompts: Sequence[Sequence[int]], several: int
) -> float:
    """The same, of a sequence that is longer than the sliding window: there a layer sees only the last tokens, and is
    given a mask of its own."""
    assert decoder.window is not None
    try:
        with torch.no_grad():
            plain = _plainly(torch, decoder, forward, prompts, several, decoder.window + _TOKENS)
            return _tolerance(torch, decoder, plain, several)
    except (UsageError, *_memory_errors(torch)):
        raise
    except Exception as error:  # a model that takes one mask for all kinds of layers raises anything
        if _of_memory(error):       # such a text is the longest so far
            raise
        raise UsageError(
            f"{decoder.name} cannot be called for more than the {decoder.window} tokens of its sliding window",
            cause=f"it takes no mask of its own for the layers that slide: {_line(error)}",
            remedy='keep prompts and new tokens within the window, or pass adapter="recompute", which uses no cache',
        ) from error


@dataclass(frozen=True)
class _Plain:
    """What plain forwards answer. ids: (2, tokens and as many as drafts go beyond them); wanted: the logits of each row; allowed:
    by how much rounding may change them; scale: their largest magnitude."""

    ids: Any
    rows: list[list[int]]
    wanted: list[Any]
    allowed: float
    scale: float


def _plainly(
    torch: Any, decoder: Decoder, forward: Callable[[Any], Any], prompts: Sequence[Sequence[int]], several: int, length: int
) -> _Plain:
    """Raises UsageError for a model whose plain forwards already do not agree with each other."""
    tokens = _sequence(prompts, min(length, (decoder.context or length) - several))
    if len(tokens) < _STEPS + 3:
        raise UsageError(f"{decoder.name} takes at most {decoder.context} tokens, too few to generate")
    rows = [tokens, tokens[1:-1]]           # different tokens at different positions
    ids = torch.zeros(2, len(tokens) + several + 1, dtype=torch.long, device=decoder.device)
    for row, known in zip(ids, rows):
        row[:len(known)] = torch.tensor(known, device=decoder.device)
    wanted = [forward(row[:len(known)].unsqueeze(0))[0].float() for row, known in zip(ids, rows)]
    scale = max(float(w.abs().max()) for w in wanted)
    if not scale < float("inf"):  # also where it is NaN
        raise UsageError(
            f"the logits of {decoder.name} are not finite on the prompt", remedy="check the weights and their dtype"
        )
    allowed = scale * _rounding(torch, decoder.dtype)
    _same(forward(ids[:1, :len(tokens)])[0].float(), wanted[0], allowed, decoder,
          "gives other logits for the same tokens when it is called again",
          "it is random, or keeps a state between calls that cannot be rolled back; is it in evaluation mode?")
    half = len(tokens) // 2
    _same(forward(ids[:1, :half])[0].float(), wanted[0][:half], allowed, decoder,
          "changes the logits of a token with the tokens that follow it", "it is not a causal language model")
    return _Plain(ids, rows, wanted, allowed, scale)


def _tolerance(torch: Any, decoder: Decoder, plain: _Plain, several: int) -> float:
    """For ties. Raises UsageError where the decoder's logits are others, and whatever a model raises that cannot be called so."""
    return TIE * max(_replay(torch, decoder, plain.ids, plain.rows, plain.wanted, plain.allowed, several), 1e-6 * plain.scale)


def _replay(
    torch: Any, decoder: Decoder, ids: Any, rows: list[list[int]], wanted: list[Any], allowed: float, several: int
) -> float:
    """Feed the rows as decoding does, and compare; the rounding between one token and several at a time."""
    why = "its cache does not keep what it should at the positions given to it, or it keeps more than keys and values"
    known = [len(row) for row in rows]
    starts = [length - _STEPS for length in known]
    decoder.start(len(rows), ids.shape[1])
    first = max(starts)
    prefill = decoder.feed(ids, [0] * len(rows), first).float()
    for row, want, start in zip(prefill, wanted, starts):
        _same(
            row[:start],
            want[:start],
            allowed,
            decoder,
            "is not itself when rows of different length are fed together",
            why,
        )
    one = []
    for step in range(_STEPS):
        one.append(decoder.feed(ids, [start + step for start in starts], 1).float()[:, 0].clone())
    single = torch.stack(one, 1)
    junk = ids.flip(1).contiguous()         # drafts that will be rejected
    decoder.feed(junk, starts, several)
    many = decoder.feed(ids, starts, several).float()[:, :_STEPS]
    for index, (want, start) in enumerate(zip(wanted, starts)):
        behind = want[start:start + _STEPS]
        _same(single[index], behind, allowed, decoder, "is not itself when tokens are fed one at a time", why)
        _same(many[index], behind[:many.shape[1]], allowed, decoder, "is not itself after drafts were rejected", why)
    return float((single[:, :many.shape[1]] - many).abs().max())


def _same(found: Any, wanted: Any, allowed: float, decoder: Decoder, what: str, cause: str) -> None:
    if found.shape != wanted.shape:
        raise UsageError(
            f"{decoder.name} {what}",
            cause=cause,
            evidence=f"logits {tuple(found.shape)}, expected {tuple(wanted.shape)}",
        )
    worst = float((found - wanted).abs().max()) if found.numel() else 0.0
    if not worst <= allowed:
        raise UsageError(
            f"{decoder.name} {what}",
            cause=cause,
            evidence=f"logits differ by {worst:.3g}, rounding explains {allowed:.3g}",
            remedy="use the model's own generate, or pass adapter=, see saturate.inference.generation.models",
        )


def _rounding(torch: Any, dtype: Any) -> float:
    """The largest difference of logits, over their largest magnitude, that rounding of a whole model explains."""
    return {torch.bfloat16: 2e-1, torch.float16: 5e-2}.get(dtype, 2e-3)


def _sequence(prompts: Sequence[Sequence[int]], length: int) -> list[int]:
    """`length` real tokens: prompts one after the other, repeated where they are short."""
    joined: list[int] = []
    for prompt in prompts:
        joined += prompt
        if len(joined) >= length:
            break
    return (joined * (length // max(1, len(joined)) + 1))[:max(0, length)]
